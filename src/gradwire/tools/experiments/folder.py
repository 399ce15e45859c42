"""The run folder: ``config.json``, ``metrics.jsonl`` and ``checkpoint/``, whose files are never left half-written.

A checkpoint is written under a temporary name, flushed to disk and renamed to ``checkpoint/step-N``; only then are
older ones removed. A row of metrics that could not be written whole is removed again.

The process that owns a run, which starts its workers or is rank 0 of its group, locks the folder while it trains. Its
workers hold the lock with it: they end a moment after an owner that is killed, and may be writing a checkpoint until
then. The kernel unlocks the folder however these processes end, so that a killed run can be resumed at once.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.digests import pack, unpack
from gradwire.tools.experiments.errors import RunError, UsageError

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

CAN_LOCK = fcntl is not None
ROW_FIELDS = (
    "step",
    "event",
    "loss",
    "accuracy",
    "step_time_s",
    "elapsed_s",
    "sent_bytes",
    "received_bytes",
    "dense_bytes",
    "bits_per_element",
)
GAUGES = "gauges"
"""Additional field of rows if the method has gauges: mean and deviation of each, by name."""

TEMPORARY = ".tmp"
RECORD = 1
"""Version of ``config.json``, under "gradwire_run"."""

CONTINUE = (
    "free space or choose another folder; what was written before is intact: --resume goes on from the last "
    "checkpoint, and --overwrite begins again where there is none"
)
"""Advice if a run cannot be written any more."""

RECORD_KEYS = {"method", "plan", "world_size"}
"""Fields that every ``config.json`` of a run has had; files of other programs have the same name."""

LOCK_PATIENCE_S = 3.0
"""Seconds to wait for the workers of a killed run, which end with their launcher, before a folder counts as in use."""

TICK_S = 0.02

_locks: set[int] = set()
"""Descriptors of the folders that this process has locked."""


def _forget_locks() -> None:
    # A lock is held until all copies of its descriptor are closed, and a fork may outlive the process that it copies.
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _unlock(descriptor: int) -> None:
    # A fork that leaves the body has closed it already.
    if descriptor in _locks:
        _locks.remove(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, deadline_s: float) -> None:
    """Lock an open folder; raises RunError if others hold it until the deadline, OSError if it cannot be locked."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise RunError(
                    f"another process trains in {path}: wait for its end, or choose another folder"
                ) from None
        time.sleep(TICK_S)


@contextlib.contextmanager
def writing(path: Path, advice: str = CONTINUE) -> Iterator[None]:
    """Raise RunError, which names a file and says what to do, where the body fails to write it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def write_durably(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, by a temporary name, a flush to disk and a rename; raises RunError."""
    temporary = path.with_name(path.name + TEMPORARY)
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def make_new_folder(path: Path) -> Path:
    """Make a folder that did not exist: ``path``, or ``path-2``, ``path-3`` and so on if others have made that.

    Raises:
        RunError: it cannot be made.
    """
    for number in itertools.count(1):
        found = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with writing(found, "choose another folder"):
            found.parent.mkdir(parents=True, exist_ok=True)
            # Of several processes that try, one makes the folder.
            with contextlib.suppress(FileExistsError):
                found.mkdir()
                break
    return found


def _is_record(path: Path, keys: set[str]) -> bool:
    """Return whether a file holds a JSON object with these keys."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and keys <= found.keys()


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of a run folder's complete checkpoints, in order."""
    names = [path.name for path in (folder / "checkpoint").glob("step-*")]
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


class RunFolder:
    """One run's folder.

    Args:
        path: The folder, which :meth:`create` makes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunFolder:
        """Make an empty run folder.

        Args:
            path: The folder.
            overwrite: Remove what it holds, if it is of a run or a comparison that nobody trains.

        Raises:
            UsageError: it is not empty, or a file, or with ``overwrite`` not a run's folder.
            RunError: it cannot be made or removed, or is to be removed while another process trains in it.
        """
        with writing(path, "choose another folder"):
            if path.exists() and not path.is_dir():
                raise UsageError(f"run folder {path} is a file")
            if path.is_dir() and any(path.iterdir()):
                if not overwrite:
                    raise UsageError(f"run folder {path} is not empty: continue it with --resume, or add --overwrite")
                cls._remove(path)
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def _remove(cls, path: Path) -> None:
        """Remove the folder of a run or a comparison; raises UsageError for any other, RunError if one trains in it."""
        if path.is_symlink():
            raise UsageError(f"{path} is a symbolic link, and is not overwritten: name the folder that it leads to")
        compared = _is_record(path / "compare.json", {"methods"})
        if not compared and not _is_record(path / "config.json", RECORD_KEYS):
            raise UsageError(f"{path} does not look like a run folder; it is not overwritten")
        with contextlib.ExitStack() as locks:
            for part in (path, *(config.parent for config in path.glob("*/config.json"))):
                locks.enter_context(cls(part).locked(patience_s=LOCK_PATIENCE_S))
            shutil.rmtree(path)

    @contextlib.contextmanager
    def locked(self, *, patience_s: float = 0.0) -> Iterator[int | None]:
        """Keep other processes from training in the folder, while the body trains in it.

        File systems without locks, as some network folders, are not locked.

        Args:
            patience_s: Seconds to wait while other processes hold the lock.

        Yields:
            The descriptor of the lock, or None if there is none. The folder stays locked until all processes that
            inherit the descriptor have ended or closed it.

        Raises:
            RunError: another process trains in the folder.
        """
        if not CAN_LOCK:
            yield None
            return
        held = None
        with contextlib.ExitStack() as stack:
            # A folder that cannot be opened fails where it is read or written.
            with contextlib.suppress(OSError):
                descriptor = os.open(self.path, os.O_RDONLY)
                _locks.add(descriptor)
                stack.callback(_unlock, descriptor)
                _lock(descriptor, self.path, time.monotonic() + patience_s)
                held = descriptor
            yield held

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``."""
        write_durably(self.path / "config.json", (json.dumps(config, indent=2) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """Read ``config.json``; raises RunError."""
        path = self.path / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run folder: it holds no config.json") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        if not isinstance(config, dict) or config.get("gradwire_run", RECORD) != RECORD:
            raise RunError(f"{path} is not a run's record of this version of gradwire: use the version that wrote it")
        return config

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append a row to ``metrics.jsonl``, whole or not at all; raises RunError."""
        fields = (*ROW_FIELDS, GAUGES) if GAUGES in row else ROW_FIELDS
        line = (json.dumps({field: row[field] for field in fields}) + "\n").encode()
        with writing(self.metrics), self.metrics.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(28, os.strerror(28))
            except OSError:
                file.truncate(before)
                raise

    def cut_metrics(self, last_step: int) -> None:
        """Drop the rows after ``last_step``, which a resumed run writes again; raises RunError."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= last_step:
                    # The last one may lack its end, and the next row would be joined with it.
                    kept.append(line + b"\n")
        write_durably(self.metrics, b"".join(kept))

    def pending(self, step: int) -> Path:
        """Return the temporary folder for the parts of the checkpoint of ``step``."""
        return self.path / "checkpoint" / f"step-{step}{TEMPORARY}"

    def begin_checkpoint(self, step: int) -> None:
        """Make an empty temporary folder for a checkpoint; raises RunError."""
        pending = self.pending(step)
        with writing(pending):
            shutil.rmtree(pending, ignore_errors=True)
            pending.mkdir(parents=True)

    def save_part(self, step: int, name: str, state: object) -> None:
        """Write one part of the pending checkpoint to the disk; raises RunError."""
        buffer = io.BytesIO()
        # The digest alone would not detect parts that were swapped.
        torch.save(pack({"part": name, "step": step, "state": state})[0], buffer)
        write_durably(self.pending(step) / f"{name}.pt", buffer.getvalue())

    def commit_checkpoint(self, step: int) -> None:
        """Rename the pending checkpoint to its final name, then remove older ones; raises RunError."""
        parent, final = self.path / "checkpoint", self.path / "checkpoint" / f"step-{step}"
        with writing(final):
            shutil.rmtree(final, ignore_errors=True)
            self.pending(step).replace(final)
            descriptor = os.open(parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        for other in parent.iterdir():
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def abandon_checkpoint(self, step: int) -> None:
        """Remove the parts of a checkpoint that failed."""
        shutil.rmtree(self.pending(step), ignore_errors=True)

    def load_part(self, name: str) -> Any:
        """Read one part of the newest checkpoint; raises RunError."""
        steps = checkpoint_steps(self.path)
        if not steps:
            raise RunError(f"{self.path} holds no checkpoint to resume from")
        path = self.path / "checkpoint" / f"step-{steps[-1]}" / f"{name}.pt"
        try:
            found = unpack(torch.load(path, weights_only=True), str(path))
            if not isinstance(found, dict) or (found.get("part"), found.get("step")) != (name, steps[-1]):
                raise IncompatibleError(f"{path} is not the file that was saved here: it is another part or step")
            return found["state"]
        except IncompatibleError as error:
            raise RunError(str(error)) from error
        except FileNotFoundError:
            raise RunError(f"{path} is missing; was the run started with another number of workers?") from None
        except Exception as error:
            raise RunError(f"{path} cannot be read: {error}") from error
