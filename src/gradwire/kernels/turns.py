"""Processes that start together on one machine compile each part of the kernels once, side by side."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gradwire.kernels.kept_times import machine_name, source_digest

try:
    import fcntl
except ImportError:  # not on Windows, where every process compiles for itself
    fcntl = None  # type: ignore[assignment]

__all__ = ["in_turn"]


def in_turn(parts: Sequence[str], compile_part: Callable[[str], object], folder: Path | None) -> None:
    """Compile parts of the kernels, each of them in one process at a time.

    A part that another process is compiling is left for later, so that processes that start together share the work;
    whoever has to wait loads what the other has left in Numba's cache. The operating system releases a lock when its
    process ends, however it ends. A part that has been compiled once on this machine, from these sources, is loaded
    without a lock.

    Args:
        parts: By name.
        compile_part: Compiles one of them, or loads it.
        folder: Of the cache, which the processes share; None, or a folder in which locks cannot be made, as one that is
            read-only or on a file system without them: every process compiles for itself.
    """
    waiting = list(parts)
    while waiting:
        # First those that nobody is compiling. When all that is left is in the hands of others, wait for the first.
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
    """Hold the lock of a part while it is compiled; gives False where another process has it, and is not waited for."""
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
    """Note that a part has been compiled; whoever finds no note compiles, or loads, under the lock again."""
    partial = done.with_name(f"{done.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.write_text(mark)
        partial.replace(done)
