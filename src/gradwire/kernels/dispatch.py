"""Which backend computes: asked for by name, reported by name, never replaced in silence."""

from __future__ import annotations

import difflib
from functools import cache

from gradwire.errors import HyperparameterError
from gradwire.kernels.base import Kernels
from gradwire.kernels.meta import MetaKernels
from gradwire.kernels.reference import ReferenceKernels

__all__ = ["BACKENDS", "get_kernels"]

BACKENDS = ("auto", "reference", "cpu", "cpu-plain", "meta")


@cache
def get_kernels(name: str = "auto", threads: int = 1) -> Kernels:
    """Give a backend; the same object for the same arguments.

    Args:
        name: ``reference`` (plain PyTorch), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without),
            ``meta`` (computes nothing) or ``auto``: ``cpu`` if its code compiles here and agrees with ``reference`` on
            a small case, else ``cpu-plain``, with a warning; found out for each family when it is first needed.
        threads: threads that share a call of a ``cpu`` backend.

    Example:
        >>> get_kernels("reference").name
        'reference'
    """
    if threads < 1:
        raise HyperparameterError(f"threads={threads}: a kernel needs at least one")
    if name == "reference":
        return ReferenceKernels()
    if name == "meta":
        return MetaKernels()
    if name in ("cpu", "cpu-plain"):
        # Imported here: numba takes half a second, and whoever asks for another backend need not have it.
        from gradwire.kernels.cpu import CpuKernels

        return CpuKernels(vectors=name == "cpu", threads=threads)
    if name == "auto":
        from gradwire.kernels.automatic import AutomaticKernels

        return AutomaticKernels(get_kernels("cpu", threads), get_kernels("reference"), threads)
    near = difflib.get_close_matches(name, BACKENDS, 1, 0.0)[0]
    raise HyperparameterError(f"no kernel backend {name!r}: did you mean {near!r}? There are {', '.join(BACKENDS)}")
