"""Which labs exist on this machine, and which of them are dead.

Every lab holds a lock on a file named after it for as long as its process lives; the kernel lets go of it however
the process ends. So a lab whose lock can be taken is dead, whatever process numbers have been given out since, and
a living lab is never mistaken for one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["Claim", "dead_labs"]

FOLDER = Path("/run/gradwire-labs")


class Claim:
    """This process's hold on the name of one lab.

    Attributes:
        name: Unique among the labs of this machine.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.name = f"gw{secrets.token_hex(3)}"
            self.path = folder / self.name
            try:
                # Python opens files so that children do not inherit them: the lock is this process's alone.
                self._file: IO[str] = self.path.open("x")
            except FileExistsError:
                continue
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Between creation and lock, another lab's start may have taken the file for a dead lab's.
            if self.path.exists():
                return
            self._file.close()

    def release(self) -> None:
        """Return the name back, once nothing bears it any more."""
        self.path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Try to take a lab's lock; tells whether its process is gone."""
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
    """Yield the name of each lab whose process is gone; its file goes when the caller asks for the next.

    The lock is held meanwhile, so that two starts do not tidy up the same lab.
    """
    for path in sorted(folder.glob("gw*")) if folder.is_dir() else ():
        with _locked(path) as gone:
            if gone:
                yield path.name
                path.unlink(missing_ok=True)
