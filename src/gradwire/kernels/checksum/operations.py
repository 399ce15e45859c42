"""The checksum of payloads and coded sections, as docs/wire-format.md defines it: constants and the slow, clear form.

A step is a bijection of 64 bits (an odd product, then the upper half folded into the lower), so bodies of one length
that differ in one word leave different sums, and others but by chance. Steps of one block do not wait for those of
another, so that a GPU can take them side by side.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import BackendError
from gradwire.kernels.checksum.reference import BLOCK_BYTES, Bytes, Words, reference_check
from gradwire.kernels.compiling import cache_folder, compile_time, in_turn


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


_verified: set[torch.device] = set()
_lock = threading.Lock()


def device_checksums(heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each row, as :func:`gradwire.kernels.checksum.checksums` does, without leaving a device.

    Args:
        heads: int64 ``[rows, words]`` with the bits of uint64.
        rows: uint8 ``[rows, bytes]``; the bytes of a row are neighbours in memory.

    Returns:
        int64 ``[rows]`` with the bits of uint64.

    Raises:
        BackendError: Triton is not installed, or its kernel gives other bits than the reference on this device.
    """
    _verify(rows.device)
    return _found_there(heads, rows)


def _found_there(heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    try:
        kernel = import_module("gradwire.kernels.checksum.triton")
    except ImportError as error:
        raise BackendError(f"checksums on a GPU need triton ({error}): pip install 'gradwire[triton]'") from error
    out = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    kernel.row_checksums(heads, rows, out)
    return out


def _verify(device: torch.device) -> None:
    """Compare the kernel with the reference on a device, unless that was done before."""
    if device in _verified:
        return
    with _lock:
        if device in _verified:
            return
        # Of several blocks, with a partial row at the end, at whole words and beside them.
        size = 2 * BLOCK_BYTES + 1032
        octets = (np.arange(3 * size) * 37 >> 3).astype(np.uint8).reshape(3, size)
        heads = np.arange(9, dtype=np.uint64).reshape(3, 3)
        words, rows = torch.from_numpy(heads.view(np.int64)).to(device), torch.from_numpy(octets).to(device)
        wrong = False
        for begin in (0, 1):
            expected = [reference_check(head.tobytes(), row[begin:]) for head, row in zip(heads, octets)]
            wrong |= _found_there(words, rows[:, begin:]).cpu().numpy().view(np.uint64).tolist() != expected
        if wrong:
            raise BackendError(
                f"the checksum of payloads differs from its reference on {device}: use transport='staged' with "
                "backend='cpu', which checks payloads in main memory"
            )
        _verified.add(device)
