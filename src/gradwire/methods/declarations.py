"""Checks of a class of methods from outside the package, when it is registered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from gradwire.errors import HyperparameterError
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.fields import is_whole
from gradwire.exchange.method import Method, Properties, require

LARGEST_TAG = 126
"""Largest tag of a compressor; the next one marks payloads with float32 values only."""


def check_class(kind: object, known: Iterable[type[Method]]) -> None:
    """Check what a class of methods declares.

    Args:
        kind: The class.
        known: All classes whose tags are taken.

    Raises:
        HyperparameterError: it is no class of methods, or a declaration is missing or wrong; the message names it.
    """
    if not isinstance(kind, type) or not issubclass(kind, Method):
        raise HyperparameterError(
            "gw.register takes a class of methods, which inherits from gw.Method, from a compressor or from a wrapper, "
            f"not {kind!r}"
        )
    owner = kind.__name__
    name = getattr(kind, "name", None)
    require(
        isinstance(name, str) and name.replace("-", "_").isidentifier(),
        owner,
        f"name is its name in specs, letters, digits and '_', such as name: ClassVar[str] = 'thirds', not {name!r}",
    )
    properties = getattr(kind, "properties", None)
    require(isinstance(properties, Properties), owner, f"properties is a gw.Properties, not {properties!r}")
    lacking = sorted(each for each in dir(kind) if getattr(getattr(kind, each, None), "__isabstractmethod__", False))
    require(not lacking, owner, f"it must define {', '.join(lacking)}")
    require(
        is_dataclass(kind) and all(each.kw_only or each.name == "compressor" for each in fields(kind)),
        owner,
        "decorate it with @dataclass(frozen=True, kw_only=True)",
    )
    if issubclass(kind, Compressor):
        _check_tag(kind, known)


def _check_tag(kind: type[Compressor], known: Iterable[type[Method]]) -> None:
    taken = {other.tag: other for other in known if issubclass(other, Compressor) and not _same_place(other, kind)}
    free = next((n for n in range(LARGEST_TAG, 0, -1) if n not in taken), None)
    tag = getattr(kind, "tag", None)
    require(
        is_whole(tag, 1, LARGEST_TAG),
        kind.__name__,
        f"tag is a whole number from 1 to {LARGEST_TAG} that no other compressor has, such as {free}, not {tag!r}",
    )
    if tag in taken:
        other = taken[tag].__name__
        raise HyperparameterError(f"{kind.__name__}: tag {tag} belongs to {other}: choose another one, such as {free}")


def _same_place(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def is_defined_again(kind: type[Method], known: type[Method]) -> bool:
    """Return whether a class replaces a known one, as where a cell of a notebook runs once more."""
    return kind is known or _same_place(kind, known)
