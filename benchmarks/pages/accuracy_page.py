"""``docs/accuracy.md`` and its figures, from the tables of all methods on one task each.

    python benchmarks/pages/accuracy_page.py

draws the figures; ``summarise.py`` writes the page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.method_entries import plain
from benchmarks.lib.page_parts import where
from benchmarks.lib.results import ROOT, result

FIGURES = ROOT / "docs" / "figures"
TASKS = {
    "digits": "A perceptron 64-256-256-10 on scikit-learn's digits",
    "mnist": "LeNet on MNIST",
    "text": "A transformer on bytes of text",
    "cifar10": "ResNet-8 on CIFAR-10",
    "cifar10_long": "ResNet-8 on CIFAR-10, five times as long",
    "cifar10_longer": "ResNet-8 on CIFAR-10, ten times as long",
    "cifar10_longest": "ResNet-8 on CIFAR-10, twenty times as long",
}
"""By the name of a table: a task's, or a longer training of it with what sends few bytes alone."""
NOTES = {
    "digits": (
        "The perceptron's biases, 522 of 85 002 elements, travel in float32. They cost every method that compresses no parameter "
        "below 1024 elements 0.2 bits per element, which is most of what the sparsest methods send. 360 images are held out, so "
        "one image is 0.28 points, and differences of less than a point mean nothing.",
    ),
}
LOSSES = {
    "FourierATOMO": (
        "the gradients of a perceptron are not smooth. Kept frequencies have one and a half to three times the variance of kept elements, and without error feedback the steps "
        "diverge at all three rates. The method is meant for vectors with few frequencies."
    ),
    "SketchedAMSGrad(density=0.001)": (
        "a thousandth of the elements is 82 per step, and an adaptive step moves each of them by about the learning rate, so most elements move at most a few "
        "times in 300 steps. With a hundredth of the elements the method reaches the mark."
    ),
}
"""By the label of a method: why it does not reach the mark."""

WITHIN = {"mnist": 0.3, "cifar10": 1.0, "cifar10_long": 1.0, "cifar10_longer": 1.0, "cifar10_longest": 1.0}
"""By the table, within how many points of float32's accuracy a hundred times fewer bytes are to end."""

Row = dict[str, Any]


def reaches(row: Row) -> bool:
    """Return whether a method reaches the mark with every seed; one that failed does not."""
    return row["rate"] is not None and row["mark"]["seeds"] == row["seeds"] + row["failed"]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the fewest bytes to the mark first, then those that do not reach it, best accuracy first."""

    def place(row: Row) -> tuple[int, float]:
        if row["rate"] is None:
            return 2, 0.0
        sent = row["mark"]["bytes"]["mean"]
        if not reaches(row) or sent is None:
            return 1, -row["accuracy"]["mean"]
        return 0, sent

    return sorted(rows, key=place)


def spread(moments: Row, unit: float, digits: int) -> str:
    """Write a mean, with the standard deviation if there is one."""
    text = f"{moments['mean'] * unit:.{digits}f}"
    return text if moments["std"] is None else f"{text} ± {moments['std'] * unit:.{digits}f}"


def figures(value: float) -> str:
    """Write a number with three figures, without an exponent."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def remark(row: Row, seeds: int) -> str:
    """Write what keeps a line from having all seeds."""
    if row["failed"]:
        return f" ({row['failed']} more failed)"
    return "" if row["seeds"] == seeds else f" ({row['seeds']} of {seeds} seeds)"


def cells(row: Row, seeds: int) -> list[str]:
    """Write a line of the table; ``seeds`` is how many other lines have."""
    if row["rate"] is None:
        return [name_of(row), row["momentum"], "-", "failed", *["-"] * 7]
    mark = row["mark"]
    to_it = ["not reached"] + ["-"] * 3
    if mark["seeds"]:
        to_it = [figures(mark["bytes"]["mean"] / 1e6), figures(mark["steps"]["mean"])]
        if mark["seeds"] < row["seeds"]:
            to_it[0] += f" ({mark['seeds']} of {row['seeds']} seeds)"
            to_it += ["-", "-"]
        else:
            to_it += [figures(mark["seconds_100mbit"]), figures(mark["seconds_1gbit"])]
    return [
        name_of(row),
        row["momentum"],
        f"{row['rate']:g}" + ("\\*" if row["at_the_grids_end"] else ""),
        spread(row["accuracy"], 100, 2) + remark(row, seeds),
        spread(row["loss"], 1, 3),
        f"{row['bits_per_element']:.2f}",
        figures(row["sent_bytes"]["mean"] / 1e6),
        *to_it,
    ]


def section(task: str, title: str) -> list[str]:
    """Describe one task's table."""
    found = result(f"training/methods_{task}")
    if not found:
        return []
    rows = in_order(found["rows"])
    whole = found["rows"][0]
    ours = task.partition("_")[0]
    option = "" if task == "digits" else f" --task {ours}" + (" --data FOLDER" if task != "text" else "")
    if task != ours:
        option += f" --steps {whole['steps']} --narrow benchmarks/results/training/methods_{ours}.json"
    seeds = max(row["seeds"] for row in rows)
    missed = [row for row in rows if not reaches(row)]
    chosen = [row for row in rows if row["rate"] is not None]
    ends = sum(row["at_the_grids_end"] for row in chosen)
    lines = [
        f"## {title}",
        "",
        f"`python benchmarks/training/method_table.py{option} --json benchmarks/results/training/methods_{task}.json`. {where(found)}. "
        f"The {found['runs']} trainings took {found['machine_hours']:.2f} hours, {found['processor_hours']:.2f} of them on the "
        "processor, since the machine was shared.",
        "",
        f"The trainings have {found['workers']} simulated workers, {whole['steps']} steps, and "
        + (
            f"{seeds} seeds, or fewer if the line says so; ± is the standard deviation over seeds. "
            if seeds > 1
            else "one seed, so the spread over seeds is not known. "
        )
        + ("They use the rates of the previous table. " if task != ours else "")
        + f"The mark is an accuracy of {100 * found['mark']:.2f} %, 0.95 times fp32's {100 * whole['accuracy']['mean']:.2f} %. "
        f"{len(rows) - len(missed)} of {len(rows)} settings reach it with every seed.",
        "",
        *NOTES.get(task, ()),
        "",
        *(figure_lines(task) if task == ours else ()),
        "| method | momentum | rate | accuracy, % | loss | bits an element | sent, MB | to the mark, MB | steps | s at 100 Mbit/s | s at 1 Gbit/s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(cells(row, seeds))} |" for row in rows),
        "",
        f"\\* The rate is the lowest or the highest of the three ({ends} of {len(chosen)} settings), so a rate beyond it may be better.",
        "",
    ]
    told = [f"- `{row['label']}`{ending(row)}: {LOSSES[row['label']]}" for row in missed if row["label"] in LOSSES]
    if found["missing"]:
        names = ", ".join(f"`{name}`" for name in found["missing"])
        lines += [f"These are not trained to the end yet; the same command continues their training: {names}.", ""]
    lines += narrow_lines(task, found["rows"])
    lines += momentum_lines(found["rows"], waits(task))
    lines += places_lines(task)
    if told:
        lines += ["These methods do not reach the mark:", "", *told, ""]
    return lines


PLACES = {"optimizer's, 0.9": "after the exchange", "own, 0.9": "before it", "none": "none, rates ten times as high"}
"""Where momentum stands, by a row's words."""

WAITS = " rounds waited: expected | measured | of the mean |"


LOST = 2.0, 0.01
"""With momentum after the exchange, a training loss above so many times the best elsewhere plus so much is a loss."""


def waits(task: str) -> dict[str, Row]:
    """Return how long gradients wait in residuals, by the method's spec without momentum."""
    found = result(f"training/waiting_{task}")
    return {row["method"]: row for row in found["rows"]} if found else {}


def places_lines(task: str) -> list[str]:
    """Compare places of momentum in a shorter training of a task, made for that alone."""
    found = result(f"training/places_{task}")
    if not found:
        return []
    whole = found["rows"][0]
    seeds = max(row["seeds"] for row in found["rows"])
    lines = momentum_lines(found["rows"])
    lines[2] = (
        f"These trainings have {whole['steps']} steps and {'one seed' if seeds == 1 else f'{seeds} seeds'}, so differences of a fifth mean nothing. "
        f"fp32 ends at {spread(whole['accuracy'], 100, 2)} % with a training loss of {whole['training_loss']['mean']:.3f}. "
        "The table shows the lowest training loss of three rates: with momentum 0.9 of the optimizer on the mean after the exchange, with momentum 0.9 of the method on "
        "each worker's gradient before the exchange, and without momentum. `python benchmarks/training/method_table.py --task "
        f"{task} --data FOLDER --steps {whole['steps']} --evaluations 3 --seeds {seeds} --methods ...` (`benchmarks/README.md` has the whole command). "
        f"{where(found)}. The {found['runs']} trainings took {found['processor_hours']:.2f} hours of a processor."
    )
    if found["missing"]:
        lines += [f"These are not trained to the end: {', '.join(f'`{name}`' for name in found['missing'])}.", ""]
    return lines


def rule_lines(rows: Sequence[Row], known: dict[str, Row]) -> list[str]:
    """Say up to which wait momentum after the exchange loses nothing, and from which on it does."""
    kept: list[tuple[float, Row]] = []
    lost: list[tuple[float, Row]] = []
    for row in rows:
        expected = known.get(plain(row["method"]), {}).get("expected_wait")
        places = [_lowest(row, place) for place in PLACES]
        if expected is None or places[0] is None:
            continue
        elsewhere = min(loss for loss in places[1:] if loss is not None)
        (lost if places[0] > LOST[0] * elsewhere + LOST[1] else kept).append((expected, row))
    if not kept or not lost:
        return []
    longest, shortest = max(kept, key=lambda pair: pair[0]), min(lost, key=lambda pair: pair[0])
    return [
        "*Rounds waited* is the number of rounds that a part of a gradient waits on average in the residual before it is sent. The "
        "*expected* number is (1 - delta) / delta, where delta is the share of a long Gaussian vector that a round sends. The *measured* number is "
        "|residual|^2 / |sent|^2 of worker 0 in a training with momentum after the exchange, the median of rounds 10, 30, 100 and 200; the last column has the same ratio for the "
        "means over workers (`python benchmarks/training/waiting.py --json benchmarks/results/training/waiting_digits.json`). Momentum "
        f"after the exchange is a loss if the training loss is above {LOST[0]:g} times the best elsewhere plus {LOST[1]:g}. It is a loss for {len(lost)} of the "
        f"{len(lost) + len(kept)} methods with an expected wait, and for all methods that wait {shortest[0]:.2g} rounds or more. Methods that wait "
        f"{longest[0]:.2g} rounds or less lose nothing. `gw.attach` warns above 5."
        if longest[0] < shortest[0]
        else "Expected waits do not separate the methods that lose from the others: "
        f"`{longest[1]['label']}` waits {longest[0]:.2g} rounds and loses nothing, while `{shortest[1]['label']}` waits {shortest[0]:.2g} and loses.",
        "",
    ]


def waited(found: Row | None) -> list[str]:
    """Write the cells of a method's waits."""
    if not found:
        return ["-"] * 3
    expected = found["expected_wait"]
    return ["-" if v is None else figures(v) for v in (expected, found["wait"], found["wait_of_means"])]


def momentum_lines(rows: Sequence[Row], known: dict[str, Row] | None = None) -> list[str]:
    """Compare places of momentum, for the methods that keep what they have not sent.

    Args:
        rows: Rows of a table.
        known: How long gradients wait, by the spec without momentum; columns are left out without it.
    """
    compared = [row for row in rows if len({one.get("momentum") for one in row["tried"]}) > 1]
    if not compared:
        return []
    lines = [
        "### Where momentum stands",
        "",
        "For methods with a residual, the table shows the lowest training loss of three rates with the first seed: with momentum 0.9 of the "
        "optimizer on the mean after the exchange, with momentum 0.9 of the method on each worker's gradient before the exchange, and without momentum. The table above "
        "has the best of the three.",
        "",
        f"| method | {' | '.join(PLACES.values())} | accuracy of the best, % |" + (WAITS if known else ""),
        f"|---|{'---:|' * (len(PLACES) + (4 if known else 1))}",
    ]
    for row in sorted(compared, key=lambda row: row["label"]):
        best = {place: _lowest(row, place) for place in PLACES}
        least = min(value for value in best.values() if value is not None) if any(best.values()) else None
        cells = ["failed" if v is None else f"**{v:.3f}**" if v == least else f"{v:.3f}" for v in best.values()]
        ending = "-" if row["rate"] is None else spread(row["accuracy"], 100, 2)
        name = re.sub(r"(, )?momentum=0\.9", "", row["label"]).replace("()", "")
        cells += [ending, *(waited(known.get(plain(row["method"]))) if known else ())]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    won = {text: sum(row["momentum"] == place for row in compared) for place, text in PLACES.items()}
    told = ", ".join(f"{text} for {count}" for text, count in won.items())
    return [
        *lines,
        "",
        f"The best place of momentum among {len(compared)} methods: {told}.",
        "",
        *rule_lines(compared, known or {}),
    ]


def _lowest(row: Row, place: str) -> float | None:
    """Return the lowest training loss with momentum in a place; None if all rates failed."""
    losses = [one["training_loss"] for one in row["tried"] if one["momentum"] == place]
    return min((loss for loss in losses if loss is not None), default=None)


def figure_lines(task: str) -> list[str]:
    """Show the figures of a task."""
    return [
        f"![Final accuracy over bytes sent](figures/accuracy_{task}.png)",
        "",
        f"![Bytes to the mark and final accuracy of each method](figures/bytes_{task}.png)",
        "",
    ]


def name_of(row: Row) -> str:
    """Write a method's label, and whether small parameters are compressed, too."""
    return f"`{row['label']}`" + (" (all)" if row.get("min_numel") == 0 else "")


def narrow_lines(task: str, rows: Sequence[Row]) -> list[str]:
    """Say what ends best with a hundred and with a thousand times fewer bytes than float32."""
    if task not in WITHIN:
        return []
    whole, lines = (
        rows[0],
        ["Among the settings that send 100 or 1000 times fewer bytes than float32, these end best:", ""],
    )
    for factor in (100, 1000):
        few = [row for row in rows if row["rate"] is not None and factor * row["bits_per_element"] <= 32.0]
        if not few:
            lines.append(f"- {factor}: none.")
            continue
        best = max(few, key=lambda row: row["accuracy"]["mean"])
        behind = 100 * (whole["accuracy"]["mean"] - best["accuracy"]["mean"])
        goal = f" (the goal is {WITHIN[task]:g})" if factor == 100 else ""
        lines.append(
            f"- {factor}: {name_of(best)}, {32 / best['bits_per_element']:.0f} times fewer, "
            f"{spread(best['accuracy'], 100, 2)} %, {abs(behind):.2f} points {'below' if behind > 0 else 'above'} float32's "
            f"{spread(whole['accuracy'], 100, 2)} %{goal}; momentum: {best['momentum']}."
        )
    return [*lines, ""]


def ending(row: Row) -> str:
    """Write where a method ended that did not reach the mark."""
    return " (failed)" if row["rate"] is None else f" ({100 * row['accuracy']['mean']:.1f} %)"


def page() -> str:
    """Return the page's text."""
    lines = [
        "# Accuracy over bytes",
        "",
        "This page is generated by `python benchmarks/pages/summarise.py` from `benchmarks/results/`. [Quantisers](quantisers.md) has the "
        "error of methods in one round, and [Benchmarks](benchmarks.md) has measured steps on slow links.",
        "",
        "How to read the tables:",
        "",
        "- *Method*: fields with their default values and the name of the field `compressor` are left out. *(all)* means that parameters "
        "of any size are compressed; otherwise those below 1024 elements travel in float32.",
        "- *Budget*: every method has the same. It is trained with three learning rates from the first seed; the rate with the lowest training loss "
        "over the last tenth of the steps is then trained from the other seeds. No other field of a method is tuned. `Coded` takes the "
        "rate of the method that it codes, and `EDEN(bits=1)` takes that of `DRIVE`, which is the same method. The tasks after digits train only "
        "methods that reach the mark of digits with the fewest bytes and end within a point of fp32 there, with one setting each.",
        "- *Momentum*: the optimizer is SGD with momentum 0.9, applied after the exchange. Methods that have a momentum of their own, or warn of the "
        "optimizer's, apply theirs before compression, and the optimizer has none. Directions (such as `SignSGD`) are trained at "
        "0.006 of these rates.",
        "- *Sent* is what one worker sends in the whole training. *To the mark* is what it sends until the first evaluation whose accuracy is at "
        "least 0.95 times fp32's final accuracy, in the busier direction, as the mean over seeds.",
        "- *Seconds* are computed, not measured: the bytes to the mark divided by the bandwidth of a worker's link, plus, for each step "
        "to the mark, the processor time of a simulated step divided by the number of workers. Nothing overlaps, messages take "
        "no time of their own, and the processor was shared, so its time is accurate only to a factor of about two. The seconds show whether bytes or computing matter more; [Benchmarks](benchmarks.md) has "
        "steps on real links.",
        "",
        *[line for task, title in TASKS.items() for line in section(task, title)],
    ]
    return "\n".join(lines).rstrip() + "\n"


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other beats in bytes without being worse in accuracy, by bytes."""
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not kept or points[i][1] > points[kept[-1]][1]:
            kept.append(i)
    return kept


COLOURS = {True: "tab:blue", False: "tab:orange"}
MEANING = {True: "remembers something between steps", False: "remembers nothing"}
MEGABYTES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def in_megabytes(axes: Any) -> None:
    """Give an axis of bytes a logarithmic scale with plain numbers."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in MEGABYTES if low <= tick <= high]
    if len(ticks) > 9:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)


def folded(label: str, width: int) -> str:
    """Return a spec on lines of at most so many characters, which end behind a bracket or a comma where they can."""
    lines = [""]
    for piece in re.findall(r"[^(,]*(?:\(|, ?|$)", label):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip() for line in lines)


def percentages(low: float, high: float) -> list[float]:
    """Return errors to mark on a logarithmic axis: round ones, at least three where the axis has room for them."""
    scales = [(1, 1.5, 2, 3, 5, 10, 20, 30, 40, 60, 80), *(range(step, 100, step) for step in (5, 2, 1))]
    found = [[float(tick) for tick in scale if low <= tick <= high] for scale in scales]
    return next((ticks for ticks in found if len(ticks) >= 3), found[-1])


def place_names(axes: Any, points: Sequence[tuple[float, float]], names: dict[int, str]) -> None:
    """Write names of points beside them, each at the nearest place that is free of points and of other names."""
    places = [tuple(axes.transData.transform(point)) for point in points]
    left, bottom, right, top = (*axes.transAxes.transform((0, 0)), *axes.transAxes.transform((1, 1)))
    taken: list[tuple[float, float, float, float]] = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    around = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
    for i, label in names.items():
        x, y = places[i]
        name = folded(label, 30)
        wide = 7.6 * max(map(len, name.splitlines()))
        high = 14.5 * len(name.splitlines())
        for radius, (dx, dy) in ((r, d) for r in range(12, 240, 8) for d in around):
            cx, cy = x + dx * (radius + wide / 2), y + dy * radius
            box = (cx - wide / 2, cy - high / 2, cx + wide / 2, cy + high / 2)
            inside = box[0] > left and box[1] > bottom and box[2] < right and box[3] < top
            if inside and all(box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in taken):
                taken.append(box)
                axes.annotate(
                    name,
                    (x, y),
                    xycoords="figure pixels",
                    xytext=(cx, cy),
                    textcoords="figure pixels",
                    ha="center",
                    va="center",
                    fontsize=8,
                    arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
                )
                break


def draw_scatter(task: str, title: str, rows: Sequence[Row]) -> None:
    """Draw final accuracy over all bytes; fp32, those that no other beats and those that miss the mark have names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 6.8), dpi=110)
    figure.subplots_adjust(left=0.105, right=0.98, bottom=0.165, top=0.95)
    axes = figure.subplots()
    points = [(row["sent_bytes"]["mean"] / 1e6, 100 * (1 - row["accuracy"]["mean"])) for row in rows]
    for remembers, colour in COLOURS.items():
        mine = [point for point, row in zip(points, rows) if row["remembers"] is remembers]
        if mine:
            axes.scatter(*zip(*mine), color=colour, alpha=0.75, label=MEANING[remembers])
    best = front([(x, -y) for x, y in points])
    axes.plot(*zip(*(points[i] for i in best)), "--", color="grey", lw=0.8, label="none ends as high with fewer bytes")
    miss = 100 * (1 - rows[0]["mark"]["accuracy"])
    axes.axhline(miss, color="grey", lw=0.8, linestyle=":", label="the mark")
    in_megabytes(axes)
    axes.set_yscale("log")
    axes.invert_yaxis()
    ticks = percentages(*sorted(axes.get_ylim()))
    axes.set_yticks(ticks, [f"{100 - tick:g}" for tick in ticks])
    axes.tick_params(axis="y", which="minor", length=0, labelleft=False)
    axes.set(xlabel="sent by one worker in the whole training, MB", ylabel="final accuracy, %", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="lower center", ncols=2, fontsize=8.5)
    named = [0, *best, *(i for i, row in enumerate(rows) if not reaches(row))]
    place_names(axes, points, {i: rows[i]["label"] for i in dict.fromkeys(named)})
    figure.savefig(FIGURES / f"accuracy_{task}.png", dpi=110)


def draw_lines(task: str, title: str, rows: Sequence[Row]) -> None:
    """Draw a line for each method: bytes to the mark, all bytes, and final accuracy."""
    from matplotlib.figure import Figure

    ordered = in_order(rows)
    names = [folded(row["label"], 30) for row in ordered]
    # A place is as high as its name has lines.
    heights = [0.19 + 0.125 * name.count("\n") for name in names]
    places = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    figure = Figure(figsize=(6.2, 1.6 + sum(heights)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, row in zip(places, ordered):
        colour, sent = COLOURS[row["remembers"]], row["sent_bytes"]["mean"] / 1e6
        left.plot(sent, place, "o", mfc="white", mec=colour, ms=5)
        if reaches(row):
            reached = row["mark"]["bytes"]["mean"] / 1e6
            left.plot([reached, sent], [place, place], color=colour, lw=0.8, zorder=0)
            left.plot(reached, place, "o", color=colour, ms=5)
    low = 100 * ordered[0]["mark"]["accuracy"] - 2
    for place, row in zip(places, ordered):
        accuracy, colour = 100 * row["accuracy"]["mean"], COLOURS[row["remembers"]]
        if accuracy < low:
            right.annotate(f"◂ {accuracy:.0f} %", (low, place), va="center", fontsize=8, color=colour)
        else:
            right.errorbar(
                accuracy, place, xerr=100 * (row["accuracy"]["std"] or 0), fmt="o", color=colour, ms=4, capsize=2
            )
    right.axvline(100 * ordered[0]["mark"]["accuracy"], color="grey", linestyle="--", lw=0.8)
    right.set_xlim(low, None)
    left.set_yticks(places, names, fontsize=8)
    left.set_ylim(sum(heights), 0)
    in_megabytes(left)
    left.set_xlabel("MB sent by a worker: filled\nto the mark, hollow in all", fontsize=9)
    right.set_xlabel("final accuracy, %\n(dashed: the mark)", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}.\nBlue: {MEANING[True]}; orange: {MEANING[False]}", fontsize=9)
    figure.savefig(FIGURES / f"bytes_{task}.png", dpi=110)


def draw() -> None:
    """Draw two figures for each task."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    # A handful of settings need no figure.
    for task, title in ((task, title) for task, title in TASKS.items() if "_" not in task):
        found = result(f"training/methods_{task}")
        if found:
            rows = [row for row in found["rows"] if row["rate"] is not None]
            draw_scatter(task, title, rows)
            draw_lines(task, title, rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw()
