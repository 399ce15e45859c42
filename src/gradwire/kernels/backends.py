"""The backends by name, and the backend ``auto``, which chooses one for each family."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from gradwire.errors import BackendError, HyperparameterError, unknown
from gradwire.kernels.api import Backend, Kernels
from gradwire.kernels.compiling import default_file, read_times, write_times
from gradwire.kernels.families import OPERATIONS, compiled_loops
from gradwire.kernels.front import Family
from gradwire.kernels.self_test import SELF_TESTS, agree
from gradwire.kernels.triton_core.backend import TritonBackend

FASTEST, PLAIN, REFERENCE = "cpu", "cpu-plain", "reference"

NOISE = 0.03
"""``cpu-plain`` is preferred only if it is faster than ``cpu`` by more than this share."""

SIZE, RUNS = 914, 5
"""Size of a measurement in units of the self test's ``NUMEL``, 2^18 elements; runs, of which the fastest counts."""


@dataclass(frozen=True)
class Choice:
    """The backend of a family, the reason, and seconds by backend for the self test on 2^18 elements, if measured."""

    backend: str
    reason: str
    times_s: dict[str, float] = field(default_factory=dict)


_chosen: dict[str, Choice] = {}


def chosen() -> dict[str, dict[str, Any]]:
    """Return the choices of ``auto`` in this process, by family: ``backend``, ``reason`` and ``times_s``.

    A family that was not needed yet has no entry.
    """
    return {family: asdict(choice) for family, choice in sorted(_chosen.items())}


class Automatic:
    """The backend ``auto``: for each family ``cpu`` or ``cpu-plain``.

    The choice is made before the family's first call, or by :meth:`Kernels.warm_up`. ``cpu`` is used if its vectors
    compile on this machine and agree with the reference, unless ``cpu-plain`` was measured to be faster by more than
    3 %. If ``cpu`` fails, a warning says so, and all families use ``cpu-plain`` from then on.

    Nothing is measured before training: plain loops take as long to compile as explicit vectors, and on none of the
    processors measured so far are they faster by 3 % (``docs/results.md``). :meth:`measure`, which ``gradwire bench
    kernels`` calls, stores times beside the compiled code, by processor and sources, and every later process uses
    them. The bits do not depend on the choice, so ranks may choose differently.

    Args:
        backends: ``cpu``, ``cpu-plain`` and ``reference``.
        clock: Returns a time in seconds. The default is the CPU time of this process, which does not grow while the
            process waits for a core.
        file: File in which times are stored, by default in Numba's cache directory; None: times are not stored.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        clock: Callable[[], float] = time.process_time,
        file: Path | str | None = "default",
    ) -> None:
        self._backends, self._kernels = backends, {name: Kernels(backend) for name, backend in backends.items()}
        self._clock, self._file = clock, file
        self._choices: dict[str, Choice] = {}
        self._times: dict[str, dict[str, float]] = {}
        self._only_plain = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The name of the backend in use: ``cpu-plain`` once explicit vectors have failed, else ``cpu``."""
        return PLAIN if self._only_plain else FASTEST

    @property
    def compiles_for(self) -> str:
        """The backend that families are compiled of."""
        return self.name

    @property
    def coders(self) -> str:
        """The backend of entropy coders."""
        return PLAIN if self._only_plain else "auto"

    def family(self, name: str) -> Family:
        return self._backends[self._choose(name).backend].family(name)

    def warm_up(self, name: str) -> None:
        """Compile a family, or load it."""
        SELF_TESTS[name](Kernels(self))

    def _choose(self, family: str) -> Choice:
        choice = self._choices.get(family)
        if choice is None or (self._only_plain and choice.backend != PLAIN):
            with self._lock:
                choice = self._decide(family)
                self._choices[family] = _chosen[family] = choice
        return choice

    def _decide(self, family: str) -> Choice:
        if self._only_plain:
            return Choice(PLAIN, "the vectors of another family do not serve here")
        times = self._times.get(family) or _known(read_times(self._times_file()).get(family))
        backend = FASTEST if times is None else _fastest(times)
        # The backend is compared in every process: its machine code depends on more than the sources.
        reason = self._refusal(backend, family)
        if reason is None:
            return Choice(backend, _why(times), dict(times or {}))
        self._only_plain = True
        warnings.warn(
            f"kernel backend 'cpu' does not serve here ({family}: {reason}); using 'cpu-plain', which is slower",
            stacklevel=6,
        )
        return Choice(PLAIN, f"cpu does not serve: {reason}")

    def _refusal(self, backend: str, family: str) -> str | None:
        """Return why a backend cannot compute a family, or None if it can."""
        try:
            if agree(family, self._kernels[backend], self._kernels[REFERENCE]):
                return None
            return "its results differ from the reference"
        except Exception as error:  # a compiler may raise any type on an unknown machine
            return f"its code does not compile: {type(error).__name__}: {error}"

    def measure(self, name: str) -> None:
        """Time the variants of a family that agree with the reference, and use the fastest from now on."""
        self._choose(name)
        if self._only_plain:
            return
        with self._lock:
            self._times[name] = self._measure(name)
            write_times(self._times_file(), {name: self._times[name]})
            self._choices[name] = _chosen[name] = self._decide(name)

    def _times_file(self) -> Path | None:
        file = default_file() if self._file == "default" else self._file
        return None if file is None else Path(file)

    def _measure(self, family: str) -> dict[str, float]:
        """Time the variants that agree with the reference, in turns; ``cpu`` is known to agree."""
        names = [FASTEST, *([PLAIN] if self._refusal(PLAIN, family) is None else [])]
        times = dict.fromkeys(names, float("inf"))
        for _ in range(RUNS):
            for name in names:
                began = self._clock()
                SELF_TESTS[family](self._kernels[name], SIZE)
                times[name] = min(times[name], self._clock() - began)
        return times


def _why(times: Mapping[str, float] | None) -> str:
    if times is None:
        return "explicit vectors, which agree; not measured on this machine"
    return "the only one that agrees" if len(times) < 2 else "the fastest that agrees"


def _fastest(times: Mapping[str, float]) -> str:
    plain = times.get(PLAIN)
    return PLAIN if plain is not None and plain < (1 - NOISE) * times[FASTEST] else FASTEST


def _known(times: Mapping[str, float] | None) -> Mapping[str, float] | None:
    """Return stored times if they are of these backends, else None."""
    return times if times is not None and FASTEST in times and {FASTEST, PLAIN} >= set(times) else None


class Functions:
    """A backend with one function for each operation.

    Args:
        name: Name of the backend.
        find: Returns the namespace, such as a module, that holds the functions of a family.
    """

    compiles_for, coders = "", "reference"

    def __init__(self, name: str, find: Callable[[str], Family]) -> None:
        self.name, self.family = name, find

    def warm_up(self, name: str) -> None:
        """Compile nothing."""

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""


class CompiledLoops:
    """A backend of loops that Numba compiles, around explicit vectors or scalar bodies.

    Args:
        simd: True for explicit vectors, False for scalar bodies.
        threads: Number of threads that share a call.

    Raises:
        BackendError: numba is not installed, or its compiler is switched off.
    """

    def __init__(self, simd: bool, threads: int) -> None:
        try:
            # Imported here: Numba takes half a second to import, and the other backends do not need it.
            import_module("gradwire.kernels.numba_core.compiled")
            import_module("numba")
        except BackendError:  # an ImportError, too
            raise
        except ImportError as error:
            raise BackendError(f"kernel backend 'cpu' needs numba ({error}): pip install 'numba>=0.61'") from error
        self.name, self.coders = ("cpu", "auto") if simd else ("cpu-plain", "cpu-plain")
        self.compiles_for = self.name
        self._simd, self._threads, self._families = simd, threads, dict[str, Family]()

    def family(self, name: str) -> Family:
        if name not in self._families:
            self._families[name] = compiled_loops(name)(self._simd, self._threads)
        return self._families[name]

    def warm_up(self, name: str) -> None:
        """Compile a family, or load it."""
        SELF_TESTS[name](Kernels(self))

    def measure(self, name: str) -> None:
        """Measure nothing: there is one variant."""


class Nothing:
    """A backend that computes nothing and leaves every output unchanged, for dry runs on ``meta`` tensors."""

    name, compiles_for, coders = "meta", "", "reference"

    def family(self, name: str) -> Family:
        return self

    def warm_up(self, name: str) -> None:
        """Compile nothing."""

    def measure(self, name: str) -> None:
        """Measure nothing."""

    def __getattr__(self, operation: str) -> Callable[..., None]:
        return lambda *arguments: None


def reference() -> Functions:
    """Return the backend in plain PyTorch, which defines the bits."""
    return Functions("reference", OPERATIONS.__getitem__)


def _selected(threads: int) -> Backend:
    return Automatic({name: BACKENDS[name](threads) for name in ("cpu", "cpu-plain", "reference")})


BACKENDS: dict[str, Callable[[int], Backend]] = {
    "auto": _selected,
    "reference": lambda threads: reference(),
    "cpu": lambda threads: CompiledLoops(True, threads),
    "cpu-plain": lambda threads: CompiledLoops(False, threads),
    "triton": lambda threads: TritonBackend(reference()),
    "meta": lambda threads: Nothing(),
}
"""Functions that make a backend, given a number of threads."""


@cache
def get_kernels(name: str = "auto", threads: int = 1) -> Kernels:
    """Return the kernels of a backend; the same object for the same arguments.

    Args:
        name: ``reference`` (plain PyTorch), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without),
            ``triton`` (CUDA devices, or Triton's interpreter on the CPU), ``meta`` (computes nothing) or ``auto``: for
            each family ``cpu`` or ``cpu-plain``, chosen before its first call, see
            :class:`gradwire.kernels.backends.Automatic`.
        threads: Threads that share a call of a ``cpu`` backend.

    Raises:
        HyperparameterError: there is no such backend.
        BackendError: the backend needs a library that is not installed, or a compiler that is switched off.

    Example:
        >>> get_kernels("reference").name
        'reference'
    """
    if threads < 1:
        raise HyperparameterError(f"threads={threads}: a kernel needs at least one")
    if name not in BACKENDS:
        raise HyperparameterError(unknown("kernel backend", name, BACKENDS))
    return Kernels(BACKENDS[name](threads))
