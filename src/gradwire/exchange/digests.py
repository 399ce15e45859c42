"""Files of state with a digest of their body, so that a changed byte is detected."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch

from gradwire.errors import IncompatibleError

DIGEST_BYTES = 32


def digest_of(body: bytes, key: bytes = b"") -> bytes:
    """Return the BLAKE2b digest (32 bytes) of a file's body, or of a message under a key."""
    return hashlib.blake2b(body, key=key, digest_size=DIGEST_BYTES).digest()


def pack(value: object) -> tuple[dict[str, torch.Tensor], bytes]:
    """Pack a value for :func:`torch.save`.

    Returns:
        A dict with ``body`` (uint8), the bytes of ``torch.save``, and ``digest`` (uint8 ``[32]``) of that body; and the
        digest as bytes.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    body = buffer.getvalue()
    digest = digest_of(body)
    packed = {"body": body, "digest": digest}
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in packed.items()}, digest


def unpack(packed: object, name: str, expected: bytes | None = None) -> Any:
    """Return the value that :func:`pack` packed, with all tensors in main memory, wherever they were.

    Who takes them copies them to its own device: the device that they were on may be another rank's, or not exist here.

    Args:
        packed: The object that ``torch.load(..., weights_only=True)`` returned.
        name: Name of the file, for the error.
        expected: The digest that another file has for this one; None: only its own is checked.

    Raises:
        IncompatibleError: ``packed`` was not made by :func:`pack`, was changed, or has another digest than expected.
    """
    whole = isinstance(packed, dict) and packed.keys() == {"body", "digest"}
    if not whole or not all(isinstance(t, torch.Tensor) and t.dtype == torch.uint8 for t in packed.values()):  # type: ignore[attr-defined]
        raise IncompatibleError(f"{name} carries no digest: it is none of gradwire's, or of an earlier version")
    body, digest = (bytes(packed[key].numpy().tobytes()) for key in ("body", "digest"))  # type: ignore[index]
    if digest_of(body) != digest:
        raise IncompatibleError(f"{name} has changed since it was saved: its digest is another; restore it from a copy")
    if expected is not None and digest != expected:
        raise IncompatibleError(f"{name} is not the file that was saved here: its digest is another one's")
    return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
