"""Compilation ahead of a link."""

from __future__ import annotations

from gradwire.exchange.method import Method
from gradwire.kernels import checksum, get_kernels
from gradwire.methods.spec import method as read_method

__all__ = ["warm_up"]


def warm_up(method: str | Method = "terngrad", backend: str = "auto") -> float:
    """Compile what a method will call, once a machine; the result is kept on disk.

    Call it before starting several workers on one machine, so that they do not compile the same code side by side.

    Returns:
        Seconds in which something was compiled; 0 where all of it was kept on disk.
    """
    families = read_method(method).kernels
    return get_kernels(backend).warm_up(families) + checksum.warm_up() if families else 0.0
