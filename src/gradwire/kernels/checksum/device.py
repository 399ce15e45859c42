"""Checksums of rows that lie on a device, by a kernel that has shown there to give the bits of the reference."""

from __future__ import annotations

import threading
from importlib import import_module

import numpy as np
import torch

from gradwire.errors import BackendError
from gradwire.kernels.checksum.reference import BLOCK_BYTES, reference_check

__all__ = ["device_checksums"]

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
    return _found(heads, rows)


def _found(heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
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
            wrong |= _found(words, rows[:, begin:]).cpu().numpy().view(np.uint64).tolist() != expected
        if wrong:
            raise BackendError(
                f"the checksum of payloads differs from its reference on {device}: use transport='staged' with "
                "backend='cpu', which checks payloads in main memory"
            )
        _verified.add(device)
