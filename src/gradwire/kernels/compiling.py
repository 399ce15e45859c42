"""Compilation: its seconds, the files beside Numba's cache, and locks by which processes share the work."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO


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
    except (OSError, ValueError):
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
    """Return the folder in which Numba stores compiled code, or None if it stores nothing, or was unable to."""
    from gradwire.kernels.moments.loops import moments_range
    from gradwire.kernels.numba_core.storing import refused

    folder = moments_range.stats.cache_path
    return Path(folder) if folder and not refused() else None


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
    _write(file, json.dumps(kept, indent=1))


def _write(file: Path, text: str) -> None:
    """Replace a file as a whole; leave it as it is if that fails."""
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


try:
    import fcntl
except ImportError:  # Windows, where every process compiles everything
    fcntl = None  # type: ignore[assignment]

POLL_S = 0.2
"""Seconds between two attempts to take a lock that another process holds."""

MAX_WAIT_S = 120.0
"""Seconds of waiting for other processes without any progress, after which a process compiles without locks.

The longest part takes 15 s of a processor's time to compile, and twice as much on a slow one. It takes these two
minutes if four processes share each core. Compiling twice costs only time, but a process that has stopped may hold its
lock for ever.
"""


def in_turn(parts: Sequence[str], compile_part: Callable[[str], object], folder: Path | None) -> None:
    """Compile parts of the kernels, each in one process at a time.

    A part that another process is compiling is left for later, so that processes that start together share the work. A
    process that has to wait loads the result from Numba's cache. The operating system releases a lock when its process
    ends, however it ends. A process that may have stopped is not waited for: after :data:`MAX_WAIT_S` without progress,
    this process warns and compiles the remaining parts without locks. A part that has been compiled on this machine,
    from these sources, is loaded without a lock.

    Args:
        parts: Names of the parts.
        compile_part: Compiles a part, or loads it.
        folder: Folder of the cache, which the processes share. If it is None, or locks cannot be made in it (it is
            read-only, or its file system has none), every process compiles everything.
    """
    waiting, patient, since_s = list(parts), True, time.monotonic()
    while waiting:
        for part in waiting:
            with _locked(folder, part, patient) as mine:
                if mine:
                    compile_part(part)
                    break
        else:
            # Other processes are compiling all that are left.
            if time.monotonic() - since_s < MAX_WAIT_S:
                time.sleep(POLL_S)
            else:
                patient = False
                warnings.warn(
                    f"another process has held the locks of kernels ({', '.join(waiting)}) in {folder} for "
                    f"{MAX_WAIT_S:.0f} s and may have stopped: compiling them without locks",
                    stacklevel=2,
                )
            continue
        waiting.remove(part)
        since_s = time.monotonic()


@contextlib.contextmanager
def _locked(folder: Path | None, part: str, patient: bool) -> Iterator[bool]:
    """Hold the lock of a part while it is compiled.

    If another process holds it, yield False if ``patient``, else go on without it.
    """
    if folder is None or fcntl is None:
        yield True
        return
    stem = f"gradwire-{re.sub(r'[^a-z0-9_]', '_', part.lower())}"
    done, mark = folder / f"{stem}.compiled", f"{machine_name()} {source_digest()}"
    if _holds(done, mark):
        yield True
        return
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context((folder / f"{stem}.lock").open("a"))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stack.callback(_unlock, handle)
        except BlockingIOError:
            if patient:
                yield False
                return
        except OSError:
            pass
        yield True
        _leave(done, mark)


def _unlock(handle: IO[str]) -> None:
    # Closing the file is not enough: a child that was forked meanwhile holds the lock, too, as long as it lives.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)


def _holds(done: Path, mark: str) -> bool:
    """Return whether a record says that a part has been compiled."""
    try:
        return done.read_bytes() == mark.encode()
    except OSError:
        return False


def _leave(done: Path, mark: str) -> None:
    """Record that a part has been compiled; without the record a process takes the lock again."""
    from gradwire.kernels.numba_core.storing import refused

    if not refused():
        _write(done, mark)
