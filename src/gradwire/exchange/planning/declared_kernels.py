"""The kernels that a method declares: wrong names are refused, and every call if it declares none."""

from __future__ import annotations

from typing import NoReturn

from gradwire.errors import HyperparameterError, IncompatibleError, unknown
from gradwire.exchange.method import Method
from gradwire.kernels import CODERS, FAMILIES, Kernels


def check_families(method: Method) -> None:
    """Check the names in the trait ``kernels``.

    Raises:
        HyperparameterError: one is neither a family of kernels nor an entropy coder.
    """
    for name in method.traits.kernels:
        if name not in FAMILIES and name not in CODERS:
            wrong = unknown("family of kernels", name, (*FAMILIES, *CODERS))
            raise HyperparameterError(f"{type(method).__name__}: {wrong}")


class _Refusing:
    """A backend that refuses every family by the name of the method that calls it."""

    name, compiles_for, coders = "none", "", "reference"

    def __init__(self, method: str) -> None:
        self._method = method

    def family(self, name: str) -> NoReturn:
        raise IncompatibleError(
            f"{self._method} calls kernels of the family {name!r} and declares none: add {name!r} to the trait "
            "`kernels` that declare() returns"
        )

    warm_up = measure = family


def no_kernels(method: str) -> Kernels:
    """Return kernels that raise as soon as one of them is called.

    Args:
        method: The class of the method, for the message.
    """
    return Kernels(_Refusing(method))
