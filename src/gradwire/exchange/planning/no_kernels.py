"""The kernels of a method that declares none: each call is refused, since nothing else would compute it."""

from __future__ import annotations

from typing import NoReturn

from gradwire.errors import IncompatibleError
from gradwire.kernels import Kernels


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
