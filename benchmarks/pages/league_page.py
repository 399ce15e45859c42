"""The league of ``docs/local-steps.md``: its section, and its figure, from the committed result of ``league.py``.

    python benchmarks/pages/league_page.py

draws the figure; ``summarise.py`` writes the page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.page_parts import Row, where
from benchmarks.lib.results import ROOT, result

__all__ = ["Ordering", "pooled_spread", "section", "verdict"]

FIGURE = ROOT / "docs" / "figures" / "league.png"
SIGMAS = 2.0
"""Standard errors that a difference must exceed."""
CLOSE = 0.01
"""Share of the loss within which one method ends "as low as" another."""


@dataclass(frozen=True)
class Ordering:
    """A published ordering of two methods of the league.

    Args:
        one: The method that is said to end lower, or as low.
        other: The method that it is compared with.
        claim: What the source says, in our words.
        ahead: True if ``one`` is said to end lower, False if as low.
    """

    one: str
    other: str
    claim: str
    ahead: bool = True


ORDERINGS = (
    Ordering(
        "SparseLoCo",
        "DiLoCo",
        "SparseLoCo ends lower than DiLoCo in float32 while it sends 1 to 3 % of the elements at 2 bits (SparseLoCo 2025: "
        "512 M parameters, 15 to 250 steps between exchanges).",
    ),
    Ordering(
        "DiLoCo",
        "LocalSGD",
        "An outer step with Nesterov momentum ends lower than averaging (Douillard et al. 2023, where it was the best of "
        "the outer optimizers).",
    ),
    Ordering(
        "DiLoCo",
        "DDP",
        "DiLoCo ends as low as synchronous training (Douillard et al. 2023: 8 workers, 500 steps between exchanges).",
        ahead=False,
    ),
    Ordering(
        "streaming DiLoCo",
        "DiLoCo",
        "Fragments in turn, exchanged beside training, end as low as one exchange (Douillard et al. 2025).",
        ahead=False,
    ),
    Ordering(
        "DiLoCo, EDEN 4 bits",
        "DiLoCo",
        "Differences of four bits cost nothing (Douillard et al. 2025, there with an exponent of three bits; here EDEN).",
        ahead=False,
    ),
    Ordering(
        "NoLoCo",
        "DiLoCo",
        "Pairs drawn anew, with a term that draws them together, end as low as DiLoCo or lower, up to 4 % faster (NoLoCo "
        "2025: 125 M to 6.8 B parameters).",
        ahead=False,
    ),
    Ordering("MuLoCo", "DiLoCo", "DiLoCo with Muon inside ends lower than with AdamW (MuLoCo 2025: 150 M to 15 B)."),
    Ordering("DDP, Muon", "DDP", "Muon ends lower than AdamW in synchronous training (as MuLoCo 2025 cites it)."),
    Ordering(
        "EASGD",
        "LocalSGD",
        "Elastic averaging, which lets workers stay apart, ends lower than pulling them together (Zhang et al. 2015, "
        "against DOWNPOUR, whose workers fetch the server's parameters).",
    ),
)


def pooled_spread(rows: Sequence[Row], steps: int) -> float | None:
    """Return the standard deviation over seeds, pooled over the methods of a horizon that have more than one.

    If none has, that of the other horizon.
    """
    for wanted in ((steps,), tuple({row["steps"] for row in rows})):
        squares = [
            ((row["seeds"] - 1) * row["loss_std"] ** 2, row["seeds"] - 1)
            for row in rows
            if row["steps"] in wanted and row["loss_std"] is not None
        ]
        if squares:
            return math.sqrt(sum(s for s, _ in squares) / sum(n for _, n in squares))
    return None


def verdict(ordering: Ordering, rows: Sequence[Row], steps: int) -> tuple[str, float, float] | None:
    """Judge an ordering at a horizon.

    Returns:
        "reproduced", "refuted here" or "open", the difference of mean losses (below 0: ``one`` ends lower), and its
        standard error; None where a method or a spread is missing.
    """
    cells = {row["name"]: row for row in rows if row["steps"] == steps}
    one, other, spread = cells.get(ordering.one), cells.get(ordering.other), pooled_spread(rows, steps)
    if one is None or other is None or spread is None:
        return None
    difference = one["loss_mean"] - other["loss_mean"]
    error = spread * math.sqrt(1 / one["seeds"] + 1 / other["seeds"])
    if one["loss_std"] is not None and other["loss_std"] is not None:
        # Of few seeds a method's own spread may come out small by chance, or be larger than the others'.
        error = max(error, math.hypot(*(row["loss_std"] / math.sqrt(row["seeds"]) for row in (one, other))))
    if min(one["seeds"], other["seeds"]) < 2:
        return "open", difference, error
    margin = 0.0 if ordering.ahead else CLOSE * other["loss_mean"]
    if difference - margin < -SIGMAS * error:
        return "reproduced", difference, error
    if difference - margin > SIGMAS * error:
        return "refuted here", difference, error
    return "open", difference, error


def loss(row: Row) -> str:
    """Write a cell's loss."""
    return f"{row['loss_mean']:.3f}" + (f" ± {row['loss_std']:.3f}" if row["loss_std"] is not None else "")


def megabytes(count: float) -> str:
    """Write bytes in MB with three figures."""
    value = count / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def setting(row: Row) -> str:
    """Write what a method was trained with."""
    return f"`{row['method']}`, rate {row['lr']:.2g}"


def table(found: dict[str, Any]) -> list[str]:
    """Return the table of the league."""
    lines = [
        "| method | horizon | final loss | seeds | tries | MB sent | bits an element and step | setting |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for steps in found["horizons"]:
        for row in sorted((row for row in found["league"] if row["steps"] == steps), key=lambda row: row["loss_mean"]):
            optimizer = " (Muon inside)" if row["name"] == "MuLoCo" else ""
            lines.append(
                f"| {row['name']}{optimizer} | {steps} | {loss(row)} | {row['seeds']} | {row['tried'] or '-'} | "
                f"{megabytes(row['bytes_mean'])} | {row['bits_per_element_and_step']:.3f} | {setting(row)} |"
            )
    return lines


def tries_table(found: dict[str, Any]) -> list[str]:
    """Return the table of all settings that were tried."""
    lines = ["| method | horizon | losses |", "|---|---:|---|"]
    for steps in found["horizons"]:
        for name in dict.fromkeys(row["name"] for row in found["tried"]):
            rows = [row for row in found["tried"] if (row["name"], row["steps"]) == (name, steps)]
            told = [f"{row['loss']:.3f} ({setting(row)})" for row in sorted(rows, key=lambda row: row["loss"])]
            if told:
                lines.append(f"| {name} | {steps} | {'; '.join(told)} |")
    return lines


def study_table(found: dict[str, Any]) -> list[str]:
    """Return the table of SparseLoCo's settings."""
    horizons = found["horizons"]
    rows = {(row["name"], row["steps"]): row for row in found["study"]}
    names = list(dict.fromkeys(row["name"] for row in found["study"]))
    lines = [
        "| changed | "
        + " | ".join(f"loss after {steps} steps" for steps in horizons)
        + " | bits an element and step |",
        "|---|" + "---:|" * (len(horizons) + 1),
    ]
    for name in names:
        cells = [f"{rows[name, steps]['loss']:.3f}" if (name, steps) in rows else "-" for steps in horizons]
        bits = next(rows[name, steps]["bits_per_element_and_step"] for steps in horizons if (name, steps) in rows)
        lines.append(f"| {name} | {' | '.join(cells)} | {bits:.3f} |")
    return lines


def paragraph(ordering: Ordering, found: dict[str, Any]) -> str:
    """Return what became of an ordering."""
    told, verdicts = [], []
    for steps in found["horizons"]:
        judged = verdict(ordering, found["league"], steps)
        if judged is None:
            continue
        word, difference, error = judged
        verdicts.append(word)
        cells = {row["name"]: row for row in found["league"] if row["steps"] == steps}
        one, other = cells[ordering.one], cells[ordering.other]
        seeds = sorted({one["seeds"], other["seeds"]})
        count = " and ".join(map(str, seeds)) + (" seeds" if seeds != [1] else " seed")
        told.append(
            f"after {steps} steps the losses are {one['loss_mean']:.3f} and {other['loss_mean']:.3f}, a difference of "
            f"{difference:+.3f} ± {error:.3f} ({count}): {word}"
        )
    if not told:
        return f"- **{ordering.one} and {ordering.other}: open.** {ordering.claim} Not measured yet."
    whole = verdicts[0] if len(set(verdicts)) == 1 else ", then ".join(verdicts)
    whole += " at the one horizon so far" if len(verdicts) < len(found["horizons"]) else ""
    return f"- **{ordering.one} and {ordering.other}: {whole}.** {ordering.claim} Here, {'; '.join(told)}."


HEAD = """\
## A league

This section is generated from `benchmarks/results/training/league.json`; {where}. Its {runs} runs took {minutes:.0f} minutes of one core.

    python benchmarks/training/league.py --data FILE --work runs/league --json benchmarks/results/training/league.json

- *Training*: the model and its training are those of nanoGPT's CPU example, whose README gives a validation loss of 1.88
  after 2000 steps: 0.80 M elements, Tiny Shakespeare by characters, and twelve samples of 64 in each step. Each of
  {workers} simulated workers has {samples} of them, so every method sees the same tokens in a step. The learning rate rises
  over a twentieth of the steps and falls to a tenth. Each worker clips its own gradients at 1. Local steps are exchanged every
  {every} steps, which makes {exchanges} exchanges at the two horizons.
- *Settings*: every method is tried in the same number of settings, from one seed, and the best by the loss in the table is kept.
  SparseLoCo and DiLoCo, whose order is in question, are tried in one more at the long horizon, with a larger outer step.
  *Seeds* is the number of seeds from which this setting has been trained so far; *tries* is the number of settings that
  were tried at that horizon. "DiLoCo, EDEN 4 bits" has DiLoCo's best setting and was not tuned.
- *Loss*: it is in nats per character, on {windows} fixed windows of the last tenth of the text; ± is the standard deviation over
  seeds. The evaluated parameters are the global ones, EASGD's centre, and the mean of NoLoCo's workers.
- *Bytes*: they are those of the busier direction of one worker, counted by the library. NoLoCo is not a method of the
  library: its outer step is that of its authors' program, and its bytes are its two vectors of float32.
"""


def section() -> list[str]:
    """Return the section; nothing where nothing was measured."""
    found = result("training/league")
    if found is None:
        return []
    head = HEAD.format(
        where=where(found),
        runs=found["ended"],
        minutes=found["cpu_minutes"],
        samples=found["samples"],
        workers=found["workers"],
        every=found["every"],
        windows=found["windows"],
        exchanges=" and ".join(f"{steps // found['every']}" for steps in found["horizons"]),
    )
    return [
        "",
        head,
        *table(found),
        "",
        "![Final loss over the bytes that one worker sends](figures/league.png)",
        "",
        "### Settings that were tried",
        "",
        "The losses are from one seed, with the best setting of a method first.",
        "",
        *tries_table(found),
        "",
        "### Published orderings",
        "",
        "A difference counts if it exceeds two standard errors. These come from the two methods' own spreads over seeds or from the "
        "spread pooled over the methods of the horizon, whichever is larger. With three seeds this is a rough test. A method ends *as "
        f"low* as another if its loss is at most {100 * CLOSE:g} % above the other's. With one seed an ordering stays open.",
        "",
        *(paragraph(ordering, found) for ordering in ORDERINGS),
        "",
        "### What SparseLoCo's settings change",
        "",
        "The table shows SparseLoCo's defaults with one field changed, from one seed, at the learning rate that is best for the defaults "
        f"({found['study'][0]['lr']:g})."
        if found["study"]
        else "Not measured yet.",
        "",
        *(study_table(found) if found["study"] else []),
        *why(found),
    ]


def why(found: dict[str, Any]) -> list[str]:
    """Say what the study answers, as far as it has been run."""
    rows = {(row["name"].partition(" (")[0], row["steps"]): row for row in found["study"]}
    league = {(row["name"], row["steps"]): row for row in found["league"]}
    short, long = found["horizons"]
    every, lines = found["every"], [""]

    def at(name: str, steps: int = short) -> float:
        return float(rows[name, steps]["loss"])

    plain, diloco, sparse = (
        rows.get(("nothing", short)),
        league.get(("DiLoCo", short)),
        league.get(("SparseLoCo", short)),
    )
    if plain is None or diloco is None or sparse is None:
        return []
    if diloco["distance_mean"]:
        lines.append(
            f"- **Too little arrives.** In {short // every} exchanges at density 1/64, the four workers together have moved "
            f"{100 * plain['share_moved']:.0f} % of the elements. The global parameters are at a distance of {plain['distance']:.1f} from "
            f"their start, and DiLoCo's at {diloco['distance_mean']:.1f}. A residual of many rounds waits to be sent, and a "
            f"twentieth of it decays in each round. The defaults end at {plain['loss']:.3f}, DiLoCo at {diloco['loss_mean']:.3f}."
        )
    densities = [name for name in ("density 1/16", "density 1/4", "density 1") if (name, short) in rows]
    if densities:
        told = ", ".join(f"{at(name):.3f} at {name.removeprefix('density ')}" for name in densities)
        lines.append(f"- **Density.** The loss after {short} steps is {plain['loss']:.3f} at 1/64, {told}.")
    rates = [name for name in ("outer rate 2", "outer rate 4") if (name, short) in rows]
    if rates:
        told = ", ".join(f"{at(name):.3f} at {name.removeprefix('outer rate ')}" for name in rates)
        lines.append(
            f"- **Outer rate.** The loss after {short} steps is {plain['loss']:.3f} at 1, {told}. A larger outer step makes up for "
            "elements that are not sent, without sending more bytes; a step that is too large overshoots."
        )
    if ("every 4 steps", short) in rows:
        lines.append(
            f"- **Interval.** With an exchange every 4 steps, {short // 4} in all, the loss is {at('every 4 steps'):.3f} after {short} "
            "steps, for four times the bytes."
        )
        if ("DiLoCo, every 4 steps", short) in rows:
            lines[-1] += (
                f" DiLoCo at this interval ends at {at('DiLoCo, every 4 steps'):.3f}, with the setting that is its best "
                f"at every {every} steps."
            )
    decays = [name for name in ("decay 0.8", "decay 0.999") if (name, short) in rows]
    if decays:
        told = ", ".join(f"{at(name):.3f} with {name.removeprefix('decay ')}" for name in decays)
        lines.append(f"- **Decay, its momentum.** The loss is {plain['loss']:.3f} with 0.95, {told}.")
    if ("8 bits a value", short) in rows and ("blocks of 256", short) in rows:
        lines.append(
            f"- **Values and positions** are not the reason. The loss is {at('8 bits a value'):.3f} with values of 8 bits instead of 2, and "
            f"{at('blocks of 256'):.3f} with the largest of each 256 elements instead of 4096."
        )
    published = [
        row["loss"]
        for row in found["tried"]
        if row["steps"] == short and row["name"] == "DiLoCo" and "0.7" in row["method"] and "0.9" in row["method"]
    ]
    if published:
        lines.append(
            f"- **DiLoCo's own outer step** depends on the horizon as well: its paper's rate of 0.7 with momentum 0.9 ends at "
            f"{min(published):.3f} at best after {short // every} exchanges, behind averaging."
        )
    far, other = league.get(("SparseLoCo", long)), league.get(("DiLoCo", long))
    if far and other:
        before, after = (a["loss_mean"] - b["loss_mean"] for a, b in ((sparse, diloco), (far, other)))
        lines.append(
            f"- **Horizon.** {'A longer horizon alone does not close the gap. ' if after > before else 'A longer horizon, with a larger outer step, narrows the gap. '}The loss of SparseLoCo differs from that of DiLoCo by {before:+.3f} after {short} "
            f"steps (settings tried: {sparse['tried']}, seeds: {sparse['seeds']}), and by {after:+.3f} after {long} steps "
            f"(settings tried: {far['tried']}, seeds: {far['seeds']})."
        )
    if ("LocalSGD, top-k and feedback", short) in rows:
        lines.append(
            "- **The row that was called SparseLoCo** on this page was local SGD with top-k, QSGD's values and feedback. It ends "
            f"at {at('LocalSGD, top-k and feedback'):.3f}, and the method itself at {plain['loss']:.3f}. The name was "
            "wrong, but it was not the reason."
        )
    return lines


def draw() -> None:
    """Draw the final loss over the bytes sent, a panel a horizon."""
    from matplotlib.figure import Figure

    found = result("training/league")
    if found is None:
        return
    horizons = [steps for steps in found["horizons"] if any(row["steps"] == steps for row in found["league"])]
    # Below each other, so that the names can be read on a telephone.
    figure = Figure(figsize=(5.0, 4.4 * len(horizons)), layout="constrained")
    for axes, steps in zip(figure.subplots(len(horizons), squeeze=False)[:, 0], horizons):
        rows = [row for row in found["league"] if row["steps"] == steps]
        for row in rows:
            axes.errorbar(
                row["bytes_mean"] / 1e6, row["loss_mean"], yerr=row["loss_std"], fmt="o", capsize=3, color="tab:blue"
            )
        names = [(row["bytes_mean"] / 1e6, row["loss_mean"], row["name"]) for row in rows]
        swept = [row for row in found["study"] if row["steps"] == steps and is_density(row["name"])]
        swept.sort(key=lambda row: row["bytes"])
        if len(swept) > 1:
            points = [(row["bytes"] / 1e6, row["loss"]) for row in swept]
            axes.plot(*zip(*points), "x--", color="grey", lw=0.8, label="SparseLoCo's defaults at other densities")
            axes.legend(loc="upper right", fontsize=8)
        axes.set_xscale("log")
        axes.set(xlabel="sent by one worker, MB", ylabel="validation loss, nats a character", title=f"{steps} steps")
        axes.grid(alpha=0.3)
        axes.margins(x=0.3, y=0.12)
        place(axes, names)
    figure.savefig(FIGURE, dpi=110)


def is_density(name: str) -> bool:
    """Return whether a line of the study changes the density alone, or nothing."""
    return "density" in name and "outer" not in name.partition("(")[0]


def place(axes: Any, names: Sequence[tuple[float, float, str]]) -> None:
    """Write names beside their points, from the top, each below the one before where they would touch.

    A name is about a decade long.
    """
    low, high = axes.get_ylim()
    step = 0.045 * (high - low)
    below: dict[int, float] = {}
    for x, y, name in sorted(names, key=lambda point: -point[1]):
        column = round(2 * math.log10(x))
        at = min(y, *(below[near] - step for near in range(column - 2, column + 3) if near in below), y)
        below[column] = at
        axes.annotate(
            name,
            (x, y),
            xytext=(x * 1.18, at),
            textcoords="data",
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "grey"} if at != y else None,
        )


if __name__ == "__main__":
    draw()
