"""Which backend serves a family on this machine: of those that agree with the reference, the fastest, measured."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.kernels.api import Backend, Kernels
from gradwire.kernels.front import Family
from gradwire.kernels.self_test import SELF_TESTS, agree

__all__ = ["Automatic", "Choice", "chosen", "machine_name", "source_digest"]

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
    here and agree with the reference, unless ``cpu-plain`` is faster by more than 3 %. Where it does not serve, a
    warning says so, and all families are scalar loops from then on. Times are kept beside the compiled code, by
    processor and sources; what another machine or version has measured is measured anew. The bits are the same
    whatever is chosen, so ranks may differ.

    Args:
        backends: ``cpu``, ``cpu-plain`` and ``reference``.
        clock: Tells the time in seconds.
        file: Where times are kept; by default in Numba's cache directory, None: nowhere.
    """

    compiles = True

    def __init__(
        self,
        backends: Mapping[str, Backend],
        clock: Callable[[], float] = time.perf_counter,
        file: Path | str | None = "default",
    ) -> None:
        self._backends, self._kernels = backends, {name: Kernels(backend) for name, backend in backends.items()}
        self._clock, self._file = clock, file
        self._choices: dict[str, Choice] = {}
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
        file = default_file() if self._file == "default" else self._file
        file = None if file is None else Path(file)
        times = _read(file).get(family)
        backend = FASTEST if times is None else _fastest(times)
        # What serves is compared on every start: what it is compiled to depends on more than the sources.
        reason = self._refusal(backend, family)
        if reason is None and times is None:
            times = self._measure(family)
            _write(file, family, times)
            backend = _fastest(times)
        if reason is None:
            times = times or {}
            return Choice(backend, "the only one that agrees" if len(times) < 2 else "the fastest that agrees", times)
        self._only_plain = True
        warnings.warn(
            f"kernel backend 'cpu' does not serve here ({family}: {reason}); using 'cpu-plain', which is slower",
            stacklevel=6,
        )
        return Choice(PLAIN, f"cpu does not serve: {reason}")

    def _refusal(self, backend: str, family: str) -> str | None:
        """Say why a backend cannot serve a family, or None."""
        try:
            if agree(family, self._kernels[backend], self._kernels[REFERENCE]):
                return None
            return "its results differ from the reference"
        except Exception as error:  # whatever the compiler raises on a machine we have not seen
            return f"its code does not compile: {type(error).__name__}: {error}"

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


def _fastest(times: Mapping[str, float]) -> str:
    plain = times.get(PLAIN)
    return PLAIN if plain is not None and plain < (1 - NOISE) * times[FASTEST] else FASTEST


def machine_name() -> str:
    """Return the name of the processor, as the operating system and the compiler tell it."""
    from llvmlite.binding import get_host_cpu_name

    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model} ({get_host_cpu_name()})"


def source_digest() -> str:
    """Return a digest of all that kernels are compiled from, and of the compiler's versions."""
    import llvmlite
    import numba

    home = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def default_file() -> Path | None:
    """Return the file beside the compiled code in which times are kept, or None where Numba keeps nothing."""
    from gradwire.kernels.moments.loops import moments_range

    folder = moments_range.stats.cache_path
    return Path(folder) / "gradwire-kernel-times.json" if folder else None


def _read(file: Path | None) -> dict[str, dict[str, float]]:
    """Return the kept times of families; none where the file is damaged, or of another machine or version."""
    try:
        kept = json.loads(file.read_text()) if file is not None else {}
        if kept["machine"] != machine_name() or kept["sources"] != source_digest():
            return {}
        times = {family: {str(k): float(v) for k, v in row.items()} for family, row in kept["times_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    known = {FASTEST, PLAIN}
    return {f: row for f, row in times.items() if FASTEST in row and known >= set(row) and min(row.values()) > 0}


def _write(file: Path | None, family: str, times: Mapping[str, float]) -> None:
    """Keep the times of a family, beside what is kept of others; a file that cannot be written is none."""
    if file is None:
        return
    kept = {"machine": machine_name(), "sources": source_digest(), "times_s": {**_read(file), family: dict(times)}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as stream:
            json.dump(kept, stream, indent=1)
        os.replace(name, file)
    except OSError:
        pass
