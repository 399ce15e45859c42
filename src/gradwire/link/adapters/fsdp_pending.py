"""Gradients that an exchange still computes: tensors that wait for it when they are read.

FSDP2 handles the result of a reduction as soon as the call that started it returns: it divides it, casts it, and makes
views of it the gradients. None of this needs the values, so that backward goes on while they are computed. All that
does need them waits, wherever it is: the next addition to the gradient, a hook of the user, an optimizer in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_DIVISIONS = (torch.ops.aten.div_.Tensor, torch.ops.aten.div_.Scalar)
_CAST = torch.ops.aten._to_copy.default


class Pending:
    """A result that is computed in the background, and what is to be done with it then.

    It begins as an ordinary result that nobody computes.
    """

    def __init__(self) -> None:
        # Held while a thread waits, so that another one that reads waits as well.
        self._lock = threading.RLock()
        self._finish: Callable[[], None] | None = None
        self._later: list[Callable[[], object]] = []
        self.done = False

    @property
    def under_way(self) -> bool:
        """Whether the values are not there yet."""
        return self._finish is not None

    def begin(self, finish: Callable[[], None]) -> None:
        """Let the result be computed by ``finish``, which waits for it and writes it, when it is needed."""
        self._finish = finish

    def later(self, work: Callable[[], object]) -> None:
        """Add work to do when the values are there, after what was added before."""
        self._later.append(work)

    def wait(self) -> None:
        """Wait for the values; return at once if they are there.

        Raises:
            Exception: the exception of ``finish``, each time.
        """
        with self._lock:
            if self._finish is None:
                return
            self._finish()
            for work in self._later:
                work()
            self._finish, self._later, self.done = None, [], True


class PendingTensor(torch.Tensor):
    """A tensor whose values are there when its result is; an operation that needs them waits.

    Views are pending as well. A cast and a division in place are done when the values are there. Before the result is
    begun, and after its end, it is the plain tensor.

    Args:
        plain: The tensor that the result is written to.
        pending: The result.
    """

    plain: torch.Tensor
    pending: Pending

    # Needed by DTensor, which holds it, and unwraps it below this level.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, pending: Pending) -> PendingTensor:
        made: PendingTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
        )
        made.plain, made.pending = plain, pending
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingTensor({self.wait()})"

    def wait(self) -> torch.Tensor:
        """Wait for the values, and return them."""
        self.pending.wait()
        return self.plain

    def numpy(self, **options: Any) -> Any:
        """Wait for the values, and return them as :meth:`torch.Tensor.numpy` does."""
        return self.wait().numpy(**options)

    def tolist(self) -> Any:
        """Wait for the values, and return them as :meth:`torch.Tensor.tolist` does."""
        return self.wait().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values, now or later."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, PendingTensor) and not first.pending.done:
            if _is_view(func):
                wrapped = partial(PendingTensor, pending=first.pending)
                return tree_map_only(torch.Tensor, wrapped, func(first.plain, *args[1:], **kwargs))
            if first.pending.under_way:
                if func in _DIVISIONS and not isinstance(args[1], torch.Tensor):
                    first.pending.later(partial(func, first.plain, *args[1:]))
                    return first
                if func is _CAST and kwargs.keys() <= {"dtype"}:
                    cast = torch.empty_like(first.plain, dtype=kwargs["dtype"])
                    first.pending.later(partial(cast.copy_, first.plain))
                    return PendingTensor(cast, first.pending)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, PendingTensor):
                tensor.pending.wait()
        plain_args, plain_kwargs = tree_map_only(PendingTensor, plain_of, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        return first if isinstance(first, PendingTensor) and found is first.plain else found


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a pending result is written to, without waiting; another tensor as it is."""
    return tensor.plain if isinstance(tensor, PendingTensor) else tensor


def settle(parameter: torch.Tensor) -> None:
    """Make the gradient of a sharded parameter hold plain values, which must be there."""
    grad: Any = parameter.grad
    local = getattr(grad, "_local_tensor", None)
    if isinstance(local, PendingTensor):
        grad._local_tensor = local.plain


def _is_view(func: Any) -> bool:
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write
