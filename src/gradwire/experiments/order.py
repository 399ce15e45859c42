"""Which samples a step takes: a function of (seed, step), the same for every number of workers.

Each epoch is one permutation of the training samples, drawn from (seed, epoch). The permutations are laid end
to end and step ``t`` takes positions ``t * batch .. (t + 1) * batch`` of that sequence, so that no sample is
dropped. Worker ``r`` of ``N`` takes the r-th of N equal, contiguous parts of the batch.
"""

from __future__ import annotations

import torch

from gradwire.seeds import parameter_key

__all__ = ["DataOrder", "generator", "share"]


def generator(seed: int, purpose: str, counter: int) -> torch.Generator:
    """Make a generator that depends on nothing but its arguments; no global generator is touched."""
    low, high = parameter_key(seed, str(counter), purpose)
    return torch.Generator().manual_seed(low | high << 32)


def share(batch: int, rank: int, world_size: int) -> slice:
    """Give the part of a global batch of ``batch`` samples that is worker ``rank``'s."""
    part = batch // world_size
    return slice(rank * part, (rank + 1) * part)


class DataOrder:
    """The sequence of training samples of one run.

    Args:
        seed: the run's seed.
        samples: how many training samples there are.
        batch: samples per step, over all workers.
    """

    def __init__(self, seed: int, samples: int, batch: int) -> None:
        self.seed, self.samples, self.batch = seed, samples, batch
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def _of_epoch(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            draw = generator(self.seed, "data order", epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.samples, generator=draw)
        return self._permutation

    def indices(self, step: int) -> torch.Tensor:
        """Give the indices of the samples of ``step`` (counted from 0), as int64."""
        first, last = step * self.batch, (step + 1) * self.batch
        parts = []
        while first < last:
            epoch, at = divmod(first, self.samples)
            taken = min(last - first, self.samples - at)
            parts.append(self._of_epoch(epoch)[at : at + taken])
            first += taken
        return torch.cat(parts)
