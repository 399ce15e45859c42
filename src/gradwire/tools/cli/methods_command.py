"""The command ``gradwire methods``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.table import Column, Table
from rich.text import Text

import gradwire as gw
from gradwire.methods.accuracy import note_of
from gradwire.tools.cli.show import print_table

NOTES = {
    "omega": "E|Q(g) - g|^2 <= omega |g|^2 for a vector, or blocks, of d elements: the variance that it adds",
    "delta": "E|Q(g) - g|^2 <= (1 - delta) |g|^2: the share of a vector that it keeps at least",
    "state bytes per element": "what each rank remembers; in memory twice: as it holds, and as the round makes it",
    "bits per element": "sent for each element and direction with 4 workers; a float32 all-reduce has 32",
    "delays": "one-way delays of the network on the critical path of an exchange with 4 workers, on Gloo",
}

DELAY_WORKERS, DELAY_SHAPES = 4, {"weight": (1024, 1024), "bias": (1024,)}
"""Workers and parameters for which delays are shown: one bucket of one chunk."""

DIRECTION = "a direction to step in, not the mean: it needs a learning rate of its own"
PARAMETERS = "parameters, after steps that each worker takes with its own gradients"


def method_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the declared properties of the named methods, or of all, as flat objects."""
    defaults = {name: info.spec for name, info in gw.methods().items()}
    rows = []
    for name in names or list(defaults):
        chosen = gw.method(name)
        info = gw.MethodInfo.of(chosen)
        rows.append({**dataclasses.asdict(info), "collectives": ", ".join(info.collectives), **_delays(chosen)})
        if info.spec != defaults.get(info.name):
            # Both are declared for the default settings only.
            rows[-1] |= {"bits_per_element": None, "state_bytes_per_element": None}
        if info.name not in defaults:
            rows[-1] |= {
                "unbiased": None,
                "bits_per_element": None,
                "state_bytes_per_element": None,
                "bit_stable": None,
            }
    return rows


def _delays(method: gw.Method) -> dict[str, Any]:
    """Return the delays of an exchange; None for a method that chooses among others, or needs to know the cluster."""
    from gradwire.model.exchange_profile import delays_of

    found = delays_of(method, DELAY_SHAPES, DELAY_WORKERS)
    return {"delays": found and found.count, "delay_phases": found and str(found)}


def _count(delays: int | None) -> str:
    return "-" if delays is None else str(delays)


def unbiased_text(row: Mapping[str, Any]) -> str:
    """Return "yes", "no" or the method's note on whether it is unbiased."""
    return row["unbiased_note"] or ("yes" if row["unbiased"] else "no")


def print_methods(rows: Sequence[Mapping[str, Any]], *, in_full: bool = False) -> None:
    """Print all properties of a single method, else one line for each: by family, or ``in_full`` as a table."""
    if len(rows) == 1:
        _print_one(rows[0])
        return
    if not in_full:
        _print_families(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("name", "bits/element (4 workers)", "delays", "unbiased", "bit-stable", "state", "summary")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        stable = "yes" if row["bit_stable"] else "no"
        bits = f"{row['bits_per_element']:.3g}"
        delays = _count(row["delays"])
        table.add_row(row["name"], bits, delays, unbiased_text(row), stable, row["state"], row["summary"])
    print_table(table)


def _print_families(rows: Sequence[Mapping[str, Any]]) -> None:
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(_family(row["spec"]), []).append(row)
    table = Table(*(Column(overflow="fold") for _ in range(4)), box=None, pad_edge=False, show_header=False)
    for family, members in families.items():
        table.add_row(Text(family, style="bold"))
        for row in members:
            bits, delays = f"{row['bits_per_element']:.3g} bits", f"{_count(row['delays'])} delays"
            table.add_row(f"  {row['name']}", bits, delays, row["summary"])
    print_table(table)
    print("Bits are those sent for each element and direction with 4 workers; a float32 all-reduce has 32.")
    print(
        "Delays are the one-way delays of the network for which an exchange of a bucket among 4 workers waits on Gloo."
    )
    print("gradwire methods NAME shows a method in full, gradwire methods --all more of each.")


def _family(spec: str) -> str:
    """Return the name of a method's family: the beginning of its package's docstring."""
    package = type(gw.method(spec)).__module__.rpartition(".")[0]
    return (import_module(package).__doc__ or package).partition(":")[0].rstrip(".\n")


def _outcome(chosen: gw.Method) -> str:
    if chosen.traits.direction:
        return DIRECTION
    return PARAMETERS if chosen.traits.local_steps else "the mean of the gradients, or an estimate of it"


def _print_one(row: Mapping[str, Any]) -> None:
    chosen = gw.method(row["spec"])
    lines = {key.replace("_", " "): value for key, value in row.items() if key != "unbiased_note"}
    if isinstance(chosen, gw.Auto):
        lines = {key: lines[key] for key in ("name", "spec", "summary")}
        lines |= {"candidates": ", ".join(chosen.traits.tries), "turns": chosen.turns, "steps": chosen.steps}
    else:
        lines |= {"unbiased": unbiased_text(row), "bit stable": "yes" if row["bit_stable"] else "no"}
        lines["outcome"] = _outcome(chosen)
    for key, value in lines.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(f"{key + ':':<18} {'-' if value in (None, '') else shown}")
    if isinstance(chosen, gw.Auto):
        print("It tries the candidates in so many turns of so many steps each, and keeps the fastest.")
        for spec in chosen.traits.tries:
            if (note := note_of(spec)) is not None:
                print(f"{spec}: {note}")
    for key, text in NOTES.items():
        if any(lines.get(name) is not None for name in (key, f"{key} formula")):
            print(f"{key}: {text}")
