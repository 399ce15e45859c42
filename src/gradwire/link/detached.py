"""The object that replaces a link in a pickled and reloaded module."""

from __future__ import annotations

import warnings


class DetachedLink:
    """Replaces a link in a pickled and reloaded module; it exchanges nothing."""

    def __init__(self, spec: str) -> None:
        self.spec = spec


def lost(spec: str) -> DetachedLink:
    warnings.warn(
        f"a module that exchanged gradients by {spec} was reloaded or copied without its link: DDP now sends float32; "
        "call gradwire.attach on it again",
        stacklevel=2,
    )
    return DetachedLink(spec)
