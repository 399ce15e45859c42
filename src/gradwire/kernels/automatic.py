"""The backend that is chosen for this machine, one family of kernels after the other."""

from __future__ import annotations

import threading
import warnings

from gradwire.kernels import self_test
from gradwire.kernels.base import Kernels
from gradwire.kernels.cpu import CpuKernels

__all__ = ["AutomaticKernels"]


class AutomaticKernels(CpuKernels):
    """``cpu`` for every family whose vectors compile here and agree with the reference; else ``cpu-plain``.

    A family is compiled and compared before its first call, or by :meth:`warm_up`. One that fails settles it: all
    families are plain loops from then on, with a warning.

    Args:
        vectors: the backend to try.
        reference: what it must equal.
        threads: how many threads share a call.
    """

    def __init__(self, vectors: Kernels, reference: Kernels, threads: int = 1) -> None:
        super().__init__(True, threads)
        self._tried, self._reference = vectors, reference
        self._agreed: set[str] = set()
        self._lock = threading.Lock()

    def _variant(self, family: str) -> bool | None:
        if self._vectors and family not in self._agreed:
            with self._lock:
                if self._vectors and family not in self._agreed:
                    self._try(family)
        return super()._variant(family)

    def _try(self, family: str) -> None:
        try:
            if self_test.agree(family, self._tried, self._reference):
                self._agreed.add(family)
                return
            reason = "its results differ from the reference"
        except Exception as error:  # whatever the compiler raises on a machine we have not seen
            reason = f"its code does not compile: {type(error).__name__}: {error}"
        self._vectors = False
        warnings.warn(
            f"kernel backend 'cpu' does not serve here ({family}: {reason}); using 'cpu-plain', which is slower",
            stacklevel=4,
        )
