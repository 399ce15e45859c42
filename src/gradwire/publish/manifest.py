"""The manifest: the files that a publisher keeps, in JSON, with a digest behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.publish.container import ANCHOR, NO_STEP, PATCH, Octets, PatchHead, digest_of
from gradwire.publish.disk import is_partial
from gradwire.publish.stores import Place

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
_FORMAT, _VERSION, _SHARDED_VERSION = "gradwire-weights", 1, 2
_ROW_BYTES = 320
"""Bytes of a file's row at most, but for steps of more than twelve digits."""

MAX_PARTS = 1 << 16
MAX_SPEC = 1000
"""Characters of the spec of a method."""

_KINDS = {"anchor": ANCHOR, "patch": PATCH}


@dataclass(frozen=True)
class PublishedFile:
    """A file in the manifest; digests are in hexadecimal digits.

    Attributes:
        name: Name of the file.
        kind: "anchor" or "patch".
        step: Step of the weights.
        base_step: Step that a patch starts from; -1 for an anchor.
        nbytes: Bytes of the file.
        digest: Digest of the file's head, which has the digests of all its chunks.
        base_state: Digest of the weights that a patch starts from; zeros for an anchor.
        state: Digest of the weights.
        part: Number of the part of sharded weights that the file is of.
    """

    name: str
    kind: str
    step: int
    base_step: int
    nbytes: int
    digest: str
    base_state: str
    state: str
    part: int = 0

    @classmethod
    def of(cls, head: PatchHead, part: int | None = None) -> PublishedFile:
        """Describe a packed file, of a part of sharded weights or of all."""
        kind = "anchor" if head.kind == ANCHOR else "patch"
        ending = "" if part is None else f"-part{part:05d}"
        name = f"{kind}-{head.step:012d}-{head.run.hex()[:8]}{ending}.gww"
        return cls(
            name,
            kind,
            head.step,
            head.base_step,
            head.nbytes,
            head.digest.hex(),
            head.base_state.hex(),
            head.state.hex(),
            part or 0,
        )


@dataclass(frozen=True)
class StepFiles:
    """The files of all parts, of one kind and step; of weights that are not sharded, one file.

    Attributes:
        files: The files, in the order of their parts.
    """

    files: tuple[PublishedFile, ...]

    @property
    def kind(self) -> str:
        """ "anchor" or "patch"."""
        return self.files[0].kind

    @property
    def step(self) -> int:
        """Step of the weights."""
        return self.files[0].step

    @property
    def state(self) -> str:
        """Digest of the states of all parts, in hexadecimal digits; of a single one, its state."""
        return joined_state([file.state for file in self.files])

    def of_parts(self, parts: Iterable[int]) -> StepFiles:
        """Return the files of some parts only."""
        return StepFiles(tuple(self.files[part] for part in parts))

    @property
    def base_states(self) -> tuple[str, ...]:
        """States of the parts that patches start from."""
        return tuple(file.base_state for file in self.files)

    @property
    def states(self) -> tuple[str, ...]:
        """States of the parts."""
        return tuple(file.state for file in self.files)


def joined_state(states: Sequence[str]) -> str:
    """Return the digest of the states of all parts; of a single one, its state."""
    return states[0] if len(states) == 1 else digest_of(*map(bytes.fromhex, states)).hex()


@dataclass(frozen=True)
class Manifest:
    """The files of a run, in the order in which they were published; patches come before anchors of their step.

    Attributes:
        run: Identity of the publisher's run, in hexadecimal digits.
        parts: Digest of the layout of each part, in hexadecimal digits; one, unless the weights are sharded.
        nbytes: Bytes of the weights.
        files: The files.
        sharded: Whether layouts name pieces of tensors.
        lossy: Spec of the method that patches may round differences by; "": none.
    """

    run: str
    parts: tuple[str, ...]
    nbytes: int
    files: tuple[PublishedFile, ...]
    sharded: bool = False
    lossy: str = ""

    @property
    def step(self) -> int:
        """The latest step."""
        return self.files[-1].step if self.files else NO_STEP

    @cached_property
    def stages(self) -> tuple[StepFiles, ...]:
        """The files by kind and step.

        Raises:
            PayloadError: a part has no file of some kind and step, or more than one.
        """
        found = [StepFiles(tuple(files)) for _, files in groupby(self.files, lambda file: (file.step, file.kind))]
        wanted = list(range(len(self.parts)))
        for stage in found:
            if [file.part for file in stage.files] != wanted:
                raise PayloadError(f"the manifest does not list a {stage.kind} of step {stage.step} for each part")
        return tuple(found)

    def pack(self) -> bytes:
        """Return the manifest's bytes: a line of JSON, and a line with its digest."""
        files = [asdict(file) for file in self.files]
        common = {"nbytes": self.nbytes, "files": files} | ({"lossy": self.lossy} if self.lossy else {})
        rows: dict[str, object]
        if self.sharded:
            state = self.stages[-1].state if self.files else ""
            rows = {"format": _FORMAT, "version": _SHARDED_VERSION, "run": self.run, "parts": self.parts, **common}
            rows["state"] = state
        else:
            for file in files:
                del file["part"]
            rows = {"format": _FORMAT, "version": _VERSION, "run": self.run, "layout": self.parts[0], **common}
        text = json.dumps(rows, separators=(",", ":")).encode()
        return text + b"\n" + digest_of(text).hex().encode() + b"\n"

    @classmethod
    def parse(cls, data: Octets | bytes) -> Manifest:
        """Read a manifest.

        Raises:
            PayloadError: it is not complete, or not a manifest.
        """
        text, _, digest = bytes(data).partition(b"\n")
        if digest.strip().decode("ascii", "replace") != digest_of(text).hex():
            raise PayloadError("the manifest is not complete: its digest differs; read it again, it is being written")
        try:
            rows = json.loads(text)
            if rows["format"] != _FORMAT or rows["version"] not in (_VERSION, _SHARDED_VERSION):
                raise PayloadError(f"the manifest is {rows['format']} {rows['version']}: update the older side")
            sharded = rows["version"] == _SHARDED_VERSION
            parts = tuple(_hex(row) for row in (rows["parts"] if sharded else [rows["layout"]]))
            if not 1 <= len(parts) <= MAX_PARTS:
                raise PayloadError(f"the manifest has {len(parts)} parts")
            files = tuple(_file(row, sharded) for row in rows["files"])
            lossy = rows.get("lossy", "")
            if not isinstance(lossy, str) or len(lossy) > MAX_SPEC:
                raise PayloadError("the manifest has something else where the spec of a method is due")
            manifest = cls(_hex(rows["run"]), parts, _count(rows["nbytes"]), files, sharded, lossy)
            latest = manifest.stages[-1].state if manifest.stages else ""
            if sharded and rows["state"] != latest:
                raise PayloadError("the manifest's digest of all parts differs from that of its last files")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PayloadError(f"the manifest is not one of gradwire's: {error!r}") from error
        if any(second.step < first.step for first, second in pairwise(files)):
            raise PayloadError("the manifest's files are out of order")
        return manifest

    def kept(self, anchors: int) -> Manifest:
        """Return the manifest with the latest ``anchors`` anchors, and all patches behind the first of them."""
        places = [place for place, stage in enumerate(self.stages) if stage.kind == "anchor"]
        first = places[-anchors] if len(places) >= anchors else 0
        return replace(self, files=tuple(file for stage in self.stages[first:] for file in stage.files))

    def plus(self, files: Iterable[PublishedFile]) -> Manifest:
        """Return the manifest with more files."""
        return replace(self, files=(*self.files, *files))


def check_length(parts: int, anchor_every: int, keep_anchors: int) -> None:
    """Refuse settings by which a manifest would grow longer than readers accept.

    Raises:
        HyperparameterError: they are such.
    """
    files = parts * keep_anchors * (anchor_every + 1)
    most = MAX_MANIFEST_BYTES // _ROW_BYTES
    if files > most:
        raise HyperparameterError(
            f"anchor_every={anchor_every} and keep_anchors={keep_anchors} with {parts} parts make a manifest of up to "
            f"{files} files, and readers accept {most}: write anchors more often, or keep fewer"
        )


def read_manifest(place: Place, attempts: int = 1) -> Manifest | None:
    """Return the manifest of a place; None if there is none.

    Args:
        place: The place.
        attempts: Readings before an error is raised. While a manifest is being replaced, some places return a part of
            it.

    Raises:
        PayloadError: it is damaged.
        OSError: it cannot be read.
    """
    for _ in range(attempts - 1):
        with contextlib.suppress(PayloadError, OSError):
            return _read_manifest(place)
    return _read_manifest(place)


def _read_manifest(place: Place) -> Manifest | None:
    try:
        data = place.read(MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return Manifest.parse(data)


def remove_unlisted(place: Place, manifest: Manifest, before: Iterable[str] = (), *, others: bool = True) -> None:
    """Remove files that a manifest does not name: of earlier runs, and those that no manifest ever named.

    Args:
        place: The place.
        manifest: The manifest that was written.
        before: Names of files that were listed before it, for places that cannot list their files.
        others: Also remove files of other runs that were not listed. Another publisher may be writing the first of its
            files, to take over the place.
    """
    run = manifest.run[:8]
    stale = {*before, *(name for name in place.names() if _is_own(name) and (others or run in name))}
    for name in sorted(stale - {file.name for file in manifest.files}):
        with contextlib.suppress(OSError):
            place.remove(name)


def _file(row: dict[str, object], sharded: bool) -> PublishedFile:
    kind, name = row["kind"], row["name"]
    if kind not in _KINDS or not isinstance(kind, str) or not isinstance(name, str) or not _plain(name):
        raise PayloadError(f"the manifest names the file {str(name)[:80]!r} of kind {str(kind)[:20]!r}")
    base_step = row["base_step"]
    return PublishedFile(
        name,
        kind,
        _count(row["step"]),
        NO_STEP if base_step == NO_STEP else _count(base_step),
        _count(row["nbytes"]),
        _hex(row["digest"]),
        _hex(row["base_state"]),
        _hex(row["state"]),
        _count(row["part"]) if sharded else 0,
    )


def _is_own(name: str) -> bool:
    """Return whether a publisher has written a file of this name, or begun to."""
    return name.endswith(".gww") or (is_partial(name) and (".gww." in name or MANIFEST in name))


def _plain(name: str) -> bool:
    """Return whether a name is that of a file in the manifest's own folder."""
    return (
        name.endswith(".gww")
        and name.replace("-", "").replace(".", "").isalnum()
        and name.isascii()
        and len(name) < 200
    )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise PayloadError(f"the manifest has {str(value)[:40]!r} where a count is due")
    return value


def _hex(value: object) -> str:
    if not isinstance(value, str) or len(value) != 32:
        raise PayloadError(f"the manifest has {str(value)[:40]!r} where a digest is due")
    bytes.fromhex(value)
    return value
