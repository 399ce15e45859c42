"""The Numba backend, in two variants: explicit vectors (``cpu``) and plain loops (``cpu-plain``)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gradwire.errors import BackendError
from gradwire.kernels.entropy.base import CODERS, Coder
from gradwire.kernels.entropy.dispatch import get_coder
from gradwire.kernels.families import FAMILIES, known_families
from gradwire.kernels.self_test import SELF_TESTS

try:
    from gradwire.kernels.lattice.cpu import CpuLattice
    from gradwire.kernels.levels.cpu import CpuLevels
    from gradwire.kernels.natural.cpu import CpuNatural
    from gradwire.kernels.signs.cpu import CpuSigns
    from gradwire.kernels.ternary.cpu import CpuTernary
except ImportError as error:
    raise BackendError(f"kernel backend 'cpu' needs numba ({error}): pip install 'numba>=0.61'") from error

__all__ = ["CpuKernels"]


class CpuKernels(CpuTernary, CpuLevels, CpuNatural, CpuLattice, CpuSigns):
    """See :class:`gradwire.kernels.base.Kernels` for what each method computes."""

    @property
    def name(self) -> str:
        """The variant that runs."""
        return "cpu" if self._vectors else "cpu-plain"

    def coder(self, name: str) -> Coder:
        return get_coder(name, "auto" if self._vectors else "cpu-plain")

    def warm_up(self, families: Sequence[str] = FAMILIES) -> float:
        """Compile the drivers of these families, or load them from Numba's cache; return the seconds that took."""
        began = time.perf_counter()
        for name in known_families(families):
            if name in CODERS:
                self.coder(name).warm_up()
            else:
                SELF_TESTS[name](self)
        return time.perf_counter() - began
