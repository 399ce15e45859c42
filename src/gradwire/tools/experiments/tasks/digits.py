"""``digits``: scikit-learn's 1797 bundled images of handwritten digits, 8 x 8, learnt by a small perceptron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from gradwire.errors import BackendError
from gradwire.tools.experiments.order import generator
from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.images import Images

TRAINING_IMAGES = 1437


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Settings of the ``digits`` task."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "handwritten digits, 8 x 8, bundled with scikit-learn; a perceptron 64-256-256-10"
    evaluated_on: ClassVar[str] = "360 images kept out of training (a fixed draw)"
    reads_data: ClassVar[bool] = False

    steps: int = 300
    batch: int = 64
    lr: float = 0.05
    eval_every: int = 25

    def build_model(self) -> nn.Module:
        """Build the perceptron."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )

    def check_data(self) -> None:
        """Check that scikit-learn is installed."""
        try:
            import sklearn.datasets  # noqa: F401
        except ImportError as error:
            raise BackendError('task digits needs scikit-learn: pip install "gradwire[cli]"') from error

    def load(self) -> Source:
        """Load and split the images; the split is the same for every seed."""
        self.check_data()
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.from_numpy(bunch.images).to(torch.uint8)[:, None]
        labels = torch.from_numpy(bunch.target).to(torch.int64)
        order = torch.randperm(len(labels), generator=generator(0, "digits split", 0))
        train, held_out = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
        return Images(
            inputs=images[train],
            labels=labels[train],
            eval_inputs=images[held_out],
            eval_labels=labels[held_out],
            scale=torch.tensor([1 / 16]),
            shift=torch.tensor([0.5]),
        )
