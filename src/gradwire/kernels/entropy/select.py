"""Entropy coders by name, and the choice of their parts: of the variants that agree with the reference, the fastest.

Speed does not follow from the instruction set alone: an expansion of 16-bit words that is one instruction on one CPU is
sixteen branches on another, and then takes six times as long. So all variants are timed once on a machine, and times
are stored beside the compiled code. The chosen variants are compared with the reference in every process.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import torch

from gradwire.errors import BackendError, HyperparameterError, unknown
from gradwire.kernels.compiling import default_file, read_times, write_times
from gradwire.kernels.entropy.base import CODERS, PARTS, SCALAR, VARIANTS, Body, Bytes, Coder, SectionCoder, Variants
from gradwire.kernels.entropy.reference import reference_body

SAMPLE = 1 << 16
"""Bytes that are coded for a measurement, which takes some dozens of microseconds."""

TURNS = 9

Times: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by part and variant."""


@dataclass(frozen=True)
class Selected:
    """The chosen variants, and the times by which they were chosen.

    Attributes:
        variants: The variant of each part.
        ns_per_byte: Times by part and variant, for allowed variants that compile here and agree with the reference.
    """

    variants: Variants
    ns_per_byte: Mapping[str, Mapping[str, float]]


@cache
def select(coder: str, scalar: bool = True) -> Selected:
    """Return the fastest variant of each of a coder's parts that agrees with the reference.

    Args:
        coder: "rans" or "huffman".
        scalar: True if plain loops may be chosen for a part that also has explicit vectors.

    Raises:
        BackendError: numba is not installed, or no variant of a part compiles and agrees.
    """
    times = _allowed(_measured(coder), scalar)
    missing = [part for part in PARTS if not times.get(part)]
    if missing:
        raise BackendError(f"no variant of {coder}'s {', '.join(missing)} serves on this machine")
    per_byte = {part: {variant: 1e9 * s / SAMPLE for variant, s in found.items()} for part, found in times.items()}
    return Selected(_best(times), per_byte)


def _allowed(times: Times, scalar: bool) -> Times:
    """Return the times without those of plain loops, unless ``scalar``, or a part has no other variant."""
    return {
        part: {variant: s for variant, s in found.items() if scalar or variant != SCALAR or len(found) == 1}
        for part, found in times.items()
    }


def _best(times: Times) -> Variants:
    return Variants(**{part: min(found, key=lambda variant: found[variant]) for part, found in times.items()})


@cache
def _measured(coder: str) -> Times:
    """Return the seconds of each usable variant by part: stored ones, if the variants they choose still agree."""
    file, parts = default_file(), VARIANTS[coder]
    kept = read_times(file)
    times: Times = {part: kept.get(f"{coder} {part}", {}) for part in PARTS}
    # Without times of all variants they are measured anew, so that a failing variant is reported again.
    if all(set(times[part]) == set(parts[part]) for part in PARTS):
        chosen = {_best(_allowed(times, scalar)) for scalar in (True, False)}
        if all(_refusal(coder, variants) is None for variants in chosen):
            return times
    times = measure(coder)
    write_times(file, {f"{coder} {part}": found for part, found in times.items() if found})
    return times


def measure(coder: str) -> Times:
    """Time the variants of a coder's parts; those that fail are left out, with a warning.

    Raises:
        BackendError: numba is not installed.
    """
    return {part: fastest(calls) for part, calls in variant_calls(coder).items()}


def variant_calls(coder: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the functions to time by part and variant; variants that fail are left out, with a warning."""
    from gradwire.kernels.entropy.cpu import compiled_body

    plain = Variants(SCALAR, SCALAR, SCALAR)
    found: dict[str, dict[str, Callable[[], object]]] = {part: {} for part in PARTS}
    for part in PARTS:
        for variant in VARIANTS[coder][part]:
            variants = replace(plain, **{part: variant})
            reason = _refusal(coder, variants)
            if reason is None:
                found[part][variant] = _call(compiled_body(coder, variants), part)
            else:
                warnings.warn(
                    f"variant {variant!r} of {coder}'s {part} does not serve here ({reason}); others do, which may be "
                    "slower",
                    stacklevel=2,
                )
    return found


def _refusal(coder: str, variants: Variants) -> str | None:
    """Return why variants cannot be used, or None if they can."""
    from gradwire.kernels.entropy.cpu import compiled_body

    try:
        return None if agrees(SectionCoder(compiled_body(coder, variants))) else "its results differ from the reference"
    except BackendError:
        raise
    except Exception as error:  # a compiler may raise any type on an unknown machine
        return f"its code does not compile: {type(error).__name__}: {error}"


def fastest(calls: Mapping[str, Callable[[], object]], turns: int = TURNS) -> dict[str, float]:
    """Return the seconds of each call: the least over turns, each of which makes every call once."""
    least = {name: float("inf") for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn:  # the first turn warms memory and caches
                least[name] = min(least[name], time.perf_counter() - began)
    return least


def time_coders(coders: Mapping[str, Coder], symbols: torch.Tensor, turns: int = TURNS) -> dict[str, float]:
    """Return the seconds of each coder to encode ``symbols`` (uint8 ``[n]``) and decode them."""
    calls: dict[str, Callable[[], object]] = {}
    for name, coder in coders.items():
        room, back = torch.empty(coder.bound(len(symbols)), dtype=torch.uint8, device="cpu"), torch.empty_like(symbols)
        section = room[: coder.encode(symbols, room)].clone()
        calls[f"encode {name}"] = partial(coder.encode, symbols, room)
        calls[f"decode {name}"] = partial(coder.decode, section, back)
    times = fastest(calls, turns)
    return {name: times[f"encode {name}"] + times[f"decode {name}"] for name in coders}


def agrees(coder: SectionCoder) -> bool:
    """Return whether a coder writes the reference's bytes for a small case with rare symbols, and decodes them."""
    symbols, expected = _small_case(coder.name)
    out, back = torch.empty(coder.bound(len(symbols)), dtype=torch.uint8, device="cpu"), torch.empty_like(symbols)
    section = out[: coder.encode(symbols, out)]
    coder.decode(section, back)
    return torch.equal(section, expected) and torch.equal(back, symbols)


@cache
def _small_case(coder: str) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(3001, device="cpu")
    symbols = (index * index % 61 * (index % 7 == 0)).to(torch.uint8)
    symbols[::1000] = 255 - index[::1000].to(torch.uint8)
    reference = SectionCoder(reference_body(coder))
    out = torch.empty(reference.bound(3001), dtype=torch.uint8, device="cpu")
    return symbols, out[: reference.encode(symbols, out)]


@cache
def _sample() -> Bytes:
    """Return bytes of five trits of a Gaussian clipped at 2.5 deviations, with an entropy of 6 bits each."""
    uniform = torch.rand((SAMPLE, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    digits = (uniform < 0.16).to(torch.uint8) + (uniform < 0.84).to(torch.uint8)
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device="cpu")
    joined: Bytes = (digits * powers).sum(1, dtype=torch.uint8).numpy()
    return joined


def _call(body: Body, part: str) -> Callable[[], object]:
    symbols, room = _sample(), np.zeros(SAMPLE, np.uint8)
    if part == "check":
        return partial(body.check, bytes(16), symbols)
    if part == "encode":
        return partial(body.encode, symbols, room)
    size = body.encode(symbols, room)
    return partial(body.decode, room[:size].copy(), np.zeros(SAMPLE, np.uint8))


CODER_BACKENDS = ("auto", "reference", "cpu", "cpu-plain")


@cache
def get_coder(name: str, backend: str = "auto") -> SectionCoder:
    """Return an entropy coder; the same object for the same arguments. Several threads may use it at once.

    Args:
        name: ``rans`` (within a percent of the entropy for some hundred thousand symbols of at least 2.5 bits) or
            ``huffman`` (at least one bit for each symbol, usually up to seven percent above the entropy, but fast on
            any CPU).
        backend: ``reference`` (NumPy), ``cpu`` (Numba with explicit vectors), ``cpu-plain`` (Numba without) or
            ``auto``: for each part, the fastest of ``cpu`` and ``cpu-plain`` that agrees with ``reference``; see
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
    # Imported here: Numba takes half a second to import, and the reference does not need it.
    from gradwire.kernels.entropy.cpu import compiled_body

    if backend == "cpu-plain":
        return SectionCoder(compiled_body(name, Variants(SCALAR, SCALAR, SCALAR)))
    return SectionCoder(compiled_body(name, select(name, scalar=backend == "auto").variants))


def _known(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise HyperparameterError(unknown(what, name, names))
