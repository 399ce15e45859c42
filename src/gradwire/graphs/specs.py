"""Specs of methods for halos."""

from __future__ import annotations

from gradwire.errors import HyperparameterError
from gradwire.exchange.method import Method
from gradwire.graphs.cdfgnn import CDFGNN
from gradwire.graphs.halo_method import Halo, HaloMethod, Isolated
from gradwire.graphs.varco import VARCO
from gradwire.methods.spec import parse

HALO_METHODS: tuple[type[HaloMethod], ...] = (Halo, VARCO, CDFGNN, Isolated)
"""All methods for halos; a new one is added here."""


def halo_method(spec: str | HaloMethod | Method) -> HaloMethod:
    """Read a method for the halo of a partitioned graph.

    A spec is as for :func:`gradwire.method`, with the names of :data:`HALO_METHODS` besides those of the methods. An
    operator on one vector stands for :class:`Halo` around it.

    Raises:
        HyperparameterError: there is no such method, or a value is wrong.
        IncompatibleError: the method is not an operator on one vector.

    Example:
        >>> halo_method("bf16")
        Halo(compressor=BF16())
        >>> halo_method("VARCO(start=64)") == halo_method(repr(VARCO(start=64)))
        True
    """
    if isinstance(spec, str):
        found = parse(spec, HALO_METHODS)
    else:
        found = spec
    if isinstance(found, Method):
        return Halo(compressor=found)
    if not isinstance(found, HaloMethod):
        raise HyperparameterError(f"a method for halos is a spec such as 'bf16' or 'varco', not {spec!r}")
    return found
