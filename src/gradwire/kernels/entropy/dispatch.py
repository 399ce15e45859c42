"""Which backend codes: asked for by name, reported by name, never replaced in silence."""

from __future__ import annotations

import difflib
from functools import cache

from gradwire.errors import HyperparameterError
from gradwire.kernels.entropy.base import CODERS, Coder
from gradwire.kernels.entropy.reference import reference_body
from gradwire.kernels.entropy.section import SectionCoder
from gradwire.kernels.entropy.select import select
from gradwire.kernels.entropy.variants import SCALAR, Variants

__all__ = ["CODER_BACKENDS", "get_coder"]

CODER_BACKENDS = ("auto", "reference", "cpu", "cpu-plain")


@cache
def get_coder(name: str, backend: str = "auto") -> Coder:
    """Return an entropy coder; the same object for the same arguments. It may be used by several threads at once.

    Args:
        name: ``rans`` (within a percent of the entropy from some hundred thousand symbols of 2.5 bits and more on) or
            ``huffman`` (at least a bit a symbol, mostly up to seven percent above the entropy, but fast on any CPU).
        backend: ``reference`` (NumPy), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without) or
            ``auto``: of the parts of ``cpu`` and ``cpu-plain``, the fastest that agree with ``reference``; see
            :func:`gradwire.kernels.entropy.select.select`.

    Raises:
        HyperparameterError: there is no such coder or backend.
        BackendError: numba is not installed.

    Example:
        >>> import torch
        >>> coder = get_coder("rans", "reference")
        >>> symbols = torch.zeros(1000, dtype=torch.uint8)
        >>> out = torch.empty(coder.bound(1000), dtype=torch.uint8)
        >>> coder.encode(symbols, out)
        25
    """
    _known("coder", name, CODERS)
    _known("coder backend", backend, CODER_BACKENDS)
    if backend == "reference":
        return SectionCoder(reference_body(name))
    # Imported here: numba takes half a second, and whoever asks for the reference need not have it.
    from gradwire.kernels.entropy.cpu import compiled_body

    if backend == "cpu-plain":
        return SectionCoder(compiled_body(name, Variants(SCALAR, SCALAR, SCALAR)))
    return SectionCoder(compiled_body(name, select(name, scalar=backend == "auto").variants))


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.0)[0]
        raise HyperparameterError(f"no {what} {name!r}: did you mean {near!r}? There are {', '.join(names)}")
