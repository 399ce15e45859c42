"""``cifar10``: ResNet-8, or the network of TensorFlow's tutorial that the TernGrad paper trains, on CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.tools.experiments.errors import UsageError, check_known
from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.images import Images
from gradwire.tools.experiments.tasks.readers import existing_folder, find_file, read_cifar10

TRAINING, EVALUATION = range(1, 5), 5
"""Numbers of the files that are trained on, and evaluated on."""
ENDINGS = (".bin", ".bin.xz")
SIDE, PAD = 32, 4
LEAST_CROP = 8
MEAN = torch.tensor([0.4914, 0.4822, 0.4465])
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616])

CHANNELS = 64
RADIUS = 4


class ResponseNorm(nn.Module):
    """Local response normalisation over neighbouring channels, y = x (1 + alpha / n sum x^2) ** -beta.

    The sum runs over the n = 2 * ``RADIUS`` + 1 channels nearest to each. It is a 1 x 1 convolution with a band of
    ones, so that it costs a third of ``torch.nn.LocalResponseNorm`` and equals it up to rounding.

    Args:
        channels: Channels of the input.
        alpha: Weight of the mean square.
        beta: Exponent of the norm.
    """

    def __init__(self, channels: int, alpha: float = 0.001, beta: float = 0.75) -> None:
        super().__init__()
        self.beta = beta
        index = torch.arange(channels)
        near = (index[:, None] - index).abs() <= RADIUS
        # No buffer: DDP would broadcast it before every step, and it never changes.
        self.band = (near.to(torch.float32) * (alpha / (2 * RADIUS + 1)))[:, :, None, None]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[count, channels, height, width]``."""
        return x * (1.0 + F.conv2d(x.square(), self.band)).pow(-self.beta)


class ConvNet(nn.Sequential):
    """Two convolutions of 64 channels of 5 x 5, each with pooling and response normalisation, then three linear layers.

    Weights are drawn from normal distributions cut at two standard deviations, as in the tutorial. There is no dropout.
    Weights lie in memory with the channels last, in which order CPUs train it fastest.

    Args:
        size: Height and width of the images, a multiple of 4.
    """

    def __init__(self, size: int) -> None:
        # In TensorFlow's padding "SAME" a window of 3 over an even size has its one row of padding at the end.
        super().__init__(
            _filled(nn.Conv2d(3, CHANNELS, 5, padding=2), std=0.05, bias=0.0),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            ResponseNorm(CHANNELS),
            _filled(nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2), std=0.05, bias=0.1),
            nn.ReLU(),
            ResponseNorm(CHANNELS),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Flatten(),
            _filled(nn.Linear(CHANNELS * (size // 4) ** 2, 384), std=0.04, bias=0.1),
            nn.ReLU(),
            _filled(nn.Linear(384, 192), std=0.04, bias=0.1),
            nn.ReLU(),
            _filled(nn.Linear(192, 10), std=1 / 192, bias=0.0),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def decayed(self) -> list[nn.Parameter]:
        """Return the weights on which the tutorial's weight decay acts: those of the two hidden linear layers."""
        *hidden, _ = (layer for layer in self if isinstance(layer, nn.Linear))
        return [p for layer in hidden for p in layer.parameters() if p.dim() > 1]


def _filled(layer: nn.Conv2d | nn.Linear, *, std: float, bias: float) -> nn.Conv2d | nn.Linear:
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    nn.init.constant_(layer.bias, bias)  # type: ignore[arg-type]
    return layer


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = (
            nn.Identity()
            if inner == outer and stride == 1
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(shortcut(x) + two convolutions of x)``."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        out: Tensor = F.relu(y + self.shortcut(x))
        return out


def resnet8(size: int) -> nn.Module:
    """Build a convolution, three residual blocks of 16, 32 and 64 channels, and a linear layer, for any size."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


MODELS: dict[str, Callable[[int], nn.Module]] = {"resnet8": resnet8, "convnet": ConvNet}


@dataclass(frozen=True, kw_only=True)
class Cifar10(Task):
    """Settings of the ``cifar10`` task.

    ``model`` is "resnet8" or "convnet", the network of TensorFlow's CIFAR-10 tutorial, on whose two hidden linear
    layers alone weight decay acts. ``crop`` is the height and width of random crops in training and of central ones
    in evaluation, a multiple of 4; 0 shifts images of full size by up to four pixels instead. Images are flipped at
    random either way. The programs of the TernGrad paper (Wen et al., NeurIPS 2017, table 1) train "convnet" on crops
    of 24 with Adam at a learning rate of 2e-4 and a weight decay of 0.004, and evaluate an average of the weights
    (``ema=0.9999``).
    """

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = (
        "ResNet-8 or a ConvNet on CIFAR-10; --data names the folder of data_batch_1..5.bin, plain or .xz"
    )
    evaluated_on: ClassVar[str] = "data_batch_5 (10 000 images; trained on batches 1 to 4, not the official test set)"

    steps: int = 2000
    batch: int = 128
    lr: float = 0.1
    schedule: str = "cosine"
    weight_decay: float = 5e-4
    eval_every: int = 250
    model: str = "resnet8"
    crop: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that make no sense; raises UsageError."""
        super().__post_init__()
        check_known("model", self.model, MODELS, " of the task cifar10")
        if self.crop and (self.crop % 4 or not LEAST_CROP <= self.crop <= SIDE):
            raise UsageError(f"crop = {self.crop}: must be a multiple of 4 from {LEAST_CROP} to {SIDE}, or 0 for none")

    def build_model(self) -> nn.Module:
        """Build the network."""
        return MODELS[self.model](self.crop or SIDE)

    def decayed(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters on which weight decay acts: a ConvNet chooses its own, else all weights."""
        return model.decayed() if isinstance(model, ConvNet) else super().decayed(model)

    def check_data(self) -> None:
        """Check that the five files exist."""
        folder = existing_folder(self.data_path(), "data_batch_1.bin to data_batch_5.bin (plain or .xz)")
        for number in (*TRAINING, EVALUATION):
            find_file(folder, f"data_batch_{number}", ENDINGS)

    def load(self) -> Source:
        """Read the five files."""
        self.check_data()
        folder = self.data_path()
        parts = [read_cifar10(find_file(folder, f"data_batch_{n}", ENDINGS)) for n in (*TRAINING, EVALUATION)]
        images, labels = zip(*parts)
        return Images(
            inputs=torch.cat(images[:-1]),
            labels=torch.cat(labels[:-1]),
            eval_inputs=images[-1],
            eval_labels=labels[-1],
            scale=1.0 / (255.0 * DEVIATION),
            shift=MEAN / DEVIATION,
            pad=0 if self.crop else PAD,
            crop=self.crop,
        )
