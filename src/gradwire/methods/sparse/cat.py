"""CAT: in every round the number of elements with the most descent for the cost of sending them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_number, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.atoms.atomo import AdaptiveAtomCodec
from gradwire.methods.sparse.descent_per_byte import BestRatioRule, MessageCost
from gradwire.methods.sparse.sparse_codec import SparseCodec
from gradwire.methods.sparse.sparse_values import CastValues, SignedValues, UnitTable

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


SCHEMES = ("topk", "sign", "stochastic")


@dataclass(frozen=True, kw_only=True)
class CAT(Compressor):
    r"""CAT: in every round the number of elements T with the most guaranteed descent for the cost of a message.

    For a gradient g of an L-smooth function, a step of 1 / L along its sparse version with T elements descends by at
    least descent(T) |g|^2 / (2 L). Each worker sends T elements with::

        T = argmax descent(T) / (c0 + bytes of T elements)

        topk:        the T largest as they are                    sum of the T largest squares / |g|^2
        sign:        their mean magnitude, and their signs        (sum of the T largest magnitudes)^2 / (T |g|^2)
        stochastic:  ATOMO's T elements, times omega(T)           omega(T) = |g|^2 / sum_i g_i^2 / p_i

    There is no compression ratio to tune: T is large if messages are expensive (large ``fixed_bytes``), and one if only
    bytes count. The rule counts an element as a value, or a sign, and ceil(log2 d) bits of position; positions are
    shorter on the wire. With ``packet_bytes`` bytes are counted in whole packets, which T then fills.

    Args:
        scheme: "topk", "sign" or "stochastic".
        fixed_bytes: c0, the fixed cost of a message in bytes: its seconds times the link's bytes a second. At 100
            Mbit/s, a millisecond is 12500; the paper: 1500 and less. None: measured by all ranks together when the
            method is attached (:class:`gradwire.LinkCost`), and stored in checkpoints, so that a resumed training uses
            the same. A simulation takes it from its option ``link_cost``.
        packet_bytes: Payload of a packet, at least 16, such as 1472 for UDP over Ethernet; None: bytes are not counted
            in packets.
        blocks: "model", one T for all parameters together, which needs the whole gradient; or "parameter".

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: in a simulation, if ``fixed_bytes`` is None and no ``link_cost`` is given.

    Gauges: ``elements``, this rank's T for all parameters together, or its mean over parameters.

    Wire: a sparse section (``docs/wire-format.md``), whose length depends on the gradient. "stochastic" draws from the
    rank's stream.

    Reference: S. Khirirat et al., "A Flexible Framework for Communication-Efficient Machine Learning", AAAI 2021 (arXiv
    2003.06377), sections 3 to 5.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.tensor([[8.0, 4.0, 2.0, 1.0, 0.5, 0.25]])
        >>> [int(gw.simulate(x, gw.CAT(fixed_bytes=c)).mean.count_nonzero()) for c in (0.0, 20.0, 1000.0)]
        [1, 2, 4]
    """

    scheme: str = "topk"
    fixed_bytes: float | None = 150000.0
    packet_bytes: int | None = None
    blocks: str = "model"

    name: ClassVar[str] = "cat"
    tag: ClassVar[int] = 39
    properties: ClassVar[Properties] = Properties(
        summary="As many of the largest elements as descend most for what a message costs",
        paper="Khirirat et al., AAAI 2021",
        bit_stable=True,
        bits_per_element=2 * 32.0,
        paper_settings={"fixed_bytes": 1500.0},
    )

    def __post_init__(self) -> None:
        require(self.scheme in SCHEMES, "CAT", f"scheme is one of {', '.join(SCHEMES)}, not {self.scheme!r}")
        fixed = self.fixed_bytes
        if fixed is not None:
            require(
                is_number(fixed, least=0), "CAT", f"fixed_bytes is a number of bytes from 0 on, or None, not {fixed!r}"
            )
            object.__setattr__(self, "fixed_bytes", float(fixed))
        size = self.packet_bytes
        packet = size is None or is_whole(size, 16)
        require(packet, "CAT", f"packet_bytes is at least 16 bytes, or None, not {size!r}")
        require(self.blocks in ("parameter", "model"), "CAT", f"blocks is 'parameter' or 'model', not {self.blocks!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            cut=1 << 40,
            whole_step=(self.blocks == "model"),
            joined=self.blocks == "model",
            # Without a number, the link measures the cost of a message. Kernels of norms, positions and, where elements
            # are drawn, trits.
            kernels=(
                "moments",
                "signs",
                *(("ternary",) if self.scheme == "stochastic" else ()),
                "selection",
                "indices",
            ),
            needs_link_cost=self.fixed_bytes is None,
            gauges=("elements",),
            unbiased=False,
        )

    @property
    def delta_formula(self) -> str | None:
        return "1/d, the descent for most" if self.scheme == "topk" else None

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the share of the largest element, which is always sent."""
        return 1 / numel if self.scheme == "topk" and numel and self.blocks == "parameter" else None

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SparseCodec:
        cost = MessageCost(self.fixed_bytes, self.packet_bytes)
        if self.scheme == "stochastic":
            return AdaptiveAtomCodec(kernels, segments, world_size, seed, cost=cost)
        return SparseCodec(
            kernels,
            UnitTable(segments, [1] * len(segments)),
            world_size,
            rule=BestRatioRule(self.scheme, cost),
            block=None,
            values=SignedValues() if self.scheme == "sign" else CastValues(torch.float32),
        )
