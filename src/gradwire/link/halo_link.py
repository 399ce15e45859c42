"""Halo exchanges over a process group, and the worker that real and simulated ones share: round, state, reports."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Meter, TorchGroup, Traffic
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Gauges, Memory, Workspace
from gradwire.graphs import Boundary, Halo, HaloMethod, HaloPlan, halo_method
from gradwire.graphs.halo_plan import BACKWARD, FORWARD, LOSS, WORDS
from gradwire.kernels import checksum, get_kernels
from gradwire.link.handshake import agreement, default_group
from gradwire.link.side_lane import SideLane
from gradwire.version import __version__

State: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]

HALO_BYTES = "halo_bytes"
"""Name of a gauge that every method has: the bytes that a worker sent in a step."""

ROUND, COUNTS, RANK = "round", "boundaries", "rank"
"""Keys of the round and of the sizes of all boundaries in a state, and of the rank in what it keeps of its own."""

ROW_BYTES = 4
"""Bytes of a value that is sent in float32."""


def compiled(method: HaloMethod, backend: str) -> float:
    """Compile the kernels of an exchange, or load them; return the seconds of compilation."""
    found_s = get_kernels(backend).warm_up(method.kernels) if method.kernels else 0.0
    return found_s + (0.0 if method.silent else checksum.warm_up())


class HaloWorker:
    """One worker of an exchange, real or simulated.

    Attributes:
        round: Training step, counted from 0, also over a loaded state.
        rounds_here: Training steps that this object has exchanged.
        meter: Bytes of the training, without those of evaluations.
        full_bytes: Bytes that this worker would have sent with all values in float32.
    """

    def __init__(
        self, method: HaloMethod, boundary: Boundary, *, seed: int = 0, steps: int | None = None, backend: str = "auto"
    ) -> None:
        self.plan = HaloPlan(method, get_kernels(backend), boundary, seed=seed, steps=steps)
        self.boundary, self.method = boundary, method
        self.memory, self.gauges, self.meter = Memory(), Gauges(), Meter()
        self.round = self.rounds_here = self.full_bytes = self._counted_bytes = 0
        self._space = Workspace()

    def context(self, layer: int, direction: int) -> Context:
        """Return the context of one exchange."""
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
        """Count the rows sent to other workers, of a width."""
        self.full_bytes += ROW_BYTES * width * int(self.boundary.counts[self.boundary.rank].sum())

    def count_backward(self, width: int) -> None:
        """Count the gradients of rows sent to their owners, of a width."""
        self.full_bytes += ROW_BYTES * width * int(self.boundary.counts[:, self.boundary.rank].sum())

    def agreed_loss(self, loss: float | None) -> Exchange[float]:
        """Return the sum of all workers' losses.

        Raises:
            IncompatibleError: there is no loss.
        """
        if loss is None:
            raise IncompatibleError(
                f"{self.method!r} follows the loss: give this worker's loss of the step to next_round()"
            )
        return self.plan.agreed_loss(self.context(0, LOSS), float(loss))

    def next_round(self, loss: float | None = None) -> None:
        """End a training step, with the sum of all workers' losses if the method follows it."""
        if loss is not None:
            self.method.follow(self.memory, loss)
            self.memory.commit()
        self.gauges.add(HALO_BYTES, self.meter.sent_bytes - self._counted_bytes, 1)
        self.round, self._counted_bytes = self.round + 1, self.meter.sent_bytes
        self.plan.drawn.clear()
        self.rounds_here += 1
        self.gauges.end_round(skipped=False)

    def traffic(self) -> Traffic:
        """Return the bytes and steps so far, without those before a loaded state.

        ``dense_bytes`` are :attr:`full_bytes`.
        """
        full = self.full_bytes
        return Traffic(self.meter.sent_bytes, self.meter.received_bytes, full, full // ROW_BYTES, self.rounds_here)

    def record(self) -> dict[str, int]:
        """Return the bytes of the training so far as plain values."""
        return {
            "sent_bytes": self.meter.sent_bytes,
            "received_bytes": self.meter.received_bytes,
            "full_bytes": self.full_bytes,
        }

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the round, the sizes of all boundaries, and the method's state by "kind/channel".

        What the method remembers alike on all workers is beside the round, under ``global``; this worker's rank is
        beside what it remembers alone, under ``rank``.
        """
        found = self.memory.state()
        found["global"] |= {ROUND: torch.tensor(self.round, device="cpu"), COUNTS: self.boundary.counts.clone()}
        found["rank"][RANK] = torch.tensor(self.boundary.rank, device="cpu")
        return found

    def load(self, state: State) -> None:
        """Continue from a state of :meth:`state`.

        Raises:
            IncompatibleError: it is not such a state, or is one of another partition or another rank.
        """
        here = self.boundary.rank
        try:
            common, own = dict(state["global"]), dict(state["rank"])
            round, counts = int(common.pop(ROUND)), common.pop(COUNTS)
            # Earlier versions did not save the rank; a state without values of its own suits every rank.
            rank = int(own.pop(RANK)) if own else here
        except (KeyError, TypeError) as error:
            raise IncompatibleError(f"this is not the state of a halo link: it has no {error}") from error
        # The copies of rows at both ends would differ: the method would use wrong rows without an error.
        if rank != here:
            raise IncompatibleError(
                f"this is the state of rank {rank}, and this is rank {here}: load on each rank the state that it saved"
            )
        if not torch.equal(counts, self.boundary.counts):
            raise IncompatibleError(
                "this is the state of another partition: continue with the graph, workers and seed of its training"
            )
        self.round = round
        self.plan.drawn.clear()
        self.memory.load({"global": common, "replicated": {}, "rank": own})


class HaloLink:
    """Exchanges the boundary rows of a partitioned graph over a process group, and returns their gradients.

    It is the ``exchange`` of a :class:`gradwire.graphs.GraphNetwork`. Gradients of weights need a link of their own::

        parts = graphs.subgraphs(graph, graphs.partition(graph, world_size))
        part = parts[rank]
        halo = gw.HaloLink(part.boundary, "VARCO(start=128)", steps=300)
        link = gw.Link(model.named_parameters(), "fp32")
        for _ in range(300):
            loss(model(part.features, part, halo)).backward()
            link.reduce_()
            optimizer.step()
            halo.next_round()

    The constructor is a collective call. The object has one lane, a thread with connections of its own, which the
    thread of the forward and backward pass waits for.

    Args:
        boundary: This rank's boundary, in a partition for as many workers as the group has.
        method: The method for rows, or its spec; see :func:`gradwire.graphs.halo_method`.
        steps: Number of steps of the training, for methods that depend on it.
        seed: Seed of random numbers.
        group: Process group; the default group if None.
        backend: Backend of the kernels.

    Attributes:
        close: Call it to end the thread and the connections; also called when the object is garbage-collected.

    Raises:
        HyperparameterError: a spec is wrong.
        IncompatibleError: the boundary is that of another rank or number of workers, or the method is not supported.
        RankMismatchError: ranks differ in version, method, seed, steps or partition.
    """

    def __init__(
        self,
        boundary: Boundary,
        method: str | HaloMethod | Method,
        *,
        steps: int | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
    ) -> None:
        ranks = default_group() if group is None else TorchGroup(group)
        rank, world_size = ranks.place, ranks.world_size
        with agreement(ranks) as mine:
            self.method = halo_method(method)
            if (boundary.rank, boundary.workers) != (rank, world_size):
                raise IncompatibleError(
                    f"the boundary is that of worker {boundary.rank} of {boundary.workers}, and this is rank {rank} of "
                    f"{world_size}: partition the graph for as many workers as there are ranks"
                )
            self._worker = HaloWorker(self.method, boundary, seed=seed, steps=steps, backend=backend)
            self._exact = HaloWorker(Halo(), boundary)
            compiled(self.method, backend)
            mine.fields = {
                "gradwire version": __version__,
                "method of the halo": repr(self.method),
                "seed": seed,
                "steps": steps,
                "boundaries": hashlib.sha256(boundary.counts.numpy().tobytes()).hexdigest(),
            }
        self._side = SideLane(ranks, mine.circle, "halo")
        self._evaluates = False
        self._side.lane.meter = self._worker.meter
        self.close: Callable[[], object] = self._side.close

    @property
    def round(self) -> int:
        """Training step, counted from 0."""
        return self._worker.round

    def next_round(self, loss: float | None = None) -> None:
        """End a training step; call it once a step on all ranks.

        Args:
            loss: Loss of this rank in the step, such that the sum over ranks is the loss of the training or a constant
                multiple of it. Only methods that follow the loss need it, such as ``CDFGNN(adaptive=True)``; with them
                the call is collective, and it costs a message of 8 bytes and a header to each other rank.

        Raises:
            IncompatibleError: the method follows the loss, and there is none.
            ExchangeError: the exchange of losses failed.
        """
        total = None
        if self.method.follows_loss:
            total = self._side.run(self._worker.agreed_loss(loss), f"loss of step {self.round}")
        self._worker.next_round(total)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Send all rows in float32 within the ``with`` block, without counting traffic or changing state."""
        self._evaluates, self._side.lane.meter = True, self._exact.meter
        try:
            yield
        finally:
            self._evaluates, self._side.lane.meter = False, self._worker.meter

    def forward(self, layer: int, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :class:`gradwire.graphs.HaloExchange`.

        Raises:
            IncompatibleError: the rows are not in main memory.
        """
        (own,), worker = rows, self._now()
        if own.device.type != "cpu":
            raise IncompatibleError(
                f"the rows of layer {layer} are on {own.device}, and halos are exchanged in main memory: move the "
                "model and the features to the CPU"
            )
        worker.count_forward(own.shape[1])
        return [self._call(worker.plan.forward(worker.context(layer, FORWARD), own), layer, FORWARD)]

    def backward(self, layer: int, gradients: Sequence[torch.Tensor], own: Sequence[int]) -> list[torch.Tensor]:
        """See :class:`gradwire.graphs.HaloExchange`."""
        (halo,), worker = gradients, self._now()
        worker.count_backward(halo.shape[1])
        generator = worker.plan.backward(worker.context(layer, BACKWARD), halo, own[0])
        return [self._call(generator, layer, BACKWARD)]

    def _now(self) -> HaloWorker:
        return self._exact if self._evaluates else self._worker

    def _call(self, generator: Exchange[torch.Tensor], layer: int, direction: int) -> torch.Tensor:
        return self._side.run(generator, f"layer {layer} {WORDS[direction]}, step {self.round}")

    def traffic(self) -> Traffic:
        """Return the bytes of the training's exchanges on this rank, and the steps, since the link was made.

        ``dense_bytes`` are the bytes of the values in float32, and ``elements`` is their number. As on a
        :class:`gradwire.Link`, what was exchanged before a loaded state is not counted.
        """
        return self._worker.traffic()

    def gauges(self) -> dict[str, float]:
        """Return the method's gauges of this rank's latest step."""
        return dict(self._worker.gauges.latest)

    def record(self) -> dict[str, Any]:
        """Return the method, the options and the bytes so far as plain values."""
        return {"method": repr(self.method), "traffic": [self._worker.record()]}

    @property
    def error(self) -> Exception | None:
        """The error that broke the link, in full."""
        return self._side.failures.told()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's state, tensors only, with the method's under ``rank``; a local call."""
        return self._worker.state()

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Continue from a state of :meth:`state_dict`, on the same rank of the same partition.

        Raises:
            IncompatibleError: it is not such a state, or is one of another rank or partition.
        """
        self._worker.load(state)
