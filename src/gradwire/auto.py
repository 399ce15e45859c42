"""The method that tries others in the first steps of a training, and keeps the fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.algorithms.grandk import GRandK
from gradwire.methods import Method, Properties, require
from gradwire.spec import method, register
from gradwire.wrappers.wrapper import Wrapper

__all__ = ["Auto", "not_comparable"]


@register
@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Tries methods in the first steps of a real training, and keeps the fastest.

    Every step of the trial is an ordinary step of training under one of the candidates. Candidates that the link
    alone would make slower than another's whole step are not tried. ``coded`` is TernGrad behind an entropy coder, the
    same bits out: it is taken where the bytes that it saves are worth its time on this machine and this link.

    Attributes:
        candidates: Specs, the ones to prefer at equal speed first.
        turns: In which the candidates alternate.
        steps: Of each candidate in a turn.

    Raises:
        HyperparameterError: fewer than two candidates, one named twice, one that keeps state, gives a direction or
            leaves out a part of the gradient, or no turns or steps.
    """

    name: ClassVar[str] = "auto"
    properties: ClassVar[Properties] = Properties(
        summary="The fastest of a list, by trial in the first steps",
        paper="none",
        bit_stable=False,
        bits_per_element=32.0,
    )
    collectives: ClassVar[tuple[str, ...]] = ()
    unbiased: ClassVar[bool] = False

    candidates: tuple[str, ...] = ("fp32", "bf16", "terngrad", "coded")
    turns: int = 4
    steps: int = 3

    def __post_init__(self) -> None:
        listed = isinstance(self.candidates, (tuple, list)) and all(isinstance(c, str) for c in self.candidates)
        require(listed, "Auto(candidates=...)", f"a tuple of specs is needed, not {self.candidates!r}")
        chosen = [method(c) for c in self.candidates]
        require(len(chosen) > 1, "Auto(candidates=...)", "at least two are needed to choose from")
        require(len(set(chosen)) == len(chosen), "Auto(candidates=...)", "a method is named twice")
        for one in chosen:
            fixed = not isinstance(one, Auto) and one.properties.state == "none"
            require(fixed, "Auto(candidates=...)", f"{one!r} remembers something between steps: it cannot be tried")
            apart = None if isinstance(one, Auto) else not_comparable(one)
            require(apart is None, "Auto(candidates=...)", f"{one!r} {apart}")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        for field in ("turns", "steps"):
            value = getattr(self, field)
            require(isinstance(value, int) and value >= 1, f"Auto({field}=...)", f"at least 1 is needed, not {value!r}")

    @property
    def kernels(self) -> tuple[str, ...]:  # type: ignore[override]
        """All candidates'."""
        return tuple(dict.fromkeys(name for spec in self.candidates for name in method(spec).kernels))

    @property
    def needs_link_cost(self) -> bool:  # type: ignore[override]
        """Whether a candidate does."""
        return any(method(spec).needs_link_cost for spec in self.candidates)


def not_comparable(one: Method) -> str | None:
    """Explain why the time of a step alone cannot tell whether a method is better than others; None where it can."""
    if one.direction:
        return "gives a direction, which needs a learning rate of its own"
    if _sends_parts(one):
        return (
            "sends a part of the gradient a round, the faster the more it leaves out, and what is left out is lost "
            "without error feedback: use ErrorFeedback around it, by name rather than by trial"
        )
    return None


def _sends_parts(one: Method) -> bool:
    return isinstance(one, GRandK) or (isinstance(one, Wrapper) and _sends_parts(one.compressor))
