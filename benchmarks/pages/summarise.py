"""Write ``docs/results.md``, ``benchmarks.md``, ``quantisers.md``, ``accuracy.md``, ``local-steps.md``, parts of ``graphs.md`` and the README's table and the steps' figure from the committed results; ``--check`` only compares the texts.

python benchmarks/pages/summarise.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.page_parts import cells_of, where
from benchmarks.lib.results import RESULTS, ROOT, result, rows_of
from benchmarks.pages import (
    accuracy_page,
    fsdp_page,
    gossip_page,
    graph_page,
    integrations_page,
    lgc_page,
    local_page,
    quantisers_page,
    steps_page,
    trials_page,
    two_level_page,
)

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def readme_table() -> str:
    """Return the README's measured table."""
    mnist, cells = result("claims/mnist"), cells_of(rows_of("speed/step_grid"))
    lines = steps_page.readme_lines(cells)
    if mnist:
        four = next((r for r in mnist["table"] if r["workers"] == 4), None)
        if four:
            lines += [
                "",
                f"LeNet on MNIST, 4 workers, {four['terngrad_seeds']} seeds: fp32 "
                f"{100 * four['fp32_accuracy_mean']:.2f} %, TernGrad {100 * four['terngrad_accuracy_mean']:.2f} % "
                "([all workers](docs/results.md)).",
            ]
    return "\n".join(lines)


def kernels() -> list[str]:
    """Describe the kernels' result."""
    path = RESULTS / "speed/kernels.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    first = rows[0]
    found = {
        **{k: first[k] for k in ("cpu", "cores", "date_utc", "backend")},
        "versions": {k: first[k] for k in ("gradwire", "torch", "numba", "numpy", "python") if k in first},
    }
    lines = [
        "## Kernels",
        "",
        "Time per element as a share of a float32 memcpy of 20 M elements in the same run, one thread, backend "
        f"`{found['backend']}`. `gradwire bench kernels --json`. {where(found)}.",
        "",
        "| kernel | segments | ms | share of memcpy | 20 % - 80 % | goal |",
        "|---|---|---:|---:|---:|---:|",
    ]
    steps = [row for row in rows if row["kernel"].startswith("step of ")]
    for row in rows:
        if row in steps:
            continue
        goal = row["goal_ratio"]
        lines.append(
            f"| {row['kernel']} | {row['layout']} | {1e3 * row['median_s']:.2f} | {row['ratio_to_memcpy']:.2f} "
            f"| {row['ratio_p20']:.2f} - {row['ratio_p80']:.2f} | {goal if goal else '-'} |"
        )
    lines += [
        "",
        "The goals were set on a machine whose memcpy took 12.5 ms for the same length; here it is three times as fast, while "
        "arithmetic is not. The floors are in the table: writing alone costs more than the goal for decoding, which is therefore "
        "out of reach on this machine; reading alone leaves moments next to nothing for arithmetic; encoding is bound by Philox. "
        "In time, not in shares, every large kernel of ternary codes is well below its goal there (0.50 of 12.5 ms is 6.3 ms); "
        "coders are not all: rANS is to decode in 1.9 ms, Huffman to encode in 3.1. Tiny segments are above their goals: a call's "
        "overhead for a segment does not shrink with memcpy.",
        "",
    ]
    if steps:
        lines += [
            "### A step of each method",
            "",
            f"All that one rank of four computes in a step for {steps[0]['elements']:,} elements (an MLP's large parameters): statistics, "
            "encoder, reduction or the peers' payloads, decoder, memory; with the methods' defaults, over a float32 memcpy of as "
            "many elements. Those that travel by all-gather decode four payloads. The wire is not in it.",
            "",
            "| method | ms | memcpys | 20 % - 80 % |",
            "|---|---:|---:|---:|",
        ]
        lines += [
            f"| `{row['kernel'].removeprefix('step of ')}` | {1e3 * row['median_s']:.1f} | {row['ratio_to_memcpy']:.1f} "
            f"| {row['ratio_p20']:.1f} - {row['ratio_p80']:.1f} |"
            for row in steps
        ]
        lines.append("")
    return lines


def mnist() -> list[str]:
    """Describe the MNIST curve."""
    found = result("claims/mnist")
    if not found:
        return []
    lines = [
        "## MNIST, 2 to 64 workers",
        "",
        f"{found['what']}. `python benchmarks/claims/mnist_curve.py --data FOLDER`. {where(found)}.",
        "",
        "| workers | TernGrad, % | seeds | fp32, % | fp32's workers | difference, points | allowed |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["table"]:

        def cell(method: str, row: dict[str, Any] = row) -> str:
            spread = row[f"{method}_accuracy_std"]
            return f"{100 * row[f'{method}_accuracy_mean']:.2f}" + (
                f" ± {100 * spread:.2f}" if spread is not None else ""
            )

        lines.append(
            f"| {row['workers']} | {cell('terngrad')} | {row['terngrad_seeds']} | {cell('fp32')} "
            f"| {', '.join(map(str, row['fp32_workers']))} | {row['difference_points']:+.2f} | ±{row['allowed_points']} |"
        )
    lines += [
        "",
        "± is the standard deviation over seeds. All numbers of workers see the same batches of a seed, so fp32 differs between "
        "them in rounding alone; where the column says another number of workers, that run stands in.",
        "",
    ]
    return lines


def terngrad_cifar10() -> list[str]:
    """Describe TernGrad's CIFAR-10 table, shortened."""
    found = result("claims/terngrad_cifar10")
    if not found:
        return []
    hours = [sum(run[key] or 0 for run in found["runs"]) / 3600 for key in ("wall_s", "cpu_s")]
    lines = [
        "## CIFAR-10 with Adam, the TernGrad paper's table 1, shortened",
        "",
        f"{found['what']}. `python benchmarks/claims/terngrad_cifar10.py --data FOLDER`. {where(found)}. {len(found['runs'])} runs, "
        f"{hours[1]:.1f} hours of the processor, one thread each, in {hours[0]:.1f} hours of the clock beside other programs.",
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
        f"**Shortened**: a run sees {found['samples']:,} images ({epochs:.1f} epochs of 40,000), the paper's 38.4 million (768 of "
        f"50,000), {1 / share:.0f} times as many. Accuracies are of a network that has only begun to learn, on images held out of the "
        "training set, and cannot be compared with the paper's; what can be compared is fp32 with TernGrad in the same row.",
        "",
        f"TernGrad ends below fp32 in {below} of {len(found['table'])} rows, by several times the paper's differences; in the column *half "
        "way* is the difference after half of the steps. The paper's own are of whole trainings, one run each. These runs show what the "
        "noise costs early in a training with Adam; they do not show what is left of it at the end. With 16 workers the mean "
        "is of eight times as many draws, and of twice as many samples a worker: there, as in the paper, less is lost.",
        "",
        "As in the authors' programs: the network (TensorFlow's tutorial's, with local response normalisation), crops of 24 and flips, "
        "Adam at 2e-4, weight decay of the two hidden linear layers inside the differentiated loss, an average of the weights in "
        "evaluation, clipping at 2.5. Not as there: no jitter of brightness and contrast, pixels standardised by the data set's mean and "
        "deviation instead of each image's, batches 1 to 4 of the training set alone, sigma about zero, and parameters below 1024 "
        "elements (the biases) in float32.",
        "",
        "The second row is the paper's advice for TernGrad on larger networks, a quarter of the weight decay; the paper changes it for "
        "TernGrad alone, here both columns have it. "
        + (
            f"From the first row to the second TernGrad gains {gains[0]:.2f} points and fp32 {gains[1]:.2f} ({len(seeds)} of the seeds). "
            if gains
            else ""
        )
        + "Less dropout is its other advice, and this network has none.",
        "",
    ]


def bytes_() -> list[str]:
    """Describe the interface's counters."""
    found = result("speed/bytes")
    if not found:
        return []
    lines = [
        "## Bytes",
        "",
        "`link.traffic()`, summed over ranks, against the loopback interface's counter in a network namespace of its own. "
        f"`python benchmarks/speed/bench_bytes.py`. {where(found)}.",
        "",
        "| method | workers | elements x rounds | traffic(), bytes | interface, bytes | difference |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| `{row['method']}` | {row['workers']} | {row['elements']:,} x {row['rounds']} | {row['traffic_bytes']:,} "
            f"| {row['interface_bytes']:,} | {row['difference_percent']:+.2f} % |"
        )
    return [*lines, ""]


def identity() -> list[str]:
    """Describe which runs end in the same bits."""
    found = result("claims/identity")
    if not found:
        return []
    lines = [
        "## The same bits",
        "",
        f"Digests of the parameters after training. `python benchmarks/claims/identity.py`. {where(found)}.",
        "",
        "| run | ranks | digest |",
        "|---|---:|---|",
    ]
    lines += [f"| {row['run']} | {row['ranks']} | `{'`, `'.join(row['digest'])}` |" for row in found["rows"]]
    lines += [""] + [
        f"- {'Same' if group['same_bits'] else '**Different**'}: {'; '.join(group['runs'])}."
        for group in found["groups"]
    ]
    return [*lines, ""]


def demo() -> list[str]:
    """Describe the demo."""
    path = RESULTS / "training/demo.txt"
    if not path.exists():
        return []
    return ["## `make demo`", "", "```", path.read_text().rstrip(), "```", ""]


def with_measured(page: str, measured: str) -> str:
    """Return a page with what was measured between its two marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{measured}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Write, or compare."""
    page = "\n".join(["# Results", "", "Generated by `python benchmarks/pages/summarise.py` from `benchmarks/results/`.", ""]
                     + [line for part in (kernels, mnist, terngrad_cifar10, bytes_, identity, demo) for line in part()])  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    graphs, fsdp, joined, which = (
        ROOT / "docs" / f"{name}.md" for name in ("graphs", "fsdp", "integrations", "which-method")
    )
    wanted = {
        ROOT / "docs" / "results.md": page.rstrip() + "\n",
        ROOT / "docs" / "benchmarks.md": steps_page.page(),
        ROOT / "docs" / "quantisers.md": quantisers_page.page(),
        ROOT / "docs" / "accuracy.md": accuracy_page.page(),
        graphs: with_measured(graphs.read_text(), graph_page.measured()),
        fsdp: with_measured(fsdp.read_text(), fsdp_page.measured()),
        joined: with_measured(joined.read_text(), integrations_page.measured()),
        which: with_measured(which.read_text(), local_page.advice()),
        ROOT / "README.md": with_measured(readme, readme_table()),
    }
    others = (
        ("local-steps", local_page.page()),
        ("gossip", gossip_page.page()),
        ("lgc", lgc_page.page()),
        ("two-level", two_level_page.page()),
        ("trials", trials_page.page()),
    )
    for name, made in others:
        if made is not None:
            wanted[ROOT / "docs" / f"{name}.md"] = made
    stale = [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}" if stale else "up to date")
        return int(bool(stale))
    for path, text in wanted.items():
        path.write_text(text)
    steps_page.draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
