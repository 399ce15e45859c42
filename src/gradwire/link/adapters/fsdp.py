"""Modules sharded by FSDP2: hooks for the reduce-scatter, or the all-reduce between replicas. Only layouts here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method, is_whole
from gradwire.exchange.planning import REDUCE_SCATTER
from gradwire.link.adapters.fsdp_collectives import NamedCollective, name_collectives
from gradwire.link.checks import check_unit_by_unit
from gradwire.link.link import Link
from gradwire.link.parameters import plain_name
from gradwire.seeds import shard_seed


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
    units = _units(module)
    for unit in units:
        unit.check()
    shards, native = _mesh(units)
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
        exchange = _Replicas(units, group, shards, method, options)
    for unit in _all_units(module):
        name_collectives(unit.module, unit.group, unit.name, exchange.link.naming)
    return exchange.link


@dataclass(frozen=True)
class _Sharded:
    """A parameter sharded by FSDP2: its number of elements in all, on this rank, and in the longest shard."""

    name: str
    tensor: torch.Tensor
    numel: int
    local: int
    padded: int


class _Unit:
    """A group of parameters whose gradients FSDP2 reduces in one collective.

    Every trainable parameter must take part: FSDP2 does not report to a reduce-scatter or a hook which ones it left
    out.

    Args:
        module: The module that the parameters were grouped for.
        group: FSDP2's own record of the group.
        names: Names of modules, by identity.
    """

    def __init__(self, module: Any, group: Any, names: dict[int, str]) -> None:
        self.module, self.group = module, group
        self.name = names[id(module)] or "the root"
        self.parameters: list[_Sharded] = []
        for p in group.fsdp_params:
            prefix, tensor = names[id(p._module_info.module)], p.sharded_param
            name = f"{prefix}.{p._module_info.param_name}" if prefix else p._module_info.param_name
            if tensor.requires_grad:
                sizes = tensor.numel(), p.sharded_size.numel(), p.padded_sharded_param_size.numel()
                self.parameters.append(_Sharded(name, tensor, *sizes))
        self.names = [p.name for p in self.parameters]
        self.padded = sum(p.padded for p in self.parameters)

    def check(self) -> None:
        """Raise if the unit cannot be exchanged; remove the hooks of a closed link."""
        for p in self.group.fsdp_params:
            if p.is_dtensor:
                raise IncompatibleError(
                    f"parameter {p._module_info.param_name!r} of module {self.name!r} is sharded in another way beside "
                    "FSDP2's: tensor parallelism is not supported; exchange its gradients in a hook of your own"
                )
        hook, scatter = self.group._all_reduce_hook, self.group._reduce_scatter_comm
        for taken in (hook, scatter):
            if isinstance(taken, NamedCollective):
                taken.remove()
            elif isinstance(taken, _Hook):
                if taken.exchange.link.close.alive:
                    raise IncompatibleError(
                        f"this module already exchanges by {taken.exchange.link.method!r}: close that link first "
                        "(link.close())"
                    )
                taken.remove()
            elif taken is not None and type(taken).__name__ != "DefaultReduceScatter":
                raise IncompatibleError(
                    f"module {self.name!r} has an exchange of its own ({type(taken).__name__}): remove it, or shard "
                    "the module anew"
                )

    def check_numel(self, found: int, ranks: int = 1) -> None:
        """Raise if not all parameters take part in a reduction."""
        if found != self.padded * ranks:
            raise IncompatibleError(
                f"module {self.name!r} reduces {found} elements instead of {self.padded * ranks}: a parameter has no "
                "gradient in this backward pass, and FSDP2 does not say which; call "
                "model.set_reduce_scatter_unused_params(True), or set requires_grad=False before attach"
            )


def _units(module: nn.Module) -> list[_Unit]:
    """Return the units of a sharded module whose gradients are reduced."""
    found = [unit for unit in _all_units(module) if unit.parameters]
    if not found:
        raise IncompatibleError("no parameter of the sharded module requires a gradient: there is nothing to exchange")
    return found


def _all_units(module: nn.Module) -> list[_Unit]:
    """Return the units of a sharded module whose parameters are gathered, also those without gradients."""
    names = {id(part): plain_name(name) for name, part in module.named_modules()}
    found, seen = list[_Unit](), set[int]()
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            # PyTorch before 2.12 has at most one group.
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if id(state) in seen or not groups:
            continue
        seen.add(id(state))
        if len(groups) > 1:
            raise IncompatibleError(
                f"module {names[id(part)]!r} has parameters on several meshes (shard_placement_fn), for which FSDP2 "
                "takes no exchange of ours: shard them in modules of their own"
            )
        found.append(_Unit(part, groups[0], names))
    return found


def units_of(module: nn.Module) -> tuple[list[_Unit], dist.ProcessGroup]:
    """Return the units of a sharded module, and the ranks that hold its shards.

    Raises:
        IncompatibleError: they are not supported; the message says what to change.
    """
    units = _units(module)
    return units, _mesh(units)[0]


def _mesh(units: Sequence[_Unit]) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the ranks that units are sharded over, and those that hold the same shard, if the mesh has any."""
    meshes = [(_shards(unit), getattr(unit.group.mesh_info, "replicate_process_group", None)) for unit in units]
    shards, replicas = meshes[0]
    for unit, (theirs, copies) in zip(units, meshes):
        same = dist.get_process_group_ranks(theirs) == dist.get_process_group_ranks(shards)
        if not same or (copies is None) != (replicas is None):
            raise IncompatibleError(
                f"module {unit.name!r} is sharded over other ranks than {units[0].name!r}: all parts of a module need "
                "one mesh"
            )
    return shards, replicas


def _shards(unit: _Unit) -> dist.ProcessGroup:
    group = getattr(unit.group.mesh_info, "shard_process_group", None)
    if group is None:
        raise IncompatibleError(
            f"module {unit.name!r} is replicated, not sharded: wrap it in DistributedDataParallel instead"
        )
    return group  # type: ignore[no-any-return]


def mesh_ranks(unit: _Unit) -> list[int]:
    """Return all ranks of a unit's mesh. In HSDP each waits for every other, directly or through a third."""
    ranks: list[int] = unit.group.mesh_info.mesh.mesh.flatten().tolist()
    return ranks


class _ShardedExchange:
    """The rounds of a link whose buckets are FSDP2's units, each reduced when its gradients are ready.

    FSDP2 uses the result of a reduction as soon as the call returns, so that each call waits. It does not say which one
    is the last: a round ends with the backward pass, or when a unit reduces for the second time, as it does if a loss
    is computed in parts.

    Attributes:
        link: The link.
    """

    link: Link

    def __init__(self) -> None:
        self._reduced: set[int] = set()

    def reduce(self, unit: _Unit, flat: torch.Tensor) -> torch.Tensor:
        """Exchange a bucket in place, and return it."""
        if id(unit) in self._reduced:
            self._end()
        index = len(self._reduced)
        self._reduced.add(id(unit))
        Variable._execution_engine.queue_callback(self._end)
        future = self.link.exchange(index, unit.names, flat, False)
        try:
            return future.wait()
        except Exception:
            # The future holds only a mangled part of the message.
            if self.link.error is not None:
                raise self.link.error from None
            raise

    def _end(self) -> None:
        if self._reduced:
            self._reduced.clear()
            self.link.end_round()


class _Scatter(_ShardedExchange):
    """Replaces the reduce-scatter of every unit, over the ranks that hold shards."""

    def __init__(self, units: Sequence[_Unit], shards: dist.ProcessGroup, method: str | Method, options: Any) -> None:
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
        self.link = Link(tensors, method, group=shards, **{**options, "collective": REDUCE_SCATTER})
        for unit in units:
            _ReduceScatter(self, unit)


def _trainable(unit: _Unit) -> list[Any]:
    return [p for p in unit.group.fsdp_params if p.sharded_param.requires_grad]


class _Hook:
    """A callable that replaces one of FSDP2's for a unit, and the one that it replaces."""

    def __init__(self, exchange: _ShardedExchange, unit: _Unit) -> None:
        self.exchange, self.unit = exchange, unit

    def remove(self) -> None:
        """Restore FSDP2's own reduction of the unit's gradients."""


class _ReduceScatter(_Hook):
    """Reduces a unit's gradients to this rank's shard; implements FSDP2's protocol ``ReduceScatter``."""

    def __init__(self, exchange: _ShardedExchange, unit: _Unit) -> None:
        super().__init__(exchange, unit)
        self._before = unit.group._reduce_scatter_comm
        unit.module.set_custom_reduce_scatter(self)

    def remove(self) -> None:
        self.unit.module.set_custom_reduce_scatter(self._before)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the gradients of all ranks' shards, or of one."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor``, a row of padded shards for each rank, to the row of this rank."""
        link, parameters = self.exchange.link, self.unit.parameters
        world, rank = link.world_size, link.rank
        factor = _factor(op, world)
        self.unit.check_numel(input_tensor.numel(), world)
        columns = input_tensor.view(world, -1).split([p.padded for p in parameters], dim=1)
        whole = [part.reshape(-1)[: p.numel] for part, p in zip(columns, parameters)]
        mean = self.exchange.reduce(self.unit, torch.cat(whole).to(torch.float32)).mul_(factor)
        # Padding is never read as a gradient, but it may be added to a norm.
        output_tensor.zero_()
        of_parameters = mean.split([p.numel for p in parameters])
        for room, values, p in zip(output_tensor.split([p.padded for p in parameters]), of_parameters, parameters):
            room[: p.local].copy_(values[rank * p.padded : rank * p.padded + p.local])


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
        units: Sequence[_Unit],
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
                alone = alone or dist.new_group([dist.get_rank()], use_local_synchronization=True)
            _AllReduceHook(self, unit, alone)


class _AllReduceHook(_Hook):
    """Averages the gradients of a unit's shard over replicas, after FSDP2 has reduced them over the shards.

    Args:
        exchange: The exchange of the module.
        unit: The unit.
        alone: A group of this rank alone, for FSDP2's own all-reduce; None if FSDP2 does none.
    """

    def __init__(self, exchange: _ShardedExchange, unit: _Unit, alone: dist.ProcessGroup | None) -> None:
        super().__init__(exchange, unit)
        mesh = unit.group.mesh_info
        self._native = None if alone is None else mesh.replicate_process_group
        if alone is not None:
            mesh.replicate_process_group = alone
        unit.module.set_all_reduce_hook(self)

    def remove(self) -> None:
        self.unit.module.set_all_reduce_hook(None)
        if self._native is not None:
            self.unit.group.mesh_info.replicate_process_group = self._native

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Replace the gradients by their mean over replicas, or by their sum if the user divides by a factor."""
        link, parameters = self.exchange.link, self.unit.parameters
        self.unit.check_numel(reduce_output.numel())
        padded = reduce_output.split([p.padded for p in parameters])
        flat = torch.cat([part[: p.local] for part, p in zip(padded, parameters)])
        mean = self.exchange.reduce(self.unit, flat)
        if self.unit.group.gradient_divide_factor is not None:
            mean.mul_(link.world_size)
        for part, values in zip(padded, mean.split([p.local for p in parameters])):
            part[: len(values)].copy_(values)
