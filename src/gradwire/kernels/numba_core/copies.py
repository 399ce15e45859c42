# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Copying between vectors in compiled code."""

from __future__ import annotations

from numba import njit

__all__ = ["copy_into"]


@njit(nogil=True)
def copy_into(target, source):
    """Copy as many values as ``target`` has from the beginning of ``source``, which has as many or more.

    For ``target[:] = source`` Numba compiles the text of an error about two shapes as well, and with it most of its
    strings: three seconds, in each module that has such a line.
    """
    for i in range(target.size):
        target[i] = source[i]
