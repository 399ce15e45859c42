"""The manifest: the files that a publisher keeps, in JSON, with a digest behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise

from gradwire.errors import PayloadError
from gradwire.publish.container import ANCHOR, NO_STEP, PATCH, Octets, PatchHead, digest_of
from gradwire.publish.stores import Place

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
_FORMAT, _VERSION = "gradwire-weights", 1
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
    """

    name: str
    kind: str
    step: int
    base_step: int
    nbytes: int
    digest: str
    base_state: str
    state: str

    @classmethod
    def of(cls, head: PatchHead) -> PublishedFile:
        """Describe a packed file."""
        kind = "anchor" if head.kind == ANCHOR else "patch"
        name = f"{kind}-{head.step:012d}-{head.run.hex()[:8]}.gww"
        return cls(
            name,
            kind,
            head.step,
            head.base_step,
            head.nbytes,
            head.digest.hex(),
            head.base_state.hex(),
            head.state.hex(),
        )


@dataclass(frozen=True)
class Manifest:
    """The files of a run, in the order in which they were published; a patch comes before an anchor of its step.

    Attributes:
        run: Identity of the publisher's run, in hexadecimal digits.
        layout: Digest of the layout of all files, in hexadecimal digits.
        nbytes: Bytes of the weights.
        files: The files.
    """

    run: str
    layout: str
    nbytes: int
    files: tuple[PublishedFile, ...]

    @property
    def step(self) -> int:
        """The latest step."""
        return self.files[-1].step if self.files else NO_STEP

    def pack(self) -> bytes:
        """Return the manifest's bytes: a line of JSON, and a line with its digest."""
        rows = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
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
            if rows["format"] != _FORMAT or rows["version"] != _VERSION:
                raise PayloadError(f"the manifest is {rows['format']} {rows['version']}: update the older side")
            files = tuple(_file(row) for row in rows["files"])
            manifest = cls(_hex(rows["run"]), _hex(rows["layout"]), _count(rows["nbytes"]), files)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PayloadError(f"the manifest is not one of gradwire's: {error!r}") from error
        if any(second.step < first.step for first, second in pairwise(files)):
            raise PayloadError("the manifest's files are out of order")
        return manifest


def read_manifest(place: Place) -> Manifest | None:
    """Return the manifest of a place; None if there is none.

    Raises:
        PayloadError: it is damaged.
    """
    try:
        data = place.read(MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return Manifest.parse(data)


def _file(row: dict[str, object]) -> PublishedFile:
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
    )


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


def kept(files: Iterable[PublishedFile], anchors: int) -> tuple[PublishedFile, ...]:
    """Return the files to keep: the latest ``anchors`` anchors, and all patches behind the first of them."""
    files = tuple(files)
    places = [place for place, file in enumerate(files) if file.kind == "anchor"]
    first = places[-anchors] if len(places) >= anchors else 0
    return files[first:]
