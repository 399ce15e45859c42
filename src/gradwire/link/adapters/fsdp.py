"""Modules sharded by FSDP2: hooks for the reduce-scatter, or the all-reduce between replicas.

Only layouts are here, and the order of exchanges.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method, is_whole
from gradwire.exchange.planning import REDUCE_SCATTER
from gradwire.link.adapters.fsdp_collectives import name_collectives
from gradwire.link.adapters.fsdp_pending import Pending, PendingTensor, plain_of
from gradwire.link.adapters.fsdp_units import (
    Hook,
    Unit,
    all_units,
    end_with_passes,
    mesh_groups,
    mesh_ranks,
    trainable_units,
)
from gradwire.link.checks import check_unit_by_unit
from gradwire.link.handshake import compare_values
from gradwire.link.link import Link
from gradwire.link.parameters import check_still_frozen
from gradwire.seeds import shard_seed

IN_FLIGHT = 3
"""Most units whose gradients are exchanged at a time: one for each of the default lanes, and one that comes next.

Their gradients are kept until then.
"""

_ALONE: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The group of this rank alone, by the default group."""


def attach_fsdp(module: nn.Module, method: str | Method, replicas: dist.ProcessGroup | None, options: Any) -> Link:
    """Exchange the gradients of a sharded module by a method from now on; see :func:`gradwire.attach`.

    Args:
        module: The root module that ``fully_shard`` was called on.
        replicas: Ranks that hold the same shard. None: taken from the module's mesh if that has two dimensions.
        options: Options of the link, with ``collective`` and ``seed``.

    Raises:
        IncompatibleError: the module or the method is not supported; the message says what to change.
        RankMismatchError: replicas of a shard have different parameters.
    """
    units = trainable_units(module)
    for unit in units:
        unit.check()
    shards, native = mesh_groups(units)
    if native is not None and replicas is not None and replicas is not native:
        raise IncompatibleError("process_group differs from the replicas of the module's own mesh; leave it out")
    group = replicas or native
    ranks = dist.get_process_group_ranks
    if group is None or (native is None and ranks(group) == ranks(shards)):
        exchange: _ShardedExchange = _Scatter(units, shards, method, options)
    else:
        if set(ranks(group)) & set(ranks(shards)) != {dist.get_rank()}:
            raise IncompatibleError(
                f"process_group has ranks {ranks(group)}, and the module is sharded over ranks {ranks(shards)}: the "
                "ranks that hold the same shard are needed, such as mesh['replicate'].get_group(), or no process_group"
            )
        _check_frozen(module, group)
        exchange = _Replicas(units, group, shards, method, options)
    for unit in all_units(module):
        numel = unit.padded if isinstance(exchange, _Replicas) else 0
        name_collectives(unit.module, unit.group, unit.name, exchange.link.naming, numel)
        if isinstance(exchange, _Replicas) and not unit.parameters:
            exchange.guard(unit)
    end_with_passes(module, exchange.end)
    return exchange.link


def _check_frozen(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Compare the frozen parameters of replicas, which nobody makes equal (collective call if there are some).

    Raises:
        RankMismatchError: replicas of a shard have different ones.
    """
    units = all_units(module)
    frozen = {name: p for unit in units for name, p in unit.frozen.items()}
    if frozen:
        compare_values(frozen, replicas, mesh_ranks(units[0]))


class _ShardedExchange:
    """The rounds of a link whose buckets are FSDP2's units, each reduced when its gradients are ready.

    A unit's exchange starts when FSDP2 reduces it, and is waited for when its gradients are read, when too many are
    under way, or at the end of the backward pass. Every rank reduces the same units in the same order, so that their
    exchanges and FSDP2's own collectives start in one order everywhere. Waiting for an exchange changes nothing in it:
    each depends only on those that started before, on all ranks.

    FSDP2 does not say which reduction is the last: a round ends with the backward pass, or when a unit reduces for the
    second time, as it does if a loss is computed in parts.

    Attributes:
        link: The link.
    """

    link: Link

    def __init__(self) -> None:
        self._reduced: set[int] = set()
        self._in_flight: deque[Pending] = deque()

    def make_room(self, unit: Unit) -> None:
        """Wait until a unit's exchange may start; call it before its gradients are copied."""
        if id(unit) in self._reduced:
            self.end()
        self._wait(IN_FLIGHT - 1)

    def start(
        self, unit: Unit, flat: torch.Tensor, result: torch.Tensor, write: Callable[[torch.Tensor], None]
    ) -> None:
        """Start the exchange of a bucket.

        Args:
            unit: The unit.
            flat: Its gradients, overwritten by their mean.
            result: What FSDP2 takes for the outcome. If it is not a :class:`PendingTensor`, the exchange is waited for.
            write: Called with the mean; writes the outcome.
        """
        index = len(self._reduced)
        self._reduced.add(id(unit))
        Variable._execution_engine.queue_callback(partial(self._end_pass, unit))
        future = self.link.exchange(index, unit.names, flat, False)

        def finish() -> None:
            try:
                mean = future.wait()
            except Exception:
                # The future holds only a mangled part of the message.
                if self.link.error is not None:
                    raise self.link.error from None
                raise
            write(mean)
            unit.settle()

        if isinstance(result, PendingTensor):
            result.pending.begin(finish)
            self._in_flight.append(result.pending)
        else:
            finish()

    def _wait(self, most: int) -> None:
        """Wait until at most so many exchanges are under way."""
        while len(self._in_flight) > most:
            self._in_flight.popleft().wait()

    def _end_pass(self, unit: Unit) -> None:
        """End the round at the end of a backward pass, but not of one within another, as of a reentrant checkpoint."""
        if not unit.in_backward:
            self.end()

    def end(self) -> None:
        """Wait for all exchanges, and end the round, if one has begun."""
        self._wait(0)
        if self._reduced:
            self._reduced.clear()
            self.link.end_round()


class _Scatter(_ShardedExchange):
    """Replaces the reduce-scatter of every unit, over the ranks that hold shards."""

    def __init__(self, units: Sequence[Unit], shards: dist.ProcessGroup, method: str | Method, options: Any) -> None:
        super().__init__()
        check_unit_by_unit(method)
        for unit in units:
            for p, ours in zip(_trainable(unit), unit.parameters):
                if p.fsdp_placement.dim != 0:
                    raise IncompatibleError(
                        f"parameter {ours.name!r} is sharded along dimension {p.fsdp_placement.dim}: a compressing "
                        "reduce-scatter needs shards of dimension 0; leave shard_placement_fn out, or shard over a "
                        "mesh of two dimensions, such as ('replicate', 'shard'), where replicas exchange their shards"
                    )
        if options["collective"] not in ("auto", REDUCE_SCATTER):
            raise IncompatibleError(
                f"collective={options['collective']!r}: a module that is sharded and has no replicas is exchanged by a "
                "reduce-scatter; leave collective out"
            )
        tensors = [(p.name, p.tensor) for unit in units for p in unit.parameters]
        self.link = Link(tensors, method, group=shards, unit_by_unit=True, **{**options, "collective": REDUCE_SCATTER})
        for unit in units:
            _ReduceScatter(self, unit)


def _trainable(unit: Unit) -> list[Any]:
    return [p for p in unit.group.fsdp_params if p.sharded_param.requires_grad]


class _ReduceScatter(Hook):
    """Reduces a unit's gradients to this rank's shard; implements FSDP2's protocol ``ReduceScatter``."""

    def __init__(self, exchange: _ShardedExchange, unit: Unit) -> None:
        super().__init__(exchange.link, unit)
        self._exchange, self._before = exchange, unit.group._reduce_scatter_comm
        unit.module.set_custom_reduce_scatter(self)

    def remove(self) -> None:
        self.unit.module.set_custom_reduce_scatter(self._before)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the gradients of all ranks' shards, or of one, which are there after their exchange."""
        room = torch.empty(*size, dtype=dtype, device=device)
        late = device.type == "cpu" and room.numel() == self.unit.padded
        return PendingTensor(room, Pending()) if late else room

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, op: Any, async_op: bool = False
    ) -> None:
        """Start to reduce ``input_tensor``, a row of padded shards for each rank, to the row of this rank."""
        parameters, rank, world = self.unit.parameters, self.link.rank, self.link.world_size
        factor = _factor(op, world)
        self.unit.check_numel(input_tensor.numel(), world)
        self._exchange.make_room(self.unit)
        columns = input_tensor.view(world, -1).split([p.padded for p in parameters], dim=1)
        whole = [part.reshape(-1)[: p.numel] for part, p in zip(columns, parameters)]
        output = plain_of(output_tensor)

        def write(mean: torch.Tensor) -> None:
            mean.mul_(factor)
            # Padding is never read as a gradient, but it may be added to a norm.
            output.zero_()
            of_parameters = mean.split([p.numel for p in parameters])
            for room, values, p in zip(output.split([p.padded for p in parameters]), of_parameters, parameters):
                room[: p.local].copy_(values[rank * p.padded : rank * p.padded + p.local])

        self._exchange.start(self.unit, torch.cat(whole).to(torch.float32), output_tensor, write)


def _factor(op: Any, world_size: int) -> float:
    """Return the factor by which to multiply the mean over ranks.

    Raises:
        IncompatibleError: FSDP2 asks for a reduction other than a sum, a mean, or a sum of multiples.
    """
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(world_size)
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1]) * world_size
    raise IncompatibleError(f"FSDP2 asks for a reduction by {op}, which is neither a sum nor a mean")


class _Replicas(_ShardedExchange):
    """Replaces the all-reduce of every unit's shard, over the ranks that hold the same shard."""

    def __init__(
        self,
        units: Sequence[Unit],
        replicas: dist.ProcessGroup,
        shards: dist.ProcessGroup,
        method: str | Method,
        options: Any,
    ) -> None:
        super().__init__()
        check_unit_by_unit(method)
        tensors = [(p.name, p.tensor) for unit in units for p in unit.parameters]
        if is_whole(options["seed"]):
            options = {**options, "seed": shard_seed(options["seed"], shards.rank())}
        self.link = Link(tensors, method, group=replicas, beside=mesh_ranks(units[0]), unit_by_unit=True, **options)
        if shards.size() > 1:
            self.link.part = f"shard-{shards.rank()}-of-{shards.size()}"
        alone = None
        for unit in units:
            if hasattr(unit.group.mesh_info, "replicate_process_group"):
                # FSDP2's own all-reduce cannot be turned off. In a group of this rank alone it sends nothing.
                alone = alone or _group_of_this_rank()
            _AllReduceHook(self, unit, alone)

    def guard(self, unit: Unit) -> None:
        """See to it that a unit all of whose parameters are frozen is not left out if they no longer are."""
        hook = unit.group._all_reduce_hook
        if isinstance(hook, Hook):
            hook.remove()  # a closed link's
        # With FSDP2's own all-reduce, replicas stay equal without a link.
        if unit.group._all_reduce_hook is None and not hasattr(unit.group.mesh_info, "replicate_process_group"):
            _FrozenHook(self.link, unit)


def _group_of_this_rank() -> dist.ProcessGroup:
    """Return a group of this rank alone, the same one for all links, since it lasts as long as the process group."""
    whole = dist.group.WORLD
    if whole not in _ALONE:
        _ALONE[whole] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _ALONE[whole]


class _FrozenHook(Hook):
    """Refuses to go on without an exchange of a unit whose parameters were frozen, once FSDP2 reduces it."""

    def __init__(self, link: Link, unit: Unit) -> None:
        super().__init__(link, unit)
        unit.module.set_all_reduce_hook(self)

    def remove(self) -> None:
        self.unit.module.set_all_reduce_hook(None)

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Raise if a parameter is no longer frozen."""
        check_still_frozen(self.unit.frozen)


class _AllReduceHook(Hook):
    """Averages the gradients of a unit's shard over replicas, after FSDP2 has reduced them over the shards.

    Args:
        exchange: The exchange of the module.
        unit: The unit.
        alone: A group of this rank alone, for FSDP2's own all-reduce; None if FSDP2 does none.
    """

    def __init__(self, exchange: _ShardedExchange, unit: Unit, alone: dist.ProcessGroup | None) -> None:
        super().__init__(exchange.link, unit)
        mesh = unit.group.mesh_info
        self._exchange, self._native = exchange, None if alone is None else mesh.replicate_process_group
        if alone is not None:
            mesh.replicate_process_group = alone
        unit.module.set_all_reduce_hook(self)

    def remove(self) -> None:
        self.unit.module.set_all_reduce_hook(None)
        if self._native is not None:
            self.unit.group.mesh_info.replicate_process_group = self._native

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Start to replace the gradients by their mean over replicas, or by their sum if the user sets a divisor."""
        link, parameters = self.link, self.unit.parameters
        self.unit.check_numel(reduce_output.numel())
        self._exchange.make_room(self.unit)
        padded = plain_of(reduce_output).split([p.padded for p in parameters])
        flat = torch.cat([part[: p.local] for part, p in zip(padded, parameters)])
        takes_sum = self.unit.group.gradient_divide_factor is not None

        def write(mean: torch.Tensor) -> None:
            if takes_sum:
                mean.mul_(link.world_size)
            for part, values in zip(padded, mean.split([p.local for p in parameters])):
                part[: len(values)].copy_(values)

        self._exchange.start(self.unit, flat, reduce_output, write)
