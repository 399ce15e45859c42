"""``logreg``: regularised logistic regression on a LIBSVM file, the convex problem of the DIANA papers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire as gw
from gradwire.tools.experiments.errors import DataError, UsageError, check_known
from gradwire.tools.experiments.order import Order, ShareOrder, generator
from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.readers import SparseRows, read_libsvm

SPLITS = ("label", "random")
EVALUATION_ROWS = 4096
"""Rows evaluated at once, which bounds memory and does not change results."""
DENSE_BYTES = 4 * 2**30
"""Most memory that the dense rows may take."""


def split_order(labels: Tensor, split: str) -> Tensor:
    """Return the indices of the rows in the order in which they are divided among the workers.

    ``label``: the -1 rows first, then the +1 rows, each in the file's order, so that most workers see one label only.
    ``random``: a fixed draw, the same for every run.
    """
    if split == "label":
        return torch.sort(labels, stable=True).indices
    return torch.randperm(labels.numel(), generator=generator(0, "logreg split", 0))


@dataclass(frozen=True)
class DenseRows:
    """Rows in float32 ``[count, features]`` with labels -1 or +1, in the order of the workers' shares."""

    inputs: Tensor
    labels: Tensor

    @property
    def samples(self) -> int:
        """Number of rows."""
        return self.inputs.shape[0]

    def batch(self, indices: Tensor, part: slice, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return one worker's rows and labels; see :class:`~gradwire.tools.experiments.tasks.base.Source`."""
        mine = indices[part]
        return self.inputs[mine], self.labels[mine]

    def evaluation(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return every ``world_size``-th block of rows."""
        step = EVALUATION_ROWS
        for first in range(rank * step, self.samples, world_size * step):
            yield self.inputs[first : first + step], self.labels[first : first + step]


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed_ns: int, size_bytes: int) -> SparseRows:
    return read_libsvm(path)


@dataclass(frozen=True, kw_only=True)
class Logreg(Task):
    r"""Settings of the ``logreg`` task.

    For rows a_i and labels b_i = -1 or +1, without an intercept and from zero, as in the papers::

        min_x  (1/n) sum_i log(1 + exp(-b_i a_i.x)) + (l2 / 2) |x|^2 + l1 |x|_1

    Every worker owns one of N equal shares of the rows: sorted by label first (``split="label"``), or drawn
    (``split="random"``). ``batch=0``, the default, takes the gradient over its whole share, so that plain gradient
    descent has no noise but the method's; another number draws from each share. The l2 term is differentiated with the
    loss and compressed with it; the l1 term is the business of :class:`gradwire.ProximalSGD`, which takes SGD's place
    where ``l1 > 0``. Reported losses are the whole objective, penalties included.

    One small vector is all there is to exchange, so it is compressed whatever its size (``min_numel`` 0).
    """

    name: ClassVar[str] = "logreg"
    summary: ClassVar[str] = "regularised logistic regression on two classes; --data names a LIBSVM text file"
    evaluated_on: ClassVar[str] = "the training rows: the loss is the objective itself, penalties included"
    least_batch: ClassVar[int] = 0
    min_numel: ClassVar[int | None] = 0

    steps: int = 500
    batch: int = 0
    lr: float = 0.3
    momentum: float = 0.0
    eval_every: int = 50
    l2: float = 1e-3
    l1: float = 0.0
    split: str = "label"

    def __post_init__(self) -> None:
        """Refuse settings that make no sense; raises UsageError."""
        super().__post_init__()
        check_known("split", self.split, SPLITS)
        for field in ("l2", "l1"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0):
                raise UsageError(f"{field} = {getattr(self, field)}: must be a finite number of at least 0")
        if self.weight_decay:
            raise UsageError("task logreg calls its weight decay l2: set l2 and leave weight_decay out")
        if self.l1 and self.optimizer != "sgd":
            raise UsageError(f"l1 = {self.l1} needs the proximal step of sgd: leave --optimizer {self.optimizer} out")

    def rows(self) -> SparseRows:
        """Return the rows of the file, which is read once in a process; raises DataError or UsageError."""
        path = self.data_path()
        if not path.is_file():
            state = "is no file" if path.exists() else "does not exist"
            raise DataError(f"--data {path} {state}; expected a LIBSVM text file of rows: label index:value ...")
        found = path.stat()
        return _read(path, found.st_mtime_ns, found.st_size)

    def check_data(self) -> None:
        """Read the file, whose number of features is the size of the model."""
        rows = self.rows()
        needed = 4 * rows.labels.numel() * rows.features
        if needed > DENSE_BYTES:
            raise DataError(
                f"{self.data}: {rows.labels.numel()} rows of {rows.features} features take {needed / 2**30:.1f} GiB "
                f"dense; this task holds at most {DENSE_BYTES / 2**30:.0f} GiB: use fewer rows"
            )

    def build_model(self) -> nn.Module:
        """Build the linear model without bias, at zero."""
        model = nn.Linear(self.rows().features, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def load(self) -> Source:
        """Read the file and return its rows in the order of the shares."""
        self.check_data()
        rows = self.rows()
        order = split_order(rows.labels, self.split)
        return DenseRows(rows.dense(torch.float32)[order], rows.labels.to(torch.float32)[order])

    def order(self, seed: int, samples: int, workers: int) -> Order:
        """Return an order in which every worker takes samples of its own share."""
        return ShareOrder(seed, samples, self.batch, workers)

    @property
    def decay(self) -> float:
        """The strength ``l2``."""
        return self.l2

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer; with ``l1`` it takes proximal steps."""
        if not self.l1:
            return super().build_optimizer(model)
        prox = gw.L1(strength=self.l1)
        return gw.ProximalSGD(model.parameters(), lr=self.lr, prox=prox, momentum=self.momentum)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean of ``log(1 + exp(-target * output))``; ``output`` is ``[rows, 1]``."""
        return F.softplus(-target * output.squeeze(1)).mean()

    def score(self, output: Tensor, target: Tensor) -> tuple[float, int, int]:
        """Return the summed loss, the number of right signs and the number of rows."""
        margin = output.squeeze(1)
        loss = F.softplus(-target * margin).sum(dtype=torch.float64)
        return float(loss), int(((margin >= 0) == (target > 0)).sum()), target.numel()

    @torch.no_grad()
    def penalty(self, model: nn.Module) -> float:
        """Return ``(l2 / 2) |x|^2 + l1 |x|_1``, summed in float64."""
        weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).to(torch.float64)
        return float(self.l2 / 2 * weights.square().sum() + self.l1 * weights.abs().sum())
