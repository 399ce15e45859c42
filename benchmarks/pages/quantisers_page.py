"""``docs/quantisers.md`` and its figures, from the committed results on variance, DIANA, AQSGD and sign methods.

    python benchmarks/pages/quantisers_page.py

draws the figures; ``summarise.py`` writes the page.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.page_parts import where
from benchmarks.lib.results import ROOT, result
from benchmarks.pages import formats_page

FIGURES = ROOT / "docs" / "figures"

Found = dict[str, Any]

DATA = ("mushrooms", "a9a")
PENALTIES = (0.0, 0.005)
GOAL = 1e-10
# The authors' notebook, ResNet-8, 3 bits, 4 workers, best of 90 epochs or so.
AUTHORS = {
    64: (88.18, 88.12, 88.28, 88.13, 88.21, 87.31, 88.08),
    1024: (88.52, 88.53, 88.75, 88.38, 88.10, 87.48, 84.46),
    8192: (88.47, 88.39, 87.91, 88.00, 86.88, 86.27, 75.72),
    32768: (88.07, 88.19, 86.57, 86.54, 83.84, 84.88, 73.33),
}
AQSGD = ("ALQ", "ALQ-N", "AMQ", "AMQ-N", "QSGDinf", "TernGrad", "NUQSGD")
SIGNS = {
    "fp32": "fp32",
    "terngrad": "TernGrad",
    "ef_signsgd": "EF-signSGD",
    "onebit": "1-bit SGD",
    "scaledsign": "ScaledSign",
    "signsgd": "signSGD",
    "signum": "Signum",
    "fp32 on SGD": "fp32, on SGD",
    "ef_signsgd on SGD": "EF-signSGD, on SGD",
}


def variance() -> list[str]:
    """Describe the variances."""
    found = result("claims/variance")
    if not found:
        return []
    gaussian = [row for row in found["rows"] if row["vector"] == "Gaussian"]
    real = [row for row in found["rows"] if row["vector"] != "Gaussian"]
    worst = {name: 100 * max(abs(r["deviation"]) for r in rows) for name, rows in (("g", gaussian), ("r", real))}
    outside = sum(not row["within_3_percent"] for row in found["rows"])
    rounding = max(row["rounding_of_expected"] for row in gaussian)
    missed = [
        f"`{row['spec']}` {100 * row['deviation']:+.1f} % ({row['vector']})"
        for row in found["rows"]
        if abs(row["deviation"]) > 0.01 + row["rounding_of_expected"]
    ]
    lines = [
        "## Variance",
        "",
        f"`python benchmarks/claims/variance.py --json benchmarks/results/claims/variance.json`. {where(found)}.",
        "",
        "The table shows the relative variance E|Q(v) - v|^2 / |v|^2 for Gaussian blocks: the measured value, and in brackets the value "
        "of the papers' formulas.",
        "",
        f"- The {len(gaussian)} entries for Gaussian blocks deviate from the formulas by at most {worst['g']:.1f} %. Rounding an entry to two digits may "
        f"account for up to {100 * rounding:.1f} %.",
        f"- On a gradient of the `text` task ({found['numel_text']:,} elements, after {found['text_steps']} steps), {len(real)} entries deviate from the exact "
        f"formula for the same blocks by at most {worst['r']:.1f} %.",
        f"- Entries that deviate by more than 3 % and the rounding: {outside or 'none'}. By more than 1 % and the rounding: {', '.join(missed) or 'none'}.",
        "- Samples are finite. The mean of the squared maxima of 256 blocks of 8192 has a deviation of 1.0 %. ALQ's outermost levels of "
        "such blocks make up a twelfth of its variance and are drawn about fifteen times, which is a deviation of 2 % of the whole.",
        "",
        "| Gaussian blocks of | " + " | ".join(str(size) for size in (128, 512, 1024, 8192)) + " |",
        "|---|" + 4 * "---:|",
    ]
    table: dict[str, dict[str, str]] = {}
    for row in gaussian:
        name, size = row["spec"].split("block_size=")
        size = size.rstrip(")").split(",")[0]
        table.setdefault(name.rstrip(", ("), {})[size] = f"{row['measured']:.3g} ({row['written']})"
    for name, entries in table.items():
        spec = f"{name})" if "(" in name else name
        lines.append(f"| `{spec}` | " + " | ".join(entries.get(str(s), "-") for s in (128, 512, 1024, 8192)) + " |")
    return [*lines, ""]


def vnmse() -> list[str]:
    """Describe the errors of all quantisers at the bits that they take."""
    found = result("claims/vnmse")
    if not found:
        return []
    rows = sorted(found["rows"], key=lambda row: row["bits"])
    off = [abs(row[kind] / row["expected"] - 1) for row in rows if row["expected"] for kind in ("normal", "lognormal")]
    lines = [
        "## Error by bits",
        "",
        f"`python benchmarks/claims/vnmse.py --json benchmarks/results/claims/vnmse.json`. {where(found)}.",
        "",
        f"The error is E|Q(x) - x|^2 / |x|^2 of {found['numel']:,} values for one worker, the mean of {found['rounds']} draws. The bits are those of a "
        "whole payload.",
        "",
        "- Rotated blocks (EDEN, DRIVE, QUICFL) have the error that is derived for normal values, whatever the vector: the "
        f"largest deviation is {100 * max(off):.1f} %.",
        "- The last column compares EDEN with the least distortion that is possible. No code of R bits for normal values has, with the best "
        "scale, a distortion D below 2^(-2R). The column shows in dB how far above this bound D = e / (1 + e) is, where e is the error "
        "without a bias. Fine, evenly spaced levels with a coder are 1.53 dB above the bound; the payload's scales and tables add the rest.",
        "- A coder saves less on the levels that have the least error for their number than on evenly spaced ones.",
        "- Biased methods (TernGrad with a clip, signs, DRIVE with the least error) leave out a part of the vector in every round, "
        "so their errors cannot be compared with those of unbiased methods.",
        "",
        "| method | bits | normal | lognormal | derived | dB above 2^(-2R) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        derived = f"{row['expected']:.3g}" if row["expected"] else "-"
        above = "-"
        if row["spec"].startswith(("EDEN", "Coded(compressor=EDEN")):
            above = f"{10 * math.log10(row['normal'] / (1 + row['normal']) * 4 ** row['bits']):.2f}"
        lines.append(
            f"| `{row['spec']}` | {row['bits']:.2f} | {row['normal']:.3g} | {row['lognormal']:.3g} | {derived} | {above} |"
        )
    return [*lines, ""]


def gap_codes() -> list[str]:
    """Describe the bits that positions take."""
    found = result("speed/gap_codes")
    if not found:
        return []
    lines = [
        "## Positions of the largest elements",
        "",
        "`python benchmarks/speed/gap_codes.py --mnist FOLDER --cifar10 FOLDER --json benchmarks/results/speed/gap_codes.json`. "
        f"{where(found)}.",
        "",
        f"The table shows the bits of a position in payloads of `ErrorFeedback(TopK(density))` for 4 workers, in every tenth of {found['steps']} steps.",
        "",
        "- *Packed* is without a coder, and *rANS* and *Huffman* are with that coder. *Sent* is what `Coded` sends with the better of the two; it chooses for each "
        "payload whether to code.",
        "- *Entropy* is the entropy of the gaps' symbols and the bits beside them, without a table. *Random* is log2 of the number of "
        "ways to choose as many positions.",
        "- Real positions lie in clusters and need fewer bits than random ones. A coder saves bits if there are thousands of positions; for a "
        "few hundred, its table takes more than it saves.",
        "",
        "| positions of | elements | density | packed | rANS | Huffman | sent | saved, % | entropy | random |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        bits = " | ".join(f"{row[f'{key}_bits']:.2f}" for key in ("packed", "rans", "huffman", "sent"))
        saved = 100 * (1 - row["sent_bits"] / row["packed_bits"])
        lines.append(
            f"| {row['positions_of']} | {row['numel']:,} | {row['density']:g} | {bits} | {saved:.1f} | "
            f"{row['entropy_bits']:.2f} | {row['random_bits']:.2f} |"
        )
    return [*lines, ""]


def diana() -> list[str]:
    """Describe DIANA's descent."""
    found = result("claims/diana")
    if not found:
        return []
    cell = {(row["data"], row["l1"], row["method"]): row for row in found["rows"]}
    columns = [(data, l1) for l1 in PENALTIES for data in DATA]

    def reached(row: Found) -> str:
        steps = row["steps_to_goal"]
        return f"{steps:,}".replace(",", " ") if steps else f"not in {row['steps']:,}".replace(",", " ")

    def plateau(row: Found) -> str:
        bound = row["plateau_bound_sq"]
        return f"{row['plateau_sq']:.2g}" + (f" (bound {bound:.2g})" if bound else "")

    def support(row: Found) -> str:
        return f"{row['support']}" + (", the same" if row["l1"] and row["support_is_the_optimums"] else "")

    wanted = [
        ("DIANA, p = inf", f"steps to {GOAL:g}", reached),
        ("DIANA, p = inf", "at the end", lambda row: f"{row['final_sq']:.1e}"),
        ("DIANA, p = 2", f"steps to {GOAL:g}", reached),
        ("DIANA, p = 2", "at the end", lambda row: f"{row['final_sq']:.1e}"),
        ("DQGD, p = inf", "plateau", plateau),
        ("QSGD, p = 2", "plateau", plateau),
        ("TernGrad", "plateau", plateau),
        ("fp32", "at the end", lambda row: f"{row['final_sq']:.1e}"),
        ("DIANA, p = inf", "non-zeros", support),
        ("DQGD, p = inf", "non-zeros", support),
        ("TernGrad", "non-zeros", support),
    ]
    lines = [
        "## DIANA, DQGD, QSGD, TernGrad on logistic regression",
        "",
        "`python benchmarks/claims/diana_convergence.py --data a9a.txt --data mushrooms.txt --json benchmarks/results/claims/diana.json`. "
        f"{where(found)}.",
        "",
        f"{found['workers']} workers train with full gradients, l2 = 0.01, blocks of 32, and the step sizes of the theory. Rows are dealt out by label, "
        "so most workers see only one label. The figures are squared distances to the optimum. DIANA and fp32 run for 12 000 steps from "
        "zero, the other methods for 3000 steps from the optimum.",
        "",
        "![Squared distance to the optimum](figures/diana.png)",
        "",
        "| | | " + " | ".join(data + (f", l1 = {l1:g}" if l1 else "") for data, l1 in columns) + " |",
        "|---|---|" + len(columns) * "---:|",
    ]
    for method, what, show in wanted:
        lines.append(f"| {method} | {what} | " + " | ".join(show(cell[(*c, method)]) for c in columns) + " |")
    optima = " | ".join(str(cell[(*c, "fp32")]["optimum_support"]) for c in columns)
    return [
        *lines,
        f"| scikit-learn (saga) | non-zeros | {optima} |",
        "",
        "- DIANA converges linearly until rounding stops it. Gradients travel in float32, which stops fp32 as well. The mean of the "
        "differences also travels in float32, so the mean of all shifts, which is updated by it, drifts slightly away from the mean of the workers' own "
        "shifts; on a9a this leaves the distance of 1e-12.",
        "- With p = 2, omega is twice that of p = inf, and theory allows only smaller steps.",
        *predicted(cell),
        "- The plateaus lie well below their bounds, which assume the worst case of omega.",
        "- With l1, only DIANA, whose noise vanishes, ends with the non-zeros of the reference solution.",
        "",
    ]


def predicted(cell: dict[tuple[str, float, str], Found]) -> list[str]:
    """Describe in how many steps exact gradients reach the goal with DIANA's step sizes, beside what DIANA took."""
    found = result("claims/diana_steps")
    if not found:
        return []
    told = []
    for row in found["rows"]:
        measured = cell[row["data"], row["l1"], row["method"]]
        steps = f"{row['steps_to_goal']:,}".replace(",", " ")
        took = measured["steps_to_goal"]
        if took:
            beside = f"DIANA took {took:,}".replace(",", " ")
        else:
            step = measured["steps"]
            beside = (
                f"after {step:,} at {row['distances_sq'][str(step)]:.1e}; DIANA is at {measured['final_sq']:.1e} there"
            ).replace(",", " ")
        penalty = f", l1 = {row['l1']:g}" if row["l1"] else ""
        told.append(f"{row['data']}{penalty}, {row['method'].removeprefix('DIANA, ')}: {steps} steps ({beside})")
    return [
        f"- Theory predicts for DIANA, whose noise vanishes, the steps that exact gradients with the same step sizes need to reach {found['goal']:g} "
        f"(`python benchmarks/claims/diana_steps.py --data a9a.txt --data mushrooms.txt`): {'; '.join(told)}. DIANA with p = 2 on "
        "mushrooms thus converges as predicted, and 12 000 steps are too few to reach the goal."
    ]


def aqsgd() -> list[str]:
    """Describe the AQSGD comparison."""
    found = result("claims/cifar_levels")
    if not found:
        return []
    cell = {(row["method"], row["block_size"]): row for row in found["table"]}

    def show(row: Found | None) -> str:
        if row is None:
            return "-"
        mean = f"{100 * row['accuracy_mean']:.1f}"
        return mean if row["seeds"] < 2 else f"{mean} ± {100 * row['accuracy_std']:.1f}"

    def table(cells: dict[int, list[str]]) -> list[str]:
        head = ["| block size | " + " | ".join(AQSGD) + " |", "|---:|" + len(AQSGD) * "---:|"]
        return head + [f"| {size} | " + " | ".join(row) + " |" for size, row in cells.items()]

    whole = show(cell.get(("fp32", 0)))
    return [
        "## The AQSGD comparison",
        "",
        f"`python benchmarks/claims/cifar_levels.py --data FOLDER --json benchmarks/results/claims/cifar_levels.json`. {where(found)}.",
        "",
        f"{found['what']}: five epochs with 3 bits, whole-network blocks, and every parameter compressed. The table shows accuracies in %; ± is the "
        f"standard deviation over two seeds, and an entry without it has one seed. fp32 has {whole}. TernGrad is "
        '`QSGDinf(levels=1, blocks="model")` here: each worker has its own scaler for a block, and nothing is clipped.',
        "",
        *table({s: [show(cell.get((m, s))) for m in AQSGD] for s in sorted(AUTHORS)}),
        "",
        "![Accuracy over block size](figures/cifar_levels.png)",
        "",
        "The authors' accuracies at the end of training (Faghri et al., NeurIPS 2020, notebook):",
        "",
        *table({s: [f"{x:.1f}" for x in row] for s, row in AUTHORS.items()}),
        "",
        *aqsgd_text(cell),
        "",
    ]


def aqsgd_text(cell: dict[tuple[str, int], Found]) -> list[str]:
    """Describe what the table shows, in numbers of its own."""
    ends = {m: [cell.get((m, size)) for size in (64, 32768)] for m in AQSGD}
    if any(row is None for rows in ends.values() for row in rows):
        return []
    low, high = min(AUTHORS), max(AUTHORS)
    at = {(m, s): 100 * cell[m, s]["accuracy_mean"] for m in AQSGD for s in (low, high)}
    drop = {m: at[m, low] - at[m, high] for m in AQSGD}
    below = at["ALQ", high] - at["NUQSGD", high]
    return [
        f"From blocks of {low} to blocks of {high}, ALQ loses {drop['ALQ']:.1f} points (0.1 in the authors' table), AMQ {drop['AMQ']:.1f} (1.7), "
        f"QSGDinf {drop['QSGDinf']:.1f} (4.4), TernGrad {drop['TernGrad']:.1f} (2.4), and NUQSGD {drop['NUQSGD']:.1f} (14.8). With blocks of {high}, "
        f"NUQSGD lies {below:.1f} points below ALQ (14.7), and QSGDinf {at['ALQ', high] - at['QSGDinf', high]:.1f} below ALQ (4.2) and {at['ALQ-N', high] - at['QSGDinf', high]:.1f} below "
        "ALQ-N. The tables have the same shape, except for the order of the adaptive methods. The differences and their causes:",
        "",
        "- Runs have five epochs instead of a whole training. All accuracies are 16 points lower, and methods that noise slows down have no time to "
        "catch up, so NUQSGD and TernGrad differ more from the others at large blocks.",
        *zero(high),
        "- Runs with different seeds differ by about a point (see ±), which is as much as most of these methods differ from each other up to "
        "blocks of 8192.",
        *fits(low, high),
    ]


def zero(block_size: int) -> list[str]:
    """Describe what a level at zero does for QSGDinf."""
    found = result("claims/zero_level")
    if not found:
        return []
    rows = [row for row in found["rows"] if row["block_size"] == block_size]
    pairs = ", ".join(f"{r['without_zero']:.2g} and {r['with_zero']:.2g} (step {r['step']})" for r in rows)
    return [
        "- QSGDinf has seven levels with a zero here, and eight levels without one in the authors' program. Whole-network blocks mix layers of very "
        "different scale, so most values are far below the maximum, and without a zero each of them adds (R/7)^2 to the variance. The variance of this "
        f"network's gradient in blocks of {block_size}, without and with a zero, is {pairs} times its square "
        "(`python benchmarks/claims/zero_level.py --data FOLDER`). Therefore QSGDinf loses more in the authors' table. Here it loses less than ALQ "
        "and AMQ suggest, whose levels have no zero here either, as in the authors' program.",
    ]


def fits(low: int, high: int) -> list[str]:
    """Describe how far gradients are from the normals that levels are fitted to, and the alternative."""
    found = result("claims/fitted_levels")
    if not found:
        return []

    def of(method: str, model: str, block_size: int, kind: str) -> list[float]:
        wanted = (method, model, block_size)
        return [r[kind] for r in found["rows"] if (r["method"], r["model"], r["block_size"]) == wanted]

    def told(method: str, model: str, block_size: int, kind: str = "fresh") -> str:
        values = of(method, model, block_size, kind)
        return f"{min(values):.2g} to {max(values):.2g}" if values else "-"

    def older(model: str) -> float:
        pairs = [zip(of(m, model, high, "in_use"), of(m, model, high, "fresh")) for m in ("ALQ", "AMQ")]
        return max(use / new for pair in pairs for use, new in pair)

    sizes = sorted({row["block_size"] for row in found["rows"]})
    names = {
        "normal": "the best of the normal model",
        "normal, authors' solver": "the normal model, by the authors' solver",
        "published": "published, ResNet-32, blocks of 8192",
        "histogram": "the best of the histogram",
    }
    lines = [
        "| levels of | "
        + " | ".join(f"blocks of {s}" for s in sizes)
        + f" | if values were normal, blocks of {high} |",
        "|---|" + (len(sizes) + 1) * "---:|",
    ]
    for method, label in (("ALQ", "ALQ"), ("ALQN", "ALQ-N"), ("AMQ", "AMQ"), ("AMQN", "AMQ-N")):
        for model, name in names.items():
            if of(method, model, high, "fresh"):
                cells = [told(method, model, s) for s in sizes] + [told(method, model, high, "fresh_if_normal")]
                lines.append(f"| {label}, {name} | " + " | ".join(cells) + " |")
    return [
        f"- With blocks of {high}, ALQ and ALQ-N lie below AMQ here, and above AMQ in the authors' table. The levels here are the optimum of the authors' "
        "objective; their published levels are not, since their solver stops early. Its gradient steps have the rate 1. The first step moves the level next "
        "to 1 so far out that the normal model has almost no values there; the gradient is then too small to move it back. By accident, such levels suit gradients, "
        f"whose tails are heavier than those of a normal distribution. This network's {-(-found['elements'] // high)} blocks of {high} mix layers and are far from normal, so the "
        "optimum of the model has a larger variance for them than the levels at which the authors' solver stops. AMQ's levels, the powers of a ratio, suit heavy tails by their form. Levels fitted to a "
        'histogram of the values (`model="histogram"`) depend neither on the model nor on the solver. The table shows the exact variance of the gradients with levels fitted to these '
        "very gradients, in units of their squares, from the smallest to the largest at "
        f"{len({row['step'] for row in found['rows']})} steps from 0 to {max(row['step'] for row in found['rows'])} (`python benchmarks/claims/fitted_levels.py --data FOLDER`, {where(found)}):",
        "",
        *(f"  {line}" for line in lines),
        "",
        f"  Levels from the last update, at steps 0, 100 and 1000, have up to {older('normal'):.2f} times the variance of freshly fitted ones under the normal model, and up to {older('histogram'):.2f} "
        f"times under the histogram, since levels that are fitted to measured values age with them. The largest variance in use of ALQ with the histogram is {max(of('ALQ', 'histogram', high, 'in_use')):.2g}. "
        "The accuracies above are of the normal model, from runs in which a block's weight was its squared norm, whatever its length, so that the last, shorter block weighed too "
        f"much. With blocks of {low}, the two models and weights differ by little.",
    ]


def signs() -> list[str]:
    """Describe the sign methods."""
    found = result("claims/signs")
    if not found:
        return []
    lines = [
        "## Sign methods",
        "",
        f"`python benchmarks/claims/signs.py --mnist FOLDER --json benchmarks/results/claims/signs.json`. {where(found)}.",
        "",
        "Runs have 4 simulated workers. The task `mnist` is LeNet for 3000 steps of SGD with momentum 0.9. The task `text` is a GRU on bytes for 600 steps of Adam, "
        "or of SGD with momentum 0.9 in the rows that say so. signSGD and Signum use SGD without momentum. A learning rate in the table is the best "
        "of several, by the accuracy of seed 0. 1-bit SGD begins with 5 % of its steps in float32. ± is over two seeds. Bytes are those that one worker sent.",
        "",
        "| task | method | learning rate | accuracy, % | loss | sent, MB | bits an element |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.2f}"
        rate = "task's" if row.get("learning_rate") is None else f"{row['learning_rate']:g}"
        lines.append(
            f"| {row['task']} | {SIGNS[row['method']]} | {rate} | {100 * row['accuracy_mean']:.2f}{spread} | {row['loss_mean']:.3f} "
            f"| {row['sent_bytes_mean'] / 1e6:.0f} | {row['bits_per_element']:.2f} |"
        )
    tried = "; ".join(
        f"{task}, {SIGNS[method]}: "
        + ", ".join(
            f"{r['learning_rate']:g}: {100 * r['accuracy']:.1f} %"
            for r in found["tried"]
            if (r["task"], r["method"]) == (task, method)
        )
        for task, method in dict.fromkeys((r["task"], r["method"]) for r in found.get("tried", ()))
    )
    return [
        *lines,
        "",
        *(
            [
                f"These learning rates were tried; the accuracies are those of seed 0: {tried}. On MNIST, EF-signSGD diverges at 0.08. "
                "The rates of the other methods were not chosen in this way, so the higher accuracy of EF-signSGD than of fp32 on MNIST does not show that signs are better. On text, EF-signSGD stays far "
                "below fp32 at all rates tried here, with Adam and with SGD, and below the scaled sign without feedback. All of these optimizers have a momentum, and the residual of EF-signSGD is long, as the next sections show.",
                "",
            ]
            if tried
            else []
        ),
    ]


def losses() -> list[str]:
    """Describe what signs lose of gradients, and how long residuals grow."""
    found = result("claims/sign_residuals")
    if not found:
        return []
    lost = [row for row in found["rows"] if "lost" in row]
    sizes = list(dict.fromkeys(row["block_size"] for row in lost))

    def of(row: Found) -> str:
        return f"{row['spec']}, momentum {row['momentum']:g}, rate {row['lr']:g}"

    def span(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}" if values else "-"

    residuals: dict[str, dict[int, list[float]]] = {}
    accuracy = {of(row): row["accuracy"] for row in found["rows"] if "accuracy" in row}
    for row in found["rows"]:
        if "residual_over_gradient" in row:
            residuals.setdefault(of(row), {}).setdefault(row["step"], []).append(row["residual_over_gradient"])
    steps = sorted({row["step"] for row in lost})
    return [
        "## What signs lose",
        "",
        f"`python benchmarks/claims/sign_residuals.py --json benchmarks/results/claims/sign_residuals.json`. {where(found)}.",
        "",
        f"The task is `text`, trained by SGD on {found['workers']} simulated workers for {found['steps']} steps with one seed. The table shows the share of the gradient's "
        "square that the scaled sign loses: the least and the most of all compressed parameters of worker 0, in a float32 training with momentum 0.9 and "
        "rate 0.3. A Gaussian vector loses 0.36.",
        "",
        "| scale of | " + " | ".join(f"step {step}" for step in steps) + " |",
        "|---|" + len(steps) * "---:|",
        *(
            f"| {'a parameter' if size is None else f'{size} elements'} | "
            + " | ".join(
                span([r["lost"] for r in lost if (r["step"], r["block_size"]) == (step, size)]) for step in steps
            )
            + " |"
            for size in sizes
        ),
        "",
        "The next table shows the length of the residual divided by the length of the gradient, or of the momentum if that is applied before compression: the "
        "least and the most of all compressed parameters.",
        "",
        "| training | " + " | ".join(f"step {step}" for step in steps) + " | accuracy, % |",
        "|---|" + (len(steps) + 1) * "---:|",
        *(
            f"| {name} | "
            + " | ".join(span(by_step.get(step, [])) for step in steps)
            + f" | {100 * accuracy[name]:.1f} |"
            for name, by_step in residuals.items()
        ),
        "",
        "A link's warning considers both the age of a residual and the cosine: see [what a link warns of](methods/feedback.md#what-a-link-warns-of).",
        "",
    ]


def momentum() -> list[str]:
    """Describe sign methods with a momentum after the exchange, before compression, and without."""
    found = result("claims/sign_momentum")
    if not found:
        return []
    lines = [
        "## Signs and momentum",
        "",
        f"`python benchmarks/claims/sign_momentum.py --json benchmarks/results/claims/sign_momentum.json`. {where(found)}.",
        "",
        "Runs use SGD on 4 simulated workers, for as many steps as the table shows. The optimizer applies its momentum after the exchange; each worker applies a momentum in "
        "the method's spec before compression. 1-bit SGD begins with 5 % of its steps in float32. ± is over two seeds.",
        "",
        "| task | method | optimizer's momentum | learning rate | steps | accuracy, % | loss | bits an element |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.2f}"
        lines.append(
            f"| {row['task']} | `{row['method']}` | {row['momentum']:g} | {row['learning_rate']:g} | {row['steps']} "
            f"| {100 * row['accuracy_mean']:.2f}{spread} | {row['loss_mean']:.3f} | {row['bits_per_element']:.2f} |"
        )
    return [*lines, ""]


def page() -> str:
    """Return the page's text."""
    lines = [
        "# Measurements of the quantisers",
        "",
        "This page is generated by `python benchmarks/pages/summarise.py` from `benchmarks/results/`. [Benchmarks](benchmarks.md) has the "
        "steps on slow links, and [Entropy coders](coders.md) has the coders.",
        "",
        *[
            line
            for part in (variance, vnmse, formats_page.section, gap_codes, diana, aqsgd, signs, losses, momentum)
            for line in part()
        ],
    ]
    return "\n".join(lines).rstrip() + "\n"


def draw() -> None:
    """Draw both figures."""
    from matplotlib.figure import Figure

    FIGURES.mkdir(parents=True, exist_ok=True)
    found = result("claims/cifar_levels")
    if found:
        figure = Figure(figsize=(5.4, 3.9), layout="constrained")
        axes = figure.subplots()
        for name in AQSGD:
            rows = sorted((r for r in found["table"] if r["method"] == name), key=lambda r: r["block_size"])
            axes.errorbar(
                [r["block_size"] for r in rows],
                [100 * r["accuracy_mean"] for r in rows],
                [100 * (r["accuracy_std"] or 0.0) for r in rows],
                marker="o",
                capsize=3,
                label=name,
            )
        whole = next(r for r in found["table"] if r["method"] == "fp32")
        axes.axhline(100 * whole["accuracy_mean"], color="black", linestyle="--", linewidth=1, label="fp32")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(AUTHORS), [str(size) for size in sorted(AUTHORS)])
        axes.set(xlabel="block size, elements", ylabel="accuracy after five epochs, %")
        axes.legend(ncols=2, fontsize=9)
        axes.grid(alpha=0.3)
        figure.savefig(FIGURES / "cifar_levels.png", dpi=150)
    found = result("claims/diana")
    if found:
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        for axes, data in zip(figure.subplots(1, 2, sharey=True), DATA):
            for row in (r for r in found["rows"] if r["data"] == data and r["l1"] == 0.0):
                distances = row["distances_sq"]
                every = row["steps"] / (len(distances) - 1)
                axes.plot([i * every for i in range(len(distances))], distances, label=row["method"])
            axes.set_yscale("log")
            axes.set(title=data, xlabel="step")
            axes.locator_params(axis="x", nbins=4)
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("squared distance to the optimum")
        figure.axes[1].legend(fontsize=8)
        figure.savefig(FIGURES / "diana.png", dpi=150)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw()
