"""The table of what becomes of methods' state when members come and go, from what the methods declare."""

from __future__ import annotations

import gradwire as gw
from gradwire.link.membership.method_rules import BALANCED, OF_FIRST, OF_RANKS, OWN, WAITING, Fate, fates, refusal

VARIANTS = (
    "ErrorFeedback(compressor=TopK(density=0.01), momentum=0.9)",
    "EF21(momentum=0.9)",
    "DGC(density=0.01, momentum=0.9)",
    "TernGrad(ahead=True)",
    "PowerSGD(values=BF16())",
    "ACPSGD(values=BF16())",
    "RankCurve(feedback='reconstruction')",
    "LGC(feedback='reconstruction')",
)
"""Methods that keep more than with their defaults."""

ORDER = (WAITING, BALANCED, OWN, OF_RANKS, OF_FIRST)


def table() -> str:
    """Return the table, a row for each kind of state and what becomes of it."""
    rows: dict[tuple[str, Fate], list[str]] = {}
    for spec in (*gw.methods(), *VARIANTS):
        method = gw.method(spec)
        if refusal(method) is not None:
            continue
        for kind, fate in fates(method).items():
            names = rows.setdefault((kind, fate), [])
            usual = fates(gw.method(method.name)).get(kind, fate)
            shown = method.name if usual == fate else spec
            if shown not in names:
                names.append(shown)

    def place(row: tuple[str, Fate]) -> tuple[int, str]:
        kind, fate = row
        return (ORDER.index(fate) if fate in ORDER else len(ORDER)), kind

    lines = ["| state | kept by | a member is lost | a member leaves | a member comes |", "|---|---|---|---|---|"]
    for kind, fate in sorted(rows, key=place):
        kept = ", ".join(f"`{name}`" for name in sorted(rows[kind, fate]))
        lines.append(f"| `{kind}` | {kept} | {fate.lost} | {fate.leaves} | {fate.comes} |")
    return "\n".join(lines)
