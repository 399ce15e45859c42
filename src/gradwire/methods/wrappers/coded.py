"""Coded: entropy coding of a method's payload."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Inherited, Method, Properties, cast_of, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting, SectionPlan
from gradwire.exchange.traits import Traits
from gradwire.kernels import CODERS
from gradwire.methods.ternary.terngrad import TernGrad
from gradwire.methods.wrappers.wrapper import Wrapper

AUTO = "auto"

UNCODED = ("low_rank", "selection", "sketch")
"""Families of kernels that write neither digits nor positions: the payload of a method with no other is floats."""


class _OfPayload(Inherited):
    """Properties of the inner method; if it is a cast, of sums that are not the backend's."""

    def __get__(self, instance: Method | None, owner: type[Method]) -> Any:
        found = super().__get__(instance, owner)
        cast = instance is not None and cast_of(getattr(instance, self._field)) is not None
        return replace(found, bit_stable=True) if cast else found


@dataclass(frozen=True, kw_only=True)
class Coded(Wrapper):
    r"""Entropy coding of any method with digits or positions in its payload, or of a cast's exponents.

    The outcome is the method's own, bit for bit, except for casts (see below). Digits are joined to bytes, five trits
    or two digits of up to 16 levels, and coded by their frequencies, so a payload is about as long as its empirical
    entropy: for trits 1.22 bits an element if the gradient is clipped at 2.5 deviations, or 0.76 if the scaler is the
    maximum, instead of 1.6. Payloads of different ranks differ in length, so lengths are exchanged first. Use it if the
    link is slower than the coder: see ``gradwire plan``, or let ``auto`` try.

    **Positions.** For methods that send a few elements the gaps between positions are coded, if that shortens the
    payload; values are not coded. Positions of the largest elements cluster by parameters, rows and columns: thousands
    of them take 7 to 8 % fewer bits at a density of 0.01, and a tenth to a quarter fewer at 0.1. Choose "huffman" for
    positions: its table is smaller, while that of rANS takes more than is saved for a few thousand. For a few hundred
    either table is too large, and positions are sent without a coder.

    **Factors.** Low-rank methods code the factors if their ``values`` are digits. Factors and sketches of floats are
    refused, since there is nothing to code.

    **Casts.** For ``fp32``, ``fp16`` and ``bf16`` the exponents are coded, whose distribution is skewed; signs and
    mantissas are not coded. The decoded values are exactly those of the cast. A backend cannot add up such payloads, so
    the outcome is not that of its ring, but::

        mean = cast(sum_r cast(g_r) * float32(1 / N))

    with products and sums in float32, in the order of ranks: each value is rounded twice, whatever the number of
    workers, and the bits do not depend on the layout. With two-shot the owner of a share adds up and sends the mean;
    with all-gather, as for two workers, all ranks add up; the bits are the same. With two workers they are also those
    of the plain cast, unless ``fp16`` or ``bf16`` cannot represent half of a value: below 2^-13 and 2^-125 in
    magnitude. With more, plain ``fp16`` and ``bf16`` round quotients and every partial sum in their own type, and plain
    ``fp32`` adds in another order.

    Args:
        compressor: The method. Digits of its operator must fit a byte.
        coder: "rans" (close to the entropy where a byte has at least half a bit of it), "huffman" (at least a bit a
            byte), or "auto": the one with the least measured time to encode and decode this method's digits once. All
            ranks use the same, chosen by the times of the slowest rank; see
            :func:`gradwire.exchange.planning.measure_coders`. Bytes are not considered: if the link is so slow that
            they matter most, choose the coder that sends fewer.

    Raises:
        HyperparameterError: there is no such coder, or ``compressor`` is not a method, is already coded, or takes local
            steps.
        IncompatibleError: when attached, if the method's payload has neither positions nor digits that fit a byte.

    Reference: J. Duda, "Asymmetric numeral systems", 2013 (rANS); D. A. Huffman, 1952. The methods' own papers propose
    Elias codes, which are longer: see ``docs/methods/wrappers.md``.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
        >>> plain, coded = gw.simulate(g, "terngrad"), gw.simulate(g, "coded")
        >>> torch.equal(plain.mean, coded.mean), coded.traffic.sent_bytes < 0.8 * plain.traffic.sent_bytes
        (True, True)
    """

    compressor: Method = field(default_factory=TernGrad, kw_only=False)
    coder: str = AUTO

    name: ClassVar[str] = "coded"
    properties: ClassVar[Inherited] = _OfPayload(
        "compressor",
        Properties(
            summary="Another method with its digits entropy-coded: the same bits out, fewer on the wire",
            paper="Duda, 2013; Huffman, 1952",
            bit_stable=True,
            bits_per_element=1.74,
            state="the method's",
            stream="the method's",
        ),
    )

    def __post_init__(self) -> None:
        known = (AUTO, *CODERS)
        require(self.coder in known, "Coded", f"coder is one of {', '.join(known)}, not {self.coder!r}")
        inner = self.compressor
        require(
            cast_of(inner) is not None
            or (
                isinstance(inner, Method)
                and "all_reduce" not in inner.traits.collectives
                and not (inner.traits.local_steps or inner.name == self.name)
            ),
            "Coded",
            f"compressor is a method whose payload is its own, such as TernGrad(), or a cast, not {inner!r}",
        )

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            # For a cast, only protocols with payloads.
            collectives=self.compressor.traits.collectives if self._cast is None else ("two_shot", "all_gather"),
            # The compressor's kernels and the coder, or all coders for "auto".
            kernels=(*self.compressor.traits.kernels, *((CODERS if self.coder == AUTO else ()) or (self.coder,))),
            open_coders=CODERS if self.coder == AUTO else (),
            scatters=self.compressor.traits.scatters,
            unbiased=self.compressor.traits.unbiased,
            unbiased_note=self.compressor.traits.unbiased_note,
            omega_formula=self.compressor.traits.omega_formula,
        )

    @property
    def _cast(self) -> Operator | None:
        """The compressor if it is a cast, else None."""
        return None if self.compressor.cast_dtype is None else self.compressor.as_operator

    def with_coder(self, coder: str) -> Coded:
        return replace(self, coder=coder) if self.coder == AUTO else self

    @property
    def delta_formula(self) -> str | None:
        return self.compressor.delta_formula

    def omega_of(self, numel: int | None = None) -> float | None:
        return self.compressor.omega_of(numel)

    def delta_of(self, numel: int | None = None) -> float | None:
        return self.compressor.delta_of(numel)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        if setting.coder is None:
            if self.traits.open_coders:
                raise IncompatibleError(
                    f"{self!r}: settle on a coder first, one of {', '.join(self.traits.open_coders)}"
                )
            setting = replace(setting, coder=setting.kernels.coder(self.coder))
        if self._cast is not None:
            return SectionPlan(self._cast, setting)
        families = self.compressor.traits.kernels
        if families and set(families) <= set(UNCODED):
            raise IncompatibleError(
                f"{self!r}: its payload is made of floats, without digits or positions that an entropy coder could "
                "shorten: use it without a coder, or a method of digits or positions, such as QSGDinf(), TopK() or "
                "PowerSGD(values=QSGDinf(levels=7, block_size=256))"
            )
        try:
            return self.compressor.plan(setting)
        except IncompatibleError as error:
            raise IncompatibleError(f"{self!r}: {error}") from None

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        if self._cast is not None:
            return SectionPlan(self._cast, setting.whole())
        return super().dense_plan(setting)
