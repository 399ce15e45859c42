"""The scaler of automatic mixed precision: methods that add up what several rounds gave must know its scale."""

from __future__ import annotations

import gc
from typing import Any

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import Method

__all__ = ["check_scaler", "check_unscaled", "scale_of"]


def check_scaler(grad_scaler: Any) -> None:
    """Refuse what cannot say by how much gradients are scaled.

    Raises:
        HyperparameterError: it is neither None nor False nor has a ``get_scale()``.
    """
    if grad_scaler is None or grad_scaler is False or callable(getattr(grad_scaler, "get_scale", None)):
        return
    raise HyperparameterError(
        f"grad_scaler: the torch.amp.GradScaler that scales the loss is needed, or None, or False for a loss that none "
        f"scales, not {grad_scaler!r}"
    )


def scale_of(grad_scaler: Any) -> float:
    """Return the factor that is in this round's gradients."""
    return float(grad_scaler.get_scale()) if grad_scaler else 1.0


def check_unscaled(method: Method, grad_scaler: Any) -> None:
    """Refuse gradients of a scaled loss where the method was not told; to be called with the first gradients.

    Nothing tells a communication hook that a loss was scaled. But a scaler that has scaled one is alive, and before the
    first backward pass only a program that trains with scaled losses has such a thing. One that ``gc.freeze`` hides is
    not found.

    Raises:
        IncompatibleError: there is one, and neither it nor False was handed over.
    """
    if not method.needs_loss_scale or grad_scaler is not None:
        return
    if not _scaling():
        return
    gc.collect()
    if _scaling():
        raise IncompatibleError(
            f"a GradScaler scales losses in this program, and {method!r} needs to know by how much: hand it over, "
            "grad_scaler=scaler, or say grad_scaler=False where these gradients are not scaled when exchanged: it is "
            "another module's, or has unscaled them before"
        )


def _scaling() -> bool:
    """Return whether there is a scaler that has scaled a loss; one that waits for collection counts, too."""
    # type(), since some objects are proxies whose class is not to be asked.
    scalers = (o for o in gc.get_objects() if issubclass(type(o), torch.amp.GradScaler))
    return any(scaler.is_enabled() and getattr(scaler, "_scale", None) is not None for scaler in scalers)
