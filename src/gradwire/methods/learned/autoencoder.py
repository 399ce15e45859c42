"""LGC's autoencoder, one-dimensional convolutions with a code of a quarter of a vector's length, and its training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch.nn import functional

from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, broadcast_values
from gradwire.methods.low_rank.factors import draw_factor
from gradwire.seeds import parameter_key

KERNEL, STRIDE, SLOPE = 3, 2, 0.01
LATENT_CHANNELS = 4
ENCODER = (1, 64, 128, 256, 64)
DECODER = (LATENT_CHANNELS, 32, 64, 128, 32)
LEAST_LENGTH = 31
"""Least length, which four unpadded convolutions reduce to one number a channel; shorter vectors are padded."""

INPUT_BITS, WEIGHT_BITS = 22, 20
"""Bits of integers for which a sum of 3 x 256 products, with one bit more for the largest, is below 2^53."""


def latent_length(length: int) -> int:
    """Return the length of a vector's code: four channels, each halved four times.

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
    """Shapes and arithmetic of an encoder and a decoder; their weights are one vector, passed to every call.

    The encoder has convolutions (kernel 3, stride 2) with 64, 128, 256 and 64 channels and one of kernel 1 with 4; the
    decoder transposed ones with 32, 64, 128 and 32, then a resize to the nearest neighbour, and a convolution of kernel
    1 to one channel. All but the last of each are followed by a leaky ReLU of slope 0.01.

    :meth:`encode` and :meth:`decode` give the same bits on every machine. Inputs of a layer are rounded to multiples of
    a power of two that is at least 2^-22 of the largest, weights likewise with 2^-20, so that products and their sums
    are integers below 2^53, which are exact in float64 in any order of addition. All other arithmetic is element by
    element. :meth:`reconstruct` is in float32, for training, whose result one rank sends to all others.

    Args:
        innovation: True if the decoder has a second input, as long as the vector, before its last layer.
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
        """Number of weights and biases of encoder and decoder."""
        return sum(math.prod(shape) for pair in self.shapes for shape in pair)

    @property
    def encoder_numel(self) -> int:
        """Number of weights and biases of the encoder."""
        return sum(math.prod(shape) for pair in self.shapes[: len(ENCODER)] for shape in pair)

    def initial(self, seed: int) -> torch.Tensor:
        """Return initial weights: uniform within one over the root of a layer's inputs, from the shared stream."""
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
        """Decode a code to a vector of ``length`` numbers, float32."""
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
        """Decode codes to vectors ``[K, length]`` in float32."""
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
    return torch.arange(wanted, device="cpu") * length // wanted


def _leaky(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x * SLOPE)


def _integers(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Return ``x`` as integers of so many bits in float64, and the value of one."""
    largest = float(x.abs().amax()) if x.numel() else 0.0
    unit = math.ldexp(1.0, math.frexp(largest)[1] - bits) if largest > 0 else 1.0
    return (x / unit).round_(), unit


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve ``[channels, length]``, with stride 2 for kernel 3 and stride 1 for kernel 1."""
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
    out = torch.zeros(outputs, STRIDE * length + KERNEL - STRIDE, dtype=torch.float64, device="cpu")
    for tap in range(KERNEL):
        out[:, tap : tap + STRIDE * length : STRIDE] += taps[:, tap]
    return out * (unit * step) + bias.double()[:, None]


TRAINER = 0
"""Rank that trains, whose global values are stored in checkpoints."""

WEIGHTS, FIRST, SECOND, STEPS, TOLD = (
    "autoencoder",
    "autoencoder_first_moment",
    "autoencoder_second_moment",
    "autoencoder_steps",
    "autoencoder_told",
)
ROUNDS = "autoencoder_rounds"
"""Number of rounds that the autoencoder has been trained on."""

REMEMBERED = (WEIGHTS, FIRST, SECOND, STEPS, TOLD, ROUNDS)
"""Stored values, of the trainer until it has sent the weights to all ranks, and then of all ranks. All count rounds."""

SIXTH_EXCHANGE = 5
BETAS, EPSILON = (0.9, 0.999), 1e-8


class ElementScales:
    """Root mean square of each parameter's elements, by which they are divided before they are encoded.

    Args:
        counts: Number of elements of each parameter.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        self.each = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), self._counts)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales of ``[numel]`` values, float32, +inf for a parameter with a NaN or an infinity.

        Squares are added up in float64, element by element, with the same bits everywhere.
        """
        squares = torch.zeros(len(self._counts), dtype=torch.float64, device="cpu")
        squares.index_add_(0, self.each, values.double().square())
        found = squares.div_(self._counts.clamp(min=1)).sqrt_().to(torch.float32)
        return torch.where(torch.isfinite(found), found, torch.inf)

    def normal(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return values divided by their parameter's scale, or zeros if it is zero or infinite."""
        usable = torch.isfinite(scales) & (scales > 0)
        safe = torch.where(usable, scales, torch.ones_like(scales))[self.each]
        return torch.where(usable[self.each], values / safe, torch.zeros_like(values))


@dataclass(frozen=True)
class Training:
    """Settings and step of the autoencoder's training.

    Attributes:
        autoencoder: The autoencoder.
        optimizer: "adam" or "sgd".
        learning_rate: Learning rate of the optimizer.
        similarity: Weight of the loss that makes the codes of all workers alike; the rest is the reconstruction's.
        mean: True if the mean of all codes must decode to the mean of all vectors. False if the code of one worker,
            drawn in each round, must decode to every worker's vector, given that worker's innovation.
    """

    autoencoder: Autoencoder
    optimizer: str
    learning_rate: float
    similarity: float
    mean: bool

    def weights(self, context: Context, seed: int) -> torch.Tensor:
        """Return the stored weights, or initial ones if none of this autoencoder are stored."""
        held = context.memory.value(WEIGHTS)
        return self.autoencoder.initial(seed) if held is None or held.numel() != self.autoencoder.numel else held

    def loss(
        self, weights: torch.Tensor, vectors: torch.Tensor, innovation: torch.Tensor | None, common: int
    ) -> torch.Tensor:
        """Return the loss on vectors ``[K, numel]``.

        Args:
            innovation: Innovation of each worker, ``[K, numel]``; None if the mean is encoded.
            common: Worker whose code is used for all.
        """
        codes, length = self.autoencoder.codes(weights, vectors), vectors.shape[1]
        if self.mean:
            found = self.autoencoder.reconstruct(weights, codes.mean(0, keepdim=True), length)
            return (found[0] - vectors.mean(0)).square().mean()
        everyone = codes[common : common + 1].expand_as(codes)
        found = self.autoencoder.reconstruct(weights, everyone, length, innovation)
        apart = (codes[:, None] - codes[None]).square().mean((2, 3)).sum()
        return (1 - self.similarity) * (found - vectors).square().mean(1).sum() + self.similarity * apart

    def step(self, context: Context, seed: int, vectors: torch.Tensor, innovation: torch.Tensor | None = None) -> float:
        """Take a step on the vectors of one round, stage its result, and return the loss before it.

        A step that would make a weight not finite is not applied.
        """
        weights = self.weights(context, seed).clone().requires_grad_(True)
        common = parameter_key(seed, f"(common {context.round})")[0] % len(vectors)
        with _one_thread(), torch.enable_grad():
            loss = self.loss(weights, vectors, innovation, common)
            (gradient,) = torch.autograd.grad(loss, weights)
        memory, weights = context.memory, weights.detach()
        held = memory.value(STEPS)
        steps = 1 if held is None else int(held) + 1
        moments = self._moments(context, gradient)
        if self.optimizer == "sgd":
            weights -= self.learning_rate * gradient
        else:
            first, second = (m / (1 - beta**steps) for m, beta in zip(moments, BETAS))
            weights -= self.learning_rate * first / (second.sqrt() + EPSILON)
        if bool(torch.isfinite(weights).all()):
            memory.stage_value(WEIGHTS, weights)
            memory.stage_value(STEPS, torch.tensor(steps, device="cpu"))
            for name, moment in zip((FIRST, SECOND), moments):
                memory.stage_value(name, moment)
        return loss.item()

    def _moments(self, context: Context, gradient: torch.Tensor) -> list[torch.Tensor]:
        if self.optimizer == "sgd":
            return []
        found = []
        for name, beta, power in zip((FIRST, SECOND), BETAS, (gradient, gradient.square())):
            held = context.memory.value(name)
            before = torch.zeros_like(gradient) if held is None or held.shape != gradient.shape else held
            found.append(before * beta + power * (1 - beta))
        return found


def told(context: Context, tag: int, training: Training, seed: int, due: bool) -> Exchange[torch.Tensor]:
    """Return the trainer's weights on every rank, sent in the first round that needs them and then stored.

    All ranks store that the weights were sent, so that all know whether they still must be.

    Args:
        due: True for a dry run of the round that sends them.
    """
    memory, dry = context.memory, context.workspace.device == "meta"
    have = memory.value(WEIGHTS)
    known = have is not None and memory.value(TOLD) is not None and have.numel() == training.autoencoder.numel
    if dry:
        empty = torch.empty(training.autoencoder.numel, device="meta", dtype=torch.float32)
        if due:
            yield from broadcast_values(replace(context, exchange=SIXTH_EXCHANGE), tag, empty, TRAINER)
        return empty
    if have is not None and known:
        return have
    mine = training.weights(context, seed)
    weights = yield from broadcast_values(replace(context, exchange=SIXTH_EXCHANGE), tag, mine, TRAINER)
    memory.stage_value(WEIGHTS, weights)
    memory.stage_value(TOLD, torch.tensor(context.round, device="cpu"))
    return weights


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, so that sums have one order and a resumed training has the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
