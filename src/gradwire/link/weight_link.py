"""The gather of sharded weights by compressed changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import TorchGroup, Traffic
from gradwire.exchange.method import Method, check_seed
from gradwire.exchange.norms import norm
from gradwire.exchange.protocols import Context, Workspace
from gradwire.exchange.protocols.differences import Known, gathered_differences
from gradwire.kernels import checksum, get_kernels
from gradwire.link.handshake import agreement
from gradwire.link.side_lane import SideLane
from gradwire.methods.gossip.vector_coder import VectorCoder, check_operator
from gradwire.methods.spec import method as read_method
from gradwire.seeds import worker_seed
from gradwire.version import __version__


class WeightLink:
    """Gathers sharded weights over a group by the compressed change of each shard since the last gather.

    :func:`gradwire.compress_weights` makes it.

    Args:
        method: An operator on one vector, or its spec.
        numels: Number of elements of each unit's shard, by name of the unit.
        group: The ranks that hold shards.
        seed: Seed of random numbers.
        backend: Backend of the kernels.
        beside: Ranks outside the group whose end breaks the link, too.

    Attributes:
        close: Call it to end the thread and the connections; also called when the link is garbage-collected.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: the method is not an operator on one vector, or has a scale that all ranks share.
        RankMismatchError: ranks differ in version, method, seed or units.
    """

    def __init__(
        self,
        method: str | Method,
        numels: dict[str, int],
        group: dist.ProcessGroup,
        seed: int,
        backend: str,
        beside: Sequence[int] = (),
    ) -> None:
        ranks = TorchGroup(group)
        self.rank, self.world_size = ranks.place, ranks.world_size
        with agreement(ranks, beside) as mine:
            check_seed(seed)
            self.method = read_method(method)
            check_operator("compress_weights", self.method)
            kernels = get_kernels(backend)
            if self.method.traits.kernels:
                kernels.warm_up(self.method.traits.kernels)
            checksum.warm_up()
            mine.fields = {
                "gradwire version": __version__,
                "method of the weights": repr(self.method),
                "seed": seed,
                "shards": list(numels.items()),
            }
        self._coders = {
            name: [VectorCoder(self.method, kernels, name, worker_seed(seed, r)) for r in range(self.world_size)]
            for name in numels
        }
        self._known = {name: Known() for name in numels}
        self._spaces = {name: Workspace() for name in numels}
        self._buckets = {name: bucket for bucket, name in enumerate(numels)}
        self._gathers = dict.fromkeys(numels, 0)
        self._elements = 0
        self._side = SideLane(ranks, mine.circle, "weights")
        self.close: Callable[[], object] = self._side.close

    def start_gather(self, name: str, own: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to gather all ranks' shards of a unit; call it in the same order on all ranks.

        Args:
            name: Name of the unit, whose last gather has ended.
            own: The shard of this rank, which must not change until the gather has ended.

        Returns:
            A function that waits and returns the shards, float32 ``[world_size, numel]``, valid until the next gather
            of the unit. It raises an ExchangeError if the gather broke.

        Raises:
            ExchangeError: the link is broken or closed.
        """
        bucket, count = self._buckets[name], self._gathers[name]
        self._gathers[name] += 1
        self._elements += own.numel() * self.world_size
        context = Context(self.rank, self.world_size, count, bucket, workspace=self._spaces[name])
        exchange = gathered_differences(context, self._known[name], self._coders[name], own)
        return self._side.start(exchange, f"weights of {name!r}, gather {count}")

    def drift(self) -> dict[str, float]:
        """Return |k - w| / |w| of this rank's shards by unit, with k the last gathered copy and w the weights."""
        found = {}
        for name, known in self._known.items():
            if known.rows is not None and known.sent is not None:
                size = norm(known.sent)
                error = norm(known.rows[self.rank] - known.sent.float())
                found[name] = error / size if size else error
        return found

    def traffic(self) -> Traffic:
        """Return the bytes so far; ``dense_bytes`` are those of the same gathers in float32."""
        meter = self._side.lane.meter
        dense = 4 * self._elements * (self.world_size - 1) // self.world_size
        return Traffic(meter.sent_bytes, meter.received_bytes, dense, self._elements, max(self._gathers.values()))

    def begin_anew(self) -> None:
        """Make the next gather of every unit exact; call it on all ranks, for example after loading weights."""
        self._known = {name: Known() for name in self._known}

    @property
    def error(self) -> Exception | None:
        """The error that broke the link, in full."""
        return self._side.failures.told()

    def __reduce__(self) -> str:
        raise IncompatibleError("a link of weights holds connections and cannot be pickled: build another one")
