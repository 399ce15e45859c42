"""The parts of a coder, and the variants that there are of each. All variants of a part give the same bytes."""

from __future__ import annotations

from dataclasses import astuple, dataclass

__all__ = ["PARTS", "SCALAR", "VARIANTS", "Variants"]

SCALAR = "scalar"
PARTS = ("check", "encode", "decode")

VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "rans": {
        "check": ("simd", SCALAR),
        "encode": ("simd", SCALAR),
        "decode": ("simd", "simd-widened", "simd-picked", SCALAR),
    },
    "huffman": {"check": ("simd", SCALAR), "encode": (SCALAR,), "decode": (SCALAR,)},
}
"""By coder and part: explicit vectors first. The forms of rANS's decoder are described in ``rans_simd.py``."""


@dataclass(frozen=True)
class Variants:
    """One variant of each part of a coder, by name.

    Example:
        >>> Variants("scalar", "scalar", "scalar").vectors
        False
    """

    check: str
    encode: str
    decode: str

    @property
    def vectors(self) -> bool:
        """Whether any part runs in explicit vectors."""
        return any(variant != SCALAR for variant in astuple(self))
