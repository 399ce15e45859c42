"""Wrappers of FSDP2's own collectives, so that their failures name the rank that broke them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire.link.peers.circle import Wait

Naming: TypeAlias = Callable[[str], AbstractContextManager[Wait]]
"""``naming(where)`` returns a context in which the failure of a collective becomes an error that names a rank."""

NATIVE = ("DefaultAllGather", "DefaultReduceScatter")
"""Class names of FSDP2's own collectives. Others, which a user has set, are not wrapped."""


class NamedCollective:
    """A collective of a unit, called in a context that names the rank that broke it.

    Its result does not change. On a device there is no such context: a call only enqueues, and fails later.

    Args:
        native: The collective to call.
        naming: The ``naming`` of the link that an error belongs to.
        where: Purpose of the collective, for messages.
        put: Sets the unit's collective.
    """

    def __init__(self, native: Any, naming: Naming, where: str, put: Callable[[Any], None]) -> None:
        self.native, self.naming, self.where, self._put = native, naming, where, put
        put(self)

    def remove(self) -> None:
        """Restore the unit's own collective."""
        self._put(self.native)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the collective."""
        room: torch.Tensor = self.native.allocate(size, dtype=dtype, device=device)
        return room


class _NamedGather(NamedCollective):
    """An all-gather; implements FSDP2's protocol ``AllGather``."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather all ranks' shards into ``output_tensor``, or start to.

        Raises:
            ExchangeError: it broke; the message names the rank.
        """
        if input_tensor.device.type != "cpu":
            return self.native(output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]
        with self.naming(self.where):
            begun = _Begun(self, self.native(output_tensor, input_tensor, group, True))
        if not async_op:
            begun.wait()
            return None
        return begun


class _Begun(dist.Work):
    """An all-gather that was started."""

    def __init__(self, gather: _NamedGather, work: dist.Work | None) -> None:
        super().__init__()
        self._gather, self._work = gather, work

    def wait(self, *_: object) -> bool:
        """Wait for its end.

        Raises:
            ExchangeError: it broke; the message names the rank.
        """
        if self._work is not None:
            with self._gather.naming(self._gather.where) as wait:
                wait(self._work)
        return True


class _NamedReduceScatter(NamedCollective):
    """A reduce-scatter; implements FSDP2's protocol ``ReduceScatter``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce all ranks' gradients to this rank's shard.

        Raises:
            ExchangeError: it broke; the message names the rank.
        """
        if input_tensor.device.type != "cpu":
            return self.native(output_tensor, input_tensor, group, op, async_op)  # type: ignore[no-any-return]
        with self.naming(self.where):
            return self.native(output_tensor, input_tensor, group, op, async_op)  # type: ignore[no-any-return]


def name_collectives(module: Any, group: Any, name: str, naming: Naming) -> None:
    """Wrap FSDP2's own collectives of a unit, so that their failures name the rank that broke them.

    Args:
        module: The unit's module.
        group: FSDP2's record of its parameters.
        name: Name of the module, for messages.
        naming: The ``naming`` of the link that an error belongs to.
    """
    gather, scatter = _bare(group._all_gather_comm), _bare(group._reduce_scatter_comm)
    if type(gather).__name__ in NATIVE:
        _NamedGather(gather, naming, f"the gather of module {name!r}", module.set_custom_all_gather)
    if type(scatter).__name__ in NATIVE:
        _NamedReduceScatter(scatter, naming, f"the reduce-scatter of module {name!r}", module.set_custom_reduce_scatter)


def _bare(collective: Any) -> Any:
    return collective.native if isinstance(collective, NamedCollective) else collective
