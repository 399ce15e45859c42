# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Instructions for loops over shifts. ``loops.py`` calls them."""

from __future__ import annotations

from gradwire.kernels.numba_core.vectors import vector_body


@vector_body(lambda *kinds: kinds[0](*kinds))
def multiply_add(e, factor, value, added):
    """Return ``factor * value + added`` rounded once, for three numbers of one floating-point type."""
    return e.b.fma(factor, value, added)
