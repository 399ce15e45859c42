"""Wrappers of FSDP2's own collectives: their failures name the rank, and gathers run beside computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire.link.adapters.fsdp_pending import Pending, PendingTensor, plain_of
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


class Begun(dist.Work):
    """A gather that was started.

    Args:
        finish: Called once, by the thread that waits first.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, *_: object) -> bool:
        """Wait for its end.

        Raises:
            ExchangeError: it broke; the message names the rank.
        """
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


class _NamedGather(NamedCollective):
    """An all-gather; implements FSDP2's protocol ``AllGather``.

    It only starts the gather, also where FSDP2 does not ask for that: FSDP2 waits for a started gather before it reads
    the output, so that a prefetched one runs while this rank computes.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Start to gather all ranks' shards into ``output_tensor``.

        Raises:
            ExchangeError: it broke; the message names the rank.
        """
        if input_tensor.device.type != "cpu":
            return self.native(output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]
        with self.naming(self.where):
            work = self.native(output_tensor, input_tensor, group, True)
        return Begun(partial(self._end, work))

    def _end(self, work: dist.Work | None) -> None:
        if work is not None:
            with self.naming(self.where) as wait:
                wait(work)


class _NamedReduceScatter(NamedCollective):
    """A reduce-scatter; implements FSDP2's protocol ``ReduceScatter``.

    Args:
        numel: Number of elements of an output that a hook goes on to exchange in the background; 0: of none.
    """

    def __init__(self, *given: Any, numel: int = 0) -> None:
        super().__init__(*given)
        self._numel = numel

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the reduce-scatter."""
        room = super().allocate(size, dtype=dtype, device=device)
        late = device.type == "cpu" and room.numel() == self._numel
        return PendingTensor(room, Pending()) if late else room

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
            return self.native(  # type: ignore[no-any-return]
                plain_of(output_tensor), plain_of(input_tensor), group, op, async_op
            )


def name_collectives(module: Any, group: Any, name: str, naming: Naming, numel: int = 0) -> None:
    """Wrap FSDP2's own collectives of a unit, so that their failures name the rank that broke them.

    Args:
        module: The unit's module.
        group: FSDP2's record of its parameters.
        name: Name of the module, for messages.
        naming: The ``naming`` of the link that an error belongs to.
        numel: Number of elements of a reduce-scatter's output that a hook exchanges in the background; 0: of none.
    """
    gather, scatter = _bare(group._all_gather_comm), _bare(group._reduce_scatter_comm)
    if type(gather).__name__ in NATIVE:
        _NamedGather(gather, naming, f"the gather of module {name!r}", module.set_custom_all_gather)
    if type(scatter).__name__ in NATIVE:
        where = f"the reduce-scatter of module {name!r}"
        _NamedReduceScatter(scatter, naming, where, module.set_custom_reduce_scatter, numel=numel)


def _bare(collective: Any) -> Any:
    return collective.native if isinstance(collective, NamedCollective) else collective
