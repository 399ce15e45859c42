"""Orders of samples: the batch of a step is a function of (seed, step), the same for every number of workers.

:class:`DataOrder`: each epoch is one permutation of the training samples, drawn from (seed, epoch). The permutations
are joined, and step ``t`` takes positions ``t * batch .. (t + 1) * batch``, so that no sample is dropped.

:class:`ShareOrder`: every worker owns a fixed share of the samples and never sees another's.

With either, worker ``r`` of ``N`` takes the r-th of N equal, contiguous parts of the batch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gradwire.seeds import parameter_key
from gradwire.tools.experiments.errors import UsageError


class Order(Protocol):
    """Order of the samples in the steps of a run."""

    batch: int
    """Samples a step, over all workers."""

    def indices(self, step: int) -> torch.Tensor:
        """Return the indices of the samples of ``step`` (counted from 0), worker after worker, as int64."""


def generator(seed: int, purpose: str, counter: int) -> torch.Generator:
    """Return a generator that depends on its arguments only."""
    low, high = parameter_key(seed, str(counter), purpose)
    return torch.Generator().manual_seed(low | high << 32)


def share(batch: int, rank: int, world_size: int) -> slice:
    """Return the part of a batch of ``batch`` samples that belongs to worker ``rank``."""
    part = batch // world_size
    return slice(rank * part, (rank + 1) * part)


class DataOrder:
    """Permutations of all training samples, one after the other.

    Args:
        seed: Seed of the run.
        samples: Number of training samples.
        batch: Samples in a step, over all workers.
        purpose: Name of the use; orders for different purposes are independent.
    """

    def __init__(self, seed: int, samples: int, batch: int, purpose: str = "data order") -> None:
        self.seed, self.samples, self.batch, self.purpose = seed, samples, batch, purpose
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def _of_epoch(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            draw = generator(self.seed, self.purpose, epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.samples, generator=draw)
        return self._permutation

    def indices(self, step: int) -> torch.Tensor:
        """Return the indices of the samples of ``step`` (counted from 0), as int64."""
        first, last = step * self.batch, (step + 1) * self.batch
        parts = []
        while first < last:
            epoch, at = divmod(first, self.samples)
            taken = min(last - first, self.samples - at)
            parts.append(self._of_epoch(epoch)[at : at + taken])
            first += taken
        return torch.cat(parts)


class ShareOrder:
    """Permutations within shares: worker ``r`` of ``N`` owns the r-th of N equal, contiguous shares of the samples.

    A worker goes through its own share in permutations, as :class:`DataOrder` goes through all samples. The last
    ``samples mod N`` samples belong to nobody: with equal shares, the mean of the workers' mean losses is the mean loss
    over all samples that are used.

    Args:
        seed: Seed of the run.
        samples: Number of training samples.
        batch: Samples in a step, over all workers; 0: every worker takes its whole share in every step, in order.
        workers: Number N of workers.

    Raises:
        UsageError: there are fewer samples than workers.
    """

    def __init__(self, seed: int, samples: int, batch: int, workers: int) -> None:
        if samples < workers:
            raise UsageError(f"{samples} samples cannot be shared by {workers} workers: use at most {samples} workers")
        self.share, self.workers = samples // workers, workers
        self.batch = batch or self.share * workers
        self._orders = [
            DataOrder(seed, self.share, batch // workers, f"data order of share {worker}")
            for worker in range(workers if batch else 0)
        ]

    def indices(self, step: int) -> torch.Tensor:
        """Return the indices of the samples of ``step`` (counted from 0), worker after worker, as int64."""
        if not self._orders:
            return torch.arange(self.batch)
        return torch.cat([worker * self.share + order.indices(step) for worker, order in enumerate(self._orders)])
