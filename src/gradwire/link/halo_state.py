"""What the ends of a halo exchange share: the place in the training, what is remembered, what is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Meter, Traffic
from gradwire.exchange.protocols import Context, Gauges, Memory, Workspace
from gradwire.graphs import Boundary, HaloMethod, HaloPlan
from gradwire.kernels import checksum, get_kernels

__all__ = ["HaloWorker", "compiled"]

State: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]

HALO_BYTES = "halo_bytes"
"""Gauge of every method: the bytes that a worker sent in a step."""

COUNTS = "boundaries"
"""Key of the sizes of all boundaries in a state."""

ROW_BYTES = 4
"""Of a value in full communication."""


def compiled(method: HaloMethod, backend: str) -> float:
    """Compile what an exchange calls, or load it; return the seconds in which something was compiled."""
    found_s = get_kernels(backend).warm_up(method.kernels) if method.kernels else 0.0
    return found_s + (0.0 if method.silent else checksum.warm_up())


class HaloWorker:
    """One worker of an exchange, real or simulated.

    Attributes:
        round: Training step, counted from 0.
        meter: Bytes of the training; what evaluations exchange is not counted.
        full_bytes: Values that left this worker, at four bytes each, had all been sent.
    """

    def __init__(
        self, method: HaloMethod, boundary: Boundary, *, seed: int = 0, steps: int | None = None, backend: str = "auto"
    ) -> None:
        self.plan = HaloPlan(method, get_kernels(backend), boundary, seed=seed, steps=steps)
        self.boundary, self.method = boundary, method
        self.memory, self.gauges, self.meter = Memory(), Gauges(), Meter()
        self.round = self.full_bytes = self._counted_bytes = 0
        self._space = Workspace()

    def context(self, layer: int, direction: int) -> Context:
        """Return the place of one exchange."""
        return Context(
            rank=self.boundary.rank,
            world_size=self.boundary.workers,
            round=self.round,
            bucket=layer,
            chunk=direction,
            workspace=self._space.part(f"layer {layer}, {direction}"),
            memory=self.memory,
            gauge=self.gauges.add,
        )

    def count_forward(self, width: int) -> None:
        """Count rows of that width to other workers."""
        self.full_bytes += ROW_BYTES * width * int(self.boundary.counts[self.boundary.rank].sum())

    def count_backward(self, width: int) -> None:
        """Count gradients of rows of that width to their owners."""
        self.full_bytes += ROW_BYTES * width * int(self.boundary.counts[:, self.boundary.rank].sum())

    def next_round(self) -> None:
        """End a training step."""
        self.gauges.add(HALO_BYTES, self.meter.sent_bytes - self._counted_bytes, 1)
        self.round, self._counted_bytes = self.round + 1, self.meter.sent_bytes
        self.gauges.end_round(skipped=False)

    def traffic(self) -> Traffic:
        """Return the bytes of the training so far; ``dense_bytes`` are :attr:`full_bytes`."""
        full = self.full_bytes
        return Traffic(self.meter.sent_bytes, self.meter.received_bytes, full, full // ROW_BYTES, self.round)

    def record(self) -> dict[str, int]:
        """Return the bytes of the training so far, in plain values."""
        return {
            "sent_bytes": self.meter.sent_bytes,
            "received_bytes": self.meter.received_bytes,
            "full_bytes": self.full_bytes,
        }

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the round and the sizes of all boundaries, and what is remembered by "kind/channel"."""
        found = self.memory.state()
        found["global"] = {"round": torch.tensor(self.round), COUNTS: self.boundary.counts.clone()}
        return found

    def load(self, state: State) -> None:
        """Continue where :meth:`state` was taken.

        Raises:
            IncompatibleError: it is no such state, or of another partition.
        """
        try:
            round, counts, own = int(state["global"]["round"]), state["global"][COUNTS], state["rank"]
        except (KeyError, TypeError) as error:
            raise IncompatibleError(f"this is not the state of a halo link: it has no {error}") from error
        if not torch.equal(counts, self.boundary.counts):
            raise IncompatibleError(
                "this is the state of another partition: continue with the graph, workers and seed of its training"
            )
        self.round = round
        self.memory.load({"global": {}, "replicated": {}, "rank": own})
