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
        "Relative variance E|Q(v) - v|^2 / |v|^2. Gaussian blocks: measured over the tables derived from the papers' formulas, "
        f"{len(gaussian)} entries, largest deviation {worst['g']:.1f} %, of which the rounding of an entry to two digits may be up to {100 * rounding:.1f} %. A gradient of the `text` "
        f"task ({found['numel_text']:,} elements, after {found['text_steps']} steps): measured over the exact formula of the "
        f"same blocks, {len(real)} entries, largest deviation {worst['r']:.1f} %. Outside of 3 % and the rounding: {outside or 'none'}; "
        f"outside of 1 % and the rounding: {', '.join(missed) or 'none'}. Samples are finite: the squared maxima of 256 blocks of "
        "8192 have a mean with a deviation of 1.0 %, and ALQ's outermost levels of such blocks, a twelfth of its variance, are drawn about "
        "fifteen times, which is a deviation of 2 % of the whole.",
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
    return [*lines, "", "Measured, and in brackets what the formula gives.", ""]


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
        f"E|Q(x) - x|^2 / |x|^2 of {found['numel']:,} values, one worker, mean of {found['rounds']} draws; bits are those of a "
        "whole payload. Rotated blocks (EDEN, DRIVE, QUICFL) err as is derived for normal values, whatever the vector: "
        f"largest deviation {100 * max(off):.1f} %. Of normal values no code of R bits leaves a distortion D, with the best "
        "scale, below 2^(-2R); in dB, how far above it D = e / (1 + e) is, e the error without a bias. Evenly spaced levels "
        "behind a coder are 1.53 dB above it where they are fine, and the payload's scales and tables cost the rest. A coder "
        "makes less of the levels with the least error for their number than of these. Biased methods (TernGrad with a clip, signs, DRIVE with the least error) "
        "leave out a part of the vector in every round, so that their numbers do not compare with the others'.",
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
        f"Bits of a position in payloads of `ErrorFeedback(TopK(density))`, 4 workers, every tenth of {found['steps']} steps: "
        "packed without a coder, by either coder, and as `Coded` sends them by the better one, which chooses for each payload. "
        "Entropy is that of the gaps' symbols and the bits beside them, without a table; random is log2 of the number of ways to "
        "choose so many positions. Real positions lie in clusters, below what random ones need. A coder gains where there are "
        "thousands of them: of a few hundred, its table takes more than it saves.",
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
        f"{found['workers']} workers, rows by label (so most see one label only), full gradients, l2 = 0.01, blocks of 32, step "
        "sizes of the theory. Squared distance to the optimum; 12 000 steps for DIANA and fp32 from zero, 3000 for the others, "
        "from the optimum.",
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
        "DIANA goes on linearly until rounding ends it: gradients travel in float32, which ends fp32 as well, and so does the mean of "
        "the differences, so that the mean of all shifts, which follows it, comes to lie a little beside the mean of the workers' own; "
        "on a9a that is what is left at 1e-12. With p = 2 omega is twice "
        "that of p = inf, and theory allows smaller steps. "
        f"{predicted(cell)}The plateaus lie well below their bounds, which take the worst case of omega. With l1 only DIANA, whose noise vanishes, "
        "rests on the reference's support.",
        "",
    ]


def predicted(cell: dict[tuple[str, float, str], Found]) -> str:
    """Describe in how many steps exact gradients reach the goal with DIANA's step sizes, beside what DIANA took."""
    found = result("claims/diana_steps")
    if not found:
        return ""
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
    return (
        f"Exact gradients with the same step sizes reach {found['goal']:g} as theory predicts for DIANA, whose noise vanishes "
        f"(`python benchmarks/claims/diana_steps.py --data a9a.txt --data mushrooms.txt`): {'; '.join(told)}. So p = 2 on mushrooms "
        "does what theory says, and 12 000 steps were too few to show it. "
    )


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
        f"{found['what']}: five epochs, 3 bits, whole-network blocks, every parameter compressed. Accuracy, %; ± is the standard "
        f'deviation over two seeds, without it one seed. fp32 {whole}. TernGrad is here `QSGDinf(levels=1, blocks="model")`: each '
        "worker's own scaler of a block, no clipping.",
        "",
        *table({s: [show(cell.get((m, s))) for m in AQSGD] for s in sorted(AUTHORS)}),
        "",
        "![Accuracy over block size](figures/cifar_levels.png)",
        "",
        "The authors' (Faghri et al., NeurIPS 2020, notebook), to the end of training:",
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
        f"From blocks of {low} to {high} ALQ loses {drop['ALQ']:.1f} points (the authors': 0.1), AMQ {drop['AMQ']:.1f} (1.7), "
        f"QSGDinf {drop['QSGDinf']:.1f} (4.4), TernGrad {drop['TernGrad']:.1f} (2.4), NUQSGD {drop['NUQSGD']:.1f} (14.8). At {high} "
        f"NUQSGD lies {below:.1f} points below ALQ (14.7) and QSGDinf {at['ALQ', high] - at['QSGDinf', high]:.1f} below it (4.2), {at['ALQ-N', high] - at['QSGDinf', high]:.1f} below "
        "ALQ-N: the shape is theirs, but for the order of the adaptive ones. What differs, and why:",
        "",
        "- Five epochs instead of a whole training: accuracies are 16 points lower for all, and what noise slows down has no time to "
        "catch up, so that differences between methods at large blocks are larger for NUQSGD and TernGrad.",
        *zero(high),
        "- Runs of one seed differ by a point or so (see ±), which is as much as most of these methods differ from each other up to "
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
        "- QSGDinf here has seven levels with a zero, theirs eight without one. Whole-network blocks mix layers of very different "
        f"scale; most values are then far below the maximum, and without a zero each of them costs (R/7)^2. Variance of this network's gradient in blocks of {block_size} without and with a zero, "
        f"`python benchmarks/claims/zero_level.py --data FOLDER`: {pairs} times its square. So theirs falls off more, and ours less than ALQ "
        "and AMQ would let one expect, whose levels have no zero either, as in their program.",
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
        f"- At {high} ALQ and ALQ-N lie below AMQ, where the authors' lie above. The authors' published levels are not the optimum of their "
        "own objective: their solver stops early. Its gradient steps have the rate 1, and the first one throws the level next to 1 far out, to where the "
        "normal model has next to nothing; from there it hardly comes back, for want of a gradient. That accident serves the tails that gradients have and normals have not. The levels here are the optimum. "
        f"This network's {-(-found['elements'] // high)} blocks of {high} mix layers and are far from normal: the optimum of the model is worse for them than what the "
        "authors' solver stops at. AMQ's powers of a ratio serve the tails by their form. Levels fitted to a histogram of the values "
        '(`model="histogram"`) depend on neither. Exact variance of the gradients with levels fitted to these very gradients, in units of their squares, smallest to largest at '
        f"{len({row['step'] for row in found['rows']})} steps from 0 to {max(row['step'] for row in found['rows'])}, `python benchmarks/claims/fitted_levels.py --data FOLDER`, {where(found)}:",
        "",
        *(f"  {line}" for line in lines),
        "",
        f"  Levels from the last update, at steps 0, 100 and 1000, have up to {older('normal'):.2f} times the variance of fresh ones under the normal model, {older('histogram'):.2f} "
        f"times under the histogram, whose largest variance in use by ALQ is {max(of('ALQ', 'histogram', high, 'in_use')):.2g}: what is fitted to the measured values ages with them. The accuracies above are of the normal model, "
        f"of runs in which a block's weight was its squared norm whatever its length, so that the last, shorter block weighed too much; at {low} the two models and weights differ by little.",
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
        "4 workers, simulated. MNIST: LeNet, 3000 steps, SGD with momentum 0.9. text: GRU on bytes, 600 steps, Adam, or SGD "
        "with momentum 0.9 where it says so. signSGD and Signum: SGD without momentum. Where a learning rate is given, it is the best "
        "of several, by the accuracy of seed 0. 1-bit SGD begins with 5 % of its steps in float32. ± over two seeds. Bytes are those a worker sent.",
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
                f"Learning rates tried, and seed 0's accuracy: {tried}. On MNIST EF-signSGD diverges at 0.08. "
                "The other methods' rates were not chosen so: that EF-signSGD is above fp32 on MNIST is no merit of its signs. On text it stays far below fp32 at all rates tried here, with Adam "
                "and with SGD, and below the scaled sign without feedback: all of these optimizers have a momentum, and its residual is long, as the next sections show.",
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
        f"The task text by SGD, {found['workers']} simulated workers, {found['steps']} steps, one seed. Share of the gradient's square "
        "that the scaled sign loses, least and most of all compressed parameters of worker 0 (float32 training, momentum 0.9, rate 0.3; "
        "a Gaussian vector loses 0.36):",
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
        "Length of the residual over that of the gradient (of the momentum where that is applied before compression), least and most:",
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
        "A link warns by age and cosine together: see [what a link warns of](methods/feedback.md#what-a-link-warns-of).",
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
        "4 workers, simulated, SGD; steps as in the table. The optimizer's momentum follows the exchange; a momentum in the method's spec is "
        "applied by each worker before compression. 1-bit SGD begins with 5 % of its steps in float32. ± over two seeds.",
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
        "# What the quantisers were measured to do",
        "",
        "Generated by `python benchmarks/pages/summarise.py` from `benchmarks/results/`. Steps on slow links are in "
        "[benchmarks](benchmarks.md), coders in [coders](coders.md).",
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
