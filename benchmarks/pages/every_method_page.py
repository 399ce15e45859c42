"""The section on every method's step of ``docs/benchmarks.md``, from the rows of ``benchmarks/speed/every_method.py``."""

from __future__ import annotations

from benchmarks.lib.page_parts import UNLIMITED, Cell, Row, ms, provenance, relative, speed
from benchmarks.lib.results import rows_of

AUTO = "gradwire auto"
SPARSE = "gradwire ErrorFeedback(compressor=TopK(density=0.001))"
RACES = (
    (
        "gTop-k beside Top-k",
        "gradwire GTopK(density=0.001)",
        SPARSE,
        "Shi et al. 2019: 1.1 to 1.7 times Top-k's scaling efficiency, up to 32 GPUs on 1 Gbit/s",
    ),
    (
        "SIDCo beside Top-k",
        "gradwire ErrorFeedback(compressor=SIDCo(density=0.001))",
        SPARSE,
        "Abdelmoniem et al. 2021: training up to 7.6 times faster than with Top-k, on GPUs",
    ),
    (
        "DGC beside Top-k",
        "gradwire DGC(density=0.001)",
        SPARSE,
        "Abdelmoniem et al. 2021: DGC is 1.9 times slower than SIDCo, 4 times faster than Top-k",
    ),
)
"""Name, exchange, what it is compared with in the same turns, and what the papers say."""


def by_rate(rows: list[Row]) -> dict[float, Cell]:
    """Group rows by the links' bandwidth, the slowest first."""
    found: dict[float, Cell] = {}
    for row in rows:
        found.setdefault(row["bandwidth_bits_per_s"] or UNLIMITED, {})[row["variant"]] = row
    return dict(sorted(found.items()))


def every_method() -> list[str]:
    """Return a row of every method, measured in one run beside DDP, and the races that papers describe."""
    cells = by_rate(rows_of("speed/step_methods"))
    if not cells:
        return []
    slowest = next(iter(cells.values()))
    lines = [
        "## Every method: the MLP on 4 hosts",
        "",
        "`python benchmarks/speed/every_method.py` runs `gradwire bench step` for groups of exchanges that take turns. DDP fp32 and TernGrad are in"
        " every group, and speed-ups are over the fp32 of the same group. Methods have their defaults unless the spec says otherwise. The table shows the step in"
        " milliseconds with its 20th and 80th percentile, the processor time that a rank spends on encoding and decoding (*codec*), and the"
        " speed-up over DDP fp32. The rows are in `benchmarks/results/speed/step_methods.jsonl`."
        f" {provenance(next(iter(slowest.values())))}.",
        "",
        "| exchange | sent, MB | codec, ms | "
        + " | ".join(f"{speed(r)}: step | 20 % - 80 % | speed-up" for r in cells)
        + " |",
        "|---|---:|---:|" + "---:|---:|---:|" * len(cells),
    ]
    for variant, row in slowest.items():
        shown = []
        for cell in cells.values():
            found = cell.get(variant)
            if found is None:
                shown += ["-", "-", "-"]
                continue
            gain = found["speedup_over_ddp_fp32"]
            shown += [
                ms(found["step_time_s"]),
                f"{ms(found['percentile_20_s'])} - {ms(found['percentile_80_s'])}",
                f"{gain:.2f}" if gain and variant != "compute" else "-",
            ]
        took = f" (took {row['record']['choice']['chosen']})" if variant == AUTO else ""
        codec = row["encode_s_per_step"] + row["decode_s_per_step"]
        sent = (row["sent_bytes_per_step"] or 0) / 1e6
        lines.append(f"| {variant}{took} | {sent:.2f} | {ms(codec) if codec else '-'} | " + " | ".join(shown) + " |")
    return [*lines, "", *(races(cells) if len(cells) > 1 else []), *why_coders_miss(slowest)]


def races(cells: dict[float, Cell]) -> list[str]:
    """Compare steps as papers do, in the same turns of the same run."""
    lines = [
        "Papers also compare the times of steps. The next table repeats their comparisons, with both exchanges in the same turns. It shows the ratio of the two"
        " steps' times; below one, the first exchange is faster.",
        "",
        "| comparison | " + " | ".join(speed(rate) for rate in cells) + " | what the paper says |",
        "|---|" + "---:|" * len(cells) + "---|",
    ]
    for name, one, other, said in RACES:
        shown = []
        for cell in cells.values():
            gain, error = relative(cell, one, other) if one in cell and other in cell else (0.0, 0.0)
            shown.append(f"{1 + gain:.2f} ± {error:.2f}" if one in cell and other in cell else "-")
        lines.append(f"| {name} | " + " | ".join(shown) + f" | {said} |")
    shown = []
    for cell in cells.values():
        atomo, ternary = (cell[v]["speedup_over_ddp_fp32"] for v in ("gradwire spectral_atomo", "gradwire terngrad"))
        shown.append(f"{ternary / atomo:.2f}")
    lines.append(
        "| spectral ATOMO beside TernGrad | "
        + " | ".join(shown)
        + " | Wang et al. 2018: training up to 3 times faster than with TernGrad |"
    )
    return [*lines, ""]


def why_coders_miss(cell: Cell) -> list[str]:
    """Explain the goals for methods with a coder."""
    goals = {"gradwire coded": 0.290, "gradwire Coded(compressor=TernGrad(clip=None))": 0.215}
    told = [
        f"`{variant}` takes {ms(cell[variant]['step_time_s'])} ms (goal {ms(goal)},"
        f" {'met' if cell[variant]['step_time_s'] <= goal else 'missed'})"
        for variant, goal in goals.items()
        if variant in cell
    ]
    (rate,) = {cell[variant]["bandwidth_bits_per_s"] for variant in goals if variant in cell}
    bytes_s = [ms(8 * cell[variant]["sent_bytes_per_step"] / rate) for variant in goals if variant in cell]
    return [
        f"At the slower link, {' and '.join(told)}. The bytes alone take {' and '.join(bytes_s)} ms, and computing takes"
        f" {ms(cell['compute']['step_time_s'])}, since four workers share two virtual CPUs, so both would have to overlap almost completely."
        " Rows, sent one at a time, take 1.1 to 1.3 times their bytes divided by the bandwidth.",
        "",
    ]
