"""Which backend codes: asked for by name, reported by name, never replaced in silence."""

from __future__ import annotations

import difflib
import warnings
from functools import cache

import torch

from gradwire.errors import BackendError, HyperparameterError
from gradwire.kernels.coders.base import CODERS, Coder
from gradwire.kernels.coders.reference import ReferenceHuffman, ReferenceRans
from gradwire.kernels.coders.section import SectionCoder

__all__ = ["CODER_BACKENDS", "get_coder"]

CODER_BACKENDS = ("auto", "reference", "cpu", "cpu-plain")


@cache
def get_coder(name: str, backend: str = "auto") -> Coder:
    """Give an entropy coder; the same object for the same arguments. It may be used by several threads at once.

    Args:
        name: ``rans`` (within a percent of the entropy from some hundred thousand symbols of 2.5 bits and more on) or
            ``huffman`` (at least a bit a symbol, mostly up to seven percent above the entropy, but fast on any CPU).
        backend: ``reference`` (NumPy), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without) or
            ``auto``: ``cpu`` if its code compiles here and agrees with ``reference`` on a small case, else
            ``cpu-plain``, with a warning.

    Raises:
        HyperparameterError: there is no such coder or backend.
        BackendError: numba is not installed.

    Example:
        >>> coder = get_coder("rans", "reference")
        >>> symbols = torch.zeros(1000, dtype=torch.uint8)
        >>> out = torch.empty(coder.bound(1000), dtype=torch.uint8)
        >>> coder.encode(symbols, out)
        25
    """
    _known("coder", name, CODERS)
    _known("coder backend", backend, CODER_BACKENDS)
    if backend == "auto":
        return _automatic(name)
    if backend == "reference":
        return SectionCoder(ReferenceRans() if name == "rans" else ReferenceHuffman())
    # Imported here: numba takes half a second, and whoever asks for another backend need not have it.
    from gradwire.kernels.coders.cpu import CpuHuffman, CpuRans

    return SectionCoder((CpuRans if name == "rans" else CpuHuffman)(vectors=backend == "cpu"))


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.0)[0]
        raise HyperparameterError(f"no {what} {name!r}: did you mean {near!r}? There are {', '.join(names)}")


def _automatic(name: str) -> Coder:
    try:
        vectors = get_coder(name, "cpu")
        vectors.warm_up()
        if _agree(vectors, get_coder(name, "reference")):
            return vectors
        reason = "its results differ from the reference"
    except BackendError:
        raise
    except Exception as error:  # whatever the compiler raises on a machine we have not seen
        reason = f"its code does not compile: {type(error).__name__}: {error}"
    warnings.warn(
        f"coder backend 'cpu' does not serve here ({reason}); using 'cpu-plain', which is slower",
        stacklevel=3,
    )
    return get_coder(name, "cpu-plain")


def _agree(first: Coder, second: Coder) -> bool:
    """Tell whether two backends write the same bytes of a small case with rare symbols, and read them again."""
    index = torch.arange(3001)
    symbols = (index * index % 61 * (index % 7 == 0)).to(torch.uint8)
    symbols[::1000] = 255 - index[::1000].to(torch.uint8)
    sections = []
    for coder in (first, second):
        out, back = torch.empty(coder.bound(3001), dtype=torch.uint8), torch.empty_like(symbols)
        sections.append(out[: coder.encode(symbols, out)])
        coder.decode(sections[-1], back)
        if not torch.equal(back, symbols):
            return False
    return torch.equal(*sections)
