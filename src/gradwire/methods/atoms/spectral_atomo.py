"""Spectral ATOMO: pairs of singular vectors, kept at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.errors import PayloadError
from gradwire.exchange.codecs import Codec, Draw, Summary
from gradwire.exchange.method import Method, Properties, is_number, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import Measured, Packing
from gradwire.kernels import MatrixTable
from gradwire.kernels.philox import uniform_integers
from gradwire.methods.atoms.atom_codec import probabilities
from gradwire.methods.low_rank.factors import shape_of
from gradwire.methods.sparse.sparse_codec import SparseSummary
from gradwire.seeds import parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


SPOILT = 0xFFFF
"""Value for the number of atoms that marks a matrix as not finite."""

MOST_PAIRS = 1 << 12

ROUNDING = 2.0**-21
"""Root mean square of atoms, as a share of the matrix's norm, up to which the smallest ones are rounding errors."""


class SingularCodec(Codec):
    """Codec of each parameter's singular values and vectors, kept with the best probabilities for a budget.

    A payload is its length in bytes, a 16-bit number of atoms a segment, zeros up to a multiple of 16, and for each
    atom the left vector times its singular value over its probability, and the right vector, float32.

    Args:
        budget: Mean number of atoms of a matrix that are kept.
        pairs: Number of leading pairs of singular vectors that are atoms of large matrices; None for all.
    """

    grain = units = 1

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        seed: int,
        *,
        budget: float,
        pairs: int | None,
    ) -> None:
        self._kernels = kernels
        self.segments, self.world_size, self.budget = list(segments), world_size, budget
        self.shapes = [shape_of(s.parameter) for s in segments]
        self.keys = [parameter_key(seed, s.parameter.name, "atoms") for s in segments]
        # The probability of drawing more is below 1e-15 (Chernoff); the smallest are then left out.
        cap = int(budget + 8 * budget**0.5 + 16)
        self.most = [min(rows, columns, cap) for rows, columns in self.shapes]
        # Where few pairs are left out, a subspace takes as long as all of them.
        large = [pairs is not None and min(shape) > max(4 * pairs, cap) for shape in self.shapes]
        self._starts = [
            _start(min(shape), pairs, key) if pairs is not None and is_large else None
            for shape, key, is_large in zip(self.shapes, self.keys, large)
        ]
        self._begin = -(-(4 + 2 * len(self.segments)) // 16) * 16

    def packing(self, units: int) -> Packing:
        return Measured(self.payload_bytes(units))

    def payload_bytes(self, units: int) -> int:
        numbers = sum(k * (rows + columns) for k, (rows, columns) in zip(self.most, self.shapes))
        return -(-(self._begin + 4 * numbers) // 16) * 16

    def summarise(self, flat: torch.Tensor) -> SparseSummary:
        return SparseSummary()

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> SparseSummary:
        return SparseSummary()

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        counts, at = [], self._begin
        columns_of = zip(self.segments, self.shapes, self.keys, self.most, self._starts)
        for segment, (rows, columns), key, most, start in columns_of:
            matrix = flat[segment.offset : segment.offset + segment.numel].view(rows, columns)
            if not bool(torch.isfinite(matrix).all()):
                counts.append(SPOILT)
                continue
            # Squares of the matrix stay within float32. A power of two changes no bit of what follows.
            exponent = _exponent(matrix)
            matrix = matrix.ldexp(-exponent)
            atoms = Pairs(matrix) if start is None else PairsAndRows(matrix, start)
            chance = probabilities(without_rounding(atoms.sizes), self.budget)
            kept = torch.nonzero(_drawn(len(chance), key, draw) < (chance * 2.0**24).ceil()).flatten()[:most]
            counts.append(len(kept))
            left, right = atoms.vectors(kept)
            factor = (atoms.sizes[kept].double() / chance[kept]).to(torch.float32)
            for block in ((left * factor[:, None]).ldexp(exponent), right):
                size = 4 * block.numel()
                out[at : at + size].view(torch.float32).copy_(block.reshape(-1))
                at += size
        out[: self._begin].zero_()
        out[:4].view(torch.int32).fill_(at)
        numbers = torch.tensor(counts, dtype=torch.int32, device="cpu").to(torch.uint16)
        out[4 : 4 + 2 * len(counts)].copy_(numbers.view(torch.uint8))

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        ours = summary if isinstance(summary, SparseSummary) else SparseSummary()
        for s in self.segments:
            flat[s.offset : s.offset + s.numel].zero_()
        for row in rows:
            ours.finite = self._add(row, 1.0 / self.world_size, flat) and ours.finite

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._add(data, weight, flat)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> bool:
        return not isinstance(summary, SparseSummary) or summary.finite

    def _add(self, row: torch.Tensor, weight: float, flat: torch.Tensor) -> bool:
        numbers = row[4 : 4 + 2 * len(self.segments)].clone().view(torch.uint16).to(torch.int32).tolist()
        at, finite = self._begin, True
        for segment, (rows, columns), count, most in zip(self.segments, self.shapes, numbers, self.most):
            if count == SPOILT:
                flat[segment.offset : segment.offset + segment.numel] = torch.inf
                finite = False
                continue
            size = 4 * count * (rows + columns)
            if count > most or at + size > len(row):
                raise PayloadError(f"{count} atoms of {segment.parameter.name} where at most {most} are sent")
            if count:
                values = row[at : at + size].clone().view(torch.float32)
                table = MatrixTable([segment.offset], [rows], [columns], [count])
                self._kernels.multiply_out(values[: count * rows], values[count * rows :], table, flat, weight)
                finite = finite and bool(torch.isfinite(values).all())
            at += size
        if at != int(row[:4].clone().view(torch.int32)):
            raise PayloadError(f"a section of atoms says another length than the {at} bytes that it has")
        return finite


class Pairs:
    """All pairs of singular vectors of a matrix, as atoms.

    Attributes:
        sizes: Their singular values, descending.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        if len(matrix) == 1:
            # Exact, without a library: the number one, and the row.
            self._left, self.sizes, self._right = matrix.new_ones(1, 1), matrix.new_ones(1), matrix
        else:
            self._left, self.sizes, self._right = torch.linalg.svd(matrix, full_matrices=False)

    def vectors(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left and right vectors of some atoms, in rows."""
        return self._left[:, kept].t(), self._right[kept]


class PairsAndRows:
    """Leading pairs of singular vectors, and each row of what they leave: atoms that add up to the matrix.

    With M the matrix, or its transpose if it has more rows than columns, and orthonormal columns V near its leading
    right singular vectors::

        M = (M V) V^T + R      M V = U S W^T      M = sum_k s_k u_k (V w_k)^T + sum_i e_i R_i

    V comes from subspace iteration, ``V = orth(M^T M orth(M^T Omega))`` with a fixed Omega. The sum is M for every V,
    so that what is drawn is unbiased; a better V makes the atoms' sizes add up to less.

    Args:
        start: Omega, with a column for each pair.

    Attributes:
        sizes: Singular values s_k and the rows' Euclidean norms abs(R_i).

    Reference: N. Halko, P.-G. Martinsson, J. Tropp, "Finding Structure with Randomness", SIAM Review 53(2), 2011,
    algorithm 4.4.
    """

    def __init__(self, matrix: torch.Tensor, start: torch.Tensor) -> None:
        self._turned = len(matrix) > matrix.shape[1]
        m = matrix.t() if self._turned else matrix
        v = torch.linalg.qr(m.t() @ start).Q
        v = torch.linalg.qr(m.t() @ (m @ v)).Q
        inner = m @ v
        left, values, turn = torch.linalg.svd(inner, full_matrices=False)
        self._left, self._right, self._pairs = left.t(), turn @ v.t(), len(values)
        self._rest = torch.addmm(m, inner, v.t(), alpha=-1)
        self.sizes = torch.cat([values, self._rest.square().sum(1).sqrt()])

    def vectors(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left and right vectors of some atoms, in rows; those of a row are e_i and R_i over its norm."""
        pairs, rows = kept[kept < self._pairs], kept[kept >= self._pairs] - self._pairs
        units = torch.zeros(len(rows), self._left.shape[1], dtype=torch.float32, device="cpu")
        units[torch.arange(len(rows), device="cpu"), rows] = 1.0
        left = torch.cat([self._left[pairs], units])
        right = torch.cat([self._right[pairs], self._rest[rows] / self.sizes[self._pairs + rows][:, None]])
        return (right, left) if self._turned else (left, right)


def without_rounding(sizes: torch.Tensor) -> torch.Tensor:
    """Return the sizes of a matrix's atoms with zeros for the smallest ones that are rounding errors.

    A library finds small singular values in place of those that a matrix of a low rank does not have. Each of them
    would have a chance to be kept, and atoms within the budget would be left out instead.
    """
    squares, order = sizes.double().square().sort()
    sums = squares.cumsum(0)
    lost = sums <= ROUNDING**2 * len(sizes) * sums[-1]
    return sizes.index_fill(0, order[lost], 0.0)


def _exponent(matrix: torch.Tensor) -> torch.Tensor:
    """Return the exponent e for which the largest magnitude is in [2^(e-1), 2^e), as far as 2^-e and 2^e are normal."""
    return torch.frexp(matrix.abs().amax()).exponent.clamp(-126, 126)


def _start(numel: int, pairs: int, key: tuple[int, int]) -> torch.Tensor:
    """Return normal numbers ``[numel, pairs]`` that depend on a parameter's key alone."""
    generator = torch.Generator().manual_seed(key[0] << 31 ^ key[1])
    return torch.randn(numel, pairs, generator=generator, dtype=torch.float32, device="cpu")


def _drawn(count: int, key: tuple[int, int], draw: Draw) -> torch.Tensor:
    """Return a 24-bit uniform integer for each atom."""
    groups = torch.arange(-(-count // 80), device="cpu")
    return uniform_integers(
        groups, torch.tensor(key, device="cpu").expand(len(groups), 2), draw.round, draw.stream
    ).reshape(-1)[:count]


@dataclass(frozen=True, kw_only=True)
class SpectralATOMO(Method):
    r"""Spectral ATOMO: every parameter as a matrix, with each pair of singular vectors kept at random.

    With X = sum_k sigma_k u_k v_k^T and independent t_k, 1 with the probability p_k and else 0::

        Q(X) = sum_k (sigma_k t_k / p_k) u_k v_k^T      p_k = min(1, sigma_k / c)      sum_k p_k = budget

    Unbiased, with the variance sum_k sigma_k^2 (1 / p_k - 1), the least of all p with that sum. A matrix whose rank is
    at most the budget is exact, and so is a parameter with one dimension, whose only singular value is always sent.

    A parameter is a matrix of its outermost dimension in memory by all others, as for :class:`PowerSGD`. Each worker
    decomposes its own gradient with LAPACK. All workers decode the payload identically, in a specified order.

    To compute all pairs of a large matrix takes far longer than a step. A matrix is large if its shorter side is longer
    than 4 ``pairs``, and than the number of atoms that a payload has room for, budget + 8 sqrt(budget) + 16. Then only
    ``pairs`` leading pairs are computed, by subspace iteration. The other atoms are the rows of the rest (the columns,
    if there are more rows than columns), with their Euclidean norms in the place of singular values. The atoms add up
    to X, so Q is unbiased as before, and the probabilities are those of the least variance for these atoms. A matrix of
    a rank up to ``pairs`` has the same atoms as with all pairs. For normal values the variance is about a third larger.

    Args:
        budget: Mean number of pairs of a matrix that are kept, 1 to 32767.
        pairs: Number of leading pairs of a large matrix, 1 to 4096; None for all, as in the paper.

    Raises:
        HyperparameterError: ``budget`` or ``pairs`` is out of range.

    Wire: ``docs/wire-format.md``. On average 32 budget (rows + columns) bits a matrix and worker. Draws from the rank's
    stream.

    Reference: H. Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS 2018,
    section 5. The authors' program cuts probabilities off at 1 without distributing the rest of the budget to the
    others, and draws again if nothing was kept, which is biased. This implementation does neither.

    Example:
        >>> import torch, gradwire as gw
        >>> x = torch.outer(torch.arange(1.0, 5.0), torch.ones(6))
        >>> torch.allclose(gw.simulate([{"w": x}], gw.SpectralATOMO(budget=1.0)).mean["w"], x)
        True
    """

    budget: float = 3.0
    pairs: int | None = 16

    name: ClassVar[str] = "spectral_atomo"
    tag: ClassVar[int] = 38
    properties: ClassVar[Properties] = Properties(
        summary="Pairs of singular vectors kept at random with the probabilities of the least variance",
        paper_settings={"pairs": None},
        paper="Wang et al., ATOMO, NeurIPS 2018",
        bit_stable=False,
        bits_per_element=2 * 32 * 3 * 2000 / 1000**2,
        stream="rank",
    )

    def __post_init__(self) -> None:
        value = self.budget
        fits = is_number(value, least=1, below=2**15)
        require(fits, "SpectralATOMO", f"budget is a number of pairs, 1 to 32767, not {value!r}")
        object.__setattr__(self, "budget", float(value))
        wanted = f"pairs is None or a number of pairs, 1 to {MOST_PAIRS}, not {self.pairs!r}"
        require(self.pairs is None or is_whole(self.pairs, 1, MOST_PAIRS), "SpectralATOMO", wanted)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("all_gather",),
            cut=1 << 40,
            share_cut=1 << 40,
            kernels=("low_rank",),
            unbiased=True,
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return SectionPlan(self, setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return SectionPlan(self, replace(setting, segments=[replace(s, dense=True) for s in setting.segments]))

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SingularCodec:
        """Bind the method to segments."""
        return SingularCodec(kernels, segments, world_size, seed, budget=self.budget, pairs=self.pairs)
