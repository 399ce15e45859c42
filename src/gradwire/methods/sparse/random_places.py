"""Random elements of every parameter, of which nothing needs to be sent, since receivers draw them too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gradwire.kernels.philox import philox
from gradwire.methods.sparse.feistel_permutation import FeistelPermutation

__all__ = ["RandomElements"]

_WORD = 0xFFFFFFFF


class RandomElements:
    """k elements of each parameter, drawn anew in every round for a stream.

    They are those at the first k places of a :class:`FeistelPermutation`, a uniform choice without replacement; or a
    run of neighbours with a uniform start, which goes on from the first element behind the last: of d elements the
    start is ``floor(w d / 2^64)``, w the words 0 (low) and 1 of Philox block 0.

    Args:
        numel: Elements of each parameter.
        key: Philox key of each parameter.
        counts: k of each parameter.
        contiguous: Whether they are a run.
    """

    def __init__(
        self, numel: Sequence[int], key: Sequence[tuple[int, int]], counts: Sequence[int], contiguous: bool
    ) -> None:
        self.slots = list(counts)
        self._shuffle = None if contiguous else FeistelPermutation(numel, key, slots=counts)
        self._numel = list(numel)
        self._key = torch.tensor(list(key), dtype=torch.int64).reshape(-1, 2)

    def draw(self, round: int, stream: int) -> npt.NDArray[np.int64]:
        """Return the elements, parameter after parameter, each counted within its parameter."""
        if self._shuffle is not None:
            return self._shuffle.first(round, stream)
        zero = torch.zeros(len(self._key), dtype=torch.int64)
        early, late, last = (torch.full_like(zero, word & _WORD) for word in (round, round >> 32, stream))
        words = philox((zero, early, late, last), (self._key[:, 0], self._key[:, 1]))
        low, high = words[0].tolist(), words[1].tolist()
        runs = [
            ((((h << 32) | w) * d >> 64) + np.arange(k)) % d for w, h, d, k in zip(low, high, self._numel, self.slots)
        ]
        return np.concatenate([np.zeros(0, np.int64), *runs]).astype(np.int64)
