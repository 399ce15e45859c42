"""Final accuracies of methods in the committed tables, which ``auto`` and ``gradwire plan`` state beside speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.methods.spec import method

PAGE = "docs/accuracy.md"
"""The page with the tables, which name the program, the machine and the spread of each figure."""


@dataclass(frozen=True)
class Ended:
    """How a training by a method ended in a table, beside the one in float32 of the same table.

    Attributes:
        task: Name of the table's task.
        points: Final accuracy minus float32's, in percentage points.
        rate: The best of three learning rates, over float32's.
        momentum: "optimizer's": SGD with momentum 0.9 after the exchange; "none": SGD without momentum.
        failed: Seeds of three that diverged, and are not in ``points``.
    """

    task: str
    points: float
    rate: float
    momentum: str = "optimizer's"
    failed: int = 0


TABLES: Mapping[str, tuple[Ended, ...]] = {
    "bf16": (Ended("digits", -0.2, 1),),
    "terngrad": (Ended("digits", 0.4, 1), Ended("mnist", -0.2, 1)),
    "coded": (Ended("digits", 0.4, 1), Ended("mnist", -0.2, 1), Ended("text", 0.2, 1), Ended("cifar10", 0.7, 1)),
    "drive": (Ended("digits", 0.2, 1), Ended("mnist", 0.0, 1), Ended("text", -1.8, 0.3), Ended("cifar10", -1.4, 1)),
    "powersgd": (Ended("digits", 0.6, 1), Ended("mnist", -0.1, 1), Ended("text", -1.5, 1), Ended("cifar10", -3.1, 1)),
    "acp_sgd": (
        Ended("digits", -0.9, 0.33),
        Ended("mnist", -1.1, 0.3),
        Ended("text", -3.7, 0.3),
        Ended("cifar10", -6.0, 0.3),
    ),
    "ErrorFeedback(TopK(density=0.01))": (
        Ended("digits", 0.2, 10, "none"),
        Ended("mnist", -0.6, 1, "optimizer's", failed=2),
    ),
    "ef_signsgd": (Ended("digits", -0.1, 10, "none"),),
}
"""Rows of the tables for candidates of ``auto``, by spec; a test compares them with the committed results."""


def ends_of(spec: str) -> tuple[Ended, ...]:
    """Return the rows of a method, the best place of momentum first; empty if no table has it."""
    asked = method(spec)
    return next((rows for known, rows in TABLES.items() if method(known) == asked), ())


def without_momentum(spec: str) -> bool:
    """Return whether a method ended best without momentum, so that a momentum beside it has to be known.

    Example:
        >>> without_momentum("powersgd"), without_momentum("ef_signsgd")
        (False, True)
    """
    rows = ends_of(spec)
    return bool(rows) and rows[0].momentum == "none"


def accuracy_text(spec: str) -> str | None:
    """Return how trainings by a method ended in the tables; None if no table has it.

    Example:
        >>> accuracy_text("ef_signsgd")
        'final accuracy over float32 in points: digits -0.1 without momentum (docs/accuracy.md)'
    """
    rows = ends_of(spec)
    if not rows:
        return None
    told = []
    for row in rows:
        beside = " without momentum" if row.momentum == "none" else ""
        if row.failed:
            beside += f" with momentum 0.9, where {row.failed} of 3 seeds diverged"
        told.append(f"{row.task} {row.points:+.1f}{beside}")
    return f"final accuracy over float32 in points: {', '.join(told)} ({PAGE})"


def training_advice(spec: str) -> str | None:
    """Return with which momentum and learning rate to train by a method with a residual; None for others.

    Example:
        >>> training_advice("powersgd"), training_advice("terngrad")
        ("keep the optimizer's momentum and learning rate", None)
    """
    rows = ends_of(spec)
    if not rows or not method(spec).traits.remembers:
        return None
    if rows[0].momentum == "none":
        return f"train SGD without momentum, at {rows[0].rate:g} times the learning rate that suits momentum 0.9"
    least = min(row.rate for row in rows)
    if least == max(row.rate for row in rows) == 1:
        return "keep the optimizer's momentum and learning rate"
    return f"keep the optimizer's momentum, and try {least:g} times the learning rate, which was the best in the tables"


def note_of(spec: str) -> str | None:
    """Return what a choice of a method states beside its speed; None if there is nothing to state."""
    parts = [text for text in (accuracy_text(spec), training_advice(spec)) if text is not None]
    traits = method(spec).traits
    if traits.waiting in traits.remembers:
        parts.insert(0, "it keeps a residual on each rank")
        if len(parts) == 1:
            parts.append(f"no table of {PAGE} has its accuracy")
    return "; ".join(parts) or None
