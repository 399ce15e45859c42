"""Warnings of a method that tells a training too little of its gradients, by what was measured of it.

The limits are chosen from ``benchmarks/training/residual_age.py``: MNIST and CIFAR-10, small networks, 4 workers, 280
updates, measured in rounds 10, 30, 100 and 200. What loses a third of a point on MNIST loses ten on CIFAR-10, and a
link cannot know which of them its training is like, so the limits are those of CIFAR-10:

*Late*: age above 1.5 and cosine below 0.48 in one round. All settings that lose more than 8 points on CIFAR-10 are
warned of, but ACP-SGD of rank 1 by a hair (10.7 points; age 1.5, cosine 0.51); of those that lose 4 to 8 points, 8 of
15. PowerSGD keeps a residual of 16 gradients on MNIST and loses little, since it sends what the workers have in common,
at a cosine of 0.49 and more; its residual is what they have not. So neither number decides alone. Of the settings that
lose less than 0.4 points on MNIST, three are warned of: gTop-k with a tenth and a twentieth of the elements,
and top-k with a hundredth and error feedback, which loses 10 points on CIFAR-10.

*Left out*: less than a quarter of the elements, as they are, and less than 0.75 of the gradient, by a method that keeps
nothing: the rest is lost, for what is small stays small. Methods that round all elements send no more of the gradient,
but their errors differ from round to round. So do those of TernGrad, which draws the elements that it sends and makes
them longer: then the squared cosine is below the share of the gradient that is sent, and otherwise both are the same.

*Noise*: an error of more than 4 gradients by a method that keeps nothing. An average over the rounds takes it out, but
a training of so many rounds is over by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import Method
from gradwire.exchange.protocols import Memory
from gradwire.link.diagnostics import Comparison, Diagnostics
from gradwire.link.warn_once import WarnOnce
from gradwire.methods.feedback.error_feedback import ErrorFeedback

__all__ = ["ELEMENTS", "ERROR", "KEPT", "LATE_COSINE", "OLD", "Judge", "judge"]

OLD, LATE_COSINE = 1.5, 0.48
"""Age of what is sent, in rounds, without a warning whatever the cosine; and the cosine above which any age is fine."""

ELEMENTS, KEPT = 0.25, 0.75
"""Share of the elements, and share of the gradient, from which on nothing is said of what is left out for good."""

ALIKE = 0.9
"""Squared cosine over the share of the gradient, above which elements count as sent as they are."""

ERROR = 4.0
"""Relative error that may be noise without a warning."""

MOMENTUM = 0.9
"""What an optimizer usually has."""


class Judge:
    """Looks at every measured round of a link, and warns once.

    Args:
        serving: Returns the method that serves at present.
        diagnostics: Of the link.
        warnings: Of the link.
    """

    def __init__(self, serving: Callable[[], Method], diagnostics: Diagnostics, warnings: WarnOnce) -> None:
        self._serving, self._diagnostics, self._warnings = serving, diagnostics, warnings

    def look(self, memory: Memory, round: int) -> None:
        """Warn of a round that has ended, if it was measured and what was measured costs accuracy."""
        if not self._diagnostics.wanted(round):
            return
        method = self._serving()
        found = self._diagnostics.over_all(round, memory.norm(method.waiting))
        told = None if found is None else judge(method, found, round)
        if told is not None:
            self._warnings.once("judgement", told)


def judge(method: Method, measured: Comparison, round: int) -> str | None:
    """Return a warning of three lines where what was measured costs accuracy; None where it does not."""
    told = _problem(method, measured)
    if told is None:
        return None
    advice = [*_changes(method, measured.age is not None), "EDEN(bits=4), which leaves nothing out"]
    return (
        f"{method!r}, round {round}: {told}.\n"
        "A training of a few hundred rounds loses accuracy by this, a long one less.\n"
        f"Try {', or '.join(advice)}; link.diagnostics() has the numbers by parameter."
    )


def _problem(method: Method, measured: Comparison) -> str | None:
    cosine = f"cosine {measured.cosine:.2f}"
    if method.sharded or (method.direction and measured.age is None):
        # A rank that sends one shard for its node says nothing of the rest of its gradient, and a direction has neither
        # the length nor the angle of one.
        return None
    if measured.age is not None:
        if measured.age <= OLD or measured.cosine >= LATE_COSINE:
            return None
        return (
            f"what it sends says little of the gradient ({cosine}), and what waits to be sent is "
            f"{measured.age:.1f} gradients long, about so many rounds late"
        )
    if measured.density < ELEMENTS and measured.kept < KEPT and measured.cosine**2 > ALIKE * measured.kept:
        return (
            f"it sends {100 * measured.density:.2g} % of the elements and keeps nothing of the others, so that "
            f"{100 * (1 - measured.kept):.0f} % of the gradient is lost ({cosine})"
        )
    if measured.relative_error > ERROR:
        return f"what it sends errs by {measured.relative_error:.1f} times the gradient ({cosine}), which is noise"
    return None


def _changes(method: Method, keeps: bool) -> list[str]:
    """Return specs with a field that lets more through, and what else may help."""
    found = [repr(changed) for changed in (_with(method, field, change) for field, change in MORE.items()) if changed]
    around = None if keeps or method.unbiased else _built(partial(ErrorFeedback, compressor=method))
    if around is not None:
        found.append(repr(around))
    if keeps and getattr(method, "momentum", None) == 0.0:
        found.append(f"momentum={MOMENTUM} of the method in place of the optimizer's")
    return found


def _with(method: Method, name: str, change: Callable[[Any], Any]) -> Method | None:
    """Return a method with a field of it, or of one inside it, changed; None where there is no more to be had."""
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.name == name:
            more = change(value)
        elif isinstance(value, Method):
            more = _with(value, name, change)
        else:
            continue
        if more is not None and more != value:
            return _built(partial(dataclasses.replace, method, **{field.name: more}))
    return None


def _built(build: Callable[[], Method]) -> Method | None:
    """Return what is built, or None where there is no such method."""
    try:
        return build()
    except HyperparameterError:
        return None


def _density(value: float) -> float:
    return min(1.0, float(f"{max(10 * value, 0.05):.2g}"))


MORE: dict[str, Callable[[Any], Any]] = {
    "density": _density,
    "fixed_bytes": lambda value: None if value is None else 10 * max(value, 1500.0),
    "cycle": lambda value: max(1, value // 8),
    "matrix_rank": lambda value: 4 * value,
    "block_size": lambda value: 64 if value is None or value > 64 else None,
}
"""How to change a field so that more is sent; None or the same value: not at all."""
