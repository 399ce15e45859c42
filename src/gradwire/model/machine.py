"""Costs of a machine's collectives and cores, which are calibrated on measured steps, and models of network links."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gradwire.errors import HyperparameterError

FAR = 2.0
"""Factor beyond the calibrated range from which a prediction counts as extrapolated."""


SEGMENT_BYTES = 1448
"""Payload of a full TCP segment on Ethernet, with timestamps."""

LEAST_TIMEOUT_S = 0.2
"""Least time beyond the round trip after which Linux sends an unacknowledged segment again without a probe."""

PROBE_S = 0.008
"""Time beyond two round trips after which Linux sends a probe: two ticks of a clock of 250 Hz."""

CUBIC, BBR = "cubic", "bbr"
"""Congestion controls that the model tells apart; see :func:`connection_rate`."""

PACED = 0.46
"""Share of a round trip over which BBR spreads a message; see :meth:`LinkModel.pacing_s`."""


def timeout_s(delay_s: float) -> float:
    """Return the seconds after which Linux sends an unacknowledged segment again, and begins slowly after a rest.

    Args:
        delay_s: Delay in one direction.

    Example:
        >>> round(timeout_s(0.02), 3)
        0.24
    """
    return 2 * delay_s + LEAST_TIMEOUT_S


def connection_rate(delay_s: float, loss: float, congestion: str = CUBIC) -> float:
    """Return the bytes a second of one long TCP connection whose segments are lost at random; infinite without losses.

    The mean window of Reno and of Cubic in segments, with the round-trip time R = 2 ``delay_s`` in seconds and the
    share p of lost segments, is::

        W_reno  = sqrt(3 / 2) / sqrt(p)
        W_cubic = (C (3 + b) / (4 (1 - b)))^(1/4) (R / p)^(3/4)    with b = 0.7, C = 0.4

    Linux uses Cubic unless it is told otherwise. It sends at least as fast as Reno would, so that the rate is
    1448 max(W_reno, W_cubic) / R. BBR sends at the rate that it has measured, whatever is lost up to a fifth, so that
    nothing but the network link limits it: the rate is infinite.

    Args:
        delay_s: Delay in one direction.
        loss: Share of the segments that are lost.
        congestion: Congestion control; any name but those that begin with "bbr" is taken for Cubic.

    Sources: Mathis, Semke, Mahdavi, Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", CCR
    1997; RFC 9438, "CUBIC for fast and long-distance networks", 2023, section 5.1; Cardwell, Cheng, Gunn, Yeganeh,
    Jacobson, "BBR: congestion-based congestion control", ACM Queue 2016, figure 8.

    Example:
        >>> round(connection_rate(delay_s=0.02, loss=0.001) * 8e-6, 1)
        11.2
        >>> connection_rate(delay_s=0.02, loss=0.001, congestion="bbr")
        inf
    """
    if not loss or not delay_s or congestion.startswith(BBR):
        return math.inf
    round_trip_s = 2 * delay_s
    reno = math.sqrt(1.5 / loss)
    cubic = math.pow(0.4 * 3.7 / (4 * 0.3), 0.25) * math.pow(round_trip_s / loss, 0.75)
    return SEGMENT_BYTES * max(reno, cubic) / round_trip_s


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """The network link of a host.

    Attributes:
        bandwidth_bytes_per_s: Bandwidth in each direction; None if only memory limits it.
        latency_s: Delay of a message in one direction.
        ranks_per_host: Ranks that share the link; messages between them do not use it.
        loss: Share of the packets that are lost, at random.
        congestion: TCP's congestion control, such as "cubic" or "bbr"; it matters where packets are lost.

    Raises:
        HyperparameterError: the bandwidth is not above 0, the delay is negative or infinite, a host has no rank, or the
            loss is negative or not below 1.
    """

    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 0.0
    ranks_per_host: int = 1
    loss: float = 0.0
    congestion: str = CUBIC

    def __post_init__(self) -> None:
        rate = self.bandwidth_bytes_per_s
        if rate is not None and not rate > 0:
            raise HyperparameterError(f"LinkModel: bandwidth_bytes_per_s is above 0 or None for no limit, not {rate!r}")
        if not 0 <= self.latency_s < math.inf:
            raise HyperparameterError(f"LinkModel: latency_s is a number of seconds, 0 or more, not {self.latency_s!r}")
        if self.ranks_per_host < 1:
            raise HyperparameterError(f"LinkModel: ranks_per_host is at least 1, not {self.ranks_per_host!r}")
        if not 0 <= self.loss < 1:
            raise HyperparameterError(f"LinkModel: loss is a share of packets, from 0 to below 1, not {self.loss!r}")

    @property
    def connection_bytes_per_s(self) -> float:
        """Return :func:`connection_rate` of this link."""
        return connection_rate(self.latency_s, self.loss, self.congestion)

    def resending_s(self, messages: int, turns: int, sent_bytes: float = 0.0) -> float:
        """Return the expected time that some messages wait for packets that are sent again.

        No later packet tells the receiver that the last one of a message was lost, so that the sender waits for its
        timeout: with R the round-trip time, Linux's least one is R + 0.2 s; if the message had several packets, it
        sends a probe after 2 R + 8 ms. If m messages go in t turns, each of which waits for all messages of the turn
        before, and p is the loss, it is::

            t (1 - (1 - p)^(m / t)) min(R + 0.2 s, 2 R + 8 ms)

        Packets that are lost within a message make Cubic slower, which is part of :func:`connection_rate`. BBR goes on
        at its rate and sends them again, which takes longer than the message only if one of those that were on their
        way at its end was lost. With n the packets of a message, but at most those that the link holds, it adds::

            t (1 - (1 - p)^(n m / t)) R

        The timeouts are those of RFC 6298, with Linux's least value of its second summand, and of RFC 8985, section 7.

        Args:
            messages: Messages of all ranks, and requests for them.
            turns: Turns of messages that wait for one another.
            sent_bytes: Bytes of all these messages.
        """
        if not self.loss or not turns or not messages:
            return 0.0
        each, round_trip_s = messages / turns, 2 * self.latency_s
        packets = sent_bytes / messages / SEGMENT_BYTES
        longest_s = timeout_s(self.latency_s)
        waiting_s = self._any_lost(each) * (min(longest_s, 2 * round_trip_s + PROBE_S) if packets > 1 else longest_s)
        if self.congestion.startswith(BBR):
            held = min(packets, (self.bandwidth_bytes_per_s or math.inf) * round_trip_s / SEGMENT_BYTES)
            waiting_s += self._any_lost(each * held) * round_trip_s
        return turns * waiting_s

    def pacing_s(self, message_bytes: float, most_bytes: float | None = None) -> float:
        """Return the least time in which a connection sends a message, whatever the network link could carry.

        It is 0, but for BBR. With R the round-trip time and b the packets of the message, a connection that rests
        between messages has measured b / (R + s) packets a second after it sent b packets in s seconds. It is still in
        its startup, with a gain of g = 2 / ln 2, so that it sends the next message in s = (R + s) / g. That makes
        s = 0.53 R for many packets; 0.46 R (1 - 1 / b) was measured, since some leave at once.

        BBR takes the highest rate of its last ten round trips. Where messages differ, that is the rate of the largest,
        of B packets, and one of b packets takes 0.46 R (b - 1) / B.

        Source: Cardwell and others, as for :func:`connection_rate`; ``benchmarks/speed/lossy_messages.py``.

        Args:
            message_bytes: Bytes of the message.
            most_bytes: Bytes of the largest message that the connection sends in ten round trips; None: all are alike.
        """
        if not self.congestion.startswith(BBR) or message_bytes <= SEGMENT_BYTES:
            return 0.0
        most = message_bytes if most_bytes is None else most_bytes
        return PACED * 2 * self.latency_s * (message_bytes - SEGMENT_BYTES) / most

    def _any_lost(self, packets: float) -> float:
        """Return the probability that any of some packets is lost."""
        return -math.expm1(packets * math.log1p(-self.loss))

    def elsewhere(self, ranks: Sequence[int]) -> int:
        """Return how many of some ranks are not on the host of the first; hosts have consecutive ranks."""
        return sum(rank // self.ranks_per_host != ranks[0] // self.ranks_per_host for rank in ranks)

    def leaving(self, sent_bytes: float, ring: bool, ranks: Sequence[int]) -> float:
        """Return the bytes of a rank that leave its host; in a ring, a host's ranks share those of one of them.

        Args:
            sent_bytes: Bytes sent by the first of the ranks.
            ring: Whether each rank sends only to the next.
            ranks: Ranks that take part.

        Example:
            >>> link = LinkModel(ranks_per_host=2)
            >>> [link.leaving(90, False, ranks) for ranks in (range(4), (0, 1), (0, 2))]
            [60.0, 0.0, 90.0]
        """
        away = self.elsewhere(ranks)
        if not away:
            return 0.0
        return sent_bytes / (len(ranks) - away) if ring else sent_bytes * away / (len(ranks) - 1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Calibrated costs.

    Seconds of CPU are those of a rank with a core of its own; ``contention`` and the number of ranks on a core lengthen
    them.

    Attributes:
        efficiency: Share of the bandwidth that payloads get beside headers and what is sent again.
        round_s: Latency of one dependent message, including scheduling.
        call_s: CPU time of one collective.
        message_s: CPU time of one message to one rank.
        byte_s: CPU time of one byte that is sent and received.
        sum_byte_s: CPU time of one byte in a ring that adds.
        bucket_s: CPU time of handing over a bucket, on the computing thread.
        contention: Factor on all work besides the timeline, which was measured with all ranks running.
        residual: Standard deviation of log(measured / predicted), estimated for steps that were not fitted.
        source: Description of the source of the numbers.
        most_workers: Most workers in the steps that they were fitted to; None if unknown.
        slowest_bytes_per_s, fastest_bytes_per_s: Range of the limited network links in these steps; None without any.

    Raises:
        HyperparameterError: the efficiency is not above 0.
    """

    efficiency: float = 0.9
    round_s: float = 5e-4
    call_s: float = 4e-4
    message_s: float = 5e-5
    byte_s: float = 3e-10
    sum_byte_s: float = 1e-9
    bucket_s: float = 1e-4
    contention: float = 1.5
    residual: float = 0.25
    source: str = "not calibrated"
    most_workers: int | None = None
    slowest_bytes_per_s: float | None = None
    fastest_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        # Bytes are divided by it.
        if not self.efficiency > 0:
            raise HyperparameterError(f"Machine: efficiency is above 0, not {self.efficiency!r}")

    def beyond(self, workers: int, link: LinkModel) -> str | None:
        """Return why a prediction lies far outside the calibrated range; None if it does not."""
        if self.most_workers is None:
            return None
        if workers > FAR * self.most_workers:
            return f"more workers than calibrated (at most {self.most_workers})"
        rate = link.bandwidth_bytes_per_s
        if rate is None or workers <= link.ranks_per_host:
            return None
        if self.slowest_bytes_per_s is None or self.fastest_bytes_per_s is None:
            return "no limited link was calibrated"
        if not self.slowest_bytes_per_s / FAR <= rate <= FAR * self.fastest_bytes_per_s:
            low, high = 8e-6 * self.slowest_bytes_per_s, 8e-6 * self.fastest_bytes_per_s
            return f"a link far from those calibrated ({low:g} to {high:g} Mbit/s)"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write the numbers to a file, whole or not at all.

        Raises:
            OSError: the file cannot be written; an earlier one is untouched.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may calibrate at once.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Machine:
        """Read the file that :meth:`save` wrote.

        Raises:
            HyperparameterError: the file cannot be read, or holds no calibration.
        """
        known = {f.name for f in fields(cls)}
        try:
            found = json.loads(path.read_text())
            missing = [k for k in COSTS if k not in found]
            wrong = [k for k in COSTS if k in found and not _is_cost(found[k])]
            if missing or wrong:
                raise ValueError(f"it lacks {', '.join(missing)}" if missing else f"{wrong[0]} is {found[wrong[0]]!r}")
            return cls(**{k: v for k, v in found.items() if k in known})
        except OSError as error:
            raise HyperparameterError(
                f"the calibration {path} cannot be read ({error.strerror}): make one with gradwire plan --calibrate"
            ) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise HyperparameterError(
                f"{path} holds no calibration ({error}): make one with gradwire plan --calibrate"
            ) from None


COSTS = tuple(f.name for f in fields(Machine) if f.type == "float")
"""Fields that the file of a calibration must have."""


def _is_cost(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


DEFAULT = Machine()
