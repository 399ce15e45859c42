"""Signs, one bit an element: packing, votes, and back to one of two values."""

from gradwire.kernels.signs.base import SIGN_BYTES, RunTable, SignKernels, SignSums

__all__ = ["SIGN_BYTES", "RunTable", "SignKernels", "SignSums"]
