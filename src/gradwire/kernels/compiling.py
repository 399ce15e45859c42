"""Compilation: its seconds, the files beside Numba's cache, and locks by which processes share the work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass
class Spent:
    """A number of seconds that grows while a measurement runs."""

    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Add seconds."""
        self.seconds += seconds


_measured: list[Spent] = []


@contextmanager
def compile_time() -> Iterator[Spent]:
    """Measure the seconds of Numba's compilations, and those of :func:`compiling`, in the body of the context.

    The result is complete when the body ends. Numba reports a compilation only if it found nothing in its cache.
    """
    spent = Spent()
    _measured.append(spent)
    try:
        with _numba_timer(spent):
            yield spent
    finally:
        # Compared by identity: two objects that have measured nothing are equal.
        _measured[:] = [other for other in _measured if other is not spent]


def _numba_timer(spent: Spent) -> AbstractContextManager[object]:
    try:
        from numba.core import event
    except ImportError:
        # A caller that needs Numba raises its own error.
        return nullcontext()
    return event.install_timer("numba:compile", spent.add)


@contextmanager
def compiling() -> Iterator[None]:
    """Count the seconds of the body as compilation, for compilers that do not report it apart from loading."""
    began_s = time.perf_counter()
    try:
        yield
    finally:
        for spent in list(_measured):
            spent.add(time.perf_counter() - began_s)


@cache
def machine_name() -> str:
    """Return the operating system's name of the processor, and the name of the one that Numba compiles for."""
    from llvmlite.binding import get_host_cpu_name
    from numba.core import config

    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model} ({getattr(config, 'CPU_NAME', None) or get_host_cpu_name()})"


@cache
def source_digest() -> str:
    """Return a digest of the sources of all kernels and of the compiler's versions."""
    import llvmlite
    import numba

    home = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return the folder in which Numba stores compiled code, or None if it stores nothing."""
    from gradwire.kernels.moments.loops import moments_range

    folder = moments_range.stats.cache_path
    return Path(folder) if folder else None


def default_file() -> Path | None:
    """Return the file of stored times, beside the compiled code, or None if Numba stores nothing."""
    folder = cache_folder()
    return None if folder is None else folder / "gradwire-kernel-times.json"


def read_times(file: Path | None) -> dict[str, dict[str, float]]:
    """Return the stored seconds, by measured part and variant.

    The result is empty if the file is damaged, or was written for another machine or version.
    """
    try:
        kept = json.loads(file.read_text()) if file is not None else {}
        if kept["machine"] != machine_name() or kept["sources"] != source_digest():
            return {}
        times = {name: {str(k): float(v) for k, v in row.items()} for name, row in kept["times_s"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: row for name, row in times.items() if row and min(row.values()) > 0}


def write_times(file: Path | None, times: Mapping[str, Mapping[str, float]]) -> None:
    """Add times to the stored ones; a file that cannot be written is ignored."""
    if file is None:
        return
    rows = {**read_times(file), **{name: dict(row) for name, row in times.items()}}
    kept = {"machine": machine_name(), "sources": source_digest(), "times_s": rows}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as stream:
            json.dump(kept, stream, indent=1)
        os.replace(name, file)
    except OSError:
        pass


try:
    import fcntl
except ImportError:  # Windows, where every process compiles everything
    fcntl = None  # type: ignore[assignment]


def in_turn(parts: Sequence[str], compile_part: Callable[[str], object], folder: Path | None) -> None:
    """Compile parts of the kernels, each in one process at a time.

    A part that another process is compiling is left for later, so that processes that start together share the work. A
    process that has to wait loads the result from Numba's cache. The operating system releases a lock when its process
    ends, however it ends. A part that has been compiled on this machine, from these sources, is loaded without a lock.

    Args:
        parts: Names of the parts.
        compile_part: Compiles a part, or loads it.
        folder: Folder of the cache, which the processes share. If it is None, or locks cannot be made in it (it is
            read-only, or its file system has none), every process compiles everything.
    """
    waiting = list(parts)
    while waiting:
        # Parts that no process is compiling come first. If other processes compile all that are left, wait for one.
        for part in waiting:
            with _locked(folder, part, wait=False) as mine:
                if mine:
                    compile_part(part)
                    break
        else:
            part = waiting[0]
            with _locked(folder, part, wait=True):
                compile_part(part)
        waiting.remove(part)


@contextlib.contextmanager
def _locked(folder: Path | None, part: str, wait: bool) -> Iterator[bool]:
    """Hold the lock of a part while it is compiled; yield False if another process holds it and ``wait`` is false."""
    if folder is None or fcntl is None:
        yield True
        return
    stem = f"gradwire-{re.sub(r'[^a-z0-9_]', '_', part)}"
    done = folder / f"{stem}.compiled"
    mark = f"{machine_name()} {source_digest()}"
    with contextlib.ExitStack() as stack:
        try:
            if done.exists() and done.read_text() == mark:
                handle = None
            else:
                folder.mkdir(parents=True, exist_ok=True)
                handle = stack.enter_context((folder / f"{stem}.lock").open("a"))
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            handle = None
        yield True
        if handle is not None:
            _leave(done, mark)


def _leave(done: Path, mark: str) -> None:
    """Record that a part has been compiled; without the record a process takes the lock again."""
    partial = done.with_name(f"{done.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text(mark)
        partial.replace(done)
