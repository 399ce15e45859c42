"""Seeds and keys of random numbers, a pure function of (seed, round, parameter, element, stream).

Every random word of the package is one output of Philox4x32-7 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011) whose 64-bit key is :func:`parameter_key` and whose 128-bit counter is

    (block, round mod 2^32, round div 2^32, stream)

``block`` counts within the parameter. ``stream`` is the rank, one of the two constants below, or that of a merge. No
global generator is used or seeded, so any rank, backend or machine can repeat any draw.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

SHARED = 0xFFFFFFFF
"""Stream of draws that are the same on all ranks."""

OWNER = 0xFFFFFFFE
"""Stream of draws by the owner of a shard, whichever rank that is."""


def merge_stream(number: int) -> int:
    """Return the stream of draws by the ranks that do a merge of a tree, by its number from 1 on.

    Example:
        >>> merge_stream(1) == OWNER, merge_stream(2) == OWNER - 1
        (True, True)
    """
    return OWNER + 1 - number


@dataclass
class LinkNumber:
    """Number of a link among those of a process; a checkpoint may replace it.

    Attributes:
        value: 0 for the first of the links that are open at the same time, 1 for the next, and so on.
    """

    value: int = 0


def link_seed(seed: int, number: int) -> int:
    """Return the seed of a link, so that links open at the same time draw independently, whatever their parameters.

    Link 0 uses the user's seed; others use the BLAKE2b hash (16 bytes, little endian) of seed and number.

    Example:
        >>> link_seed(7, 0)
        7
        >>> link_seed(7, 1) == link_seed(7, 2)
        False
    """
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\x00link\x00{number}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def shard_seed(seed: int, shard: int) -> int:
    """Return the seed for the exchange of one shard between its replicas, so that shards draw independently.

    Shard 0 uses the user's seed; others use the BLAKE2b hash (16 bytes, little endian) of seed and shard.

    Example:
        >>> shard_seed(7, 0), shard_seed(7, 1) == shard_seed(7, 2)
        (7, False)
    """
    if shard == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\x00shard\x00{shard}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def worker_seed(seed: int, worker: int) -> int:
    """Return the seed of a worker whose payloads are decoded one by one, by receivers that know the sender.

    It is the BLAKE2b hash (16 bytes, little endian) of seed and rank, so that workers draw independently.

    Example:
        >>> worker_seed(7, 0) == worker_seed(7, 1)
        False
    """
    digest = hashlib.blake2b(f"{seed}\x00worker\x00{worker}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def parameter_key(seed: int, name: str, purpose: str = "") -> tuple[int, int]:
    """Return the 64-bit Philox key of one parameter as two 32-bit words.

    The key is the BLAKE2b hash (8 bytes, little endian) of the seed, the purpose and the parameter's name, so that
    neither the order of parameters nor the layout of buckets can change a stream.

    Example:
        >>> parameter_key(0, "fc.weight") == parameter_key(0, "fc.weight")
        True
        >>> parameter_key(0, "fc.weight") == parameter_key(1, "fc.weight")
        False
    """
    text = f"{seed}\x00{purpose}\x00{name}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
