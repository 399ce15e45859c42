# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""How loops are compiled: one source with two sets of bodies, explicit vectors and scalar ones; kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from numba import njit
from numba.core import types
from numba.extending import overload

__all__ = ["either", "kept"]


def kept(digest: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a loop, and keep the compiled code on disk.

    Numba names the file by the function and drops it when the function's own file changes. With the digest of all that
    the function is compiled from in its name, code of other sources is never even looked at: named tuples that these
    sources lack would make that fail.
    """

    def wrap(function):
        function.__qualname__ += f".{digest}"
        return njit(nogil=True, cache=True)(function)

    return wrap


def either(name: str, scalar: str, simd: str) -> Any:
    """Make a function whose body is the one of that name in module ``scalar`` or ``simd`` of this package.

    Its first argument decides: ``None`` takes the scalar body, ``True`` that of explicit vectors. The *type* decides,
    when the caller is compiled, so that either variant is cached on disk.
    """

    def body(variant, *arguments):
        raise RuntimeError("called from compiled code only")

    # Inlined, since passing arrays to a call costs as much as a short segment's work.
    @overload(body, jit_options={"forceinline": True})
    def choose(variant, *arguments):
        # Imported here, so that a machine on which the vector modules fail can still run the scalar ones.
        home = scalar if isinstance(variant, types.NoneType) else simd
        chosen = getattr(import_module(f"gradwire.kernels.{home}"), name)

        def call(variant, *arguments):
            return chosen(*arguments)

        return call

    return body
