"""Checksums of rows of bytes, in main memory or on a device, each verified against the reference before first use."""

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
    """Return the checksum of each row of bytes, together with the words of its head.

    The head identifies the row. Checksums are not an operation of a backend, since there is nothing to choose.

    Args:
        heads: ``[rows, words]``.
        rows: ``[rows, bytes]``; the bytes of a row are contiguous.

    Returns:
        ``[rows]``. Different rows or heads have different checksums: always if they differ in a single 64-bit word,
        else with a probability of 1 - 2^-64, but for a few patterns (``docs/wire-format.md``).

    Raises:
        BackendError: numba is not installed.
    """
    flat, stride = _joined(rows)
    return _found(_variant(), flat, stride, rows.shape[1], heads)


def warm_up() -> float:
    """Compile the functions of :func:`checksums`, or load them from the cache; return the seconds spent compiling."""
    with compile_time() as spent:
        in_turn(["checksum"], lambda _: _variant(), cache_folder())
    return spent.seconds


def _found(variant: bool | None, flat: Bytes, stride: int, length: int, heads: Words) -> Words:
    """Return the checksums of rows that begin ``stride`` bytes apart."""
    from gradwire.kernels.checksum.loops import row_checksums

    found = np.empty(len(heads), np.uint64)
    # Writable and read-only arrays have different types in Numba, which would compile the loop for the second type in
    # the middle of training.
    row_checksums(variant, _read_only(flat), stride, length, _read_only(heads), found)
    return found


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous read-only view of an array."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@cache
def _variant() -> bool | None:
    """Return True for explicit vectors if they agree with the reference, else None for plain loops."""
    try:
        import gradwire.kernels.checksum.loops  # noqa: F401
    except BackendError:
        raise
    except ImportError as error:
        raise BackendError(f"checksums of payloads need numba ({error}): pip install 'numba>=0.61'") from error
    sample = (np.arange(1 << 10) * 37 >> 3).astype(np.uint8)
    heads = np.array([[1, 2, 3]], np.uint64)
    for variant in (True, None):
        try:
            found = _found(variant, sample, 300, 300, heads)
        except Exception:  # a compiler may raise any type on an unknown machine
            continue
        if int(found[0]) == reference_check(heads.tobytes(), sample[:300]):
            return variant
    raise BackendError("the compiled checksum differs from its reference: install another version of numba")


def _joined(rows: Bytes) -> tuple[Bytes, int]:
    """Return all rows as one vector, with the gaps between them, and the distance between rows."""
    number, length = rows.shape
    if number == 1 or not length:
        return rows[0], length
    stride = rows.strides[0]
    return np.lib.stride_tricks.as_strided(rows, ((number - 1) * stride + length,), (1,)), stride


_verified: set[torch.device] = set()
_lock = threading.Lock()


def device_checksums(heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each row like :func:`gradwire.kernels.checksum.checksums`, computed on the rows' device.

    Args:
        heads: int64 ``[rows, words]`` with the bits of uint64.
        rows: uint8 ``[rows, bytes]``; the bytes of a row are contiguous.

    Returns:
        int64 ``[rows]`` with the bits of uint64.

    Raises:
        BackendError: Triton is not installed, or its kernel disagrees with the reference on this device.
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
        # Bodies of several blocks with a partial last row, aligned to words and not.
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
