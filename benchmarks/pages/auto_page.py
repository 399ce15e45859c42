"""What ``method="auto"`` chose, for ``docs/benchmarks.md``."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.page_parts import UNLIMITED, Cell, cells_of, ms, provenance, relative, speed
from benchmarks.lib.results import result, rows_of
from gradwire.methods.accuracy import note_of
from gradwire.methods.auto import Auto
from gradwire.tools.lab import Topology


def auto_section() -> list[str]:
    """Describe what "auto" chose in each cell, and how that compares."""
    found = result("speed/auto")
    if not found:
        return []
    # The list is that of the rows: what was not measured is not claimed.
    rows = [row for row in rows_of("speed/step_grid") if row["variant"] == "gradwire auto"]
    tried = ", ".join(f"`{spec}`" for spec in rows[0]["record"]["choice"]["sent_bytes_per_step"]) if rows else "-"
    now = ", ".join(f"`{spec}`" for spec in Auto().candidates)
    differs = f"; the list is {now} today, and the grid was measured before that" if rows and tried != now else ""
    lines = [
        '## `method="auto"`',
        "",
        f"`python benchmarks/speed/auto_cells.py` judges these choices. In every cell, a new link tries the methods of its list ({tried}{differs}) in the first steps and chooses one; then it"
        " takes turns with the other exchanges.",
        "",
        "- The column *over the chosen by name* compares it with the same method attached by name; the differences there are noise.",
        "- *Allowed* is how much slower than the best cast it may be: 3 % or two standard errors of the"
        " pairs, whichever is larger.",
        "- It *must win*, that is, be faster than fp32, if bytes / bandwidth exceeds a third of the fp32 step.",
        "",
        *_judged(found),
    ]
    return lines


def _judged(found: dict[str, Any]) -> list[str]:
    """Return the table of judged cells, and how many keep the promise."""
    lines = [
        "| model | hosts | link | chosen | best cast, ms | auto, ms | over best cast | allowed | over the chosen by name"
        " | must win | verdict |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for c in found["cells"]:
        itself = c["relative_to_the_chosen_alone"]
        lines.append(
            f"| {c['model']} | {c['hosts']} | {speed(c['bandwidth_bits_per_s'] or UNLIMITED)} | `{c['chosen']}` |"
            f" {ms(c['best_cast_s'])} ({c['best_cast']}) | {ms(c['auto_s'])} | {100 * c['relative_to_best_cast']:+.1f} % |"
            f" {100 * c['allowed']:.1f} % | {'-' if itself is None else f'{100 * itself:+.1f} %'} | {'yes' if c['must_win'] else ''} | {'kept' if c['kept'] else '**broken**'} |"
        )
    kept = sum(c["kept"] for c in found["cells"])
    lines += ["", f"The promise is kept in {kept} of {len(found['cells'])} cells. If a win had to be faster than the best cast instead of"
                  f" fp32, it would be kept in {sum(c['kept_strictly'] for c in found['cells'])}, since the chosen method is sometimes the best cast itself."
                  f" {found['cpu']}, {found['cores']} cores;"
                  f" {found['date_utc'][:10]}.", ""]  # fmt: skip
    return lines


def fast_links_section() -> list[str]:
    """Describe the same for small models on fast links, measured on another machine."""
    found = result("speed/auto_fast_links")
    if not found:
        return []
    return [
        "### Small models on fast links",
        "",
        "On such links the network hardly matters, every method costs something, and steps scatter by a tenth, so that choices are hardest here. Candidates that are close are"
        " tried again, in turns of up to eight times as many steps; these cells were measured when there were more turns instead of longer ones. `gradwire bench step ... --out benchmarks/results/speed/step_fast_links.jsonl`"
        " measured these cells on another machine, and `python benchmarks/speed/auto_cells.py --rows ...` judged them.",
        "",
        *_judged(found),
    ]


HOOK, CAREFUL, ALL = "ddp powersgd", "gradwire auto", "gradwire Auto(residuals=True)"


def residuals_section() -> list[str]:
    """Describe where methods that keep a residual make "auto" faster, and what they cost."""
    rows = rows_of("speed/step_auto_residuals")
    if not rows:
        return []
    lines = [
        "### With residuals",
        "",
        "`gradwire bench step --variant ... --out benchmarks/results/speed/step_auto_residuals.jsonl`: variants take turns in one run. A fresh"
        " `Auto(residuals=True)` tries all its candidates in each cell, and says with its choice what that costs. Over: mean of turns side by"
        " side, with two standard errors.",
        "",
        "| model | hosts | link | delay one way, ms | ddp powersgd | auto | `Auto(residuals=True)` | acp_sgd | powersgd | over the hook | over auto |",
        "|---|---:|---|---:|---:|---|---|---:|---:|---:|---:|",
    ]
    cells: dict[tuple[Any, ...], Cell] = {}
    for row in rows:
        delay_s = Topology.parse(row["lab"]).impairments.delay_s
        key = (row["model"], row["hosts"], row["bandwidth_bits_per_s"] or UNLIMITED, delay_s)
        cells.setdefault(key, {})[row["variant"]] = row
    chosen = set()
    for (model, hosts, rate, delay_s), cell in cells.items():
        took = {name: f"{ms(row['step_time_s'])}" for name, row in cell.items()}
        for name in (CAREFUL, ALL):
            choice = cell[name]["record"]["choice"]["chosen"]
            took[name] += f" (`{choice}`)"
            chosen.add(choice)
        hook, auto = (
            f"{100 * off:+.0f} ± {200 * error:.0f} %"
            for off, error in (relative(cell, ALL, v) for v in (HOOK, CAREFUL))
        )
        lines.append(
            f"| {model} | {hosts} | {speed(rate)} | {1e3 * delay_s:g} | {took[HOOK]} | {took[CAREFUL]} | {took[ALL]} |"
            f" {took['gradwire acp_sgd']} | {took['gradwire powersgd']} | {hook} | {auto} |"
        )
    said = [f"- `{spec}`: {note}." for spec in sorted(chosen) if (note := note_of(spec)) is not None]
    return [*lines, "", "What is said with these choices:", "", *said, "", f"{provenance(rows[0])}.", ""]


def coder_section() -> list[str]:
    """Describe where a coder pays, and whether "auto" takes it there."""
    rows = rows_of("speed/step_grid")
    if not any(row["variant"] == "gradwire coded" for row in rows):
        return []
    lines = [
        "### Packed or coded",
        "",
        "In the same cells, TernGrad runs packed and entropy-coded, with the same decoded bits. A difference below 0 means that the coder makes the step shorter. Differences are means over turns"
        " taken side by side, with two standard errors.",
        "",
        "| model | hosts | link | terngrad, ms | coded, ms | coded over terngrad | auto chose | auto, ms | auto over the best of all but PowerSGD |",
        "|---|---:|---|---:|---:|---:|---|---:|---:|",
    ]
    right, clear = 0, 0
    for (model, hosts, rate), cell in cells_of(rows).items():
        took = {name: row["step_time_s"] for name, row in cell.items() if name != "compute"}
        others = {name: s for name, s in took.items() if name not in ("gradwire auto", "ddp powersgd")}
        best = min(others, key=lambda name: others[name])
        gain, error = relative(cell, "gradwire coded", "gradwire terngrad")
        lost, spread = relative(cell, "gradwire auto", best)
        choice = cell["gradwire auto"]["record"]["choice"]["chosen"]
        if abs(gain) > 2 * error and best in ("gradwire terngrad", "gradwire coded"):
            clear += 1
            right += choice == ("coded" if gain < 0 else "terngrad")
        lines.append(
            f"| {model} | {hosts} | {speed(rate)} | {ms(took['gradwire terngrad'])} |"
            f" {ms(took['gradwire coded'])} | {100 * gain:+.0f} ± {200 * error:.0f} % | `{choice}` |"
            f" {ms(took['gradwire auto'])} | {100 * lost:+.0f} ± {200 * spread:.0f} % ({best}) |"
        )
    lines += [
        "",
        f"In {clear} of {len(cells_of(rows))} cells, one of the two is the fastest exchange, and the two differ by more than two standard errors."
        f' In {right} of these cells, "auto" took the faster one.',
        "",
    ]
    return lines
