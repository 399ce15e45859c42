"""Natural compression: values rounded at random to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.dense import NoSummary
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Properties
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.kernels import Coder, SegmentTable, natural_bytes, natural_sign_bytes
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


class NaturalCodec(Codec):
    """Codec of signs and exponents, which add up in float32 only; a unit is a group of 80 elements.

    Signs come first, uncoded since a coder could not shorten them; exponents are the symbols of a coder.
    """

    grain = 1

    def __init__(self, kernels: Kernels, table: SegmentTable, world_size: int) -> None:
        self.kernels, self.table, self.world_size = kernels, table, world_size
        self.units = table.groups

    def use_coder(self, coder: Coder) -> None:
        self.coder = coder

    def plain_payload_bytes(self, units: int) -> int:
        return natural_sign_bytes(units)

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return natural_bytes(units)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        self.kernels.natural_encode(flat, self.table, draw.round, draw.stream, out)

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        self.kernels.natural_mean(rows, self.table, 1.0 / self.world_size, flat)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self.kernels.natural_mean(data[None], self.table, weight, flat, accumulate=True)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        # There is no scale to check, so every element is checked, once.
        return all_finite(self.kernels.moments(flat, self.table).max_abs)


@dataclass(frozen=True, kw_only=True)
class Natural(Compressor):
    r"""Natural compression: values rounded at random, without bias, to one of the two nearest powers of two.

    For t != 0 and a = floor(log2 |t|)::

        C(t) = sign(t) 2^a with probability (2^(a+1) - |t|) / 2^a, else sign(t) 2^(a+1)        C(0) = 0

    Unbiased; E|C(t) - t|^2 = (2^(a+1) - |t|) (|t| - 2^a) <= t^2 / 8, tight at |t| = (4/3) 2^a; |C(t)| is between
    |t| / 2 and 2 |t|; powers of two are exact. There are no scales and no blocks, and workers agree on nothing
    beforehand. The payload is sign and exponent, nine bits. With 23 random bits u the exponent is
    ``(bits(|t|) + u) >> 23``, which has exactly these probabilities.

    At the ends of float32's range, subnormal numbers become 2^-126 or 0, without bias, though with more relative
    variance (the error stays below 2^-126); magnitudes above 2^127 become 2^127, which is biased; an infinity or NaN on
    any worker makes that element's mean +inf for all.

    As in the paper's algorithm 1, the mean is compressed again: with three workers or more each owns a share of the
    elements, and sends C of their mean to all. So 9 bits an element travel each way, whatever the number of workers,
    and with w = 1/8 the mean, still unbiased, has at most the variance::

        E|C(mean_i C(x_i)) - mean|^2 <= w |mean|^2 + (1 + w) w sum_i |x_i|^2 / N^2

    With ``collective="all_gather"``, the default of two workers, every worker receives all payloads and adds up.

    Wire: a plane of signs, a plane of exponents (``docs/wire-format.md``). Draws from the rank's stream, and for the
    mean from the owner's.

    Reference: S. Horvath et al., "Natural Compression for Distributed Deep Learning", MSML 2022, section 2, theorem 3,
    algorithm 1.

    Example:
        >>> import torch, gradwire as gw
        >>> gw.simulate(torch.tensor([[1.0, 0.25, -4.0, 0.0]]), gw.Natural()).mean
        tensor([ 1.0000,  0.2500, -4.0000,  0.0000])
    """

    name: ClassVar[str] = "natural"
    tag: ClassVar[int] = 23
    properties: ClassVar[Properties] = Properties(
        summary="Sign and exponent, the mantissa rounded away without bias",
        paper="Horvath et al., Natural Compression, MSML 2022",
        bit_stable=True,
        bits_per_element=9,
        stream="rank",
    )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            re_encoding=True,
            kernels=("moments", "natural"),
            on_device=True,
            unbiased=True,
            omega_formula="1/8",
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
