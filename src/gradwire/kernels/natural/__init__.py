"""Random rounding to powers of two."""

from gradwire.kernels.natural.base import NaturalKernels, natural_bytes, natural_sign_bytes

__all__ = ["NaturalKernels", "natural_bytes", "natural_sign_bytes"]
