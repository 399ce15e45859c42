"""Kernels by family: what is compiled, and chosen, together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from gradwire.errors import HyperparameterError
from gradwire.kernels.entropy.base import CODERS

__all__ = ["FAMILIES", "known_families"]

FAMILIES = ("moments", "ternary", "levels", "natural", "lattice", "signs")
"""Families of kernels; a method names those that it calls, and each is compiled when it is first needed."""


def known_families(names: Iterable[str]) -> list[str]:
    """Give each name once.

    Raises:
        HyperparameterError: one is neither a family nor an entropy coder.
    """
    wanted, known = list(dict.fromkeys(names)), (*FAMILIES, *CODERS)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise HyperparameterError(
                f"no family of kernels {name!r}: did you mean {near!r}? There are {', '.join(known)}"
            )
    return wanted
