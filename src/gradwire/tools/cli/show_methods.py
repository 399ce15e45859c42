"""The output of ``gradwire methods``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.table import Table

import gradwire as gw
from gradwire.tools.cli.show import print_table

__all__ = ["method_rows", "print_methods", "unbiased_text"]

NOTES = {
    "omega": "E|Q(g) - g|^2 <= omega |g|^2 for a vector, or blocks, of d elements: the variance that it adds",
    "delta": "E|Q(g) - g|^2 <= (1 - delta) |g|^2: the share of a vector that it keeps at least",
    "state bytes per element": "what each rank remembers; in memory twice: as it holds, and as the round makes it",
    "bits per element": "sent for each element and direction with 4 workers; a float32 all-reduce has 32",
}

DIRECTION = "a direction to step in, not the mean: it needs a learning rate of its own"


def method_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the declared properties of the named methods, or of all, as flat objects."""
    defaults = {name: info.spec for name, info in gw.methods().items()}
    rows = []
    for name in names or list(defaults):
        chosen = gw.method(name)
        info = gw.MethodInfo.of(chosen)
        rows.append({**dataclasses.asdict(info), "collectives": ", ".join(info.collectives)})
        if info.spec != defaults.get(info.name):
            # They are declared for the defaults alone.
            rows[-1] |= {"bits_per_element": None, "state_bytes_per_element": None}
        if info.name not in defaults:
            rows[-1] |= {
                "unbiased": None,
                "bits_per_element": None,
                "state_bytes_per_element": None,
                "bit_stable": None,
            }
    return rows


def unbiased_text(row: Mapping[str, Any]) -> str:
    """Return whether a method is unbiased, in words."""
    return row["unbiased_note"] or ("yes" if row["unbiased"] else "no")


def print_methods(rows: Sequence[Mapping[str, Any]], *, in_full: bool = False) -> None:
    """Print one line for each method by family, or with more properties; or all properties of a single one."""
    if len(rows) == 1:
        _print_one(rows[0])
        return
    if not in_full:
        _print_families(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "bits/element (4 workers)", "unbiased", "bit-stable", "state", "summary"):
        table.add_column(column)
    for row in rows:
        stable = "yes" if row["bit_stable"] else "no"
        bits = f"{row['bits_per_element']:.3g}"
        table.add_row(row["name"], bits, unbiased_text(row), stable, row["state"], row["summary"])
    print_table(table)


def _print_families(rows: Sequence[Mapping[str, Any]]) -> None:
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(_family(row["spec"]), []).append(row)
    table = Table(box=None, pad_edge=False, show_header=False)
    for family, members in families.items():
        table.add_row(f"[bold]{family}[/bold]")
        for row in members:
            table.add_row(f"  {row['name']}", f"{row['bits_per_element']:.3g} bits", row["summary"])
    print_table(table)
    print("Bits are those sent for each element and direction with 4 workers; a float32 all-reduce has 32.")
    print("gradwire methods NAME shows a method in full, gradwire methods --all more of each.")


def _family(spec: str) -> str:
    """Return what the package of a method says of itself."""
    package = type(gw.method(spec)).__module__.rpartition(".")[0]
    return (import_module(package).__doc__ or package).partition(":")[0].rstrip(".\n")


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
        if any(lines.get(name) is not None for name in (key, f"{key} formula")):
            print(f"{key}: {text}")
