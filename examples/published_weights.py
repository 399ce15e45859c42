"""A trainer and a reader: the reader follows the trainer's weights by a folder, and measures their accuracy.

    python examples/published_weights.py

Or each in a terminal, on machines that share the folder or a URL that fsspec knows:

    python examples/published_weights.py --role trainer --where published
    python examples/published_weights.py --role reader --where published

The trainer has float32 weights and publishes them in bfloat16 after every epoch; the reader has bfloat16 weights. Both
print the sum of all bytes of the weights of a step, which are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import gradwire as gw


def build() -> nn.Module:
    """Build the network that trainer and reader share."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def digest(model: nn.Module) -> str:
    """Return a digest of all weights in bfloat16."""
    weights = [p.detach().bfloat16().reshape(-1).view(torch.uint8) for _, p in sorted(model.named_parameters())]
    return hashlib.sha256(torch.cat(weights).numpy().tobytes()).hexdigest()[:12]


def train(where: str, epochs: int) -> None:
    """Train, and publish each epoch."""
    model, (images, labels) = build(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    publisher = gw.WeightPublisher(model, where, anchor_every=10, dtype=torch.bfloat16)
    for epoch in range(epochs):
        for batch in torch.randperm(1500, generator=torch.Generator().manual_seed(epoch)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        told = publisher.publish(epoch)
        changed = f"{100 * told.changed / told.elements:.0f} % changed, " if told.patch_bytes else ""
        print(
            f"trainer: step {epoch}, {changed}{told.patch_bytes or told.anchor_bytes} bytes, weights {digest(model)}",
            flush=True,
        )
        time.sleep(0.02)


def read(where: str, epochs: int) -> None:
    """Follow the weights until the last epoch, and measure their accuracy."""
    model, (images, labels) = build().bfloat16(), data()
    subscriber, step = gw.WeightSubscriber(model, where), None
    while step != epochs - 1:
        latest = subscriber.update()
        if latest == step:
            time.sleep(0.005)
            continue
        step = latest
        with torch.no_grad():
            hits = (model(images[1500:].bfloat16()).argmax(1) == labels[1500:]).float().mean()
        print(f"reader: step {step}, accuracy {hits:.3f}, weights {digest(model)}", flush=True)


def main() -> None:
    """Run one of the two, or both in two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("both", "trainer", "reader"), default="both")
    parser.add_argument("--where", help="A folder or URL; by default a temporary folder")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = arguments.where or folder
        if arguments.role == "trainer":
            train(where, arguments.epochs)
        elif arguments.role == "reader":
            read(where, arguments.epochs)
        else:
            words = [sys.executable, __file__, "--where", where, "--epochs", str(arguments.epochs)]
            with subprocess.Popen([*words, "--role", "reader"]) as reader:
                train(where, arguments.epochs)
                reader.wait(timeout=120)
            if reader.returncode:
                sys.exit(reader.returncode)


if __name__ == "__main__":
    main()
