"""The units of a module sharded by FSDP2: which parameters are reduced together, and over which ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradwire.errors import IncompatibleError
from gradwire.link.adapters.fsdp_collectives import NamedCollective
from gradwire.link.adapters.fsdp_pending import settle
from gradwire.link.link import Link
from gradwire.link.parameters import check_still_frozen, plain_name


@dataclass(frozen=True)
class Sharded:
    """A parameter sharded by FSDP2: its number of elements in all, on this rank, and in the longest shard."""

    name: str
    tensor: torch.Tensor
    numel: int
    local: int
    padded: int


class Unit:
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
        self.parameters: list[Sharded] = []
        self.frozen: dict[str, torch.Tensor] = {}
        for p in group.fsdp_params:
            prefix, tensor = names[id(p._module_info.module)], p.sharded_param
            name = f"{prefix}.{p._module_info.param_name}" if prefix else p._module_info.param_name
            if tensor.requires_grad:
                sizes = tensor.numel(), p.sharded_size.numel(), p.padded_sharded_param_size.numel()
                self.parameters.append(Sharded(name, tensor, *sizes))
            else:
                self.frozen[name] = tensor
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
            elif isinstance(taken, Hook):
                if taken.link.close.alive:
                    raise IncompatibleError(
                        f"this module already exchanges by {taken.link.method!r}: close that link first (link.close())"
                    )
                taken.remove()
            elif taken is not None and type(taken).__name__ != "DefaultReduceScatter":
                raise IncompatibleError(
                    f"module {self.name!r} has an exchange of its own ({type(taken).__name__}): remove it, or shard "
                    "the module anew"
                )

    def check_numel(self, found: int, ranks: int = 1) -> None:
        """Raise if not all parameters take part in a reduction, or others do."""
        check_still_frozen(self.frozen)
        if found != self.padded * ranks:
            raise IncompatibleError(
                f"module {self.name!r} reduces {found} elements instead of {self.padded * ranks}: a parameter has no "
                "gradient in this backward pass, and FSDP2 does not say which; call "
                "model.set_reduce_scatter_unused_params(True), or set requires_grad=False before attach"
            )

    @property
    def in_backward(self) -> bool:
        """Whether FSDP2's own end of the backward pass is still to come."""
        return bool(self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)

    def settle(self) -> None:
        """Make the gradients plain tensors again after their exchange."""
        for p in self.group.fsdp_params:
            settle(p.sharded_param)


class Hook:
    """A callable that replaces one of FSDP2's for a unit.

    Args:
        link: The link that it belongs to.
        unit: The unit.
    """

    def __init__(self, link: Link, unit: Unit) -> None:
        self.link, self.unit = link, unit

    def remove(self) -> None:
        """Restore FSDP2's own reduction of the unit's gradients."""


class _PassEnd:
    """FSDP2's own end of a backward pass, and what comes after it.

    It begins in the first module whose gradients are there, and so belongs to the whole pass, also where modules are
    reduced in passes within it, as of reentrant checkpoints.
    """

    def __init__(self, state: Any, then: Callable[[], None]) -> None:
        native = state._root_post_backward_final_callback
        self._native: Callable[[], None] = native._native if isinstance(native, _PassEnd) else native
        self._then = then

    def __call__(self) -> None:
        self._native()
        self._then()


def end_with_passes(module: nn.Module, then: Callable[[], None]) -> None:
    """Call ``then`` after FSDP2's own end of each backward pass that begins in a sharded module."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            state._root_post_backward_final_callback = _PassEnd(state, then)


def trainable_units(module: nn.Module) -> list[Unit]:
    """Return the units of a sharded module whose gradients are reduced."""
    found = [unit for unit in all_units(module) if unit.parameters]
    if not found:
        raise IncompatibleError("no parameter of the sharded module requires a gradient: there is nothing to exchange")
    return found


def all_units(module: nn.Module) -> list[Unit]:
    """Return the units of a sharded module whose parameters are gathered, also those without gradients."""
    names = {id(part): plain_name(name) for name, part in module.named_modules()}
    found, seen = list[Unit](), set[int]()
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
        found.append(Unit(part, groups[0], names))
    return found


def units_of(module: nn.Module) -> tuple[list[Unit], dist.ProcessGroup]:
    """Return the units of a sharded module, and the ranks that hold its shards.

    Raises:
        IncompatibleError: they are not supported; the message says what to change.
    """
    units = trainable_units(module)
    return units, mesh_groups(units)[0]


def mesh_groups(units: Sequence[Unit]) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
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


def _shards(unit: Unit) -> dist.ProcessGroup:
    group = getattr(unit.group.mesh_info, "shard_process_group", None)
    if group is None:
        raise IncompatibleError(
            f"module {unit.name!r} is replicated, not sharded: wrap it in DistributedDataParallel instead"
        )
    return group  # type: ignore[no-any-return]


def mesh_ranks(unit: Unit) -> list[int]:
    """Return all ranks of a unit's mesh. In HSDP each waits for every other, directly or through a third."""
    ranks: list[int] = unit.group.mesh_info.mesh.mesh.flatten().tolist()
    return ranks
