"""The kernels of one backend: the operations of all families, entropy coders, compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gradwire.errors import HyperparameterError, unknown
from gradwire.kernels.compiling import cache_folder, compile_time, in_turn
from gradwire.kernels.entropy.base import CODERS, SectionCoder
from gradwire.kernels.entropy.select import get_coder
from gradwire.kernels.front import Family
from gradwire.kernels.operations import Operations

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
    "shifts",
    "patches",
    "planes",
)
"""Families of kernels. A method names the families that it calls; each is compiled when it is first needed."""


class Backend(Protocol):
    """The interface of a backend."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    @property
    def compiles_for(self) -> str:
        """Name of the target that families are compiled for before their first call; empty if they are not compiled."""
        ...

    @property
    def coders(self) -> str:
        """The name of the backend of entropy coders that belongs to this one."""
        ...

    def family(self, name: str) -> Family:
        """Return the functions of a family."""
        ...

    def warm_up(self, name: str) -> object:
        """Compile a family, or load it, where :attr:`compiles_for` is not empty."""
        ...

    def measure(self, name: str) -> object:
        """Time the variants of a family, if it has several, and use the fastest from now on."""
        ...


class Kernels(Operations):
    """The operations of all families, computed by one backend, and the backend's entropy coders."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def _serve(self, family: str) -> Family:
        return self._backend.family(family)

    @property
    def name(self) -> str:
        """The name of the backend; ``auto`` has the name of the backend that it chose."""
        return self._backend.name

    def coder(self, name: str) -> SectionCoder:
        """Return the entropy coder with this name that belongs to the backend."""
        return get_coder(name, self._backend.coders)

    def warm_up(self, families: Sequence[str] = FAMILIES) -> float:
        """Compile families, or entropy coders, before their first call, or load them from the cache.

        If several processes of one machine do so at the same time, each part is compiled by one of them; see
        :func:`gradwire.kernels.compiling.in_turn`.

        Returns:
            Seconds spent compiling; 0 if everything was loaded.

        Raises:
            HyperparameterError: there is no such family or coder.
        """
        wanted, backend = known_families(families), self._backend
        if not backend.compiles_for:
            return 0.0
        # What one backend has compiled of a family is of no use to another.
        names = {f"{backend.coders if name in CODERS else backend.compiles_for} {name}": name for name in wanted}
        with compile_time() as spent:
            in_turn(list(names), lambda part: self._warm_up_one(names[part]), cache_folder())
        return spent.seconds

    def measure(self, families: Sequence[str] = FAMILIES) -> None:
        """Time the variants of families, if the backend has several; the fastest is used on this machine from now on.

        Raises:
            HyperparameterError: there is no such family.
        """
        for name in known_families(families):
            self._backend.measure(name)

    def _warm_up_one(self, name: str) -> None:
        if name in CODERS:
            self.coder(name).warm_up()
        else:
            self._backend.warm_up(name)


def known_families(names: Iterable[str]) -> list[str]:
    """Return each name once.

    Raises:
        HyperparameterError: one is neither a family nor an entropy coder.
    """
    wanted, known = list(dict.fromkeys(names)), (*FAMILIES, *CODERS)
    for name in wanted:
        if name not in known:
            raise HyperparameterError(unknown("family of kernels", name, known))
    return wanted
