"""Checksums of rows of bytes, by the compiled code that serves on this machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.errors import BackendError
from gradwire.kernels.checksum.reference import reference_check
from gradwire.kernels.compile_time import compile_time
from gradwire.kernels.kept_times import cache_folder
from gradwire.kernels.turns import in_turn

__all__ = ["checksums", "warm_up"]

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


def checksums(heads: Words, rows: Bytes) -> Words:
    """Return the checksum of each row of bytes together with the words that say what the row is.

    Every backend computes the same bits: this is not a matter of choice, and so not an operation of a backend.

    Args:
        heads: ``[rows, words]``.
        rows: ``[rows, bytes]``; the bytes of a row are neighbours in memory.

    Returns:
        ``[rows]``. Rows or heads that differ have different checksums: certainly where they differ in one 64-bit word
        alone, else but for chance (2^-64).

    Raises:
        BackendError: numba is not installed.
    """
    flat, stride = _joined(rows)
    return _found(_variant(), flat, stride, rows.shape[1], heads)


def warm_up() -> float:
    """Compile what :func:`checksums` calls, or load it from the cache; return the seconds in which it was compiled."""
    with compile_time() as spent:
        in_turn(["checksum"], lambda _: _variant(), cache_folder())
    return spent.seconds


def _found(variant: bool | None, flat: Bytes, stride: int, length: int, heads: Words) -> Words:
    """Return the checksums of rows that begin ``stride`` bytes apart."""
    from gradwire.kernels.checksum.loops import row_checksums

    found = np.empty(len(heads), np.uint64)
    # Arrays that may be written to and others are different types to Numba: it would compile the loop for each of them,
    # in the middle of a training.
    row_checksums(variant, _read_only(flat), stride, length, _read_only(heads), found)
    return found


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View an array as one that cannot be written to."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@cache
def _variant() -> bool | None:
    """Choose explicit vectors (True) or else plain loops (None): the first that agree with the reference."""
    try:
        import gradwire.kernels.checksum.loops  # noqa: F401
    except ImportError as error:
        raise BackendError(f"checksums of payloads need numba ({error}): pip install 'numba>=0.61'") from error
    sample = (np.arange(1 << 10) * 37 >> 3).astype(np.uint8)
    heads = np.array([[1, 2, 3]], np.uint64)
    for variant in (True, None):
        try:
            found = _found(variant, sample, 300, 300, heads)
        except Exception:  # whatever the compiler raises on a machine that we have not seen
            continue
        if int(found[0]) == reference_check(heads.tobytes(), sample[:300]):
            return variant
    raise BackendError("the compiled checksum differs from its reference: install another version of numba")


def _joined(rows: Bytes) -> tuple[Bytes, int]:
    """Return all rows as one vector, gaps included, and the distance from one to the next."""
    number, length = rows.shape
    if number == 1 or not length:
        return rows[0], length
    stride = rows.strides[0]
    return np.lib.stride_tricks.as_strided(rows, ((number - 1) * stride + length,), (1,)), stride
