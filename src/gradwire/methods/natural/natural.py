"""Natural compression: random rounding to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.kernels import SegmentTable
from gradwire.methods.natural.natural_codec import NaturalCodec
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

__all__ = ["Natural"]


@dataclass(frozen=True, kw_only=True)
class Natural(Compressor):
    r"""Natural compression: every value goes at random, without bias, to one of the two powers of two next to it.

    For t != 0 and a = floor(log2 |t|)::

        C(t) = sign(t) 2^a with probability (2^(a+1) - |t|) / 2^a, else sign(t) 2^(a+1)        C(0) = 0

    Unbiased; E|C(t) - t|^2 = (2^(a+1) - |t|) (|t| - 2^a) <= t^2 / 8, tight at |t| = (4/3) 2^a; |C(t)| lies between
    |t| / 2 and 2 |t|; powers of two are exact. No scale, no blocks, nothing to agree on before. Only sign and exponent
    travel: nine bits. With 23 random bits u this is ``(bits(|t|) + u) >> 23``, the law to the last bit.

    At the ends of float32's range: subnormal numbers go to 2^-126 or 0, without bias, though with more relative
    variance (the error stays below 2^-126); magnitudes above 2^127 come back as 2^127, which is biased there;
    an infinity or NaN on any worker makes that element's mean +inf for all.

    Wire: a plane of signs, a plane of exponents (``docs/wire-format.md``); every worker receives every worker's. Draws
    from the rank's stream.

    Reference: S. Horvath et al., "Natural Compression for Distributed Deep Learning", MSML 2022, section 2, theorem 3.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.25, -4.0, 0.0]]), gw.Natural()).mean
        tensor([ 1.0000,  0.2500, -4.0000,  0.0000])
    """

    name: ClassVar[str] = "natural"
    on_device: ClassVar[bool] = True
    tag: ClassVar[int] = 23
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)
    kernels: ClassVar[tuple[str, ...]] = ("moments", "natural")
    unbiased: ClassVar[bool] = True
    omega_formula: ClassVar[str | None] = "1/8"
    properties: ClassVar[Properties] = Properties(
        summary="Sign and exponent, the mantissa rounded away without bias",
        paper="Horvath et al., Natural Compression, MSML 2022",
        bit_stable=True,
        bits_per_element=2 * 9,
        stream="rank",
    )

    def omega_of(self, numel: int | None = None) -> float:
        """Return 1/8, attained at (4/3) 2^a."""
        return 1 / 8

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> NaturalCodec:
        table = SegmentTable(
            offset=[s.offset for s in segments],
            numel=[s.numel for s in segments],
            start=[s.start for s in segments],
            key=[parameter_key(seed, s.parameter.name, "natural") for s in segments],
        )
        return NaturalCodec(kernels, table, world_size)
