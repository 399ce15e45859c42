"""LGC's autoencoder: one-dimensional convolutions that make a vector four times shorter, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.nn import functional

from gradwire.methods.low_rank.low_rank import draw_factor

__all__ = ["LEAST_LENGTH", "Autoencoder", "latent_length"]

KERNEL, STRIDE, SLOPE = 3, 2, 0.01
LATENT_CHANNELS = 4
ENCODER = (1, 64, 128, 256, 64)
DECODER = (LATENT_CHANNELS, 32, 64, 128, 32)
LEAST_LENGTH = 31
"""Four convolutions without padding leave one number of a channel; shorter vectors have zeros behind."""

INPUT_BITS, WEIGHT_BITS = 22, 20
"""A sum of 3 x 256 products of integers of that many bits, and of a bit more for the largest, stays below 2^53."""


def latent_length(length: int) -> int:
    """Return the numbers of the code of a vector: four channels, each halved four times.

    Example:
        >>> latent_length(16384), latent_length(31), latent_length(5)
        (4092, 4, 4)
    """
    length = max(length, LEAST_LENGTH)
    for _ in ENCODER[1:]:
        length = (length - KERNEL) // STRIDE + 1
    return LATENT_CHANNELS * length


@dataclass(frozen=True)
class Autoencoder:
    """The shapes and the arithmetic of an encoder and a decoder; their weights are one vector, given with every call.

    The encoder has convolutions (kernel 3, stride 2) with 64, 128, 256 and 64 channels and one of kernel 1 with 4; the
    decoder transposed ones with 32, 64, 128 and 32, then a resize to the nearest neighbour, and a convolution of kernel
    1 to one channel. All but the last of each have a leaky ReLU of slope 0.01 behind them.

    :meth:`encode` and :meth:`decode` give the same bits on every machine. Inputs of a layer are rounded to multiples of
    a power of two that is 2^-22 of the largest or more, weights to such with 2^-20, so that products and their sums are
    integers below 2^53: float64 holds them exactly, in whatever order a library adds. All other arithmetic is element
    by element. :meth:`reconstruct` is in float32 for training, whose result one rank tells all others.

    Args:
        innovation: Whether the decoder has a second input, as long as the vector, before its last layer.
    """

    innovation: bool = False

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of weight and bias of each layer: five of the encoder, five of the decoder."""
        found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for a, b in pairwise(ENCODER):
            found.append(((b, a, KERNEL), (b,)))
        found.append(((LATENT_CHANNELS, ENCODER[-1], 1), (LATENT_CHANNELS,)))
        for a, b in pairwise(DECODER):
            found.append(((a, b, KERNEL), (b,)))
        found.append(((1, DECODER[-1] + self.innovation, 1), (1,)))
        return found

    @property
    def numel(self) -> int:
        """Weights and biases of encoder and decoder."""
        return sum(math.prod(shape) for pair in self.shapes for shape in pair)

    @property
    def encoder_numel(self) -> int:
        """Those of the encoder."""
        return sum(math.prod(shape) for pair in self.shapes[: len(ENCODER)] for shape in pair)

    def initial(self, seed: int) -> torch.Tensor:
        """Return weights at the start: uniform within one over the root of a layer's inputs, from the shared stream."""
        parts = []
        for number, (weight, bias) in enumerate(self.shapes):
            fan_in = weight[1] * weight[2]
            size = math.prod(weight) + bias[0]
            drawn = draw_factor(f"(autoencoder layer {number})", size, 1, seed, 0)[0]
            parts.append(drawn * (1 / math.sqrt(fan_in)))
        return torch.cat(parts)

    def layers(self, weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """View weight and bias of each layer."""
        found, at = [], 0
        for pair in self.shapes:
            parts = []
            for shape in pair:
                size = math.prod(shape)
                parts.append(weights[at : at + size].view(shape))
                at += size
            found.append((parts[0], parts[1]))
        return found

    # ------------------------------------------------------------------ exact

    def encode(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the code of a vector, float32 ``[latent_length]``."""
        x = _long_enough(values.double())[None]
        *hidden, last = self.layers(weights)[: len(ENCODER)]
        for weight, bias in hidden:
            x = _leaky(_convolve(x, weight, bias))
        return _convolve(x, *last).to(torch.float32).reshape(-1)

    def decode(
        self, weights: torch.Tensor, code: torch.Tensor, length: int, innovation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the vector of ``length`` numbers that a code stands for, float32."""
        x = code.double().view(LATENT_CHANNELS, -1)
        *hidden, last = self.layers(weights)[len(ENCODER) :]
        for weight, bias in hidden:
            x = _leaky(_spread(x, weight, bias))
        x = x[:, _nearest(x.shape[1], length)]
        if innovation is not None:
            x = torch.cat([x, innovation.double()[None]])
        return _convolve(x, *last).to(torch.float32)[0]

    # ------------------------------------------------------------------ training

    def codes(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of vectors ``[K, length]`` in float32, ``[K, channels, shorter]``."""
        x = _long_enough(values)[:, None]
        *hidden, last = self.layers(weights)[: len(ENCODER)]
        for weight, bias in hidden:
            x = functional.leaky_relu(functional.conv1d(x, weight, bias, stride=STRIDE), SLOPE)
        return functional.conv1d(x, *last)

    def reconstruct(
        self, weights: torch.Tensor, codes: torch.Tensor, length: int, innovation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the vectors ``[K, length]`` that codes stand for, in float32."""
        x = codes
        *hidden, last = self.layers(weights)[len(ENCODER) :]
        for weight, bias in hidden:
            x = functional.leaky_relu(functional.conv_transpose1d(x, weight, bias, stride=STRIDE), SLOPE)
        x = x[:, :, _nearest(x.shape[2], length)]
        if innovation is not None:
            x = torch.cat([x, innovation[:, None]], 1)
        return functional.conv1d(x, *last)[:, 0]


def _long_enough(values: torch.Tensor) -> torch.Tensor:
    missing = LEAST_LENGTH - values.shape[-1]
    return functional.pad(values, (0, missing)) if missing > 0 else values


def _nearest(length: int, wanted: int) -> torch.Tensor:
    """Return for each of ``wanted`` places the nearest of ``length``."""
    return torch.arange(wanted) * length // wanted


def _leaky(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x * SLOPE)


def _integers(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Return ``x`` as integers of so many bits, in float64, and what one of them stands for."""
    largest = float(x.abs().amax()) if x.numel() else 0.0
    unit = math.ldexp(1.0, math.frexp(largest)[1] - bits) if largest > 0 else 1.0
    return (x / unit).round_(), unit


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve ``[channels, length]``: stride 2 for a kernel of 3, 1 for one of 1."""
    wide = weight.shape[2]
    inputs, unit = _integers(x, INPUT_BITS)
    kernel, step = _integers(weight.double(), WEIGHT_BITS)
    taps = inputs.unfold(1, wide, STRIDE if wide > 1 else 1)
    columns = taps.permute(0, 2, 1).reshape(-1, taps.shape[1])
    return (kernel.reshape(weight.shape[0], -1) @ columns) * (unit * step) + bias.double()[:, None]


def _spread(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve ``[channels, length]``, transposed, with stride 2: ``[outputs, 2 length + 1]``."""
    outputs, length = weight.shape[1], x.shape[1]
    inputs, unit = _integers(x, INPUT_BITS)
    kernel, step = _integers(weight.double(), WEIGHT_BITS)
    taps = (kernel.reshape(len(kernel), -1).T @ inputs).view(outputs, KERNEL, length)
    out = torch.zeros(outputs, STRIDE * length + KERNEL - STRIDE, dtype=torch.float64)
    for tap in range(KERNEL):
        out[:, tap : tap + STRIDE * length : STRIDE] += taps[:, tap]
    return out * (unit * step) + bias.double()[:, None]
