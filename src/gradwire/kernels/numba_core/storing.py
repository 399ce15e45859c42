# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator, attr-defined"
"""Compiled code on disk. Where Numba cannot store any, every process compiles its kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache

from gradwire.errors import BackendError

if config.DISABLE_JIT:
    raise BackendError("NUMBA_DISABLE_JIT switches off the compiler of gradwire's kernels: unset it")

_refusals: list[Exception] = []


def refused() -> bool:
    """Return whether this process was unable to store compiled code."""
    return bool(_refusals)


def _refuse(error: Exception) -> None:
    _refusals.append(error)
    if len(_refusals) == 1:
        warnings.warn(
            f"Numba cannot store compiled kernels ({error}): every process compiles them anew at each start; set "
            "NUMBA_CACHE_DIR to a folder that can be written and has room",
            stacklevel=2,
        )


def stored(function: Callable[..., Any]) -> Any:
    """Compile a function, and store the code on disk. It is only compiled, with a warning, if there is no place."""
    dispatcher = njit(nogil=True)(function)
    try:
        # As njit(cache=True) does, with another class.
        dispatcher._cache = CodeStore(function)
    except (OSError, RuntimeError) as error:  # Numba raises RuntimeError if it can write to no folder
        _refuse(error)
    return dispatcher


class CodeStore(FunctionCache):
    """The stored code of a function. Code that cannot be read is compiled; code that cannot be written is used.

    A damaged file, such as one that ends early after a power loss, is replaced by what is compiled.
    """

    def load_overload(self, sig, target_context):
        """Return stored code, or None."""
        try:
            return super().load_overload(sig, target_context)
        except OSError:
            return None
        except Exception:  # reading damaged bytes as a pickle may raise anything
            # What is stored next reads the index again.
            self._drop_index()
            return None

    def save_overload(self, sig, data):
        """Store code, or warn."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            # Numba writes the index first. It may now name a file that an older version of the function has left.
            self._drop_index()
            _refuse(error)

    def _drop_index(self) -> None:
        with contextlib.suppress(OSError):
            Path(self._cache_file._index_path).unlink()
