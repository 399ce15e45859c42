"""A few values and their checksum, without a header.

Layout: the bytes of the values, then the checksum of them and of the words ``(sender, *place)``.
"""

from __future__ import annotations

import numpy as np
import torch

from gradwire.errors import PayloadError
from gradwire.exchange.deferred_checks import AT_ONCE, Checks
from gradwire.kernels.checksum import checksums, device_checksums

SUM_BYTES = 8


def with_checksum(values: torch.Tensor, sender: int, *place: int) -> torch.Tensor:
    """Return the bytes of ``values``, then their checksum, uint8 ``[bytes + 8]``.

    Args:
        place: Numbers that identify this message among all of its sender; the same on sender and receiver.
    """
    row = values.detach().contiguous().view(torch.uint8).reshape(1, -1)
    if row.device.type != "cpu":
        checksum = device_checksums(_heads([(sender, *place)], row.device), row)
        return torch.cat([row[0], checksum.view(torch.uint8)])
    octets = row.numpy()
    found = checksums(np.array([(sender, *place)], np.uint64), octets)
    return torch.from_numpy(np.concatenate([octets[0], found.view(np.uint8)]))


def checked_values(
    rows: torch.Tensor, dtype: torch.dtype, about: str, *place: int, checks: Checks = AT_ONCE
) -> torch.Tensor:
    """Check messages, row r (uint8 ``[ranks, bytes + 8]``) from rank r, and return their values ``[ranks, numel]``.

    Raises:
        PayloadError: a message changed; the error names the sender and ``about``. For rows on a device the result is
            passed to ``checks`` instead.
    """
    if rows.device.type != "cpu":
        rows = rows.contiguous()
        body, stated = rows[:, :-SUM_BYTES], rows[:, -SUM_BYTES:].contiguous().view(torch.int64)[:, 0]
        words = _heads([(sender, *place) for sender in range(len(rows))], rows.device)
        checks.require((device_checksums(words, body) == stated).all(), lambda: _difference(rows, dtype, about, place))
        return body.contiguous().view(dtype)
    octets = rows.contiguous().numpy()
    bodies, sums = octets[:, :-SUM_BYTES], np.ascontiguousarray(octets[:, -SUM_BYTES:]).view(np.uint64)[:, 0]
    heads = np.array([(sender, *place) for sender in range(len(rows))], np.uint64)
    differs = np.flatnonzero(sums != checksums(heads, bodies))
    if len(differs):
        raise PayloadError(
            f"{about} from {{sender}}: its checksum differs, so that bytes changed on the way, or it is another "
            "message",
            int(differs[0]),
        )
    return torch.from_numpy(np.ascontiguousarray(bodies)).view(dtype)


def _heads(words: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64, device="cpu").pin_memory().to(device, non_blocking=True)


def _difference(rows: torch.Tensor, dtype: torch.dtype, about: str, place: tuple[int, ...]) -> PayloadError:
    """Return the error for messages on a device after their check failed there."""
    try:
        checked_values(rows.cpu(), dtype, about, *place)
    except PayloadError as error:
        return error
    return PayloadError(f"{about}: a checksum differed on {rows.device}")
