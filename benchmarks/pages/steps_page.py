"""``docs/benchmarks.md`` and its figure, from the committed rows of ``gradwire bench step`` and what was made of them.

    python benchmarks/pages/steps_page.py

draws the figure; ``summarise.py`` writes the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.page_parts import (
    ORDER,
    UNLIMITED,
    Cell,
    Key,
    Row,
    cells_of,
    ms,
    provenance,
    speed,
)
from benchmarks.lib.results import ROOT, result, rows_of
from benchmarks.pages.auto_page import auto_section, coder_section, fast_links_section, residuals_section
from benchmarks.pages.every_method_page import every_method
from benchmarks.pages.links_page import long_links_section, messages_section, network_section
from gradwire.model.calibrate import BOUNDS

FIGURE = ROOT / "docs" / "figures" / "steps.png"

COLUMNS = (
    "compute",
    "ddp fp32",
    "ddp fp16",
    "ddp powersgd",
    "gradwire bf16",
    "gradwire terngrad",
    "gradwire coded",
    "gradwire auto",
)
CASTS = ("ddp fp32", "ddp fp16", "gradwire bf16")
AUTO = "gradwire auto"
NOISE = 0.02
"""Less than this is no loss: repeated cells differ by as much."""


def tables(cells: dict[Key, Cell]) -> list[str]:
    """Return one table a model: milliseconds, the fastest exchange in bold."""
    lines = []
    for model in ORDER:
        own = {key: cell for key, cell in cells.items() if key[0] == model}
        if not own:
            continue
        parameters = next(iter(own.values()))["compute"]["parameters"]
        lines += [f"### {model}: {parameters / 1e6:.2f} M parameters", ""]
        lines.append("| hosts | link | " + " | ".join(COLUMNS) + " | best: of floor | best: over DDP fp32 |")
        lines.append("|---:|---|" + "---:|" * (len(COLUMNS) + 2))
        for (_, hosts, rate), cell in own.items():
            exchanges = {v: r for v, r in cell.items() if v != "compute" and v in COLUMNS}
            best = min(exchanges, key=lambda v: exchanges[v]["step_time_s"])
            shown = []
            for column in COLUMNS:
                row = cell.get(column)
                text = "-" if row is None else ms(row["step_time_s"])
                shown.append(f"**{text}**" if column == best else text)
            gain = cell["ddp fp32"]["step_time_s"] / cell[best]["step_time_s"]
            lines.append(
                f"| {hosts} | {speed(rate)} | "
                + " | ".join(shown)
                + f" | {cell[best]['ratio_to_floor']:.2f} | {gain:.2f} |"
            )
        lines.append("")
    return lines


def losses(cells: dict[Key, Cell]) -> list[str]:
    """Name every cell where an exchange of ours is slower than DDP without a hook, or TernGrad than the best cast."""
    lines = ["## Where compression loses", ""]
    for variant, against, names in (
        ("gradwire terngrad", "DDP without a hook", ("ddp fp32",)),
        ("gradwire bf16", "DDP without a hook", ("ddp fp32",)),
        ("gradwire terngrad", "the best of DDP fp32, DDP fp16 and gradwire bf16", CASTS),
        ("gradwire coded", "the best of DDP fp32, DDP fp16 and gradwire bf16", CASTS),
        (AUTO, "the best of DDP fp32, DDP fp16 and gradwire bf16", CASTS),
        (AUTO, "DDP with PyTorch's PowerSGD hook", ("ddp powersgd",)),
    ):
        lost = []
        total = 0
        for (model, hosts, rate), cell in cells.items():
            if variant not in cell or not all(n in cell for n in names):
                continue
            total += 1
            base = min(cell[n]["step_time_s"] for n in names)
            ratio = cell[variant]["step_time_s"] / base
            if ratio > 1 + NOISE:
                lost.append(f"{model}, {hosts} hosts, {speed(rate)} ({ratio:.2f} times the step)")
        lines.append(f"- `{variant}` is slower than {against} by more than {100 * NOISE:g} % in {len(lost)} of {total}"
                     f" cells{': ' + '; '.join(lost) if lost else ''}.")  # fmt: skip
    return [*lines, "", *why_small_models_lose()]


def why_small_models_lose() -> list[str]:
    """Explain what a small model pays for, by the cells in which nothing but the exchange uses the cores."""
    cells = cells_of(rows_of("speed/step_sleep"))
    found = {hosts: cells[("lenet", hosts, UNLIMITED)] for hosts in (2, 4, 8) if ("lenet", hosts, UNLIMITED) in cells}
    if not found:
        return []
    base = {hosts: cell["ddp fp32"]["step_time_s"] for hosts, cell in found.items()}
    more = {
        name: ", ".join(f"{ms(cell[name]['step_time_s'] - base[hosts])}" for hosts, cell in found.items())
        for name in ("gradwire bf16", "gradwire terngrad", "gradwire coded")
    }
    chosen = [f"`{cell[AUTO]['record']['choice']['chosen']}`" for cell in found.values()]
    return [
        "Small models pay for messages, not for bytes. If workers sleep instead of computing, and links are unlimited, a step of"
        f" lenet on {', '.join(map(str, found))} hosts takes this many milliseconds longer than with DDP without a hook:"
        f" {'; '.join(f'`{name}` {text}' for name, text in more.items())}. An all-reduce passes a bucket to the backend once, while TernGrad's"
        " ranks wait for each other up to three times per bucket (scalers, shards, sums). On two hosts each worker has its own core; on more hosts, a worker that"
        " waits for a message also waits for a core."
        f' `method="auto"` chose {", ".join(chosen)} there.',
        "",
    ]


def bytes_(rows: Sequence[Row]) -> list[str]:
    """Describe how the interfaces' counts agree with the library's."""
    gaps = sorted(abs(r["interface_over_library"]) for r in rows if r["interface_over_library"] is not None)
    wrong = [r for r in rows if r["bytes_agree"] is False]
    if not gaps:
        return []
    text = (
        f"In {len(gaps)} rows, the bytes that the hosts' interfaces counted, less the packets' headers, differ from those that the library"
        f" reports as sent by {100 * gaps[len(gaps) // 2]:.2f} % in the median and {100 * gaps[-1]:.1f} % at most"
    )
    named = "; ".join(
        f"{r['model']}, {r['lab']}, {r['variant']}: {100 * r['interface_over_library']:+.1f} %" for r in wrong
    )
    return [
        text + (f". **More than 5 % is an error of the benchmark**: {named}." if wrong else "; the limit is 5 %."),
        "",
    ]


def goals(cells: dict[Key, Cell]) -> list[str]:
    """Hold the steps of the 10 M-parameter MLP on 4 hosts to their goals."""
    wanted = {UNLIMITED: 1.8, 1e9: 5.2, 1e8: 13.0}
    lines = ["## The goals for the MLP on 4 hosts", "", "| link | DDP fp32, ms | TernGrad, ms | ratio | goal | of floor |",
             "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for rate, goal in wanted.items():
        cell = cells.get(("mlp", 4, rate))
        if cell:
            base, ours = cell["ddp fp32"]["step_time_s"], cell["gradwire terngrad"]["step_time_s"]
            reached = base / ours
            lines.append(f"| {speed(rate)} | {ms(base)} | {ms(ours)} | {reached:.1f} | {goal:g}{'' if reached >= goal else ', missed'}"
                         f" | {cell['gradwire terngrad']['ratio_to_floor']:.2f} |")  # fmt: skip
    return [*lines, ""]


def asleep() -> list[str]:
    """Return the steps whose workers slept instead of computing, over their floors."""
    rows = rows_of("speed/step_sleep")
    if not rows:
        return []
    cells = cells_of(rows)
    variants = [v for v in dict.fromkeys(row["variant"] for row in rows) if v != "compute"]
    lines = [
        "## Steps without competition for the cores",
        "",
        "With `gradwire bench step --compute sleep`, workers sleep for as long as a single worker computes, and DDP gets the same gradients"
        " at the times at which its buckets were ready then. Only the exchanges use the machine's cores. The table shows milliseconds, and in"
        " brackets the step divided by its floor, max(compute, bytes / bandwidth). The goal for TernGrad, packed and coded, with the MLP on 4 hosts at 100 Mbit/s and"
        f" 1 Gbit/s is 1.25. The rows are in `benchmarks/results/speed/step_sleep.jsonl`. {provenance(rows[0])}.",
        "",
        "| model | hosts | link | compute | " + " | ".join(variants) + " |",
        "|---|---:|---|---:|" + "---:|" * len(variants),
    ]
    for (model, hosts, rate), cell in cells.items():
        shown = [
            f"{ms(cell[v]['step_time_s'])} ({cell[v]['ratio_to_floor']:.2f})" if v in cell else "-" for v in variants
        ]
        compute = ms(cell["compute"]["step_time_s"]) if "compute" in cell else "-"
        lines.append(f"| {model} | {hosts} | {speed(rate)} | {compute} | " + " | ".join(shown) + " |")
    return [*lines, "", *lanes()]


def lanes() -> list[str]:
    """Return where the time of a step goes that is over its floor."""
    found = result("speed/timelines")
    if not found:
        return []
    timeline = next(
        row["timeline"] for row in rows_of("speed/step_sleep") if row["model"] == found["model"] and row.get("timeline")
    )
    sizes = [bucket["numel"] for bucket in timeline["buckets"]]
    lines = [
        "### Where the time over the floor goes",
        "",
        '`sudo env "PATH=$PATH" python benchmarks/speed/timelines.py`'
        f" measured the MLP on {found['hosts']} hosts. The figures are milliseconds, medians over all ranks and {found['rows'][0]['steps']} steps.",
        "",
        "- *Earliest* is the shortest step that is possible if only the link takes time once a bucket is ready."
        f" The model's first layers hold {100 * sizes[-1] / sum(sizes):.0f} % of it and are ready last, so their bytes leave after the"
        " backward pass.",
        "- *Rows* is the time in which rows are on their way; compare it with bytes / bandwidth.",
        "- *Before* is the time from the end of the forward pass to the first row.",
        "- *Encode*, *messages* and *decode* are sums over two lanes, which overlap.",
        "",
        "| exchange | link | step | fastest - slowest | earliest | bytes / bandwidth | rows | before | between | after | update | encode | messages | decode |",
        "|---|---|" + "---:|" * 12,
    ]
    names = ("earliest_s", "wire_floor_s", "rows_s", "before_rows_s", "between_rows_s", "after_rows_s", "update_s")
    names += ("encode_s", "small_messages_s", "decode_s")
    for row in found["rows"]:
        parts = " | ".join(ms(row[name]) for name in names)
        link = speed({"100mbit": 1e8, "1gbit": 1e9}[row["bandwidth"]])
        lines.append(
            f"| {row['method']} | {link} | {ms(row['step_time_s'])} | {ms(row['fastest_s'])} - {ms(row['slowest_s'])} | {parts} |"
        )
    lines += ["", f"{found['cpu']}, {found['cores']} cores; {found['date_utc'][:10]}.", ""]
    for row in found["rows"]:
        lines.append(f"![{row['method']}, {row['bandwidth']}](figures/lanes_{row['method']}_{row['bandwidth']}.png)")
    return [*lines, "", *row_order_lines()]


HOOK = "ddp powersgd"
"""PyTorch's own, of rank 2; ours gives the same means up to rounding, so that it trains alike."""


def accuracy_on_digits(variant: str) -> str:
    """Return the accuracy of a method after the table's steps, as that says for its defaults."""
    spec = "powersgd" if variant == HOOK else variant.partition(" ")[2]
    method = repr(gw.method(spec))
    for row in (result("training/methods_digits") or {"rows": []})["rows"]:
        if row["rate"] is not None and repr(gw.method(row["method"])) == method:
            return f"{100 * row['accuracy']['mean']:.1f}"
    return "-"


def low_rank_lines() -> list[str]:
    """Describe what exchanges the fewest bytes beside PyTorch's PowerSGD hook."""
    rows = rows_of("speed/step_low_rank")
    if not rows:
        return []
    cells = cells_of(rows)
    variants = [v for v in dict.fromkeys(row["variant"] for row in rows) if v != "compute"]
    ours = [v for v in variants if v.startswith("gradwire ")]
    lines = [
        "## Beside PyTorch's PowerSGD hook",
        "",
        "`gradwire bench step --variant ... --cell-budget 14 --out benchmarks/results/speed/step_low_rank.jsonl` measured these steps. The transformer"
        " on 4 and 8 hosts has a budget of 30, since it takes few steps in 14 seconds: in a first measurement with 14, PyTorch's hook was"
        " the fastest in two of its cells (4 hosts, 50 Mbit/s: ours took 1.12 times the step; 8 hosts, 1 Gbit/s: 1.01 times). Workers compute as usual."
        f" The table shows milliseconds, with the fastest in bold. {provenance(rows[0])}.",
        "",
        "| model | hosts | link | " + " | ".join(variants) + " | ours over the hook |",
        "|---|---:|---|" + "---:|" * (len(variants) + 1),
    ]
    lost = []
    for (model, hosts, rate), cell in cells.items():
        times = {v: cell[v]["step_time_s"] for v in variants if v in cell}
        best = min(times.values(), default=0.0)
        shown = [
            "-" if v not in times else f"**{ms(times[v])}**" if times[v] == best else ms(times[v]) for v in variants
        ]
        fastest = min((v for v in ours if v in times), key=lambda v: times[v], default=None)
        share = times[fastest] / times[HOOK] if fastest and HOOK in times else None
        shown.append("-" if share is None else f"{share:.2f}")
        lines.append(f"| {model} | {hosts} | {speed(rate)} | " + " | ".join(shown) + " |")
        if share is not None and share > 1:
            lost.append(f"{model}, {hosts} hosts, {speed(rate)} (`{fastest}`, {share:.2f} times the step)")
    lines.append("| accuracy on `digits`, % | | | " + " | ".join(accuracy_on_digits(v) for v in variants) + " | |")
    pairs = [cell for cell in cells.values() if HOOK in cell]
    own = sum(cell["gradwire powersgd"]["step_time_s"] <= cell[HOOK]["step_time_s"] for cell in pairs)
    return [
        *lines,
        "",
        f"In {len(pairs) - len(lost)} of {len(pairs)} cells, one of our methods takes no longer than PyTorch's hook"
        f" (`gradwire powersgd`, with the same rank, in {own}). Cells in which all of ours take longer: {'; '.join(lost) or 'none'}. The hook has one bucket for"
        " the whole model and waits for it; gradwire sends the factors of DDP's buckets during the backward pass."
        " Accuracies are those of [the table](accuracy.md) after the same number of steps. The hook is shown with the accuracy of `powersgd`, which"
        " gives the same means up to rounding.",
        "",
    ]


def row_order_lines() -> list[str]:
    """Describe how near to the floor of its bytes an exchange of rows comes, in any order that was tried."""
    found = result("speed/row_orders")
    if not found:
        return []
    sizes = sorted({row["row_bytes"] for row in found["rows"]})
    lines = [
        f"`gradwire lab --hosts {found['hosts']} --bandwidth {found['bandwidth']} -- python benchmarks/speed/row_orders.py ...`"
        " only sends rows. The table shows their time divided by bytes / bandwidth, and in brackets the fastest and the slowest of"
        f" {found['repeats'] - 1}. Lanes take turns. A step cannot come nearer to its floor than its rows do.",
        "",
        "| order | " + " | ".join(f"{size / 1e3:.0f} kB a row" for size in sizes) + " |",
        "|---|" + "---:|" * len(sizes),
    ]
    for order in dict.fromkeys(row["order"] for row in found["rows"]):
        cells = {row["row_bytes"]: row for row in found["rows"] if row["order"] == order}
        shown = [
            f"{c['of_floor']:.2f} ({c['fastest_of_floor']:.2f} - {c['slowest_of_floor']:.2f})"
            for c in (cells[size] for size in sizes)
        ]
        lines.append(f"| {order} | {' | '.join(shown)} |")
    return [*lines, "", f"{found['cpu']}, {found['cores']} cores; {found['date_utc'][:10]}.", ""]


def readme_lines(cells: dict[Key, Cell]) -> list[str]:
    """Return the README's table: the MLP on 4 hosts."""
    shown = [(rate, cells[("mlp", 4, rate)]) for rate in (1e8, 1e9, UNLIMITED) if ("mlp", 4, rate) in cells]
    if not shown:
        return []
    first = shown[0][1]["compute"]
    lines = [
        "A training step of a 10 M-parameter MLP, milliseconds, 4 workers on 4 emulated hosts of one machine"
        f" ({first['processor']}, {first['cores']} cores):",
        "",
        "| exchange | " + " | ".join(speed(rate) for rate, _ in shown) + " | sent a step, MB |",
        "|---|" + "---:|" * (len(shown) + 1),
    ]
    for variant in (v for v in COLUMNS if all(v in cell for _, cell in shown)):
        sent = shown[0][1][variant]["sent_bytes_per_step"]
        times = " | ".join(ms(cell[variant]["step_time_s"]) for _, cell in shown)
        lines.append(f"| {variant} | {times} | {'-' if not sent else f'{sent / 1e6:.1f}'} |")
    lost = [
        key
        for key, cell in cells.items()
        if cell["gradwire terngrad"]["step_time_s"]
        > (1 + NOISE) * min(cell[n]["step_time_s"] for n in CASTS if n in cell)
    ]
    lines += [
        "",
        f"In {len(lost)} of {len(cells)} measured set-ups TernGrad is slower than the fastest of float32, fp16 and bf16 by more than {100 * NOISE:g} %:"
        " [all of them](docs/benchmarks.md#where-compression-loses).",
    ]
    return lines


def model_section() -> list[str]:
    """Describe predicted against measured."""
    found = result("speed/predictions")
    if not found:
        return []
    s, m = found["summary"], found["machine"]
    lines = [
        "## Predicted against measured",
        "",
        "`python benchmarks/speed/predictions.py` compares the model of `gradwire plan` with the measured steps. Codecs are timed on this machine; bytes and"
        f" rounds are those of the methods' own protocols. The model's {len(BOUNDS)} costs were calibrated on {m['source']} (every third cell"
        f" in the order of model, hosts, bandwidth), and the other {s['judged_steps']} steps are used to judge it."
        " Timelines of the backward pass come from the unlimited cell with the same model and hosts, stretched to the step without an exchange of each cell.",
        "",
        "| | measured | goal |",
        "|---|---:|---:|",
        f"| median absolute error | {100 * s['median_absolute_error']:.1f} % | 10 % |",
        f"| 90th percentile | {100 * s['percentile_90_absolute_error']:.1f} % | 25 % |",
        f"| worst | {100 * s['worst_absolute_error']:.0f} % | |",
    ]
    for against in ("DDP fp32", "the best cast"):
        right, clear = s[f"right_against_{against}"], s[f"clear_cells_against_{against}"]
        lines.append(f"| the faster of TernGrad and {against}, if they differ by over 5 % | {right} of {clear}"
                     f" ({100 * right / max(clear, 1):.0f} %) | 95 % |")  # fmt: skip
        advised = s[f"well_advised_against_{against}"]
        lines.append(f"| right advice there by `gradwire plan`, which needs a prediction of 5 % to advise a method | {advised} of {clear}"
                     f" ({100 * advised / max(clear, 1):.0f} %) | 95 % |")  # fmt: skip
    wrong = [a for a in found["advice"] if a["clear"] and not a["right"]]
    lines += ["", "![Predicted against measured](figures/predicted.png)", ""]
    if wrong:
        lines += ["Predicted to be the slower, and measured to be the faster, or the other way round: " + "; ".join(
            f"{a['model']}, {a['hosts']} hosts, {speed(a['bandwidth_bits_per_s'] or UNLIMITED)}, against {a['against']}"
            f" (measured {a['measured_speedup']:.2f}, predicted {a['predicted_speedup']:.2f})" for a in wrong) + ".", ""]  # fmt: skip
    worst = sorted((r for r in found["rows"] if r["role"] == "judged"), key=lambda r: -abs(r["relative_error"]))[:8]
    lines += ["Largest errors: " + "; ".join(
        f"{r['variant']}, {r['model']}, {r['hosts']} hosts, {speed(r['bandwidth_bits_per_s'] or UNLIMITED)}"
        f" ({ms(r['measured_s'])} ms, predicted {ms(r['predicted_s'])})" for r in worst) + ".", ""]  # fmt: skip
    return lines


def accuracy_section() -> list[str]:
    """Describe the time to accuracy."""
    found = result("training/time_to_accuracy")
    if not found:
        return []
    lines = [
        "## Time to accuracy",
        "",
        '`sudo env "PATH=$PATH" python benchmarks/training/time_to_accuracy.py`'
        f" measured: {found['what']}. The table shows means and standard deviations over seeds. {found['cpu']},"
        f" {found['cores']} cores; {found['date_utc'][:10]}.",
        "",
        "| task | goal | link | method | seeds, reached | time, s | of fp32's | sent by a worker, MB | steps |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for t in found["table"]:
        share = "-" if t["time_over_fp32"] is None else f"{t['time_over_fp32']:.2f}"
        lines.append(
            f"| {t['task']} | {t['goal']} | {t['bandwidth']} | `{t['name']}` | {t['seeds']}, {t['seeds_reached']}"
            f" | {spread(t, 'elapsed_s', 1, 1)} | {share} | {spread(t, 'sent_bytes', 1e6, 1)} | {spread(t, 'step', 1, 0)} |"
        )
    return [*lines, ""]


def spread(line: Row, field: str, unit: float, digits: int) -> str:
    """Write a mean with its standard deviation."""
    centre, deviation = line[f"{field}_mean"], line[f"{field}_std"]
    if centre is None:
        return "-"
    text = f"{centre / unit:.{digits}f}"
    return text if deviation is None else f"{text} ± {deviation / unit:.{digits}f}"


def page() -> str:
    """Return the page's text."""
    rows = rows_of("speed/step_grid")
    lines = [
        "# Benchmarks",
        "",
        "This page is generated by `python benchmarks/pages/summarise.py` from `benchmarks/results/`.",
        "",
    ]
    if rows:
        cells = cells_of(rows)
        lines += [
            "## Training steps",
            "",
            "`gradwire bench step` measured these steps on an emulated cluster. Each host is a network namespace whose link is limited in both directions."
            " Each host has one worker with one thread. All hosts share the cores of one machine, so computing takes longer on"
            " more hosts. The tables show milliseconds per step, as medians of interleaved turns;"
            " `benchmarks/results/speed/step_grid.jsonl` has the rows with percentiles, bytes and versions. `compute` exchanges nothing. The floor is max(compute, bytes /"
            f" bandwidth). PowerSGD is PyTorch's hook with rank 2 and one bucket. DDP's bf16 hook refuses Gloo. {provenance(rows[0])}.",
            "",
            "![Steps relative to DDP fp32 on 4 hosts](figures/steps.png)",
            "",
            *tables(cells),
            *every_method(),
            *losses(cells),
            *goals(cells),
            *bytes_(rows),
        ]
    auto = (auto_section, fast_links_section, residuals_section, coder_section)
    parts = (asleep, low_rank_lines, model_section, *auto, accuracy_section)
    for part in (*parts, network_section, messages_section, long_links_section):
        lines += part()
    projection = Path(__file__).with_name("projection.md")
    if projection.exists():
        lines += projection.read_text().splitlines()
    return "\n".join(lines).rstrip() + "\n"


def draw() -> None:
    """Draw the speed-up over DDP fp32 against bandwidth, 4 hosts."""
    from gradwire.tools.report.figures import draw_steps

    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw_steps(FIGURE, [row for row in rows_of("speed/step_grid") if row["hosts"] == 4])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw()
