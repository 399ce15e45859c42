"""Which backend serves a family on this machine: of those that agree with the reference, the fastest, measured."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.kernels.api import Backend, Kernels
from gradwire.kernels.front import Family
from gradwire.kernels.kept_times import default_file, read_times, write_times
from gradwire.kernels.self_test import SELF_TESTS, agree

__all__ = ["Automatic", "Choice", "chosen"]

FASTEST, PLAIN, REFERENCE = "cpu", "cpu-plain", "reference"

NOISE = 0.03
"""Share of its time by which ``cpu-plain`` must be faster to be preferred."""

SIZE, RUNS = 914, 5
"""Elements of a measurement, in units of the self test's ``NUMEL``: 2^18; and how often: the fastest run counts."""


@dataclass(frozen=True)
class Choice:
    """Who serves a family, why, and the seconds that each took for the self test on 2^18 elements, where measured."""

    backend: str
    reason: str
    times_s: dict[str, float] = field(default_factory=dict)


_chosen: dict[str, Choice] = {}


def chosen() -> dict[str, dict[str, Any]]:
    """Return what ``auto`` has chosen in this process, by family: ``backend``, ``reason`` and ``times_s``.

    A family that was not needed yet is not there.
    """
    return {family: asdict(choice) for family, choice in sorted(_chosen.items())}


class Automatic:
    """The backend ``auto``: for each family ``cpu`` or ``cpu-plain``.

    A family is chosen for before its first call, or by :meth:`Kernels.warm_up`. ``cpu`` serves if its vectors compile
    here and agree with the reference, unless ``cpu-plain`` was measured to be faster by more than 3 %. Where it does
    not serve, a warning says so, and all families are scalar loops from then on.

    Nothing is measured before a training: plain loops take as long to compile as explicit vectors, and on the
    processors measured so far they are nowhere faster by those 3 % (``docs/results.md``). :meth:`measure`, which
    ``gradwire bench kernels`` calls, keeps times beside the compiled code, by processor and sources, and every later
    process goes by them. The bits are the same whatever is chosen, so ranks may differ.

    Args:
        backends: ``cpu``, ``cpu-plain`` and ``reference``.
        clock: Tells the time in seconds; by default the processor's of this process, since a wait for a processor that
            others use would be kept as a variant's slowness.
        file: Where times are kept; by default in Numba's cache directory, None: nowhere.
    """

    compiles = True

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
        """What runs: ``cpu-plain`` once vectors have failed, else ``cpu``."""
        return PLAIN if self._only_plain else FASTEST

    @property
    def coders(self) -> str:
        """The backend of entropy coders."""
        return PLAIN if self._only_plain else "auto"

    def family(self, name: str) -> Family:
        return self._backends[self._choose(name).backend].family(name)

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
        # What serves is compared on every start: what it is compiled to depends on more than the sources.
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
        """Explain why a backend cannot serve a family, or None."""
        try:
            if agree(family, self._kernels[backend], self._kernels[REFERENCE]):
                return None
            return "its results differ from the reference"
        except Exception as error:  # whatever the compiler raises on a machine we have not seen
            return f"its code does not compile: {type(error).__name__}: {error}"

    def measure(self, name: str) -> None:
        """Time the variants of a family that agree with the reference; the fastest serves from now on."""
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
        """Time those that agree, in turns; ``cpu`` is known to."""
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
    """Return kept times if they are of these backends, else None."""
    return times if times is not None and FASTEST in times and {FASTEST, PLAIN} >= set(times) else None
