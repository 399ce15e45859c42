"""Dropout, clipping and the last layer under TernGrad: the settings of its ImageNet tables, on a small network.

    python benchmarks/claims/terngrad_dropout.py --data FOLDER --json FILE

FOLDER holds CIFAR-10's binary batches. Wen et al., NeurIPS 2017, section 5.2, train AlexNet with a dropout of 0.5 by
float32, and of 0.2 by TernGrad, since the noise of ternary gradients regularises as well; they clip gradients, and
leave the last layer in float32. Here a network of AlexNet's form (three convolutions, two hidden linear layers with
dropout before each) is trained on the 10,000 images of the first batch by four simulated workers with 64 images each,
for so long that it overfits. Every cell of dropout (0, 0.2, 0.5) and exchange (float32, TernGrad as by default, with
the last layer in float32, without clipping) is trained at three learning rates from the first seed; the rate with the
best accuracy on 5000 images of the fourth batch is trained from two more seeds. The table has the accuracy on the fifth
batch. Rows that are in the file already are kept, so that the program may be stopped and started again.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import earlier, write
from gradwire.tools.experiments.tasks.readers import find_file, read_cifar10

WORKERS, BATCH, UPDATES, HELD_OUT = 4, 64, 1200, 5000
MOMENTUM, DECAY = 0.9, 5e-4
RATES, SEEDS, DROPOUTS = (0.02, 0.05, 0.1), (0, 1, 2), (0.0, 0.2, 0.5)
LAST = "13.*"
EXCHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("FP32()", ()),
    "TernGrad": ("TernGrad()", ()),
    "TernGrad, last layer in float32": ("TernGrad()", (LAST,)),
    "TernGrad without clipping": ("TernGrad(clip=None)", ()),
}
"""Name, spec, and patterns of the parameters that stay in float32."""

Row = dict[str, Any]
Images = tuple[torch.Tensor, torch.Tensor]


def network(dropout: float) -> nn.Sequential:
    """Build three convolutions, two hidden linear layers with dropout before each, and the last layer."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(1024, 384), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(384, 192), nn.ReLU(),
        nn.Linear(192, 10),
    )  # fmt: skip


def images(folder: Path) -> tuple[Images, Images, Images]:
    """Read the training, validation and test images; pixels have mean 0 and deviation 1 over the training images."""
    read = [read_cifar10(find_file(folder, f"data_batch_{number}", (".bin", ".bin.xz"))) for number in (1, 4, 5)]
    x = read[0][0].float()
    centre, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    train, valid, test = (((part.float() - centre) / deviation, labels) for part, labels in read)
    return train, (valid[0][:HELD_OUT], valid[1][:HELD_OUT]), test


def accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of right answers, without dropout."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(data[0].split(1000), data[1].split(1000)))
    return right / len(data[1])


def train(exchange: str, dropout: float, rate: float, seed: int, data: tuple[Images, Images, Images]) -> Row:
    """Train once; return its row."""
    (x, y), valid, test = data
    spec, exclude = EXCHANGES[exchange]
    torch.manual_seed(seed)
    model = network(dropout)
    parameters = list(model.parameters())
    link = gw.SimulatedLink(list(model.named_parameters()), spec, WORKERS, seed=seed, exclude=exclude)
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    draw, started, losses = torch.Generator().manual_seed(seed), time.process_time(), []
    sizes = [p.numel() for p in parameters]
    for _ in range(UPDATES):
        model.train()
        rows = []
        for chosen in torch.randint(len(x), (WORKERS, BATCH), generator=draw):
            loss = cross_entropy(model(x[chosen]), y[chosen])
            rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
            losses.append(float(loss.detach()))
        for p, part in zip(parameters, link.reduce_(torch.stack(rows)).split(sizes)):
            p.grad = part.view_as(p)
        optimizer.step()
        schedule.step()
    return {
        "exchange": exchange,
        "spec": repr(link.method),
        "dropout": dropout,
        "lr": rate,
        "seed": seed,
        "train_loss": mean(losses[-WORKERS * UPDATES // 10 :]),
        "validation": accuracy(model, valid),
        "accuracy": accuracy(model, test),
        "bits_per_element": link.traffic().bits_per_element,
        "cpu_s": round(time.process_time() - started, 1),
    }


def best_rate(rows: list[Row], exchange: str, dropout: float) -> float | None:
    """Return the rate with the best validation accuracy from the first seed; None before all have ended."""
    tried = [r for r in rows if (r["exchange"], r["dropout"], r["seed"]) == (exchange, dropout, SEEDS[0])]
    return max(tried, key=lambda r: r["validation"])["lr"] if len(tried) == len(RATES) else None


def table(rows: list[Row]) -> list[Row]:
    """Return the cells whose rate is known, over the seeds that have ended."""
    cells = []
    for exchange, dropout in product(EXCHANGES, DROPOUTS):
        rate = best_rate(rows, exchange, dropout)
        its = [r for r in rows if (r["exchange"], r["dropout"], r["lr"]) == (exchange, dropout, rate)]
        if its:
            found = [r["accuracy"] for r in its]
            cells.append(
                {
                    "exchange": exchange,
                    "dropout": dropout,
                    "lr": rate,
                    "seeds": len(its),
                    "accuracy_mean": mean(found),
                    "accuracy_std": stdev(found) if len(found) > 1 else None,
                    "train_loss_mean": mean(r["train_loss"] for r in its),
                    "bits_per_element": its[0]["bits_per_element"],
                }
            )
    return cells


def main() -> int:
    """Train what is not in the file yet, print the table, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's data batches")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = images(arguments.data), earlier(arguments.json, "rows")
    settings = {"workers": WORKERS, "batch": BATCH, "updates": UPDATES, "momentum": MOMENTUM, "weight_decay": DECAY}

    def ensure(exchange: str, dropout: float, rate: float, seed: int) -> None:
        wanted = (exchange, dropout, rate, seed)
        if not any((r["exchange"], r["dropout"], r["lr"], r["seed"]) == wanted for r in rows):
            rows.append(train(*wanted, data))
            print({k: v for k, v in rows[-1].items() if k != "spec"}, flush=True)
            write(arguments.json, settings=settings, table=table(rows), rows=rows)

    for rate, exchange, dropout in product(RATES, EXCHANGES, DROPOUTS):
        ensure(exchange, dropout, rate, SEEDS[0])
    for seed, exchange, dropout in product(SEEDS[1:], EXCHANGES, DROPOUTS):
        ensure(exchange, dropout, best_rate(rows, exchange, dropout) or RATES[0], seed)
    for cell in table(rows):
        spread = f"{100 * cell['accuracy_std']:.2f}" if cell["accuracy_std"] is not None else "-"
        print(f"{cell['exchange']:32s} {cell['dropout']:.1f}  {100 * cell['accuracy_mean']:.2f} ± {spread} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
