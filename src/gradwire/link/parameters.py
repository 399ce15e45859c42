"""The parameters of a link: named, checked, written, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.segments import flat_view, is_sharded, local_shard


def named_parameters(parameters: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the parameters that require a gradient, by plain name; those without one are numbered.

    Raises:
        HyperparameterError: two have the same name.
    """
    pairs = [(plain_name(p[0]), p[1]) if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(parameters)]
    named = {name: p for name, p in pairs if p.requires_grad}
    if len({name for name, _ in pairs}) != len(pairs):
        raise HyperparameterError("two parameters have the same name")
    return named


def plain_name(name: str) -> str:
    """Return the name that a module or a parameter has before anything around it is compiled.

    Patterns, states and random numbers go by names, and ``torch.compile`` is no reason for others.

    Example:
        >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def check_parameters(parameters: dict[str, torch.Tensor]) -> None:
    """Refuse what cannot be exchanged.

    Raises:
        IncompatibleError: no parameter, or one of a type or with values that cannot travel.
    """
    if not parameters:
        raise IncompatibleError("no parameter requires a gradient: there is nothing to exchange")
    for name, p in parameters.items():
        if p.device.type not in ("cpu", "cuda"):
            raise IncompatibleError(
                f"parameter {name!r} is on {p.device}: gradients in main memory and on CUDA devices can be exchanged; "
                "use one of these, or PyTorch's own hooks"
            )
        if not p.is_floating_point():
            raise IncompatibleError(f"parameter {name!r} is {p.dtype}: only floating-point gradients can be exchanged")
        check_steps_in_backward(name, p)
        if not bool(torch.isfinite(local_shard(p.detach())).all()):
            raise IncompatibleError(f"parameter {name!r} holds a NaN or inf before the first step: mend it first")


def check_steps_in_backward(name: str, p: torch.Tensor) -> None:
    """Refuse a parameter that PyTorch lets an optimizer step during the backward pass, before it is exchanged.

    FSDP2 lets it step after its own reduction.

    Raises:
        IncompatibleError: there is such an optimizer.
    """
    if hasattr(p, "_in_backward_optimizers") and not is_sharded(p):
        raise IncompatibleError(
            f"parameter {name!r} has an optimizer that steps during the backward pass, before gradients are exchanged: "
            "build the module without torch.distributed.optim._apply_optimizer_in_backward, and call optimizer.step()"
        )


def gradient(p: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, laid out as the parameter is; zeros where there was none.

    Raises:
        IncompatibleError: the gradient is sparse.
    """
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    if p.grad.is_sparse:
        raise IncompatibleError("a sparse gradient cannot be exchanged; build the embedding with sparse=False")
    if p.grad.stride() != p.stride():
        # The same elements must lie at the same place on all ranks, whatever backward made of them here.
        p.grad = torch.empty_like(p).copy_(p.grad)
    return p.grad


@torch.no_grad()
def put(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write values, flat in memory order, into tensors."""
    for tensor, value in zip(tensors, values):
        view = flat_view(tensor)
        view.copy_(value)
        if view.data_ptr() != tensor.data_ptr():
            tensor.copy_(view.view(tensor.shape))  # it has gaps, so that its view was a copy


@contextmanager
def swapped(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put values in the place of those of tensors while the context lasts."""
    own = [flat_view(tensor.detach()).clone() for tensor in tensors]
    put(tensors, values)
    try:
        yield
    finally:
        put(tensors, own)
