"""The backends by name, and how each finds its functions of a family."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from importlib import import_module

from gradwire.errors import BackendError, HyperparameterError
from gradwire.kernels.api import Backend, Kernels
from gradwire.kernels.front import Family
from gradwire.kernels.select import Automatic
from gradwire.kernels.triton_core.backend import TritonBackend

__all__ = ["BACKENDS", "CompiledLoops", "Modules", "get_kernels"]


class Modules:
    """A backend of one module a family, ``gradwire.kernels.FAMILY.FILE``, with a function for each operation.

    Args:
        name: The backend's.
        file: Name of its modules, if it is another.
    """

    compiles, coders = False, "reference"

    def __init__(self, name: str, file: str | None = None) -> None:
        self.name, self._file = name, file or name

    def family(self, name: str) -> Family:
        return import_module(f"gradwire.kernels.{name}.{self._file}")

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""


class CompiledLoops:
    """A backend of loops that Numba compiles, around explicit vectors or scalar bodies.

    Args:
        simd: Which of the two.
        threads: How many share a call.

    Raises:
        BackendError: numba is not installed.
    """

    compiles = True

    def __init__(self, simd: bool, threads: int) -> None:
        try:
            # Here and not above: it takes half a second, and whoever asks for another backend need not have it.
            import_module("gradwire.kernels.numba_core.compiled")
            import_module("numba")
        except ImportError as error:
            raise BackendError(f"kernel backend 'cpu' needs numba ({error}): pip install 'numba>=0.61'") from error
        self.name, self.coders = ("cpu", "auto") if simd else ("cpu-plain", "cpu-plain")
        self._simd, self._threads, self._families = simd, threads, dict[str, Family]()

    def family(self, name: str) -> Family:
        if name not in self._families:
            loops = import_module(f"gradwire.kernels.{name}.loops")
            self._families[name] = getattr(loops, f"{name.title().replace('_', '')}Loops")(self._simd, self._threads)
        return self._families[name]

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""


class Nothing:
    """A backend that computes nothing and leaves every output as it is: for dry runs on sizes, on ``meta`` tensors."""

    name, compiles, coders = "meta", False, "reference"

    def family(self, name: str) -> Family:
        return self

    def __getattr__(self, operation: str) -> Callable[..., None]:
        return lambda *arguments: None


def _selected(threads: int) -> Backend:
    return Automatic({name: BACKENDS[name](threads) for name in ("cpu", "cpu-plain", "reference")})


BACKENDS: dict[str, Callable[[int], Backend]] = {
    "auto": _selected,
    "reference": lambda threads: Modules("reference"),
    "cpu": lambda threads: CompiledLoops(True, threads),
    "cpu-plain": lambda threads: CompiledLoops(False, threads),
    "triton": lambda threads: TritonBackend(Modules("reference")),
    "meta": lambda threads: Nothing(),
}
"""Makers of backends, given a number of threads."""


@cache
def get_kernels(name: str = "auto", threads: int = 1) -> Kernels:
    """Return the kernels of a backend; the same object for the same arguments.

    Args:
        name: ``reference`` (plain PyTorch), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without),
            ``triton`` (CUDA devices, or Triton's interpreter on the CPU), ``meta`` (computes nothing) or ``auto``: for
            each family the faster one of ``cpu`` and ``cpu-plain`` on this machine, measured when the family is first
            needed, see :mod:`gradwire.kernels.select`.
        threads: Threads that share a call of a ``cpu`` backend.

    Raises:
        HyperparameterError: there is no such backend.
        BackendError: it needs a library that is not installed.

    Example:
        >>> get_kernels("reference").name
        'reference'
    """
    if threads < 1:
        raise HyperparameterError(f"threads={threads}: a kernel needs at least one")
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, 1, 0.0)[0]
        raise HyperparameterError(f"no kernel backend {name!r}: did you mean {near!r}? There are {', '.join(BACKENDS)}")
    return Kernels(BACKENDS[name](threads))
