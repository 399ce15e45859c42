"""How one rank trains LGC's autoencoder on the vectors of all workers, and how the others come by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, broadcast_values
from gradwire.methods.learned.autoencoder import Autoencoder
from gradwire.seeds import parameter_key

__all__ = ["REMEMBERED", "TRAINER", "ElementScales", "Training", "told"]

TRAINER = 0
"""The rank that trains, whose global values a checkpoint keeps."""

WEIGHTS, FIRST, SECOND, STEPS, TOLD = (
    "autoencoder",
    "autoencoder_first_moment",
    "autoencoder_second_moment",
    "autoencoder_steps",
    "autoencoder_told",
)
REMEMBERED = (WEIGHTS, FIRST, SECOND, STEPS, TOLD)
"""Values that are remembered: by the trainer until it has told all ranks the weights, from then on by all."""

SIXTH_EXCHANGE = 5
BETAS, EPSILON = (0.9, 0.999), 1e-8


class ElementScales:
    """The root of the mean square of each parameter's elements, by which they are divided before they are encoded.

    Args:
        counts: Elements of each parameter.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = torch.tensor(counts, dtype=torch.int64)
        self.each = torch.repeat_interleave(torch.arange(len(counts)), self._counts)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales of ``[numel]`` values, float32; that of one with a NaN or infinity is +inf.

        Squares are added up in float64, element by element: the same bits everywhere.
        """
        squares = torch.zeros(len(self._counts), dtype=torch.float64)
        squares.index_add_(0, self.each, values.double().square())
        found = squares.div_(self._counts.clamp(min=1)).sqrt_().to(torch.float32)
        return torch.where(torch.isfinite(found), found, torch.inf)

    def normal(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return values divided by their parameter's scale; zeros where that is zero or infinite."""
        usable = torch.isfinite(scales) & (scales > 0)
        safe = torch.where(usable, scales, torch.ones_like(scales))[self.each]
        return torch.where(usable[self.each], values / safe, torch.zeros_like(values))


@dataclass(frozen=True)
class Training:
    """What a step of the autoencoder's training does.

    Attributes:
        autoencoder: Its shapes.
        optimizer: "adam" or "sgd".
        learning_rate: Of the optimizer.
        similarity: Share of the loss that makes codes of all workers alike; the other part is the reconstruction's.
        mean: Whether the mean of all codes is to give the mean of all vectors; else the code of one worker, drawn anew
            in each round, is to give every worker's vector, with that worker's innovation.
    """

    autoencoder: Autoencoder
    optimizer: str
    learning_rate: float
    similarity: float
    mean: bool

    def weights(self, context: Context, seed: int) -> torch.Tensor:
        """Return the weights that are remembered; those of the start where none of this autoencoder's are."""
        held = context.memory.value(WEIGHTS)
        return self.autoencoder.initial(seed) if held is None or held.numel() != self.autoencoder.numel else held

    def loss(
        self, weights: torch.Tensor, vectors: torch.Tensor, innovation: torch.Tensor | None, common: int
    ) -> torch.Tensor:
        """Return the loss of weights on vectors ``[K, numel]``.

        Args:
            innovation: Of each worker, ``[K, numel]``; None where the mean is encoded.
            common: Whose code stands for all.
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
        """Take a step on the vectors of one round, stage what comes of it, and return the loss before it.

        A step after which a weight is not finite changes nothing.
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
            memory.stage_value(STEPS, torch.tensor(steps))
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
    """Return the trainer's weights on every rank; they are told in the first round that needs them, and kept.

    That a round has told them is remembered by all ranks, so that all know whether they are still to be told.

    Args:
        due: Whether a dry run is of such a round.
    """
    memory, dry = context.memory, context.workspace.device == "meta"
    have = memory.value(WEIGHTS)
    known = have is not None and memory.value(TOLD) is not None and have.numel() == training.autoencoder.numel
    if dry:
        empty = torch.empty(training.autoencoder.numel, device="meta")
        if due:
            yield from broadcast_values(replace(context, exchange=SIXTH_EXCHANGE), tag, empty, TRAINER)
        return empty
    if have is not None and known:
        return have
    mine = training.weights(context, seed)
    weights = yield from broadcast_values(replace(context, exchange=SIXTH_EXCHANGE), tag, mine, TRAINER)
    memory.stage_value(WEIGHTS, weights)
    memory.stage_value(TOLD, torch.tensor(context.round))
    return weights


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Add up in one order, however many threads the process has: a training that is resumed goes on bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
