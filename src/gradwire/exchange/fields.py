"""Checks of the names and numbers in the fields of a frozen dataclass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeGuard

from gradwire.errors import HyperparameterError, unknown


def is_whole(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Return whether a value is a whole number, from ``least`` to ``most`` if these are given.

    True and False are not, although Python treats them as 1 and 0: ``seed=True`` is a mistake.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def is_number(
    value: object,
    *,
    least: float | None = None,
    above: float = -math.inf,
    most: float | None = None,
    below: float = math.inf,
) -> TypeGuard[float]:
    """Return whether a value is a number in a range, whose ends are ``least`` or ``above`` and ``most`` or ``below``.

    NaN, True and False are not numbers here. Infinity is one only if it is given as ``most``.

    Example:
        >>> [is_number(value, above=0, most=1) for value in (0, 0.5, 1, True, "0.5")]
        [False, True, True, False, False]
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return (value > above if least is None else value >= least) and (value < below if most is None else value <= most)


def plain(value: float) -> float:
    """Return a number as an int or a float, whose text a spec can have; a NumPy number is a float to Python, too.

    Example:
        >>> import numpy
        >>> plain(numpy.float64(0.25)), plain(3)
        (0.25, 3)
    """
    return int(value) if isinstance(value, int) else float(value)


def operand(kind: type[Any]) -> str | None:
    """Return the name of the field that may be given without its name: the method inside a wrapper."""
    return next((each.name for each in fields(kind) if not each.kw_only), None)


def check_fields(kind: type[Any], unnamed: int, named: Iterable[str]) -> None:
    """Check the arguments of a frozen dataclass's constructor.

    Args:
        kind: The class.
        unnamed: Number of positional arguments.
        named: Names of the keyword arguments.

    Raises:
        HyperparameterError: a name is unknown; the message has the nearest known field, or all fields.
    """
    known, first = [each.name for each in fields(kind)], operand(kind)
    if unnamed > (first is not None):
        most = "named values only" if first is None else "one value without a name"
        raise HyperparameterError(f"{kind.__name__} takes {most}: {signature(kind)}")
    for name in named:
        if name not in known:
            raise HyperparameterError(unknown("field", name, known, f" of {kind.__name__}"))
        if unnamed and name == first:
            raise HyperparameterError(f"field {name!r} of {kind.__name__} is given twice: leave one out")


def signature(kind: type[Any]) -> str:
    """Return the signature of a frozen dataclass, without values."""
    return f"{kind.__name__}({', '.join(each.name + '=...' for each in fields(kind))})"
