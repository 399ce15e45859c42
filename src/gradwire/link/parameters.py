"""The parameters of a link: their names, checks, gradients and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.segments import flat_view, is_sharded, local_shard


def named_parameters(parameters: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the parameters that require a gradient, by plain name; parameters without a name are numbered.

    Raises:
        HyperparameterError: two have the same name or are one tensor, or one is no parameter.
    """
    pairs = _pairs(parameters)
    named = {name: p for name, p in pairs if p.requires_grad}
    if len({name for name, _ in pairs}) != len(pairs):
        raise HyperparameterError("two parameters have the same name")
    first: dict[int, str] = {}
    for name, p in named.items():
        if (other := first.setdefault(id(p), name)) != name:
            raise HyperparameterError(
                f"parameters {other!r} and {name!r} are one tensor, which would be exchanged twice: pass it once, as "
                "model.named_parameters() does"
            )
    return named


def frozen_parameters(parameters: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the parameters that require no gradient, named as :func:`named_parameters` names the others."""
    return {name: p for name, p in _pairs(parameters) if not p.requires_grad}


def check_still_frozen(frozen: Mapping[str, torch.Tensor]) -> None:
    """Raise if a parameter that a link does not exchange has a gradient by now.

    Raises:
        IncompatibleError: one requires a gradient, so that it would part from that of other ranks.
    """
    for name, p in frozen.items():
        if p.requires_grad:
            raise IncompatibleError(
                f"parameter {name!r} was frozen when the link was made, which does not exchange it, and requires a "
                "gradient now: close the link, and make another one, under DDP for a module that was wrapped anew"
            )


def listed(parameters: Any) -> list[Any]:
    """Return what a user gave as parameters, which may be a generator, as a list.

    Raises:
        HyperparameterError: it is a module other than a ParameterList, a mapping or nothing that holds several.
    """
    of_modules = isinstance(parameters, torch.nn.Module) and not isinstance(parameters, torch.nn.ParameterList)
    if of_modules or isinstance(parameters, torch.Tensor | Mapping) or not isinstance(parameters, Iterable):
        raise HyperparameterError(_not_parameters(parameters))
    return list(parameters)


def names_of_round(names: Sequence[str] | None, known: Mapping[str, Any], method: Method) -> list[str]:
    """Return the names of the parameters that a round exchanges, in their order in its vector; None stands for all.

    Raises:
        IncompatibleError: one is unknown or there twice, or the method needs all parameters in every round.
    """
    if names is None:
        return list(known)
    found = [names] if isinstance(names, str) else list(names)
    repeated = [name for name, count in Counter(found).items() if count > 1]
    wrong = next(iter([name for name in found if name not in known] + repeated), None)
    if wrong is not None:
        told = "is there twice" if wrong in known else "is no parameter of this link"
        raise IncompatibleError(f"names: {wrong!r} {told}: give the names of different parameters of the link")
    missing = next((name for name in known if name not in found), None)
    if method.traits.whole_step and missing is not None:
        raise IncompatibleError(
            f"names: {missing!r} is missing, and {method!r} compares elements of the whole model: exchange all "
            "parameters in every round"
        )
    return found


def _pairs(parameters: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    pairs = [(p[0], p[1]) if isinstance(p, tuple) and len(p) == 2 else (str(i), p) for i, p in enumerate(parameters)]
    for name, p in pairs:
        if not isinstance(name, str) or not isinstance(p, torch.Tensor):
            raise HyperparameterError(_not_parameters(name if isinstance(p, torch.Tensor) else p))
    return [(plain_name(name), p) for name, p in pairs]


def _not_parameters(found: Any) -> str:
    return (
        "parameters: model.named_parameters(), pairs of a name and a parameter, or parameters are needed, not "
        f"{described(found)}"
    )


def described(found: Any) -> str:
    """Describe what a user passed in place of another thing, without its contents, for messages."""
    return repr(found) if found is None or isinstance(found, str | type) else f"a {type(found).__name__}"


def plain_name(name: str) -> str:
    """Return the name of a module or a parameter without the prefixes of ``torch.compile``.

    Patterns, states and random numbers depend on names, and must not change with compilation.

    Example:
        >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def check_parameters(parameters: dict[str, torch.Tensor], *, shards: bool = False) -> None:
    """Raise if parameters cannot be exchanged.

    Args:
        parameters: The parameters, by name.
        shards: True if they may be shards of a module.

    Raises:
        IncompatibleError: there is no parameter, or one has an unsupported type or values.
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
        if is_sharded(p) and not shards:
            raise IncompatibleError(
                f"parameter {name!r} is a DTensor, and gw.Link exchanges plain tensors: pass the module to gw.attach, "
                "which takes those that torch.distributed.fsdp.fully_shard has sharded"
            )
        if not bool(torch.isfinite(local_shard(p.detach())).all()):
            raise IncompatibleError(f"parameter {name!r} holds a NaN or inf before the first step: mend it first")


def check_steps_in_backward(name: str, p: torch.Tensor) -> None:
    """Raise if PyTorch lets an optimizer update a parameter during the backward pass, before its gradient is exchanged.

    FSDP2 does so after its own reduction.

    Raises:
        IncompatibleError: there is such an optimizer.
    """
    if hasattr(p, "_in_backward_optimizers") and not is_sharded(p):
        raise IncompatibleError(
            f"parameter {name!r} has an optimizer that steps during the backward pass, before gradients are exchanged: "
            "build the module without torch.distributed.optim._apply_optimizer_in_backward, and call optimizer.step()"
        )


def gradient(p: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, with the parameter's layout; zeros if there is none.

    The parameter keeps them, unless it requires no gradient any more: an optimizer would then go on to change it.

    Raises:
        IncompatibleError: the gradient is sparse.
    """
    if p.grad is None:
        zeros = torch.zeros_like(p)
        if not p.requires_grad:
            return zeros
        p.grad = zeros
    if p.grad.is_sparse:
        raise IncompatibleError("a sparse gradient cannot be exchanged; build the embedding with sparse=False")
    if p.grad.stride() != p.stride():
        # Elements must have the same order in memory on all ranks, whatever layout backward chose here.
        p.grad = torch.empty_like(p).copy_(p.grad)
    return p.grad


@torch.no_grad()
def put(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write values, flat in memory order, into tensors."""
    for tensor, value in zip(tensors, values):
        view = flat_view(tensor)
        view.copy_(value)
        if view.data_ptr() != tensor.data_ptr():
            tensor.copy_(view.view(tensor.shape))  # the tensor has gaps, so that its view was a copy


@contextmanager
def swapped(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace the values of tensors within the context, and restore them after it."""
    own = [flat_view(tensor.detach()).clone() for tensor in tensors]
    put(tensors, values)
    try:
        yield
    finally:
        put(tensors, own)
