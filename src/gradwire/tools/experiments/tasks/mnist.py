"""``mnist``: LeNet with the settings of the TernGrad paper's first experiment (Wen et al., NeurIPS 2017, sec. 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.images import Images
from gradwire.tools.experiments.tasks.readers import existing_folder, find_file, read_idx_images, read_idx_labels

FILES = {
    "inputs": "train-images-idx3-ubyte",
    "labels": "train-labels-idx1-ubyte",
    "eval_inputs": "t10k-images-idx3-ubyte",
    "eval_labels": "t10k-labels-idx1-ubyte",
}
ENDINGS = ("", ".gz")


@dataclass(frozen=True, kw_only=True)
class Mnist(Task):
    """Settings of the ``mnist`` task.

    Momentum SGD, learning rate ``0.01 * sqrt(1 - step / steps)``, total batch 64, 10 000 steps, weight decay
    5e-4 inside the differentiated loss and so inside what is compressed, as in the authors' programs.
    ``ema=0.9999`` evaluates an exponential moving average of the weights, as their evaluation does; it is off
    by default.
    """

    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "LeNet on MNIST; --data names the folder of the four idx files, plain or .gz"
    evaluated_on: ClassVar[str] = "the 10 000 test images (t10k)"

    steps: int = 10_000
    batch: int = 64
    lr: float = 0.01
    schedule: str = "polynomial"
    weight_decay: float = 5e-4
    eval_every: int = 500

    def build_model(self) -> nn.Module:
        """Build Caffe's LeNet, with Caffe's "xavier" filling: uniform, variance 1 / fan-in, biases 0."""
        model = nn.Sequential(
            nn.Conv2d(1, 20, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, 10),
        )
        for parameter in model.parameters():
            bound = math.sqrt(3.0 / parameter[0].numel()) if parameter.dim() > 1 else 0.0
            nn.init.uniform_(parameter, -bound, bound)
        return model

    def check_data(self) -> None:
        """Check that the four files exist."""
        folder = existing_folder(self.data_path(), f"the idx files {', '.join(FILES.values())} (plain or .gz)")
        for name in FILES.values():
            find_file(folder, name, ENDINGS)

    def load(self) -> Source:
        """Read the four files."""
        self.check_data()
        folder = self.data_path()
        path = {part: find_file(folder, name, ENDINGS) for part, name in FILES.items()}
        inputs, eval_inputs = read_idx_images(path["inputs"]), read_idx_images(path["eval_inputs"])
        return Images(
            inputs=inputs,
            labels=read_idx_labels(path["labels"], inputs.shape[0]),
            eval_inputs=eval_inputs,
            eval_labels=read_idx_labels(path["eval_labels"], eval_inputs.shape[0]),
            scale=torch.tensor([1 / 256]),
            shift=torch.tensor([0.0]),
        )
