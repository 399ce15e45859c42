"""Shifts on a device: the definitions in plain PyTorch, whose few passes over memory need no kernel of their own."""

from gradwire.kernels.shifts.operations import step_mean_shift, step_shift, subtract_shift

__all__ = ["step_mean_shift", "step_shift", "subtract_shift"]
