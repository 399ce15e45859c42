"""Regularised logistic regression over workers' own rows in float64: a problem whose optimum can be known exactly."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire.tools.experiments.errors import UsageError, check_known
from gradwire.tools.experiments.tasks.logreg import SPLITS, split_order
from gradwire.tools.experiments.tasks.readers import read_libsvm


@dataclass(frozen=True, eq=False, kw_only=True)
class LogisticProblem:
    r"""The objective of the ``logreg`` task, split over N workers, in float64.

    With m rows a_ij and labels b_ij = -1 or +1 at worker i::

        f_i(x) = (1/m) sum_j log(1 + exp(-b_ij a_ij.x)) + (l2 / 2) |x|^2
        P(x)   = (1/N) sum_i f_i(x) + l1 |x|_1

    Attributes:
        inputs: float64 ``[workers, rows, features]``.
        labels: -1 or +1, float64 ``[workers, rows]``.
        l2: Above 0, so that the optimum is unique.
        l1: At least 0.
    """

    inputs: Tensor
    labels: Tensor
    l2: float
    l1: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what has no unique optimum; raises UsageError."""
        if not (math.isfinite(self.l2) and self.l2 > 0):
            raise UsageError(f"l2 = {self.l2}: must be a positive number, or the optimum may not be unique")
        if not (math.isfinite(self.l1) and self.l1 >= 0):
            raise UsageError(f"l1 = {self.l1}: must be a finite number of at least 0")

    @classmethod
    def from_rows(
        cls, inputs: Tensor, labels: Tensor, *, workers: int, l2: float, l1: float = 0.0, split: str = "label"
    ) -> LogisticProblem:
        """Cut rows ``[rows, features]`` into equal shares, as the ``logreg`` task does; ``rows mod workers`` stay out.

        Raises:
            UsageError: a setting makes no sense, or there are fewer rows than workers.
        """
        check_known("split", split, SPLITS)
        share = labels.numel() // workers
        if not share:
            raise UsageError(f"{labels.numel()} rows cannot be shared by {workers} workers: use fewer workers")
        order = split_order(labels, split)[: share * workers]
        cut = inputs.to(torch.float64)[order].view(workers, share, -1)
        return cls(inputs=cut, labels=labels.to(torch.float64)[order].view(workers, share), l2=l2, l1=l1)

    @classmethod
    def from_file(
        cls, path: Path, *, workers: int, l2: float, l1: float = 0.0, split: str = "label"
    ) -> LogisticProblem:
        """Read a LIBSVM file; raises DataError, or UsageError as :meth:`from_rows`."""
        rows = read_libsvm(path)
        return cls.from_rows(rows.dense(torch.float64), rows.labels, workers=workers, l2=l2, l1=l1, split=split)

    def regularised(self, *, l2: float, l1: float = 0.0) -> LogisticProblem:
        """Return the same rows with other penalties."""
        return dataclasses.replace(self, l2=l2, l1=l1)

    @property
    def workers(self) -> int:
        """The number N of workers."""
        return self.inputs.shape[0]

    @property
    def features(self) -> int:
        """The length d of x."""
        return self.inputs.shape[2]

    def value(self, x: Tensor) -> float:
        """Return P(x)."""
        losses = F.softplus(-self.labels * (self.inputs @ x), threshold=math.inf)
        return float(losses.mean() + self.l2 / 2 * x.square().sum() + self.l1 * x.abs().sum())

    def gradients(self, x: Tensor) -> Tensor:
        """Return the gradient of every f_i at ``x``, float64 ``[workers, features]``."""
        rows = self.labels.shape[1]
        found = torch.empty(self.workers, self.features, dtype=torch.float64)
        for inputs, labels, out in zip(self.inputs, self.labels, found):
            # A worker's rows are read twice while they are in the cache.
            torch.mv(inputs.T, -labels * torch.sigmoid(-labels * (inputs @ x)) / rows, out=out)
        return found.add_(x, alpha=self.l2)

    def hessian(self, x: Tensor) -> Tensor:
        """Return the Hessian of the mean of all f_i at ``x``, float64 ``[features, features]``."""
        total = torch.eye(self.features, dtype=torch.float64).mul_(self.l2)
        for inputs in self.inputs:
            chance = torch.sigmoid(inputs @ x)
            total += inputs.T @ (inputs * (chance * (1 - chance) / self.labels.numel())[:, None])
        return total

    def smoothness(self) -> tuple[float, float]:
        """Return Lipschitz constants of the gradients: L of the mean of all f_i, and the largest of a single f_i.

        ``L = lambda_max(A'A) / (4 rows) + l2``, for all rows and for each worker's.
        """
        squares = torch.stack([inputs.T @ inputs for inputs in self.inputs]) / (4 * self.labels.shape[1])
        largest = torch.linalg.eigvalsh(squares)[:, -1].max()
        return float(torch.linalg.eigvalsh(squares.mean(0))[-1]) + self.l2, float(largest) + self.l2
