"""The models of the step benchmark, with batches of random numbers of the right shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradwire.tools.experiments.errors import check_known
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.tasks.cifar10 import Residual
from gradwire.tools.experiments.tasks.text import Transformer

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model to take steps with.

    Attributes:
        name: Name on the command line.
        summary: Description in one line.
        make: Builds the module.
        batch: Returns a worker's batch, drawn from a generator.
    """

    name: str
    summary: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch, whose logits may have a time axis."""
        logits = module(batch[0])
        return cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def _mlp() -> nn.Module:
    parts: list[nn.Module] = []
    for inner, outer in itertools.pairwise((784, 2048, 2048, 2048, 10)):
        parts += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _resnet() -> nn.Module:
    """Build ResNet-20 (He et al., CVPR 2016, sec. 4.2)."""
    blocks: list[nn.Module] = []
    inner = 16
    for outer in (16, 32, 64):
        for number in range(3):
            blocks.append(Residual(inner, outer, 2 if outer > 16 and number == 0 else 1))
            inner = outer
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _images(count: int, *shape: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(count, *shape, generator=generator), torch.randint(0, 10, (count,), generator=generator)

    return batch


def _text(count: int, length: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        text = torch.randint(0, 256, (count, length + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    return batch


MODELS = {
    model.name: model
    for model in (
        BenchModel(
            name="mlp",
            summary="MLP 784-2048-2048-2048-10, 10.0 M parameters, batch 16 a worker",
            make=_mlp,
            batch=_images(16, 784),
        ),
        BenchModel(
            name="resnet", summary="ResNet-20 on 32 x 32, batch 4 a worker", make=_resnet, batch=_images(4, 3, 32, 32)
        ),
        BenchModel(
            name="transformer",
            summary="4 layers of width 192, 64 bytes, batch 2 a worker",
            make=Transformer,
            batch=_text(2, 64),
        ),
        BenchModel(
            name="lenet",
            summary="Caffe's LeNet on 28 x 28, batch 16 a worker",
            make=lambda: build("mnist").build_model(),
            batch=_images(16, 1, 28, 28),
        ),
    )
}


def bench_model(name: str) -> BenchModel:
    """Return a model by name.

    Raises:
        UsageError: there is no model of that name.
    """
    check_known("model", name, MODELS, " to benchmark")
    return MODELS[name]
