"""A trainer and its readers on hosts of their own: all follow its weights over the network, to the last bit.

    sudo env "PATH=$PATH" gradwire lab --hosts 3 --bandwidth 100mbit -- python examples/published_lab.py

Or, the same on each of three machines, of which HOST is one:

    torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 published_lab.py

Rank 0 trains and publishes in bfloat16, to a store that it serves itself. The other ranks poll that store. Nothing here
is collective: a reader may begin late, or end.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from datetime import timedelta

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import TCPStore

import gradwire as gw


def build() -> nn.Module:
    """Build the network that all share."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def digest(model: nn.Module) -> str:
    """Return a digest of all weights in bfloat16."""
    total = 0
    for parameter in model.parameters():
        total = zlib.crc32(parameter.detach().bfloat16().view(torch.uint8).numpy(), total)
    return f"{total:08x}"


def train(store: TCPStore, steps: int, readers: int) -> None:
    """Train, publish each step, and serve the store until all readers have the last one."""
    model, (images, labels) = build(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    publisher = gw.WeightPublisher(model, store, dtype=torch.bfloat16)
    for step in range(steps):
        told = publisher.publish(step)
        print(
            f"trainer: step {step}, {told.patch_bytes or told.anchor_bytes} bytes, weights {digest(model)}", flush=True
        )
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(step))[:100]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        time.sleep(0.05)
    while store.add("readers", 0) < readers:
        time.sleep(0.05)


def read(store: TCPStore, rank: int, steps: int) -> None:
    """Follow to the last step."""
    model = build().bfloat16()
    subscriber = gw.WeightSubscriber(model, store)
    while subscriber.step != steps - 1:
        before = subscriber.step
        if subscriber.update() == before:
            time.sleep(0.01)
            continue
        fetched = sum(file.nbytes for file in subscriber.applied)
        print(f"reader {rank}: step {subscriber.step}, {fetched} bytes, weights {digest(model)}", flush=True)
    store.add("readers", 1)


def main() -> None:
    """Run the role of this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun's own store takes its port.
    port = int(os.environ["MASTER_PORT"]) + 1
    store = TCPStore(os.environ["MASTER_ADDR"], port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    if rank == 0:
        train(store, arguments.steps, ranks - 1)
    else:
        read(store, rank, arguments.steps)


if __name__ == "__main__":
    main()
