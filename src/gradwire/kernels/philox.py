"""The random words of a group by Philox4x32-7, in plain PyTorch.

Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) maps a 128-bit counter and a 64-bit key
to four 32-bit words. Element ``e`` of a parameter (``e = 80 * group + 16 * plane + lane``) takes, from the block

    counter = (16 * group + lane, round mod 2^32, round div 2^32, stream)

the word number ``plane``. Words 0 to 3 are Philox's; word 4 consists of the low bytes of words 0, 1 and 2, which are
free because only the upper 24 bits of a word are used. So five elements share a block, no two elements share a bit, and
lane ``j`` of a vector register computes lane ``j`` of the group.
"""

from __future__ import annotations

import torch

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_WORD = 0xFFFFFFFF


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute Philox4x32-7 on int64 tensors of any (broadcastable) shape that hold 32-bit words.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{int(word):08x}" for word in philox((zero,) * 4, (zero, zero))]
        ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # An int64 product wraps modulo 2^64, so both of its halves are right.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform_integers(group: torch.Tensor, key: torch.Tensor, round: int, stream: int) -> torch.Tensor:
    """Draw the 24-bit uniform integers of whole groups.

    Args:
        group: index of each group within its parameter, int64 ``[G]``.
        key: Philox key of each group's parameter, int64 ``[G, 2]`` that holds 32-bit words.
        round: communication round, below 2^64.
        stream: rank, or one of the constants of ``gradwire.seeds``; below 2^32.

    Returns:
        int64 ``[G, 5, 16]``: plane, lane.
    """
    block = (group[:, None] * 16 + torch.arange(16, device="cpu")) & _WORD
    low, high, last = (torch.full_like(block, word & _WORD) for word in (round, round >> 32, stream))
    w0, w1, w2, w3 = philox((block, low, high, last), (key[:, :1], key[:, 1:]))
    w4 = (w0 & 255) << 24 | (w1 & 255) << 16 | (w2 & 255) << 8
    return torch.stack([w0, w1, w2, w3, w4], dim=1) >> 8
