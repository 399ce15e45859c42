"""Checks of methods, options and optimizers that need no process group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options
from gradwire.link.failures import WarnOnce
from gradwire.link.selection.fallback import check_fallback
from gradwire.methods.feedback.optimizers import momentum_of, not_stepped, not_stepped_here
from gradwire.methods.spec import method as read_method

LONG_STEP, USUAL_STEP = 0.1, 0.01
"""Size of a step along a direction, relative to the parameter: threshold of the warning, and the size it advises."""


def check_optimizer(method: Method, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise if an optimizer does not suit a method.

    Unsuitable are optimizers that the method itself refuses, a momentum beside a method with its own, and, with local
    steps, an optimizer that updates only part of the parameters on each rank.

    Raises:
        IncompatibleError: the optimizer is unsuitable; the message names the setting or the optimizer.
    """
    method.check_optimizer(optimizer, parameters)
    if optimizer is not None and method.traits.local_steps and not_stepped_here(optimizer, parameters):
        raise IncompatibleError(
            f"{method!r} lets each rank step all parameters by itself, and {type(optimizer).__name__} steps only a "
            "share of the parameters on each rank and takes the others from other ranks: use the optimizer inside it, "
            "or a method that exchanges gradients"
        )
    found = None if optimizer is None or not method.traits.owns_momentum else momentum_of(optimizer, parameters)
    if found is not None:
        setting, value = found
        raise IncompatibleError(
            f"{method!r} brings its own momentum, and {type(optimizer).__name__} has {setting}={value!r} beside it: "
            "use torch.optim.SGD with momentum=0"
        )


def optimizer_terms(method: Method, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Return the fields in which ranks must agree on an optimizer.

    With local steps they are the parameters that it updates; an optimizer that was not given is assumed to update all
    of them. With a choice among methods they are the candidates that are not tried beside it.
    """
    if method.traits.spared:
        return {"candidates left out beside the optimizer": sorted(method.unsuited(optimizer, parameters))}
    if not method.traits.local_steps:
        return {}
    missing = () if optimizer is None else not_stepped(optimizer, parameters)
    return {"parameters that the optimizer steps": [name for name in parameters if name not in missing]}


def check_not_in_backward(method: Method, optimizer: torch.optim.Optimizer, parameters: Iterable[str]) -> None:
    """Raise at a step during the backward pass, which would use the gradients of one rank alone.

    Call it in a hook before the step.

    Args:
        parameters: Names of the parameters that the optimizer holds.

    Raises:
        IncompatibleError: backward is running in this thread.
    """
    if torch._C._current_graph_task_id() != -1:
        raise IncompatibleError(
            f"{type(optimizer).__name__} steps parameter {next(iter(parameters))!r} during the backward pass, before "
            f"{method!r} has exchanged anything: let it step after backward, without "
            "torch.distributed.optim._apply_optimizer_in_backward and without hooks of parameters that step"
        )


def caution_about(method: Method, optimizer: Any, compressed: Mapping[str, torch.Tensor], warnings: WarnOnce) -> None:
    """Warn about an optimizer that works badly with a method.

    Args:
        compressed: The parameters that are not sent in float32, by name.
    """
    sentence = method.caution(optimizer, compressed)
    if sentence is not None:
        warnings.once("optimizer", sentence)


def caution_about_rate(
    method: Method, optimizer: Any, compressed: Mapping[str, torch.Tensor], warnings: WarnOnce
) -> None:
    """Warn about a learning rate that is too large for a method whose outcome is a direction.

    Each element of a direction has magnitude about 1, so that a step moves each parameter by the learning rate, however
    small its gradient. Training diverges if that is a large share of the parameter itself.

    Groups without a rate, such as those of an Adafactor that computes its steps itself, are not checked.

    Args:
        compressed: As for :func:`caution_about`.
    """
    if optimizer is None or not method.traits.direction:
        return
    rated = [group for group in optimizer.param_groups if group.get("lr") is not None]
    rates = {id(p): float(group["lr"]) for group in rated for p in group["params"]}
    stepped = [(name, p, rates[id(p)]) for name, p in compressed.items() if id(p) in rates and p.numel() > 1]
    for name, parameter, rate in stepped:
        size = float(parameter.detach().norm()) / math.sqrt(parameter.numel())
        if size > 0 and rate > LONG_STEP * size:
            warnings.once(
                "learning rate",
                f"{method!r} gives a direction: a step moves every element by about the learning rate, {rate:.2g}.\n"
                f"The elements of {name!r} are {size:.1g} (root mean square), and trainings diverge above a tenth of "
                "that.\n"
                f"Try a learning rate of {USUAL_STEP * size:.1g}, or EDEN(bits=4), which works with {rate:.2g}.",
            )
            return


def caution_about_unused(method: Method, warnings: WarnOnce) -> None:
    """Warn that what waits for a parameter is lost in steps in which no rank uses it.

    DDP calls the hook with zeros for such a parameter, and drops what the hook returns.
    """
    traits = method.traits
    if traits.waiting in traits.remembers and not traits.local_steps:
        warnings.once(
            "unused parameters",
            f"find_unused_parameters=True beside {method!r}, which sends later what it has not sent yet: in a step in "
            "which no rank uses a parameter, DDP drops what is sent for it, and it is lost. Choose a method without a "
            "residual, such as EDEN(bits=4), or exclude parameters that are often unused",
        )


def caution_alone(method: Method) -> str:
    """Return the warning for a link with one rank."""
    beside = (
        "; the learning rate is that of a direction, and gradients are smaller, so that steps are small"
        if method.traits.direction
        else "; the momentum that it brings rests, so that steps are those of the optimizer alone"
        if method.traits.owns_momentum
        else ""
    )
    return (
        f"the group has one rank: training goes on without an exchange, with gradients as they are. What {method!r} "
        f"remembers is kept for when there are more ranks again{beside}"
    )


def check_options(method: str | Method, *, optimizer: Any = None, **options: Any) -> None:
    """Raise the errors of :func:`gradwire.attach` that depend on neither the group nor the module.

    Launchers call it before they start workers, to show an error once and not once for each worker. Parameters are not
    checked.

    Args:
        method: A method or its spec.
        optimizer: As for :func:`gradwire.attach`.
        options: As for :func:`gradwire.attach`, except ``lanes``, ``grad_scaler`` and ``process_group``, which are
            unknown here.

    Raises:
        HyperparameterError: a method or an option is unknown, or a value is wrong.
        IncompatibleError: an option or the optimizer does not suit the method.

    Example:
        >>> import gradwire as gw
        >>> gw.check_options("terngrad", fallback="bf16", fallback_limit=5.0)
    """
    found, given = read_method(method), Options.of(options)
    # What Auto(residuals=True) adds is left out where an option refuses it.
    for one in [spec for spec in found.traits.tries if spec not in found.traits.spared] or (found,):
        given.collectives(read_method(one))
    check_optimizer(found, optimizer, {})
    if given.fallback is not None:
        check_fallback(found)


def check_unit_by_unit(method: str | Method) -> None:
    """Raise if a method cannot exchange one unit after the other during backward.

    Raises:
        IncompatibleError: it cannot; the message has the reason.
    """
    found = read_method(method)
    for one in [read_method(spec) for spec in found.traits.tries] or [found]:
        reason = (
            "takes local steps, between which FSDP2 would need shards that differ by replica"
            if one.traits.local_steps or one.traits.outcomes_differ
            else "needs the gradients of a whole step at once, and FSDP2 frees them unit by unit"
            if one.traits.whole_step
            else "acts on the optimizer's steps, which see shards alone"
            if one.traits.needs_optimizer
            else None
        )
        if reason is not None:
            raise IncompatibleError(
                f"{one!r} cannot serve a sharded module: it {reason}; use DistributedDataParallel, or a method of "
                "single gradients, such as EDEN(bits=4)"
            )
