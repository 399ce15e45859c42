# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Compiled loops for shifts, which LLVM turns into vectors by itself. ``ternary/loops.py`` states the rules."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.numba_core.compiled import Compiled, kept
from gradwire.kernels.numba_core.vectors import prefer_wide
from gradwire.kernels.shifts.simd import multiply_add

# Digest of the sources of the compiled code, and part of its name in Numba's cache; ``make digests`` writes it.
DIGEST = "ed36957d6f15db47"


class ShiftsLoops(Compiled):
    """The operations of the family ``shifts``, compiled."""

    def subtract_shift(self, x, shift, scale):
        values, held = x.numpy(), shift.numpy()
        factor = held.dtype.type(-scale)
        self.split(len(values), 16, 1, lambda a, b: subtract_range(values[a:b], held[a:b], factor))

    def step_shift(self, shift, x, rate, out):
        held, values, moved = shift.numpy(), x.numpy(), out.numpy()
        factor = held.dtype.type(rate)
        self.split(len(values), 16, 1, lambda a, b: step_range(held[a:b], values[a:b], factor, moved[a:b]))

    def step_mean_shift(self, shift, x, rate, scale, out):
        held, values, moved = shift.numpy(), x.numpy(), out.numpy()
        factors = held.dtype.type(rate), held.dtype.type(scale)
        self.split(len(values), 16, 1, lambda a, b: step_mean_range(held[a:b], values[a:b], *factors, moved[a:b]))


@kept(DIGEST)
def subtract_range(x, shift, factor):
    """Add ``factor`` times the shift."""
    prefer_wide()
    for i in range(x.size):
        x[i] = np.float32(multiply_add(factor, shift[i], shift.dtype.type(x[i])))


@kept(DIGEST)
def step_range(shift, x, rate, out):
    """Write the next shift."""
    prefer_wide()
    for i in range(x.size):
        out[i] = multiply_add(rate, shift.dtype.type(x[i]), shift[i])


@kept(DIGEST)
def step_mean_range(shift, x, rate, scale, out):
    """Write the next mean of shifts, and add the present one to ``x``."""
    prefer_wide()
    for i in range(x.size):
        value, before = shift.dtype.type(x[i]), shift[i]
        out[i] = multiply_add(rate, value, before)
        x[i] = np.float32(multiply_add(scale, before, value))
