# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator, attr-defined"
"""Compiled code on disk. Where Numba cannot store any, every process compiles its kernels."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

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

    A damaged file, such as one with pages of zeros after a power loss, is replaced by what is compiled.
    """

    def __init__(self, function):
        super().__init__(function)
        self._cache_file = CheckedFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )

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


class CheckedFile(IndexDataCacheFile):
    """Files of stored code that end with a digest, since damaged machine code ends the process that runs it.

    The key, which holds the processor's name, is stored with the code: of two hosts that share a folder, each may take
    the name of the same file for its own key.
    """

    def save(self, key, data):
        """Store code under a key."""
        super().save(key, (key, data))

    def load(self, key):
        """Return the code of a key, or None."""
        found = super().load(key)
        return found[1] if found is not None and found[0] == key else None

    def _save_data(self, name, data):
        coded = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(coded + hashlib.sha256(coded).digest())

    def _load_data(self, name):
        whole = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(whole[:-32]).digest() != whole[-32:]:
            raise ValueError(f"{name} is damaged")
        # Numba reads no further than its own part.
        return super()._load_data(name)
