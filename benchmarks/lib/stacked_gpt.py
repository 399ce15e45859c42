"""A character GPT whose replicas are trained side by side, each parameter one tensor for all of them.

The shape is that of nanoGPT's CPU example: 4 layers, 4 heads, 128 wide, a context of 64, no biases, and the embedding's
values in the last layer too. One product for all replicas takes as long as one replica's on as many samples, where a
loop over replicas pays for every call four times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Shape", "StackedGPT", "Text", "read_text"]


@dataclass(frozen=True)
class Shape:
    """The numbers that fix the model: characters known, longest context, width, layers and heads."""

    characters: int = 65
    context: int = 64
    width: int = 128
    layers: int = 4
    heads: int = 4


class StackedGPT:
    """Several replicas of a GPT, which start alike.

    Args:
        shape: Numbers that fix the model.
        replicas: Number of replicas K.
        seed: Seed of the initial values; they do not depend on K.

    Attributes:
        stacks: By name, the parameters of all replicas, ``[K, *shape]``.
    """

    def __init__(self, shape: Shape, replicas: int, seed: int) -> None:
        self.shape, self.replicas = shape, replicas
        generator = torch.Generator().manual_seed(seed)
        found: dict[str, Tensor] = {}

        def normal(name: str, *sizes: int, std: float = 0.02) -> None:
            found[name] = std * torch.randn(*sizes, generator=generator)

        width, small = shape.width, 0.02 / math.sqrt(2 * shape.layers)
        normal("characters", shape.characters, width)
        normal("places", shape.context, width)
        for layer in range(shape.layers):
            found[f"{layer}.norm"] = torch.ones(width)
            normal(f"{layer}.attend", 3 * width, width)
            normal(f"{layer}.join", width, width, std=small)
            found[f"{layer}.second_norm"] = torch.ones(width)
            normal(f"{layer}.widen", 4 * width, width)
            normal(f"{layer}.narrow", width, 4 * width, std=small)
        found["last_norm"] = torch.ones(width)
        self.stacks = {name: nn.Parameter(x.expand(replicas, *x.shape).clone()) for name, x in found.items()}

    @property
    def numel(self) -> int:
        """Number of elements of a replica."""
        return sum(x.numel() for x in self.stacks.values()) // self.replicas

    def inner_matrices(self) -> list[nn.Parameter]:
        """Return the stacks of the layers' matrices, without embeddings and norms."""
        return [x for name, x in self.stacks.items() if x.dim() == 3 and name[0].isdigit()]

    def replica(self, which: int) -> dict[str, nn.Parameter]:
        """Return a replica's parameters, which share their memory with the stacks."""
        return {name: nn.Parameter(x.data[which]) for name, x in self.stacks.items()}

    def losses(self, tokens: Tensor) -> Tensor:
        """Return each replica's mean cross-entropy, in nats a character.

        Args:
            tokens: ``[K, samples, length + 1]``, int64: each character is to be told from those before it.
        """
        return _losses(self.shape, self.stacks, tokens)

    @torch.no_grad()
    def loss_of_first(self, windows: Tensor, at_once: int = 64) -> float:
        """Return the first replica's mean loss on ``windows``, ``[samples, length + 1]``."""
        first = {name: x[:1] for name, x in self.stacks.items()}
        parts = windows.split(at_once)
        losses = [float(_losses(self.shape, first, part.unsqueeze(0))) * len(part) for part in parts]
        return sum(losses) / len(windows)


def _losses(shape: Shape, stacks: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    replicas, samples, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1
    width, heads = shape.width, shape.heads

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, stacks[name].transpose(1, 2))

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (width,)) * stacks[name].unsqueeze(1)

    first = torch.arange(replicas).view(-1, 1, 1) * shape.characters
    table = stacks["characters"].reshape(replicas * shape.characters, width)
    x = functional.embedding(tokens[:, :, :-1] + first, table) + stacks["places"][:, None, :length]
    x = x.view(replicas, samples * length, width)
    for layer in range(shape.layers):
        parts = linear(norm(x, f"{layer}.norm"), f"{layer}.attend")
        parts = parts.view(replicas * samples, length, 3, heads, width // heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(x.shape), f"{layer}.join")
        y = functional.gelu(linear(norm(x, f"{layer}.second_norm"), f"{layer}.widen"))
        x = x + linear(y, f"{layer}.narrow")
    scores = linear(norm(x, "last_norm"), "characters").reshape(-1, shape.characters)
    found = functional.cross_entropy(scores, tokens[:, :, 1:].reshape(-1), reduction="none")
    return found.view(replicas, -1).mean(1)


@dataclass(frozen=True)
class Text:
    """A text as numbers of characters, the customary nine tenths to train and the rest to validate."""

    train: Tensor
    validation: Tensor
    characters: int

    def batch(self, seed: int, step: int, workers: int, samples: int, length: int) -> Tensor:
        """Return all workers' samples of a step, ``[workers, samples, length + 1]``, a function of seed and step."""
        # The generator takes the lower 32 bits of a seed.
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.train) - length, (workers, samples, 1), generator=generator)
        return self.train[starts + torch.arange(length + 1)]

    def windows(self, count: int, length: int) -> Tensor:
        """Return windows at equal distances over the validation text, ``[count, length + 1]``."""
        starts = torch.arange(count) * ((len(self.validation) - length - 1) // (count - 1))
        return self.validation[starts.unsqueeze(1) + torch.arange(length + 1)]


def read_text(path: Path) -> Text:
    """Read a text; its characters are numbered in their order.

    Raises:
        ValueError: it is too short to be split.
    """
    data = path.read_bytes()
    if len(data) < 10_000:
        raise ValueError(f"{path} has {len(data)} bytes, and a text to train on needs 10000")
    known = sorted(set(data))
    number = torch.zeros(256, dtype=torch.int64)
    number[known] = torch.arange(len(known))
    tokens = number[torch.frombuffer(bytearray(data), dtype=torch.uint8).long()]
    cut = int(0.9 * len(tokens))
    return Text(tokens[:cut], tokens[cut:], len(known))
