"""Symbols, and sections made from them, that the coder tests share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from gradwire.kernels.checksum.reference import reference_check
from gradwire.kernels.entropy import Coder, get_coder
from gradwire.kernels.entropy.base import VARIANTS, SectionCoder, Variants
from gradwire.kernels.entropy.cpu import compiled_body

CODER_NAMES = ("rans", "huffman")
CODER_BACKENDS = ("reference", "cpu", "cpu-plain")


def every_variant(name: str) -> list[Variants]:
    """Combinations in which each variant of each part comes at least once."""
    parts = VARIANTS[name]
    most = max(map(len, parts.values()))
    return [Variants(**{part: (found * most)[i] for part, found in parts.items()}) for i in range(most)]


SERVING = ["reference", *dict.fromkeys(v.decode for name in CODER_NAMES for v in every_variant(name))]
"""The reference, and the variants of the decoders: what :func:`coder_of` takes."""


def coder_of(name: str, which: str) -> Coder:
    """The reference, or the coder whose decoder is that variant (plain loops for a coder that has none such)."""
    if which == "reference":
        return get_coder(name, "reference")
    fitting = [v for v in every_variant(name) if v.decode == which] or every_variant(name)
    return SectionCoder(compiled_body(name, fitting[0]))


def trits(number: int, fired: float, seed: int = 0) -> torch.Tensor:
    """``number`` bytes of five trits each, of which a share ``fired`` is not zero."""
    generator = np.random.default_rng(seed)
    digits = generator.choice(3, (number, 5), p=[fired / 2, 1 - fired, fired / 2])
    return torch.from_numpy((digits @ np.array([1, 3, 9, 27, 81])).astype(np.uint8))


@st.composite
def symbols(draw: st.DrawFn, largest: int = 3000) -> torch.Tensor:
    """Return the bytes from a few to all values, evenly spread to very uneven."""
    number = draw(st.one_of(st.integers(0, largest), st.sampled_from([127, 128, 129, 1024, 2048])))
    alphabet, power = draw(st.integers(1, 256)), draw(st.sampled_from([1.0, 2.0, 6.0, 20.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = (generator.random(number) ** power * alphabet).astype(np.uint8)
    return torch.from_numpy(generator.permutation(256).astype(np.uint8)[values])


def section_of(coder: Coder, source: torch.Tensor) -> torch.Tensor:
    """Encode into a buffer of the exact bound with guards around, which must survive."""
    bound = coder.bound(source.numel())
    whole = torch.full((bound + 128,), 0xA5, dtype=torch.uint8)
    size = coder.encode(source, whole[64 : 64 + bound])
    assert size <= bound
    assert bool((whole[:64] == 0xA5).all() and (whole[64 + bound :] == 0xA5).all())
    return whole[64 : 64 + size].clone()


def decoded(coder: Coder, section: torch.Tensor, number: int) -> torch.Tensor:
    """Decode into a buffer with guards around, which must survive."""
    whole = torch.full((number + 128,), 0x5A, dtype=torch.uint8)
    try:
        coder.decode(section, whole[64 : 64 + number])
    finally:
        assert bool((whole[:64] == 0x5A).all() and (whole[64 + number :] == 0x5A).all())
    return whole[64 : 64 + number]


def resealed(section: torch.Tensor) -> torch.Tensor:
    """Return a section the length and the check that its bytes ask for, as an attacker would."""
    forged = section.clone().numpy()
    forged[8:12] = np.array([len(forged) - 24], "<u4").view(np.uint8)
    check = reference_check(forged[:16].tobytes(), forged[24:])
    forged[16:24] = np.frombuffer(check.to_bytes(8, "little"), np.uint8)
    return torch.from_numpy(forged)


def all_backends(name: str) -> list[Coder]:
    """The reference, and compiled coders in which every variant of every part comes at least once."""
    compiled = [SectionCoder(compiled_body(name, variants)) for variants in every_variant(name)]
    return [get_coder(name, "reference"), *compiled]
