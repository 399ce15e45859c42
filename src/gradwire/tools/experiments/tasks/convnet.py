"""The small network of TensorFlow's CIFAR-10 tutorial, which the TernGrad paper trains on CIFAR-10."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ConvNet", "ResponseNorm"]

CHANNELS = 64
RADIUS = 4


class ResponseNorm(nn.Module):
    """Local response normalisation over neighbouring channels, y = x (1 + alpha / n sum x^2) ** -beta.

    The sum runs over the n = 2 * ``RADIUS`` + 1 channels nearest to each. It is a 1 x 1 convolution with a band of
    ones, so that it costs a third of ``torch.nn.LocalResponseNorm`` and equals it up to rounding.

    Args:
        channels: Of the input.
        alpha: Weight of the mean square.
        beta: Exponent.
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
