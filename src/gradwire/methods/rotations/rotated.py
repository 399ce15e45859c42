"""Blocks of parameters rotated at random before another method compresses them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Inherited, Method, Properties, cast_of, operator_of, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import RotationTable
from gradwire.methods.levels.qsgd_max_norm import QSGDMaxNorm
from gradwire.methods.rotations.eden import check_rotation
from gradwire.methods.wrappers.wrapper import TransformedPlan, Wrapper
from gradwire.seeds import SHARED, parameter_key


class _WithSigns(Inherited):
    """Properties of a compressor that draws the signs of a rotation as well."""

    def __get__(self, instance: Method | None, owner: type[Method]) -> Any:
        return replace(super().__get__(instance, owner), stream="shared, and the compressor's")


@dataclass(frozen=True, kw_only=True)
class Rotated(Wrapper):
    r"""An operator on one vector, applied to the coordinates of randomly rotated blocks.

    For a block x of b elements, with D random signs, H the Walsh-Hadamard matrix and Q the operator::

        R = H D / sqrt(b)        C(x) = R^-1 Q(R x)

    R is orthogonal, and the coordinates of any block are nearly normal, so an operator whose error depends on the
    largest values has the error that it has for normal values, whatever the tails of the gradient. Properties of Q that
    hold for every vector hold for C: it is unbiased if Q is, with the same ``omega`` and ``delta``.

    All workers use the same rotation, drawn anew in every round, so codes that add up still do, and a mean is rotated
    back once. A block has ``block_size`` elements, counted from a parameter's first. The last block is padded with
    zeros to the smallest power of two, at least 256, and coordinates are sent for these, too. Q compresses the
    coordinates of a parameter as a parameter: its blocks, scales and clipping apply to coordinates.

    Norms of blocks must be float32 numbers: an element above 5e36 may be treated as an infinity. A value that is not
    finite makes its whole parameter +inf on all workers.

    Args:
        compressor: Q, an operator on one vector that does not itself rotate.
        block_size: Elements b that are rotated together, a power of two from 256 to 32768.

    Raises:
        HyperparameterError: ``compressor`` is not such an operator, or ``block_size`` is out of range.

    Wire: the operator's payload of the coordinates. Signs are drawn from the shared stream.

    Reference: A. T. Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017, section 3; with
    integers that add up: M. Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic
    Compression", NSDI 2024.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(1, 65536, generator=torch.Generator().manual_seed(0)).mul(2).exp()
        >>> plain = gw.simulate(g, gw.QSGDMaxNorm()).mean - g[0]
        >>> rotated = gw.simulate(g, gw.Rotated(compressor=gw.QSGDMaxNorm())).mean - g[0]
        >>> bool(rotated.square().sum() < 0.02 * plain.square().sum())
        True
    """

    compressor: Method = field(default_factory=QSGDMaxNorm, kw_only=False)
    block_size: int = 4096

    name: ClassVar[str] = "rotated"
    properties: ClassVar[Inherited] = _WithSigns(
        "compressor",
        Properties(
            summary="Another method behind a random rotation of blocks, which makes heavy tails normal",
            paper="Suresh et al., ICML 2017",
            bit_stable=True,
            bits_per_element=(16 / 3 + 8) / 2,
        ),
    )

    def __post_init__(self) -> None:
        inner = self.compressor
        require(
            operator_of(inner) is not None and cast_of(inner) is None and "rotation" not in inner.traits.kernels,
            "Rotated",
            f"compressor is an operator on one vector without a rotation, such as QSGDMaxNorm(), not {inner!r}",
        )
        check_rotation("Rotated", self.block_size)

    def refusal_of_feedback(self, unseen: str) -> str | None:
        return None

    def declare(self) -> Traits:
        traits = super().declare()
        note = self.compressor.traits.unbiased_note
        return replace(
            traits,
            # The family "signs" finds values that are not finite.
            kernels=tuple(dict.fromkeys((*self.compressor.traits.kernels, "rotation", "signs"))),
            unbiased=self.compressor.traits.unbiased,
            unbiased_note=None if note is None else note.replace("gradient", "rotated gradient"),
            omega_formula=self.compressor.traits.omega_formula,
        )

    @property
    def delta_formula(self) -> str | None:
        return self.compressor.delta_formula

    def omega_of(self, numel: int | None = None) -> float | None:
        return self.compressor.omega_of(self._coordinates(numel))

    def delta_of(self, numel: int | None = None) -> float | None:
        return self.compressor.delta_of(self._coordinates(numel))

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        return self.compressor.usual_delta_of(self._coordinates(numel))

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        return self.compressor.typical_delta_of(self._coordinates(numel))

    def _coordinates(self, numel: int | None) -> int | None:
        return None if numel is None else RotationTable([0], [numel], [0], [(0, 0)], self.block_size).coordinates

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _RotatedPlan(self, setting)


class _RotatedPlan(TransformedPlan):
    """Plan that rotates the blocks of each parameter; its slots are their coordinates."""

    def __init__(self, method: Rotated, setting: PlanSetting) -> None:
        light = divide(setting.segments)[0]
        self._blocks = RotationTable(
            offset=[s.offset for s in light],
            numel=[s.numel for s in light],
            start=[s.start for s in light],
            key=[parameter_key(setting.seed, s.parameter.name, "rotation") for s in light],
            size=method.block_size,
        )
        self._factor = torch.from_numpy(self._blocks.sizes).double().rsqrt().float()
        super().__init__(method.compressor, setting, self._blocks.by_segment)

    def gather(self, round: int, flat: torch.Tensor, slots: torch.Tensor) -> None:
        self._kernels.rotate(flat, self._blocks, self._factor, round, SHARED, slots)

    def scatter(self, round: int, slots: torch.Tensor, flat: torch.Tensor, add: bool) -> None:
        self._kernels.rotate_back(slots, self._blocks, self._factor, round, SHARED, flat, add)
