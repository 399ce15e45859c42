"""What every backend offers, and the checks that all of them make before memory is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gradwire.errors import HyperparameterError
from gradwire.kernels.entropy.base import Coder
from gradwire.kernels.families import FAMILIES
from gradwire.kernels.lattice.base import LatticeKernels
from gradwire.kernels.levels.base import LevelKernels
from gradwire.kernels.natural.base import NaturalKernels
from gradwire.kernels.packing.layout import DigitLayout, sum_layout
from gradwire.kernels.signs.base import SignKernels
from gradwire.kernels.table import GROUP_BYTES, GROUP_SIZE, SegmentTable

__all__ = [
    "Kernels",
    "Moments",
    "check_decode",
    "check_encode",
    "check_moments",
    "check_pack",
    "check_sum",
    "inverse_scale",
]


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of each segment: ``max_abs`` float32, ``mean``, ``std`` (population), ``norm`` float64; ``[S]`` each.

    ``norm`` is the Euclidean one. A segment that holds an infinity or a NaN has ``max_abs = +inf`` and zeros for the
    rest; an empty one has zeros.
    """

    max_abs: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    norm: torch.Tensor


class Kernels(LevelKernels, NaturalKernels, LatticeKernels, SignKernels, Protocol):
    """Arithmetic on blocks and bits. Every backend gives the same bits; ``reference`` defines them.

    Tensors lie in CPU memory and are contiguous unless said otherwise; outputs are the caller's. Vectors and byte
    buffers may start at any element of a larger tensor. ``N`` stands for ``world_size``, ``S`` for ``len(table)``.
    """

    @property
    def name(self) -> str:
        """The backend's."""
        ...

    def moments(self, x: torch.Tensor, table: SegmentTable) -> Moments:
        """Compute max-abs, mean, standard deviation and norm of every segment of ``x`` (float32), exactly as defined.

        A segment is cut in blocks of 4096 elements. With ``e`` the exponent of a block's largest magnitude (at least
        -104), every element becomes the integer ``q = trunc(x * 2^(23-e))``; ``sum q`` and ``sum q^2`` are exact, hence
        free of order, and are added up over blocks in float64, first to last.
        """
        ...

    def ternary_encode(
        self,
        x: torch.Tensor,
        table: SegmentTable,
        limit: torch.Tensor,
        inverse: torch.Tensor,
        round: int,
        stream: int,
        begin: int,
        end: int,
        out: torch.Tensor,
    ) -> None:
        """Ternarise and pack groups ``begin .. end`` of ``x`` (float32) into ``out`` (uint8 ``[16 * (end - begin)]``).

            digit = 1 + sign(x) * [u < min(|x|, limit) * inverse],    byte j = sum over planes k of digit_k * 3^k

        with ``u`` the element's 24-bit uniform integer and ``limit``, ``inverse`` float32 ``[S]``. See
        :func:`inverse_scale`. Elements past a segment's end have digit 1, the trit zero.
        """
        ...

    def ternary_sum(self, rows: torch.Tensor, out: torch.Tensor, layout: DigitLayout | None = None) -> None:
        """Add ``N`` ternary payloads, ``rows`` uint8 ``[N, m]``, into the packed sums of their ``5 * m`` digits.

        ``m`` is a multiple of 16; rows may be any distance apart. ``out`` is uint8 ``[packed_bytes(5 * m, N)]``, or as
        many bytes as another ``layout`` of base 2N + 1 needs.
        """
        ...

    def pack(self, values: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        """Pack ``values`` (int32 ``[n]`` in ``[-N, N]``) into ``out`` (uint8 ``[packed_bytes(n, N)]``)."""
        ...

    def unpack(self, words: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
        """Undo :meth:`pack`: ``words`` (uint8) to ``out`` (int32 ``[n]``).

        The highest digit of a word is not reduced, so that words which ``pack`` cannot make show as values above ``N``.
        """
        ...

    def decode(
        self,
        words: torch.Tensor,
        world_size: int,
        table: SegmentTable,
        scale: torch.Tensor,
        begin: int,
        end: int,
        x: torch.Tensor,
        accumulate: bool = False,
        layout: DigitLayout | None = None,
    ) -> None:
        """Write ``float32(v - N) * scale`` for the elements of groups ``begin .. end`` into ``x`` (float32).

        ``words`` (uint8) are the packed sums of those groups, ``80 * (end - begin)`` values; ``scale`` is float32
        ``[S]``. A scale that is not finite is written itself. ``accumulate`` adds instead of writing. Elements of
        ``x`` that belong to no segment or to other groups are left alone.
        """
        ...

    def coder(self, name: str) -> Coder:
        """Give the entropy coder of that name that goes with this backend."""
        ...

    def warm_up(self, families: Sequence[str] = FAMILIES) -> float:
        """Compile what calls of these families, or of entropy coders, will need; return the seconds it took.

        Raises:
            HyperparameterError: there is no such family or coder.
        """
        ...


def inverse_scale(scale: torch.Tensor) -> torch.Tensor:
    """Give ``2^24 / scale`` (float32), rounded up so that ``scale * inverse >= 2^24``; 0 for 0 and non-finite.

    The probability that a trit fires is then ``ceil(fl(|x| * inverse)) / 2^24``: within 2^-24 of ``|x| / scale``, and
    exactly one where ``|x| == scale``. A scale must be at least 2^-100, else its inverse would overflow.
    """
    usable = torch.isfinite(scale) & (scale != 0)
    if scale.device.type != "meta" and bool((scale[usable] < 2.0**-100).any()):
        raise HyperparameterError(f"scale {scale[usable].min().item()} is below 2^-100: treat such a segment as zero")
    inverse = (2.0**24 / scale.to(torch.float64)).to(torch.float32)
    # Rounded to nearest, the product may fall short of 2^24 by one rounding: step up where it does.
    higher = torch.nextafter(inverse, torch.full_like(inverse, torch.inf))
    inverse = torch.where(scale * inverse < 2.0**24, higher, inverse)
    return torch.where(usable, inverse, torch.zeros_like(inverse))


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, at_least: bool = False) -> None:
    """Refuse a tensor that would make a kernel read or write outside of it."""
    if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_contiguous():
        raise HyperparameterError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: a contiguous vector of {dtype} is needed"
        )
    if tensor.numel() < numel or (tensor.numel() > numel and not at_least):
        raise HyperparameterError(
            f"{name} has {tensor.numel()} elements, {'at least ' if at_least else ''}{numel} are needed"
        )


def _check_groups(table: SegmentTable, begin: int, end: int) -> None:
    if not 0 <= begin <= end <= table.groups:
        raise HyperparameterError(f"groups {begin}..{end} are outside 0..{table.groups}, the groups of {table!r}")


def check_moments(x: torch.Tensor, table: SegmentTable) -> None:
    """Check the arguments of :meth:`Kernels.moments`."""
    _check("x", x, torch.float32, table.extent, at_least=True)


def check_encode(
    x: torch.Tensor,
    table: SegmentTable,
    limit: torch.Tensor,
    inverse: torch.Tensor,
    round: int,
    stream: int,
    begin: int,
    end: int,
    out: torch.Tensor,
) -> None:
    """Check the arguments of :meth:`Kernels.ternary_encode`."""
    _check("x", x, torch.float32, table.extent, at_least=True)
    _check("limit", limit, torch.float32, len(table))
    _check("inverse", inverse, torch.float32, len(table))
    _check_groups(table, begin, end)
    _check("out", out, torch.uint8, GROUP_BYTES * (end - begin))
    if not (0 <= round < 2**64 and 0 <= stream < 2**32):
        raise HyperparameterError(f"round {round} or stream {stream} is outside its 64 or 32 bits")


def _of_sums(world_size: int, layout: DigitLayout | None) -> DigitLayout:
    if layout is not None and layout.base != 2 * world_size + 1:
        raise HyperparameterError(f"digits of base {layout.base} are no sums of {world_size} trits")
    return layout or sum_layout(world_size)


def check_sum(rows: torch.Tensor, out: torch.Tensor, layout: DigitLayout | None = None) -> DigitLayout:
    """Check the arguments of :meth:`Kernels.ternary_sum`; return the layout of the sums."""
    if rows.dtype != torch.uint8 or rows.ndim != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise HyperparameterError(
            f"rows is {rows.dtype} of shape {tuple(rows.shape)} and stride {rows.stride()}: uint8 rows of neighbouring "
            "bytes are needed"
        )
    if rows.shape[1] % GROUP_BYTES or (rows.shape[0] > 1 and rows.stride(0) < 0):
        raise HyperparameterError(f"rows have {rows.shape[1]} bytes: whole groups of {GROUP_BYTES} are needed")
    layout = _of_sums(rows.shape[0], layout)
    _check("out", out, torch.uint8, layout.packed_bytes(rows.shape[1] // GROUP_BYTES * GROUP_SIZE))
    return layout


def check_pack(values: torch.Tensor, world_size: int, words: torch.Tensor) -> DigitLayout:
    """Check the arguments of :meth:`Kernels.pack` and :meth:`Kernels.unpack`; return the layout."""
    layout = sum_layout(world_size)
    _check("values", values, torch.int32, values.numel())
    _check("words", words, torch.uint8, layout.packed_bytes(values.numel()))
    return layout


def check_decode(
    words: torch.Tensor,
    world_size: int,
    table: SegmentTable,
    scale: torch.Tensor,
    begin: int,
    end: int,
    x: torch.Tensor,
    layout: DigitLayout | None = None,
) -> DigitLayout:
    """Check the arguments of :meth:`Kernels.decode`; return the layout."""
    layout = _of_sums(world_size, layout)
    _check_groups(table, begin, end)
    _check("words", words, torch.uint8, layout.packed_bytes(GROUP_SIZE * (end - begin)))
    _check("scale", scale, torch.float32, len(table))
    _check("x", x, torch.float32, table.extent, at_least=True)
    return layout
