"""Run under torchrun's variables: trains a batch-normalised task on a real group; rank 0 saves model and loss."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.distributed import DistributedEngine
from gradwire.tools.experiments.engine import Engine
from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.images import Images

WORKERS, STEPS = 2, 6


@dataclass(frozen=True, kw_only=True)
class Normed(Task):
    """A convolution with batch normalisation on random images, augmented."""

    name: ClassVar[str] = "normed"
    steps: int = STEPS
    batch: int = 16
    lr: float = 0.1
    weight_decay: float = 1e-2

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def load(self) -> Source:
        draw = torch.Generator().manual_seed(5)
        images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8, generator=draw)
        labels = torch.randint(0, 10, (64,), generator=draw)
        return Images(images, labels, images, labels, torch.full((3,), 1 / 255), torch.zeros(3), pad=2)


def plan(simulate: bool) -> RunConfig:
    return RunConfig(task=Normed(), method="terngrad", workers=WORKERS, simulate=simulate, min_numel=0)


def train(engine: Engine) -> dict[str, object]:
    optimizer = Normed().build_optimizer(engine.model)
    for step in range(STEPS):
        engine.backward(step)
        optimizer.step()
        optimizer.zero_grad()
    scores = engine.score()
    return {"model": engine.model.state_dict(), "loss": scores[0], "accuracy": scores[1]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = DistributedEngine(plan(simulate=False))
    result = train(engine)
    if dist.get_rank() == 0:
        torch.save(result, sys.argv[1])
    engine.close()
    dist.destroy_process_group()
