"""TernGrad's CIFAR-10 experiment on ``docs/results.md``: whole on a GPU, and shortened on processors."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

from benchmarks.lib.page_parts import where
from benchmarks.lib.results import result

SHOWN = 5
"""Evaluations of a training that are shown beside the first, the last one among them."""


def whole() -> list[str]:
    """Describe TernGrad's CIFAR-10 table, whole."""
    found = result("claims/terngrad_whole")
    if not found:
        return []
    lines = [
        "## CIFAR-10 with Adam, the TernGrad paper's table 1, whole",
        "",
        f"{found['what']}. `python benchmarks/claims/terngrad_whole.py --data FOLDER`. {where(found)}; {found['gpu']}.",
        "",
        "| workers | total batch | seed | steps | fp32, % | TernGrad, % | difference, points | loss of fp32 | loss of TernGrad |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    runs = {(run["workers"], run["seed"], run["method"]): run for run in found["runs"]}
    for workers, seed in sorted({key[:2] for key in runs}):
        float_, ternary = (runs[workers, seed, method]["evaluations"] for method in ("fp32", "terngrad"))
        number = len(float_)
        for place in sorted({0, *(number * (i + 1) // SHOWN - 1 for i in range(SHOWN))}):
            one, other = float_[place], ternary[place]
            lines.append(
                f"| {workers} | {runs[workers, seed, 'fp32']['batch']} | {seed} | {one['step']:,} "
                f"| {100 * one['accuracy']:.2f} | {100 * other['accuracy']:.2f} "
                f"| {100 * (other['accuracy'] - one['accuracy']):+.2f} | {one['loss']:.3f} | {other['loss']:.3f} |"
            )
    last = next(line for line in found["table"] if line["workers"] == 2)
    paper_float, paper_ternary = last["paper_percent"]
    accuracy, images, off = mean(last["fp32"]), 10_000, mean(last["difference_points"])
    error = 100 * math.sqrt(accuracy * (1 - accuracy) / images)
    return [
        *lines,
        "",
        f"**After the paper's {last['paper_steps']:,} steps TernGrad ends {abs(off):.2f} points {'below' if off < 0 else 'above'} fp32** "
        f"(seeds: {len(last['seeds'])}); in the paper, with one run each, {paper_float - paper_ternary:.2f} points below ({paper_ternary} beside {paper_float} %). "
        f"{images:,} held-out images tell an accuracy to {error:.2f} points (one standard deviation). Early in the training the difference is several times "
        "as large. At the end the loss of TernGrad is the lower one. Its exchange took place in the memory of one GPU, between two workers that each had the "
        "gradient of their own half of the batch, by the codec and the kernels of the library; the first and the last exchange had the bits of a "
        "`SimulatedLink`. Convolutions and products of matrices were computed with TF32. The settings are those of the next section. Only the row of 2 workers "
        "was trained.",
        "",
    ]


def in_short() -> str | None:
    """Return a sentence on the whole training with 2 workers, for the first page."""
    found = result("claims/terngrad_whole")
    if not found:
        return None
    last = next(line for line in found["table"] if line["workers"] == 2)
    return (
        f"The TernGrad paper's ConvNet on CIFAR-10, 2 workers, all of its {last['steps']:,} steps, {len(last['seeds'])} seed: "
        f"fp32 {100 * mean(last['fp32']):.2f} %, TernGrad {100 * mean(last['terngrad']):.2f} % "
        "([its table 1](docs/results.md#cifar-10-with-adam-the-terngrad-papers-table-1-whole))."
    )


def shortened() -> list[str]:
    """Describe TernGrad's CIFAR-10 table, shortened."""
    found = result("claims/terngrad_cifar10")
    if not found:
        return []
    hours = [sum(run[key] or 0 for run in found["runs"]) / 3600 for key in ("wall_s", "cpu_s")]
    lines = [
        "## CIFAR-10 with Adam, the TernGrad paper's table 1, shortened",
        "",
        f"{found['what']}. `python benchmarks/claims/terngrad_cifar10.py --data FOLDER`. {where(found)}. The {len(found['runs'])} runs, "
        f"with one thread each, took {hours[1]:.1f} hours of processor time, in {hours[0]:.1f} hours beside other programs.",
        "",
        "| workers | total batch | weight decay | steps | fp32, % | TernGrad, % | seeds | difference, points | half way | bits | paper: steps, float, TernGrad |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found["table"]:

        def cell(name: str, row: dict[str, Any] = row) -> str:
            spread = row[f"{name}_std"]
            unit = 1 if name.startswith("difference") else 100
            text = f"{unit * row[f'{name}_mean']:{'+' if unit == 1 else ''}.2f}"
            return text + (f" ± {unit * spread:.2f}" if spread is not None else "")

        halves = [row[f"{name}_halfway_mean"] for name in ("fp32", "terngrad")]
        half = "-" if None in halves else f"{100 * (halves[1] - halves[0]):+.2f}"
        paper = "-"
        if row["paper_steps"]:
            float_, ternary = 100 * row["paper_float_accuracy"], 100 * row["paper_terngrad_accuracy"]
            paper = f"{row['paper_steps']:,}, {float_:.2f}, {ternary:.2f} ({ternary - float_:+.2f})"
        lines.append(
            f"| {row['workers']} | {row['batch']} | {row['weight_decay']:g} | {row['steps']} | {cell('fp32_accuracy')} "
            f"| {cell('terngrad_accuracy')} | {row['seeds']} | {cell('difference_points')} | {half} "
            f"| {row['bits_per_element']:.2f} | {paper} |"
        )
    of = {
        (run["method"] == "FP32()", run["workers"], run["weight_decay"], run["seed"]): run["accuracy"]
        for run in found["runs"]
    }
    seeds = [
        s for s in range(3) if all((whole, 2, decay, s) in of for whole in (True, False) for decay in (0.004, 0.001))
    ]
    gains = (
        [100 * mean(of[whole, 2, 0.001, s] - of[whole, 2, 0.004, s] for s in seeds) for whole in (False, True)]
        if seeds
        else []
    )
    below = sum(row["difference_points_mean"] < 0 for row in found["table"])
    share = found["samples"] / 38_400_000
    epochs = found["samples"] / 40_000
    return [
        *lines,
        "",
        f"**These runs are shortened.** A run sees {found['samples']:,} images ({epochs:.1f} epochs of 40,000). The paper's runs see 38.4 million (768 epochs of "
        f"50,000), which is {1 / share:.0f} times as many. The accuracies are those of a network that has only begun to learn, on images held out of the "
        "training set, and cannot be compared with the paper's. Within a row, fp32 and TernGrad can be compared.",
        "",
        f"TernGrad ends below fp32 in {below} of {len(found['table'])} rows, by several times the paper's differences, which are those of whole "
        "trainings with one run each. The column *half way* has the difference after half of the steps. These runs show what the "
        "noise costs early in a training with Adam. What remains of it at the end, the whole training above shows. With 16 workers, the mean "
        "is taken over eight times as many draws, and over twice as many samples per worker, and less is lost, as in the paper.",
        "",
        "The runs agree with the authors' programs in the network (that of TensorFlow's tutorial, with local response normalisation), crops of 24 and flips, "
        "Adam at 2e-4, weight decay of the two hidden linear layers inside the differentiated loss, an average of the weights in "
        "evaluation, and clipping at 2.5. They differ in five points: brightness and contrast are not varied; pixels are standardised by the data set's mean and "
        "deviation instead of each image's; only batches 1 to 4 of the training set are used; sigma is taken about zero; and parameters below 1024 "
        "elements (the biases) travel in float32.",
        "",
        "The second row follows the paper's advice for TernGrad on larger networks, a quarter of the weight decay. The paper changes it only for "
        "TernGrad; here both columns have it. "
        + (
            f"From the first row to the second, TernGrad gains {gains[0]:.2f} points and fp32 {gains[1]:.2f} ({len(seeds)} of the seeds). "
            if gains
            else ""
        )
        + "The paper's other advice is less dropout; this network has none.",
        "",
    ]
