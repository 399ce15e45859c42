# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""One source for compiled drivers, two sets of bodies: explicit vectors, and plain loops."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numba.core import types
from numba.extending import overload

__all__ = ["either"]


def either(name: str, plain: str, vector: str) -> Any:
    """Make a function whose body is the explicit-vector or the plain one of that name.

    Its first argument, ``variant``, decides: ``True`` takes the body from module ``vector`` of this package, ``None``
    from ``plain``. The *type* decides, when the caller is compiled, so that either variant is cached on disk.
    """

    def body(variant, *arguments):
        raise RuntimeError("called from compiled code only")

    # Inlined, since passing arrays to a call costs as much as a short segment's work.
    @overload(body, jit_options={"forceinline": True})
    def choose(variant, *arguments):
        # Imported here, so that a machine on which the vector modules fail can still run the plain ones.
        home = plain if isinstance(variant, types.NoneType) else vector
        chosen = getattr(import_module(f"gradwire.kernels.{home}"), name)

        def call(variant, *arguments):
            return chosen(*arguments)

        return call

    return body
