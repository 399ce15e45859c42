"""The time of a step by a parameter server, whose workers go at their own pace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from gradwire.exchange.method import Method, cast_of
from gradwire.exchange.pace import AtOwnPace
from gradwire.exchange.planning import Options, one_way_bytes
from gradwire.methods.spec import method as read_method
from gradwire.model.exchange_profile import exchange_of
from gradwire.model.gradients import Gradients
from gradwire.model.machine import LinkModel
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.model.schedule import Load, Steps

PUSH_AND_FETCH = 2.0
"""One-way delays of a worker's step."""


@dataclass(frozen=True)
class ServerProfile:
    """A step of a worker whose gradients go to a server.

    Attributes:
        spec: Spec of the method.
        workers: Number of workers N.
        staleness: Clocks that a worker may be ahead of the slowest; None: any number.
        push_bytes: Bytes of a push; their mean if the length of payloads depends on values.
        fetch_bytes: Bytes of a fetch, likewise.
        codec_s: Seconds on a core to encode a payload and to decode two, which is more than worker and server need.
    """

    spec: str
    workers: int
    staleness: int | None
    push_bytes: int
    fetch_bytes: int
    codec_s: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that the busier direction of the server's network link carries while each worker takes a step."""
        return self.workers * max(self.push_bytes, self.fetch_bytes)

    @property
    def delays(self) -> float:
        """One-way delays on the critical path of a step."""
        return PUSH_AND_FETCH


def server_of(
    method: str | Method,
    parameters: Mapping[str, torch.Tensor],
    buckets: Sequence[ReadyBucket],
    workers: int,
    options: Options | None = None,
    repeats: int = 5,
    gradients: Gradients | None = None,
) -> ServerProfile:
    """Profile the pushes and fetches of a method at workers' own pace, on this machine.

    Args:
        parameters: Parameters by name; their values are not read, so ``meta`` tensors suffice.
        options: Options of the server, which hold for pushes and fetches.
        gradients: See :func:`gradwire.model.exchange_profile.exchange_of`. Compressed changes of parameters are taken
            to have the values of gradients, too.

    Raises:
        IncompatibleError: a method does not allow an option.
    """
    chosen = read_method(method)
    at_own_pace = cast(AtOwnPace, chosen)
    one = ReadyBucket(
        names=tuple(name for bucket in buckets for name in bucket.names),
        numel=sum(bucket.numel for bucket in buckets),
        ready_s=0.0,
    )
    push = exchange_of(at_own_pace.inner, parameters, [one], 2, options, repeats, gradients=gradients)
    if cast_of(at_own_pace.fetch) is None:
        fetch = exchange_of(at_own_pace.fetch, parameters, [one], 2, options, repeats=1, gradients=gradients)
        fetch_bytes = round(fetch.sent_bytes)
    else:
        fetch_bytes = one_way_bytes(at_own_pace.fetch, parameters, options)
    stages = [stage for b in push.buckets for run in (b.prepare, *b.chunks) for stage in run]
    return ServerProfile(
        spec=repr(chosen),
        workers=workers,
        staleness=at_own_pace.staleness,
        push_bytes=round(push.sent_bytes),
        fetch_bytes=fetch_bytes,
        codec_s=sum(stage.work_s for stage in stages),
    )


def server_time(timeline: Timeline, profile: ServerProfile, *, link: LinkModel, load: Load) -> Steps:
    """Predict the mean time of a step of each worker, for workers of one speed and a server on a host of its own.

    Let C be the seconds of a step without an exchange, q those of the codec, L the one-way delay, u and d the seconds
    of a push and of a fetch on the server's network link, and N the workers. The pushes and fetches of all workers pass
    that link, one after the other in each direction, and the server decodes them one after the other. With a staleness
    from 1 on, or none, workers spread out, so that others compute meanwhile::

        max(C + q + u + d + 2 L,  N u,  N d,  N q)

    With ``staleness=0`` nobody fetches before the last push was applied, and whoever fetches first pushes first::

        C + q + u + d + (N - 1) max(u, d) + 2 L

    Where packets are lost, a worker's connection may be slower than the link
    (:func:`gradwire.model.machine.connection_rate`). Its own push and fetch then take u' >= u and d' >= d, while
    connections of other workers use the rest of the link, so that the last of N waits for
    max(0, N max(u, d) - max(u', d')). BBR spreads a small message (:meth:`LinkModel.pacing_s`), which makes u' and d'
    longer, too. A message that waits for lost packets (:meth:`LinkModel.resending_s`) is one of the worker, or with
    ``staleness=0`` of all workers.
    """
    rate, connection = link.bandwidth_bytes_per_s or math.inf, link.connection_bytes_per_s
    both = profile.push_bytes + profile.fetch_bytes
    push_s, fetch_s = profile.push_bytes / rate, profile.fetch_bytes / rate
    own_s = [max(b / min(rate, connection), link.pacing_s(b)) for b in (profile.push_bytes, profile.fetch_bytes)]
    codec_s, workers = load.stretch * profile.codec_s, profile.workers
    alone_s = timeline.compute_s + codec_s + PUSH_AND_FETCH * link.latency_s
    wire_s, step_s, busy_s = workers * max(push_s, fetch_s), alone_s + sum(own_s), codec_s
    if profile.staleness == 0:
        step_s += max(0.0, wire_s - max(own_s)) + link.resending_s(2 * workers, 2, workers * both)
    else:
        step_s = max(step_s + link.resending_s(2, 2, both), wire_s)
        if workers * codec_s > step_s:
            # The server decodes all the time, and workers wait for it.
            step_s = busy_s = workers * codec_s
    return Steps(step_s=step_s, compute_s=timeline.compute_s, busy_s=busy_s, wire_s=wire_s)
