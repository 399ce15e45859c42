"""Claims to the names of labs, by which a dead lab is told from a living one.

Every lab holds a lock on a file of its name while its process lives, and the kernel releases the lock however the
process ends. So a lab whose lock can be taken is dead, and is removed when another one starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FOLDER = Path("/run/gradwire-labs")
"""Folder in which each living lab holds a lock on a file of its name."""


class Claim:
    """This process's claim to the name of a lab.

    Attributes:
        name: Unique among the labs of this machine.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.name = f"gw{secrets.token_hex(3)}"
            self.path = folder / self.name
            try:
                # Python opens files so that children do not inherit them: only this process holds the lock.
                self._file: IO[str] = self.path.open("x")
            except FileExistsError:
                continue
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Another lab that started between creation and lock may have removed the file as a dead lab's.
            if self.path.exists():
                return
            self._file.close()

    def release(self) -> None:
        """Give up the name, once nothing of the lab is left."""
        self.path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Try to take a lab's lock; yield whether its process is gone."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def dead_labs(folder: Path = FOLDER) -> Iterator[str]:
    """Yield the name of each lab whose process is gone; its file is removed when the caller asks for the next.

    The lock is held until then, so that two starting labs do not remove the same one.
    """
    for path in sorted(folder.glob("gw*")) if folder.is_dir() else ():
        with _locked(path) as gone:
            if gone:
                yield path.name
                path.unlink(missing_ok=True)
