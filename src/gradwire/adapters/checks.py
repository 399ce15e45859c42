"""What can be refused before there is a group."""

from __future__ import annotations

from typing import Any

from gradwire import catalogue
from gradwire.adapters.guard import check_fallback
from gradwire.catalogue import Auto
from gradwire.methods import Method
from gradwire.planning import Options

__all__ = ["check_options"]


def check_options(method: str | Method, *, optimizer: Any = None, **options: Any) -> None:
    """Refuse what :func:`gradwire.attach` would refuse on every rank, as far as neither group nor module is needed.

    For what starts workers: an error before they start is one line, not one a worker. Of parameters, which are not
    there yet, nothing is checked.

    Args:
        method: Spec or method.
        optimizer, options: As for :func:`gradwire.attach`.

    Raises:
        HyperparameterError: an unknown method or option, or a wrong value.
        IncompatibleError: an option or an optimizer that does not go with the method.

    Example:
        >>> import gradwire as gw
        >>> gw.check_options("terngrad", fallback="bf16", fallback_limit=5.0)
    """
    found, given = catalogue.method(method), Options.of(options)
    for one in found.candidates if isinstance(found, Auto) else (found,):
        given.collectives(catalogue.method(one))
    found.check_optimizer(optimizer, {})
    if given.fallback is not None:
        check_fallback(found)
