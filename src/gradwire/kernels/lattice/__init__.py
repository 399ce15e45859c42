"""Rounding to a dithered cubic lattice, of whose points only a colour travels."""

from gradwire.kernels.lattice.base import LatticeKernels, dither_shifts

__all__ = ["LatticeKernels", "dither_shifts"]
