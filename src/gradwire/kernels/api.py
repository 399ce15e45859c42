"""What can be asked of the kernels: the operations of all families, whoever computes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Protocol

from gradwire.errors import HyperparameterError
from gradwire.kernels.compiling import cache_folder, compile_time, in_turn
from gradwire.kernels.entropy.base import CODERS, Coder
from gradwire.kernels.entropy.select import get_coder
from gradwire.kernels.front import Family
from gradwire.kernels.operations import Operations
from gradwire.kernels.self_test import SELF_TESTS

FAMILIES = (
    "moments",
    "ternary",
    "levels",
    "natural",
    "lattice",
    "signs",
    "rotation",
    "selection",
    "indices",
    "sketch",
    "low_rank",
    "fourier",
)
"""Families of kernels; a method names those that it calls, and each is compiled when it is first needed."""


class Backend(Protocol):
    """Who computes."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether something is to be compiled before the first call."""
        ...

    @property
    def coders(self) -> str:
        """The backend of entropy coders that goes with this one."""
        ...

    def family(self, name: str) -> Family:
        """Return the functions of a family."""
        ...

    def measure(self, name: str) -> object:
        """Let the fastest variant of a family serve from now on, where there are several."""
        ...


class Kernels(Operations):
    """The operations on vectors, as a backend computes them, and the entropy coders that go with it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def _serve(self, family: str) -> Family:
        return self._backend.family(family)

    @property
    def name(self) -> str:
        """The backend's name; ``auto`` is called what it has chosen."""
        return self._backend.name

    def coder(self, name: str) -> Coder:
        """Return the entropy coder of that name that goes with this backend."""
        return get_coder(name, self._backend.coders)

    def warm_up(self, families: Sequence[str] = FAMILIES) -> float:
        """Compile what calls of these families, or of entropy coders, will need, or load it from the cache.

        Returns:
            Seconds in which something was compiled; 0 where all of it was loaded.

        Of processes that do so at the same time on one machine, each part is compiled by one; see
        :func:`gradwire.kernels.compiling.in_turn`.

        Raises:
            HyperparameterError: there is no such family or coder.
        """
        wanted = known_families(families)
        if not self._backend.compiles:
            return 0.0
        with compile_time() as spent:
            in_turn(wanted, self._warm_up_one, cache_folder())
        return spent.seconds

    def measure(self, families: Sequence[str] = FAMILIES) -> None:
        """Time the variants of families where a backend has several; the fastest serves on this machine from now on.

        Raises:
            HyperparameterError: there is no such family.
        """
        for name in known_families(families):
            self._backend.measure(name)

    def _warm_up_one(self, name: str) -> None:
        if name in CODERS:
            self.coder(name).warm_up()
        else:
            SELF_TESTS[name](self)


def known_families(names: Iterable[str]) -> list[str]:
    """Return each name once.

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
