"""What fitted levels lose if blocks are weighted by other numbers than their share of the expected variance.

    python benchmarks/claims/block_weights.py --mnist FOLDER --json benchmarks/results/claims/block_weights.json

Unbiased rounding of a block's d values v = R r to levels l errs by R^2 sum_k (l_(j+1) - r_k) (r_k - l_j), so that a
block with the scale R weighs R^2 d in the expected variance. For Euclidean norms and blocks of one length that is the
squared norm times a constant; with the maximum as the scale, or for unlike lengths, it is not. This fits levels with
three weights of a block::

    right       R^2 d
    norms       |v|^2, the squared Euclidean norm, whatever the scale
    lengths     R^2, as if all blocks were equally long

by the library's own solver, once to a mixture of a truncated normal for each block ("normal") and once to the values
in bins ("histogram"). ``over`` is the exact expected variance of the values with these levels, over that with levels of
the same model by the right weights; ``by_model`` the same by the model's own variance. The values are two synthetic
sets, three draws each, and gradients of LeNet on MNIST and of the perceptron on digits, after 0, 50 and 200 steps.

Source: the sheet of ALQ and AMQ, "Added after trials": 2.1 to 4.6 times the attainable variance.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from benchmarks.lib.task_gradients import task_gradients
from gradwire.methods.levels.level_fitting import Distribution, Mixture, best_levels
from gradwire.methods.levels.level_statistics import Histogram, bin_edges
from gradwire.tools.experiments import tasks

BITS = (2, 3, 4)
STEPS = (0, 50, 200)
DRAWS = (0, 1, 2)
WEIGHTS = ("right", "norms", "lengths")
MODELS = ("normal", "histogram")

Row = dict[str, Any]


@dataclass(frozen=True)
class Values:
    """A vector cut into blocks: what it is, which draw or step, how it is cut and scaled, and the blocks."""

    name: str
    draw: int
    cut: str
    norm: str
    blocks: Sequence[Tensor]

    def scales(self) -> Tensor:
        """Return the norm of each block."""
        order = torch.inf if self.norm == "max" else 2
        return torch.stack([v.norm(order) for v in self.blocks])


def synthetic() -> Iterator[Values]:
    """Yield blocks of unlike shapes, of one length, and blocks of unlike lengths, alike but for their size."""
    for draw in DRAWS:
        generator = torch.Generator().manual_seed(draw)
        g = torch.randn(64, 512, generator=generator, dtype=torch.float64)
        g[::2, 7] = 60.0
        g[1::2] = 3 * g[1::2].sign() * torch.rand(32, 512, generator=generator, dtype=torch.float64)
        for norm in ("max", "l2"):
            yield Values("every other block with one large value", draw, "512", norm, list(g))
        short = 20 * torch.randn(3, 1024, generator=generator, dtype=torch.float64)
        long = torch.randn(1 << 17, generator=generator, dtype=torch.float64)
        for norm in ("max", "l2"):
            yield Values("short blocks twenty times as large", draw, "parameter", norm, [*short, long])


def trained(data: str) -> Iterator[Values]:
    """Yield gradients of two tasks, in blocks of each length, and whole parameters as blocks."""
    for name, settings in (("mnist", {"data": data}), ("digits", {})):
        task = dataclasses.replace(tasks.build(name, **settings), steps=STEPS[-1] + 1)
        sizes = [p.numel() for p in task.build_model().parameters()]
        for step, rows in task_gradients(task, dict.fromkeys(STEPS, 1), batch=32):
            whole = [part for part in rows[0].double().split(sizes) if part.numel() >= 1024 and bool(part.any())]
            for cut in ("parameter", "64", "512", "8192"):
                length = None if cut == "parameter" else int(cut)
                blocks = [b for part in whole for b in (part.split(length) if length else [part])]
                for norm in ("max", "l2"):
                    yield Values(name, step, cut, norm, [b for b in blocks if bool(b.any())])


def weights(values: Values) -> dict[str, Tensor]:
    """Return the weight of each block by each rule."""
    scales = values.scales()
    lengths = torch.tensor([v.numel() for v in values.blocks], dtype=torch.float64)
    squares = torch.stack([v.square().sum() for v in values.blocks])
    return dict(zip(WEIGHTS, (scales**2 * lengths, squares, scales**2)))


def model(kind: str, values: Values, weight: Tensor) -> Distribution:
    """Return the distribution of the values over their scales, with these weights of blocks."""
    over = [v / scale for v, scale in zip(values.blocks, values.scales())]
    if kind == "normal":
        return Mixture(torch.stack([r.mean() for r in over]), torch.stack([r.std(correction=0) for r in over]), weight)
    edges = bin_edges()
    r = torch.cat(over)
    each = torch.cat([w.expand(len(v)) / len(v) for w, v in zip(weight, over)])
    # Values of -1 and 1 are levels, which rounding does not change.
    inside = (r > -1) & (r < 1)
    index = torch.searchsorted(edges, r[inside], right=True).clamp(1, len(edges) - 1) - 1
    mass = torch.zeros(len(edges) - 1, dtype=torch.float64).index_add_(0, index, each[inside])
    return Histogram(edges, mass)


def exact(values: Values, levels: Sequence[float]) -> float:
    """Return the expected square error of unbiased rounding of the values, over their square."""
    points = torch.tensor(levels, dtype=torch.float64)
    total = 0.0
    for v, scale in zip(values.blocks, values.scales()):
        r = v / scale
        upper = torch.searchsorted(points, r, right=True).clamp(1, len(points) - 1)
        total += float(((points[upper] - r) * (r - points[upper - 1])).clamp(min=0).sum() * scale**2)
    return total / float(sum(v.square().sum() for v in values.blocks))


def measured(values: Values) -> Iterator[Row]:
    """Yield a row for each model and number of bits."""
    by_rule = weights(values)
    for kind in MODELS:
        models = {rule: model(kind, values, by_rule[rule]) for rule in WEIGHTS}
        for bits in BITS:
            fitted = {rule: best_levels(models[rule], 2**bits) for rule in WEIGHTS}
            found = {rule: exact(values, levels) for rule, levels in fitted.items()}
            told = {rule: models["right"].variance(levels) for rule, levels in fitted.items()}
            yield {
                "values": values.name, "draw": values.draw, "blocks": values.cut, "norm": values.norm, "model": kind,
                "bits": bits, "variance": found["right"],
                "over": {rule: found[rule] / found["right"] for rule in WEIGHTS[1:]},
                "by_model": {rule: told[rule] / told["right"] for rule in WEIGHTS[1:]},
            }  # fmt: skip


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return least, median and largest ratio of each rule, by values, blocks and norm, over bits, models and draws."""
    found = []
    for key in dict.fromkeys((row["values"], row["blocks"], row["norm"], row["model"]) for row in rows):
        own = [row for row in rows if (row["values"], row["blocks"], row["norm"], row["model"]) == key]
        for rule in WEIGHTS[1:]:
            entry: Row = dict(zip(("values", "blocks", "norm", "model"), key)) | {"weights": rule, "cases": len(own)}
            for field in ("over", "by_model"):
                ratios = [row[field][rule] for row in own]
                entry[field] = [min(ratios), median(ratios), max(ratios)]
            found.append(entry)
    return found


def main() -> int:
    """Fit, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True, help="folder with MNIST's four files")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for part in (synthetic(), trained(chosen.mnist)) for values in part for row in measured(values)]
    found = summary(rows)
    for row in found:
        over, by_model = (" ".join(f"{x:6.3f}" for x in row[field]) for field in ("over", "by_model"))
        where = f"{row['values']}, blocks {row['blocks']}, {row['norm']}, {row['model']}, weights: {row['weights']}"
        print(f"{where:90s} {over}   by the model {by_model}")
    write(chosen.json, summary=found, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
