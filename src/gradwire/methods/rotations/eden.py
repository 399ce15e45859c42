"""EDEN and DRIVE: rotated blocks whose coordinates are rounded to the nearest of a few levels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.codecs.base import Constant, Draw, Summary
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Properties, is_number, is_whole, require
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import padded
from gradwire.kernels import GROUP_SIZE, LEAST_BLOCK, MOST_BLOCK, Grid
from gradwire.methods.rotations.normal_levels import (
    LEAST_ENTROPY,
    MOST_BITS,
    NORMAL_LEVELS,
    REACH,
    level_count,
    uniform_step,
)
from gradwire.methods.rotations.rotated_blocks import OwnRotationCodec, RotatedSampleCodec

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


class RotatedLevelCodec(OwnRotationCodec):
    """Codec of rotated blocks: coordinates z = H D x / |x| rounded to the nearest level of a grid, and a scale a block.

    A payload is the float32 scales of the blocks, padded to sixteen bytes, and then the digits of all coordinates,
    packed in the layout of ``digit_layout(grid.base)``. A block is decoded to ``scale D H Q(z)``.

    If all coordinates of a block would be rounded to zero, they are first multiplied by the smallest level above zero,
    which prevents that and does not change the mean decoded value.

    Args:
        grid: Levels for standard normal values; see :meth:`gradwire.kernels.Grid.nearest`.
        block_size: Elements of a block, see :class:`gradwire.kernels.RotationTable`.
        unbiased: True for the scale ``|x| / <z, Q(z)>``, with which the estimate's projection on x is x. False, for two
            levels only, for the scale of least error: with b coordinates at +-m, ``|x| <z, Q(z)> / (b m)^2``.
    """

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        grid: Grid,
        block_size: int,
        unbiased: bool = True,
    ) -> None:
        super().__init__(kernels, segments, world_size, seed, base=grid.base, block_size=block_size)
        self.grid, self.unbiased = grid, unbiased
        self._lengths = Constant(torch.from_numpy(self.blocks.sizes).to(torch.float32) * float(grid.values[-1]))
        # The mean square of a block's coordinates is 1 up to rounding. So at least one is not rounded to zero if the
        # border of zero is clearly below 1.
        self._may_vanish = grid.zero_ends > 0.99
        self.units = -(-self.blocks.coordinates // GROUP_SIZE)
        self.side_bytes = padded(4 * self.blocks.blocks)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        norms = self.norms(flat)
        norm, kept = norms.norm, self._round(flat, norms.factor, draw, out)
        lost = norms.usable & (kept == 0)
        # A thread that reads from a device waits for it. So all are rounded again there, those that are not lost alike.
        if self._may_vanish and (flat.device.type != "cpu" or bool(lost.any())):
            # Every coordinate of a lost block is nearer to zero than to the next level. Some are at least 1 in
            # magnitude, since their mean square is 1: multiplied by that level they are beyond the border, half of it.
            stretch = torch.where(lost, float(self.grid.values[self.grid.positive + 1]), 1.0)
            kept, norm = self._round(flat, norms.factor * stretch, draw, out), norm * stretch
        self.write_scales(
            norm / kept if self.unbiased else norm * (kept / self._lengths.on(flat.device).square()), norms, out
        )

    def _round(self, flat: torch.Tensor, factor: torch.Tensor, draw: Draw, out: torch.Tensor) -> torch.Tensor:
        """Write the digits of ``factor`` times each block's coordinates; return ``<z, Q(z)>`` of each block."""
        return self.kernels.encode_rotated(
            flat, self.blocks, factor, self.grid, self.layout, draw.round, draw.stream, self.digits(out)
        )

    def decode(self, row: torch.Tensor, weight: torch.Tensor, draw: Draw, flat: torch.Tensor, accumulate: bool) -> None:
        scale = self.scales(row) * weight
        self.kernels.decode_rotated(
            self.digits(row), self.blocks, scale, self.grid, self.layout, draw.round, draw.stream, flat, accumulate
        )


def check_rotation(owner: str, size: object) -> None:
    """Check the field ``block_size`` of a method that rotates blocks.

    Raises:
        HyperparameterError: it is not a power of two in the allowed range.
    """
    require(
        is_whole(size, LEAST_BLOCK, MOST_BLOCK) and size & (size - 1) == 0,
        owner,
        f"block_size is a power of two from {LEAST_BLOCK} to {MOST_BLOCK}, not {size!r}",
    )


class RotatedLevels(Compressor):
    """A compressor that rounds rotated blocks to the nearest levels, with the field ``block_size``.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    block_size: int

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            re_encoding=True,
            cut=self.block_size,
            share_cut=self.block_size,
            kernels=("moments", "rotation"),
            unbiased=False,
            unbiased_note="over uniform rotations",
        )

    @abstractmethod
    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> OwnRotationCodec: ...


def coordinates_of(numel: int | None, block_size: int) -> int:
    """Return the coordinates of the largest block of a parameter with ``numel`` elements, or of any parameter."""
    size = block_size if numel is None else min(block_size, 1 << max(numel - 1, 1).bit_length())
    return max(LEAST_BLOCK, size)


@dataclass(frozen=True, kw_only=True)
class EDEN(RotatedLevels):
    r"""EDEN: blocks rotated at random, with every coordinate rounded to the nearest level for normal values.

    For a block x of b = ``block_size`` elements, with D random signs, H the Walsh-Hadamard matrix and Q the rounding to
    the 2^bits levels that have the least squared error for a standard normal variable (Lloyd and Max)::

        z = H D x / |x|_2        Q(x) = |x|_2 / <z, Q(z)>  D H Q(z)

    The coordinates of any block are nearly normal, even for heavy tails, so the error does not depend on the vector:
    with d the distortion of the levels, E|Q(x) - x|^2 = d / (1 - d) |x|^2, which is 0.571, 0.133, 0.0358, 0.00959,
    0.00251, 0.000645 for 1 to 6 bits. A parameter's last block has the smallest power of two that holds its elements,
    at least 256.

    The scale makes the estimate unbiased over uniform rotations. Random signs and one transform leave a bias where a
    few elements dominate a block: if all but two elements a > b are zero, one bit decodes them to (a^2 + b^2) / a and 0
    in every round. For such gradients, for example of embeddings of rare tokens, use more bits or an unbiased operator
    such as :class:`QSGDinf`.

    **Between whole bits** Q has as many levels as packed digits of ``bits`` allow: 3, 5, 6, 7, 9, 11, 23 and 40 levels
    take 1.6, 2.46, 2.67, 2.91, 3.2, 3.56, 4.57 and 5.33 bits. The error is less than with two widths for two parts of
    the coordinates: 0.235 against 0.275 at 1.6 bits. **Below one bit** the signs of a random part of the coordinates
    are sent, and the others are decoded to zero: E|Q(x) - x|^2 = (pi / (2 bits) - 1) |x|^2.

    **For a coder** (:class:`Coded`), ``spacing="uniform"`` uses the levels j step, j an integer, with the step whose
    digits have an entropy of ``bits``. ``bits`` may then be any rate, and the error is less: 1.61, 0.535, 0.0976,
    0.0227 and 0.00559 at 0.5, 1, 2, 3 and 4 bits, within 1.54 dB of the least that any code of so many bits achieves
    for normal values, 2^(-2 bits). Without a coder these digits take more bits than those of Lloyd and Max.

    Every worker draws its own rotations anew in every round. With two-shot the owner of a share averages the workers'
    estimates in float32 and encodes the mean in the same way, which adds the error of encoding the mean; both
    directions then take ``bits``, whatever the number of workers.

    Args:
        bits: Bits of a coordinate, above 0 and at most 6, or at least 0.125 if ``spacing`` is "uniform". At least
            sixteen coordinates of a block are sent.
        block_size: Elements b that are rotated together, a power of two from 256 to 32768.
        spacing: "lloyd_max" or "uniform".

    Raises:
        HyperparameterError: a field is out of range, or there are no levels for ``bits``.

    Wire: a float32 scale for each block, then packed digits of the coordinates (``docs/wire-format.md``). Signs and
    places are drawn from the rank's stream, or for a mean from the owner's.

    Reference: S. Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated
    Learning", ICML 2022, sections 3 and 4.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(1, 65536, generator=torch.Generator().manual_seed(0)).exp()
        >>> error = gw.simulate(g, gw.EDEN(bits=2)).mean - g[0]
        >>> round(float(error.square().sum() / g.square().sum()), 2)
        0.13
    """

    bits: int | float = 4
    block_size: int = 4096
    spacing: str = "lloyd_max"

    name: ClassVar[str] = "eden"
    tag: ClassVar[int] = 30
    properties: ClassVar[Properties] = Properties(
        summary="Blocks rotated at random, coordinates rounded to the nearest of a few levels for normal values",
        paper="Vargaftik et al., EDEN, ICML 2022",
        bit_stable=True,
        bits_per_element=4 + 32 / 4096,
        stream="rank",
    )

    def __post_init__(self) -> None:
        bits, fits = self.bits, is_number(self.bits, above=0, most=MOST_BITS)
        require(fits, "EDEN", f"bits is above 0 to {MOST_BITS} a coordinate, not {bits!r}")
        object.__setattr__(self, "bits", int(bits) if bits == int(bits) else float(bits))
        known = self.spacing in ("lloyd_max", "uniform")
        require(known, "EDEN", f"spacing is 'lloyd_max' or 'uniform', not {self.spacing!r}")
        check_rotation("EDEN", self.block_size)
        if self.spacing == "uniform":
            require(bits >= LEAST_ENTROPY, "EDEN", f"bits is {LEAST_ENTROPY} or more of evenly spaced levels")
        elif bits > 1 and bits != int(bits):
            count = level_count(bits)
            whole = count.bit_length() - 1
            require(
                count != 1 << whole,
                "EDEN",
                f"packed digits of {bits} bits have room for no more than the {count} levels of bits={whole}: take "
                f"that, more bits, or spacing='uniform' within Coded()",
            )

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            # Sampled coordinates need the kernels of packing, too.
            kernels=("moments", "rotation", "levels") if self.samples else ("moments", "rotation"),
            on_device=not self.samples,
        )

    @property
    def samples(self) -> bool:
        """True if only a part of the coordinates is sent."""
        return self.bits < 1 and self.spacing == "lloyd_max"

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> OwnRotationCodec:
        size = self.block_size
        if self.samples:
            return RotatedSampleCodec(kernels, segments, world_size, seed, share=self.bits, block_size=size)
        if self.spacing == "uniform":
            step = uniform_step(self.bits)
            grid = Grid.nearest([j * step for j in range(1, math.ceil(REACH / step) + 1)], zero=True)
        else:
            count = level_count(self.bits)
            grid = Grid.nearest(NORMAL_LEVELS[count], zero=count % 2 == 1)
        return RotatedLevelCodec(kernels, segments, world_size, seed, grid=grid, block_size=size)


@dataclass(frozen=True, kw_only=True)
class DRIVE(RotatedLevels):
    r"""DRIVE: signs of randomly rotated blocks.

    For a block x of b = ``block_size`` elements, with D random signs and H the Walsh-Hadamard matrix::

        y = H D x / sqrt(b)      Q(x) = S D H sign(y) / sqrt(b)      S = |x|_2^2 / |y|_1

    This is :class:`EDEN` with one bit: E|Q(x) - x|^2 = (pi / 2 - 1) |x|^2. With ``least_error`` S is |y|_1 / b, for use
    under error feedback: the error is (1 - 2 / pi) |x|^2 and the estimate is 2 / pi of the vector on average, with
    |Q(x) - x|^2 <= (1 - 1 / b) |x|^2 for every vector and every draw.

    Args:
        least_error: True for the scale of least error, False for the unbiased one.
        block_size: Elements b that are rotated together, a power of two from 256 to 32768.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: as :class:`EDEN` with one bit.

    Reference: S. Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS 2021, sections 3 and 4 (the
    scales of theorems 3 and 1).

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(1, 65536, generator=torch.Generator().manual_seed(0))
        >>> error = gw.simulate(g, gw.DRIVE(least_error=True)).mean - g[0]
        >>> round(float(error.square().sum() / g.square().sum()), 2)
        0.36
    """

    least_error: bool = False
    block_size: int = 4096

    name: ClassVar[str] = "drive"
    tag: ClassVar[int] = 31
    properties: ClassVar[Properties] = Properties(
        summary="The signs of blocks rotated at random",
        paper="Vargaftik et al., DRIVE, NeurIPS 2021",
        bit_stable=True,
        bits_per_element=1 + 32 / 4096,
        stream="rank",
    )

    def __post_init__(self) -> None:
        require(isinstance(self.least_error, bool), "DRIVE", f"least_error is True or False, not {self.least_error!r}")
        check_rotation("DRIVE", self.block_size)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            on_device=True,
        )

    def delta_of(self, numel: int | None = None) -> float | None:
        return 1 / coordinates_of(numel, self.block_size) if self.least_error else None

    @property
    def delta_formula(self) -> str | None:
        return "1/b, 2/pi for dense blocks" if self.least_error else None

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> RotatedLevelCodec:
        return RotatedLevelCodec(
            kernels,
            segments,
            world_size,
            seed,
            grid=Grid.nearest(NORMAL_LEVELS[2]),
            block_size=self.block_size,
            unbiased=not self.least_error,
        )
