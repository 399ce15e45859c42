"""The network link as two timed all-to-alls show it, without the costs that the model itself adds."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from gradwire.exchange.network_cost import LinkCost
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.schedule import Load

NOTICEABLE = 0.02
"""Least share of a large all-to-all's time that its bytes must take to determine a bandwidth."""


def host_number() -> float:
    """Return a number, exact as a float, that is equal for processes that share network interfaces.

    On Linux it identifies a network namespace of one boot of one machine, so that each container or emulated host
    counts as a host; elsewhere it depends on the host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        name = f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        name = socket.gethostname()
    return float(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big"))


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Times of two all-to-alls among all ranks, the same on every rank.

    With N ranks, H of them on a host, and rows of b bytes, b H (N - H) bytes leave a host. A row takes two one-way
    delays d, the request's and its own: a rank requests the next row when it has read the last one, and with nothing to
    compute in between the sender waits for it. (In training it has come meanwhile.) Small rows go at once, large ones
    in N - 1 turns, each of which the machine handles in a time r (:attr:`Machine.round_s`), so::

        small_s = r + 2 d + b_small H (N - H) / (bandwidth * efficiency)
        large_s = (N - 1) r + 2 d + b_large H (N - H) / (bandwidth * efficiency)

    Attributes:
        world_size: N.
        ranks_per_host: H, the largest number of ranks on a host.
        small_bytes, large_bytes: Bytes of a row.
        small_s, large_s: Seconds until all rows have arrived.
    """

    world_size: int
    ranks_per_host: int
    small_bytes: int
    small_s: float
    large_bytes: int
    large_s: float

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host, so that no byte used the network."""
        return self.world_size <= self.ranks_per_host

    @property
    def wire_s(self) -> float:
        """Seconds of the large all-to-all without delays, on a machine of the default costs."""
        return self._wire_s(DEFAULT.round_s)

    def _wire_s(self, round_s: float) -> float:
        return self.large_s - self.small_s - (self.world_size - 2) * round_s

    @property
    def host_bytes_per_s(self) -> float | None:
        """Payload that left a host in a second while all sent; None if no network link limited it."""
        return self._host_bytes_per_s(DEFAULT.round_s)

    def _host_bytes_per_s(self, round_s: float) -> float | None:
        wire_s = self._wire_s(round_s)
        if self.one_host or wire_s <= NOTICEABLE * self.large_s:
            return None
        return self._leaving(self.large_bytes) / wire_s

    @property
    def cost(self) -> LinkCost:
        """Cost of a message to all other ranks: the time of the small one, and a time for each byte beyond it.

        Of the two delays of the small one, the request's is left out: in training it comes while ranks compute.
        """
        taken_s = max(self.wire_s, NOTICEABLE * self.large_s)
        requested_s = self.link(DEFAULT, Load(ranks=self.ranks_per_host, cores=2 * self.ranks_per_host)).latency_s
        return LinkCost(message_s=self.small_s - requested_s, bytes_per_s=self.large_bytes / taken_s)

    def link(self, machine: Machine, load: Load) -> LinkModel:
        """Solve the two equations for the raw bandwidth of a host and the delay in one direction.

        Args:
            machine: Costs that the model will add again: the link's efficiency, and the latency of a round.
            load: Ranks and cores of a host, as in the prediction.
        """
        round_s = machine.round_s * load.stretch
        if self._host_bytes_per_s(round_s) is None:
            return LinkModel(latency_s=max(0.0, self.small_s - round_s) / 2, ranks_per_host=self.ranks_per_host)
        small, large = (self._leaving(count) / machine.efficiency for count in (self.small_bytes, self.large_bytes))
        byte_s = self._wire_s(round_s) / (large - small)
        return LinkModel(
            bandwidth_bytes_per_s=1.0 / byte_s,
            latency_s=max(0.0, self.small_s - small * byte_s - round_s) / 2,
            ranks_per_host=self.ranks_per_host,
        )

    def _leaving(self, row_bytes: int) -> int:
        return row_bytes * self.ranks_per_host * (self.world_size - self.ranks_per_host)
