"""What ``gradwire methods`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

import gradwire as gw
from gradwire.cli.show import print_table

__all__ = ["method_rows", "print_methods", "unbiased_text"]

NOTES = {
    "omega": "E|Q(g) - g|^2 <= omega |g|^2, for a vector of d elements: the variance that it adds",
    "delta": "E|Q(g) - g|^2 <= (1 - delta) |g|^2: how much of a vector it keeps at least",
    "bits per element": "sent for each element and direction with 4 workers; a float32 all-reduce has 32",
}

DIRECTION = "a direction to step in, with entries -1 and 1, not the mean: it needs a learning rate of its own"


def method_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the declared properties of the named methods, or of all, as flat objects."""
    table = gw.methods()
    rows = []
    for name in names or list(table):
        chosen = gw.method(name)
        known = type(chosen).name
        info = table.get(known) or _chooser(chosen)
        rows.append({**dataclasses.asdict(info), "spec": repr(chosen), "collectives": ", ".join(chosen.collectives)})
        if repr(chosen) != info.spec:
            # Those that are known are of the defaults.
            rows[-1]["bits_per_element"] = None
        if known not in table:
            rows[-1] |= {"unbiased": None, "bits_per_element": None, "bit_stable": None}
    return rows


def _chooser(method: gw.Method) -> gw.MethodInfo:
    p = method.properties
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    return gw.MethodInfo(name=type(method).name, spec=repr(method), collectives=(), **fields)


def unbiased_text(row: Mapping[str, Any]) -> str:
    """Say whether a method is unbiased, with its note."""
    note = row["unbiased_note"]
    if row["unbiased"]:
        return note or "yes"
    return f"no; {note}" if note else "no"


def print_methods(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line a method, or all that is known of a single one."""
    if len(rows) == 1:
        _print_one(rows[0])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "bits/element (4 workers)", "unbiased", "bit-stable", "state", "summary"):
        table.add_column(column)
    for row in rows:
        stable = "yes" if row["bit_stable"] else "no"
        bits = f"{row['bits_per_element']:.3g}"
        table.add_row(row["name"], bits, unbiased_text(row), stable, row["state"], row["summary"])
    print_table(table)


def _print_one(row: Mapping[str, Any]) -> None:
    chosen = gw.method(row["spec"])
    lines = {key.replace("_", " "): value for key, value in row.items() if key != "unbiased_note"}
    if isinstance(chosen, gw.Auto):
        lines = {key: lines[key] for key in ("name", "spec", "summary")}
        lines |= {"candidates": ", ".join(chosen.candidates), "turns": chosen.turns, "steps": chosen.steps}
    else:
        lines |= {"unbiased": unbiased_text(row), "bit stable": "yes" if row["bit_stable"] else "no"}
        lines["outcome"] = DIRECTION if chosen.direction else "the mean of the gradients, or an estimate of it"
    for key, value in lines.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(f"{key + ':':<18} {'-' if value in (None, '') else shown}")
    if isinstance(chosen, gw.Auto):
        print("It tries the candidates in so many turns of so many steps each, and keeps the fastest.")
    for key, text in NOTES.items():
        if lines.get(key) is not None:
            print(f"{key}: {text}")
