"""The work of ``gradwire publish``, ``subscribe`` and ``patch show``."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import gradwire as gw
from gradwire.errors import ExchangeError, GradwireError, HyperparameterError, IncompatibleError, PayloadError
from gradwire.publish.container import ANCHOR, CHANGES, CODED, LOSSY, Octets, PatchHead, read_head
from gradwire.publish.dcp_files import is_dcp
from gradwire.publish.lossy import spec_of
from gradwire.publish.manifest import read_manifest
from gradwire.publish.stores import open_place
from gradwire.tools.cli.show import print_json, print_table, table_of
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.report.verdict import bytes_text, percent, seconds_text

_NUMBER, _CUT = re.compile(r"(\d+)$"), re.compile(r"(\d{1,3})/(\d{1,3})")


@dataclass(frozen=True)
class Checkpoint:
    """A safetensors file or folder, or a folder of torch.distributed.checkpoint, of a step.

    Attributes:
        step: The number that the folder's name ends with; None: it has none.
        path: The file or folder.
        stamp: When its files were last written, and their sizes.
    """

    step: int | None
    path: Path
    stamp: tuple[tuple[int, int], ...]


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the checkpoints of a path, in the order of their steps.

    A path with safetensors files, or a folder of torch.distributed.checkpoint, is one checkpoint. Otherwise its folders
    with such files and a number at the end of their name are, such as ``checkpoint-500`` or ``step_500``.

    Raises:
        IncompatibleError: the path is not there.
    """
    if not path.exists():
        raise IncompatibleError(f"{path} does not exist: name a safetensors file or a folder of checkpoints")
    if path.is_file() or _is_checkpoint(path):
        return [Checkpoint(None, path, _stamp(path))]
    found = []
    for folder in path.iterdir():
        number = _NUMBER.search(folder.name)
        if folder.is_dir() and number and _is_checkpoint(folder):
            found.append(Checkpoint(int(number.group()), folder, _stamp(folder)))
    return sorted(found, key=lambda checkpoint: checkpoint.step or 0)


def _is_checkpoint(folder: Path) -> bool:
    return is_dcp(folder) or any(folder.glob("*.safetensors"))


def _stamp(path: Path) -> tuple[tuple[int, int], ...]:
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])
    return tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)


class FollowedFolder:
    """Publishes the checkpoints of a path, one after the other.

    The run that is in the place goes on where the checkpoint of its latest step is still there and whole. Otherwise a
    new run begins with the newest checkpoint. A checkpoint that cannot be read is left out once there is a newer one.

    Args:
        source: The path.
        to: The place.
        looks_again: Whether :meth:`publish` is called again and again: a checkpoint that is written over counts as
            whole when it is as it was at the call before. Otherwise it is published at once.
        say: Called with one line for each checkpoint that is left out.
        settings: Of the publisher.
    """

    def __init__(
        self,
        source: Path,
        to: str,
        *,
        looks_again: bool = False,
        say: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        self._source, self._to, self._settings = source, to, settings
        self._publisher: gw.WeightPublisher | None = None
        self._looks_again, self._say = looks_again, say
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._seen: tuple[tuple[int, int], ...] = ()
        self._left_out: set[Path] = set()

    def publish(self) -> Iterator[gw.Publication]:
        """Publish what could not be written before, and the checkpoints that are new and complete."""
        if self._publisher is not None:
            waiting = self._publisher.flush()
            if waiting is not None:
                yield waiting
        checkpoints = find_checkpoints(self._source)
        if not checkpoints or self._is_being_written(checkpoints[-1]):
            return
        if self._publisher is None or self._publisher.step < 0:
            checkpoints = self._begin(checkpoints)
        publisher = self._publisher
        if publisher is None:
            return
        for checkpoint in checkpoints:
            step = checkpoint.step
            if step is None:
                # A checkpoint that is written over counts on.
                if checkpoint.stamp == self._stamp:
                    continue
                step = publisher.step + 1
            if step <= publisher.step:
                continue
            try:
                publication = publisher.publish(step, checkpoint.path)
            except IncompatibleError as error:
                # The newest one may still be in the making.
                if checkpoint is checkpoints[-1]:
                    raise
                self._leave_out(checkpoint, error)
                continue
            finally:
                # Also if its patch could not be written: it waits in the publisher.
                if publisher.step == step:
                    self._stamp = checkpoint.stamp
            yield publication

    def _leave_out(self, checkpoint: Checkpoint, error: IncompatibleError) -> None:
        """Say once that a checkpoint cannot be read."""
        if self._say is not None and checkpoint.path not in self._left_out:
            self._say(f"{checkpoint.path} is left out, since there is a newer checkpoint: {error}")
        self._left_out.add(checkpoint.path)

    def _is_being_written(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint that is written over has changed since the last look."""
        if checkpoint.step is not None or not self._looks_again:
            return False
        before, self._seen = self._seen, checkpoint.stamp
        return before != checkpoint.stamp

    def _begin(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Build the publisher; return the checkpoints to publish."""
        with contextlib.suppress(PayloadError, IncompatibleError):
            manifest = read_manifest(open_place(self._to))
            for checkpoint in checkpoints:
                if manifest is not None and checkpoint.step in (None, manifest.step):
                    publisher = gw.WeightPublisher(checkpoint.path, self._to, resume=True, **self._settings)
                    self._publisher = publisher
                    if publisher.step == manifest.step:
                        self._stamp = checkpoint.stamp
                        return checkpoints
        newest = checkpoints[-1]
        if self._publisher is None or newest.step is not None:
            self._publisher = gw.WeightPublisher(newest.path, self._to, **self._settings)
        return [newest]


def strips_of(words: list[str]) -> dict[str, tuple[int, int]] | None:
    """Read strips: NAMES=DIMENSION/NUMBER each.

    Raises:
        UsageError: a word is not one.
    """
    found = {}
    for word in words:
        names, _, cut = word.rpartition("=")
        match = _CUT.fullmatch(cut)
        if not names or not match:
            raise UsageError(f"--strips {word}: write NAMES=DIMENSION/NUMBER, such as '*down_proj.weight=1/8'")
        found[names] = int(match[1]), int(match[2])
    return found or None


def publish(
    source: Path,
    to: str,
    *,
    anchor_every: int,
    keep_anchors: int,
    strips: list[str],
    base: str,
    lossy: str | None,
    watch: bool,
    every_s: float,
    as_json: bool,
) -> None:
    """Publish checkpoints, once or as they appear.

    Raises:
        IncompatibleError: the path is not there, or a checkpoint is not complete.
        ExchangeError: a file cannot be read or written.
    """
    settings = {"anchor_every": anchor_every, "keep_anchors": keep_anchors, "base": base, "lossy": lossy}
    rows, say = list[dict[str, Any]](), _Teller()
    follower = FollowedFolder(source, to, looks_again=watch, say=say, strips=strips_of(strips), **settings)
    if lossy:
        say(f"differences are rounded by {gw.method(lossy)!r}; anchors are exact")

    published = False

    def turn() -> None:
        nonlocal published
        for publication in follower.publish():
            published = True
            # Who watches for weeks keeps no rows that nobody prints.
            if as_json:
                rows.append(publication_row(publication))
            say(_publication_text(publication))

    _repeat(turn, watch, every_s, say)
    if not published and not watch:
        say(f"nothing new in {source}")
    if as_json:
        print_json(rows)


def publication_row(publication: gw.Publication) -> dict[str, Any]:
    """Return a publication as a flat object."""
    changed, nbytes = publication.changed, publication.patch_bytes
    bits = 8 * nbytes / changed if changed and nbytes else None
    return {**asdict(publication), "bits_per_changed_element": bits}


def _publication_text(publication: gw.Publication) -> str:
    parts = []
    if publication.patch_bytes:
        share = percent(publication.changed / publication.elements)
        parts.append(f"patch {bytes_text(publication.patch_bytes)}, {share} of the elements changed")
    if publication.anchor_bytes:
        parts.append(f"anchor {bytes_text(publication.anchor_bytes)}")
    spent = seconds_text(publication.encode_s), seconds_text(publication.write_s)
    return f"step {publication.step}: {'; '.join(parts)}; encoded in {spent[0]}, written in {spent[1]}"


def subscribe(
    source: str, to: Path, *, relay: str | None, lossy: bool, watch: bool, every_s: float, as_json: bool
) -> None:
    """Follow published weights, once or as they appear.

    Raises:
        PayloadError: nothing has been published, or a file was refused.
        ExchangeError: a file cannot be read or written.
    """
    with _told():
        subscriber = gw.WeightSubscriber(to, source, relay=relay, lossy=lossy)
    rows, say = list[dict[str, Any]](), _Teller()

    fetched = False

    def turn() -> None:
        nonlocal fetched
        before = subscriber.step
        try:
            step = subscriber.update()
        finally:
            for file in subscriber.applied:
                fetched = True
                if as_json:
                    rows.append(asdict(file))
                spent = seconds_text(file.fetch_s), seconds_text(file.apply_s)
                say(f"{file.name}: {bytes_text(file.nbytes)}, fetched in {spent[0]}, checked and written in {spent[1]}")
        if step is None and not watch:
            raise PayloadError(f"nothing has been published in {source} yet: run gradwire publish --to {source}")
        if step is not None and step == before and not watch:
            say(f"step {step} is the latest")

    _repeat(turn, watch, every_s, say)
    if subscriber.step is not None and not fetched:
        say(f"{to} has step {subscriber.step}, the latest")
    if as_json:
        print_json(rows)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise errors of the operating system and of the network as those that commands tell in one line."""
    try:
        yield
    except OSError as error:
        raise ExchangeError(str(error)) from error


def _repeat(turn: Any, watch: bool, every_s: float, say: Any) -> None:
    """Call a function once, or until Ctrl-C, when it fails with one line and goes on."""
    if not watch:
        with _told():
            turn()
        return
    last = ""
    try:
        while True:
            try:
                turn()
                last = ""
            except (HyperparameterError, UsageError):
                # No later turn would have other options.
                raise
            except (GradwireError, OSError) as error:
                if str(error) != last:
                    last = str(error)
                    say(f"{error}; trying again")
            time.sleep(every_s)
    except KeyboardInterrupt:
        pass


class _Teller:
    """Prints a line on standard error."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def __call__(self, line: str) -> None:
        self._console.print(line, markup=False)


def patch_rows(files: list[Path]) -> list[dict[str, Any]]:
    """Describe files of anchors and patches.

    Raises:
        PayloadError: a file is not there, or is damaged.
    """
    rows = []
    for file in files:
        if file.is_dir():
            raise PayloadError(f"{file} is a folder: name files in it, such as {file}/*.gww")
        try:
            data = np.fromfile(file, np.uint8)
        except OSError as error:
            raise PayloadError(f"{file} cannot be read: {error.strerror or error}") from error
        try:
            head = read_head(data)
        except PayloadError as error:
            raise PayloadError(f"{file}: {error}") from error
        patch = head.kind != ANCHOR
        rows.append(
            {
                "file": str(file),
                "kind": "patch" if patch else "anchor",
                "run": head.run.hex(),
                "step": head.step,
                "base_step": head.base_step if patch else None,
                "file_bytes": head.nbytes,
                "tensors": len(head.sums),
                "changed": head.changed,
                "bits_per_changed_element": 8 * head.nbytes / head.changed if head.changed else None,
                "chunks": len(head.chunks),
                "coded_chunks": sum(chunk.kind in (CHANGES, CODED) for chunk in head.chunks),
                "lossy": _lossy(head, data),
                "layout": head.layout.hex(),
                "base_state": head.base_state.hex() if patch else None,
                "state": head.state.hex(),
                "digest": head.digest.hex(),
            }
        )
    return rows


def _lossy(head: PatchHead, data: Octets) -> str | None:
    """Return the spec of the method that rounded a patch's differences; None if it is exact."""
    rounded = (place for chunk, place in zip(head.chunks, head.places()) if chunk.kind == LOSSY)
    return next((spec_of(data[place]) for place in rounded), None)


def show_patch(files: list[Path], *, as_json: bool) -> None:
    """Print what files of anchors and patches say of themselves."""
    rows = patch_rows(files)
    if as_json:
        print_json(rows)
        return
    columns = ("file", "kind", "run", "step", "from", "size", "tensors", "changed", "bits/changed", "lossy", "state")
    table = table_of(*columns, text=("lossy",))
    for row in rows:
        bits = row["bits_per_changed_element"]
        table.add_row(
            Path(row["file"]).name, row["kind"], row["run"][:8], str(row["step"]),
            "-" if row["base_step"] is None else str(row["base_step"]), bytes_text(row["file_bytes"]),
            str(row["tensors"]), str(row["changed"]), "-" if bits is None else f"{bits:.2f}",
            row["lossy"] or "-", row["state"][:8],
        )  # fmt: skip
    print_table(table)
