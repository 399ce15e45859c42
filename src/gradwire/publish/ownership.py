"""Whether a place is a publisher's own, or another one has begun to write there."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from gradwire.errors import ExchangeError, PayloadError
from gradwire.publish.manifest import Manifest, PublishedFile, read_manifest
from gradwire.publish.stores import Place

_ATTEMPTS = 3
"""Readings of the manifest before it is taken for damaged: a place may return a part of one that is being replaced."""


def check_owner(place: Place, own: Manifest, latest: Collection[PublishedFile]) -> None:
    """Refuse to write where another publisher has begun.

    A damaged manifest is nobody's: writing it may have been interrupted, and the next one replaces it.

    Args:
        place: The place.
        own: This publisher's manifest.
        latest: Last files of the manifests that this publisher has written, or may have written.

    Raises:
        ExchangeError: another publisher has begun.
        OSError: the place cannot be read.
    """
    try:
        manifest = read_manifest(place, _ATTEMPTS)
    except PayloadError:
        return
    remedy = "give each publisher a place of its own, or end one of them"
    if manifest is not None and manifest.run != own.run:
        raise ExchangeError(
            f"run {manifest.run[:8]} has taken over {place}, where run {own.run[:8]} published: {remedy}"
        )
    # A cache may serve an older manifest for a while.
    if manifest is not None and manifest.step >= own.step and manifest.files[-1] not in latest:
        raise ExchangeError(
            f"another publisher has gone on with run {own.run[:8]} in {place}, to step {manifest.step}: {remedy}"
        )


def files_before(place: Place) -> set[str]:
    """Return the names of the files that are listed in a place before a publisher's first manifest."""
    # They are read for being removed, which is no reason to fail.
    with contextlib.suppress(PayloadError, OSError):
        manifest = read_manifest(place)
        return {file.name for file in manifest.files} if manifest else set()
    return set()
