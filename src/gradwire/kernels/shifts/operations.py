"""Differences of vectors to shifts, and steps of shifts: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.front import Front, check_vector


class ShiftOperations(Front):
    """The operations of the family ``shifts``.

    Shifts are float64 or float32, and vectors float32. Products of a number and a vector are not rounded before the
    sum: each result is rounded once to the shifts' type, as by ``torch.add(..., alpha=...)`` on CPUs with fused
    multiply-add. A difference or outcome is then rounded to float32.
    """

    def subtract_shift(self, x: torch.Tensor, shift: torch.Tensor, scale: float) -> None:
        """Replace ``x`` (float32) by ``x - scale * shift``, where ``shift`` is as long."""
        _check_shift("shift", shift, x.numel())
        check_vector("x", x, torch.float32, x.numel())
        family = self._serve("shifts")
        if len(x):
            family.subtract_shift(x.detach(), shift.detach(), float(scale))

    def step_shift(self, shift: torch.Tensor, x: torch.Tensor, rate: float, out: torch.Tensor) -> None:
        """Write ``shift + rate * x`` (``x`` float32) into ``out``, which has the type and length of ``shift``."""
        self._step(shift, x, rate, None, out)

    def step_mean_shift(
        self, shift: torch.Tensor, x: torch.Tensor, rate: float, scale: float, out: torch.Tensor
    ) -> None:
        """Write ``shift + rate * x`` into ``out`` as :meth:`step_shift` does, and replace ``x`` by
        ``x + scale * shift``.
        """
        self._step(shift, x, rate, scale, out)

    def _step(self, shift: torch.Tensor, x: torch.Tensor, rate: float, scale: float | None, out: torch.Tensor) -> None:
        _check_shift("shift", shift, x.numel())
        check_vector("x", x, torch.float32, x.numel())
        check_vector("out", out, shift.dtype, x.numel())
        family = self._serve("shifts")
        if not len(x):
            return
        if scale is None:
            family.step_shift(shift.detach(), x.detach(), float(rate), out)
        else:
            family.step_mean_shift(shift.detach(), x.detach(), float(rate), float(scale), out)


def _check_shift(name: str, shift: torch.Tensor, numel: int) -> None:
    if shift.dtype not in (torch.float64, torch.float32):
        raise HyperparameterError(f"{name} is {shift.dtype}: shifts are float64 or float32")
    check_vector(name, shift, shift.dtype, numel)


def subtract_shift(x: torch.Tensor, shift: torch.Tensor, scale: float) -> None:
    x.copy_(torch.sub(x.to(shift.dtype), shift, alpha=scale))


def step_shift(shift: torch.Tensor, x: torch.Tensor, rate: float, out: torch.Tensor) -> None:
    torch.add(shift, x.to(shift.dtype), alpha=rate, out=out)


def step_mean_shift(shift: torch.Tensor, x: torch.Tensor, rate: float, scale: float, out: torch.Tensor) -> None:
    step_shift(shift, x, rate, out)
    x.copy_(torch.add(x.to(shift.dtype), shift, alpha=scale))
