"""What can be refused before there is a group."""

from __future__ import annotations

from typing import Any

from gradwire import catalogue
from gradwire.adapters.guard import check_fallback
from gradwire.methods import Method
from gradwire.planning import Options

__all__ = ["check_options"]


def check_options(method: str | Method, **options: Any) -> None:
    """Refuse what :func:`gradwire.attach` would refuse on every rank, as far as neither group nor module is needed.

    For what starts workers: an error before they start is one line, not one a worker.

    Args:
        method: Spec or method.
        options: Those of :func:`gradwire.attach` that are the same on all ranks.

    Raises:
        HyperparameterError: an unknown method or option, or a wrong value.
        IncompatibleError: an option that the method has no use for.

    Example:
        >>> import gradwire as gw
        >>> gw.check_options("terngrad", fallback="bf16", fallback_limit=5.0)
    """
    found, given = catalogue.method(method), Options.of(options)
    if given.fallback is not None:
        check_fallback(found)
