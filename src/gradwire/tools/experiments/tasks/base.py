"""Base of all tasks: settings, model, data, optimizer and loss."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.tools.experiments.errors import UsageError, check_known
from gradwire.tools.experiments.order import DataOrder, Order

OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("constant", "polynomial", "cosine")


class Source(Protocol):
    """A task's data, loaded."""

    @property
    def samples(self) -> int:
        """Number of training samples that an index may name."""

    def batch(self, indices: Tensor, part: slice, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one worker.

        ``indices`` are the whole batch's; ``part`` is the worker's. Random augmentation is a function of
        (seed, step, position in the whole batch), so the same samples look the same for every number of
        workers.
        """

    def evaluation(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this worker's share of the evaluation data in batches; the shares are disjoint and complete."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task and its settings; ``batch`` is the total over all workers, ``ema`` a decay (0: off).

    ``weight_decay`` is part of the differentiated loss, so it is compressed together with the data's gradient. It acts
    on the parameters that :meth:`decayed` returns.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    evaluated_on: ClassVar[str]
    least_batch: ClassVar[int] = 1
    """Smallest ``batch``; 0 in tasks where ``batch=0`` means all samples in every step."""
    reads_data: ClassVar[bool] = True
    """Whether ``data`` names what it trains on; otherwise it brings its own data."""
    min_numel: ClassVar[int | None] = None
    """Default of ``min_numel`` in runs of this task; None: that of ``attach``."""

    usual_method: ClassVar[str] = "terngrad"
    """Default method of a run."""

    steps: int
    batch: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    schedule: str = "constant"
    weight_decay: float = 0.0
    eval_every: int = 100
    ema: float = 0.0
    data: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that make no sense; raises UsageError."""
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        check_known("schedule", self.schedule, SCHEDULES)
        for field, least in (("steps", 1), ("batch", self.least_batch), ("eval_every", 1)):
            if getattr(self, field) < least:
                raise UsageError(f"{field} = {getattr(self, field)}: must be at least {least}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"lr = {self.lr}: must be a positive number")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum = {self.momentum}: must be at least 0 (none) and below 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise UsageError(f"weight_decay = {self.weight_decay}: must be a finite number of at least 0")
        if not 0 <= self.ema < 1:
            raise UsageError(f"ema = {self.ema}: must be at least 0 (off) and below 1")
        if self.data is not None and not self.reads_data:
            raise UsageError(f"task {self.name} brings its own data: leave --data {self.data} out")

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model from torch's current generator."""

    @abstractmethod
    def load(self) -> Source:
        """Read the data; raises DataError that names the file."""

    def check_data(self) -> None:  # noqa: B027
        """Check that the data exists, without reading all of it; raises DataError or UsageError."""

    def order(self, seed: int, samples: int, workers: int) -> Order:
        """Return the order of samples; by default any worker may take any sample."""
        return DataOrder(seed, samples, self.batch)

    @property
    def gauges(self) -> tuple[str, ...]:
        """Names of the gauges that its engines report besides the method's."""
        return ()

    @property
    def decay(self) -> float:
        """Factor of the weights in the gradient of the loss."""
        return self.weight_decay

    def decayed(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters on which weight decay acts: by default weights, not biases or normalisation."""
        return [parameter for parameter in model.parameters() if parameter.dim() > 1]

    def penalty(self, model: nn.Module) -> float:
        """Return the term that the reported objective has besides the mean loss over samples; by default 0."""
        return 0.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy over samples (and positions)."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def score(self, output: Tensor, target: Tensor) -> tuple[float, int, int]:
        """Return the summed loss, the number of right answers and the number of answers."""
        logits, wanted = output.flatten(0, -2), target.flatten()
        loss = F.cross_entropy(logits, wanted, reduction="sum")
        return float(loss), int((logits.argmax(1) == wanted).sum()), wanted.numel()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of ``step``, counted from 0."""
        done = min(step / self.steps, 1.0)
        if self.schedule == "polynomial":
            return self.lr * math.sqrt(1.0 - done)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer, without weight decay, which is in the gradient already."""
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=self.lr)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def data_path(self) -> Path:
        """Return the path given by ``--data``; raises UsageError if there is none."""
        if self.data is None:
            raise UsageError(f"task {self.name} needs --data PATH: {self.summary}")
        return Path(self.data)

    def settings(self) -> dict[str, Any]:
        """Return all settings, for the run record."""
        return dataclasses.asdict(self)
