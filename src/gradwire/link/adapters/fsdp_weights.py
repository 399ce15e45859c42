"""Modules sharded by FSDP2: the all-gather of their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.link.adapters.fsdp_collectives import Begun, NamedCollective
from gradwire.link.adapters.fsdp_units import mesh_ranks, units_of
from gradwire.link.weight_link import WeightLink


def compress_sharded_weights(module: nn.Module, method: str | Method, seed: int, backend: str) -> WeightLink:
    """Gather the parameters of a sharded module by differences; see :func:`gradwire.compress_weights`."""
    units, shards = units_of(module)
    if shards.size() == 1:
        raise IncompatibleError("the module is sharded over one rank: nothing is gathered; leave compress_weights out")
    for unit in units:
        device = unit.group.device
        if device.type != "cpu":
            raise IncompatibleError(
                f"module {unit.name!r} is on {device}: weights are gathered by differences in main memory alone; leave "
                "compress_weights out, and compress the exchange between replicas (gw.attach)"
            )
        again = unit.group.post_forward_mesh_info
        if again is not None and again != unit.group.mesh_info:
            raise IncompatibleError(
                f"module {unit.name!r} is resharded after forward over fewer ranks (reshard_after_forward is a "
                "number), from which backward gathers other shards: pass reshard_after_forward=True or False to "
                "fully_shard"
            )
        taken = unit.group._all_gather_comm
        if isinstance(taken, NamedCollective):
            # The weight link itself names the rank that breaks it.
            taken.remove()
            continue
        if isinstance(taken, _Gather) and not taken.link.close.alive:  # type: ignore[attr-defined]
            taken.remove()
        elif type(taken).__name__ != "DefaultAllGather":
            raise IncompatibleError(
                f"module {unit.name!r} has an all-gather of its own ({type(taken).__name__}): close that link first, "
                "or shard the module anew"
            )
    numels = {unit.name: sum(p.padded_sharded_param_size.numel() for p in unit.group.fsdp_params) for unit in units}
    link = WeightLink(method, numels, shards, seed, backend, mesh_ranks(units[0]))
    for unit in units:
        _Gather(link, unit.module, unit.name, unit.group)
    return link


class _Gather:
    """Gathers a unit's parameters over a weight link; implements FSDP2's protocol ``AllGather``.

    A gather runs on the link's thread from its call on, and is waited for before FSDP2 reads the weights.
    """

    def __init__(self, link: WeightLink, module: torch.nn.Module, name: str, group: object) -> None:
        self.link, self._module, self._name = link, module, name
        self._before = group._all_gather_comm  # type: ignore[attr-defined]
        module.set_custom_all_gather(self)  # type: ignore[operator]

    def remove(self) -> None:
        """Restore the unit's own all-gather."""
        self._module.set_custom_all_gather(self._before)  # type: ignore[operator]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for all ranks' shards."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, async_op: bool = False
    ) -> Begun:
        """Start to gather all ranks' shards into ``output_tensor``, of which ``input_tensor`` may be a part."""
        if not input_tensor.is_floating_point():
            raise IncompatibleError(
                f"module {self._name!r} gathers {input_tensor.dtype}, not floating-point weights: leave its weights as "
                "they are"
            )
        gathered = self.link.start_gather(self._name, input_tensor)

        def finish() -> None:
            rows = gathered()
            output_tensor.view(rows.shape).copy_(rows)

        return Begun(finish)
