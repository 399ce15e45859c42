"""SIDCo: elements above a threshold, estimated by fitting a distribution to the magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch

from gradwire.exchange.codecs.base import Draw
from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.traits import Traits
from gradwire.kernels import SegmentTable
from gradwire.methods.casts.cast import FP32
from gradwire.methods.sparse.sparse import Sparse
from gradwire.methods.sparse.sparse_codec import MOST_UNITS, LargestRule, Rule, choose_above
from gradwire.methods.sparse.top_k import TopK, check_density

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

FIRST_TAIL = 0.25
"""Target share of the first of several stages."""

FEWEST = 32
"""Least number of magnitudes for a later stage: moments of fewer do not describe a tail."""

PIECE = 1 << 16
"""Number of logarithms that are added up at a time, in float64."""


@dataclass(frozen=True)
class Tail:
    """Moments of what the magnitudes above a threshold exceed it by.

    Attributes:
        count: Number of magnitudes above it.
        mean, variance: Mean and sample variance of the excess.
        mean_log: Returns the mean logarithm of the magnitudes, which only one model needs.
    """

    count: int
    mean: float
    variance: float
    mean_log: Callable[[], float]


Fit: TypeAlias = Callable[[Tail, float], float | None]
"""``fit(tail, share)`` returns the value that the excess exceeds with probability ``share``; None where the moments
allow no fit."""


def tail_threshold(kernels: Kernels, x: torch.Tensor, density: float, model: str, stages: int) -> float | None:
    """Return a threshold that about ``density len(x)`` of the magnitudes exceed.

    Zeros are left out of the fit. With several stages the first has the target :data:`FIRST_TAIL`, and each later one
    fits the excess over the previous threshold, with equal factors of the remaining share::

        eta_1 = fit(|x|, 1/4)     eta_m = eta_(m-1) + fit(|x| - eta_(m-1) of all above, (4 density)^(1 / (stages - 1)))

    Each stage reads the vector once: sums are those of :meth:`Kernels.excess_sums`, the same with every backend.

    Args:
        x: Float32.
        model: A key of :data:`MODELS`.
        stages: At least 1.

    Returns:
        The threshold, or None if a fit degenerates: magnitudes are all equal, not finite, or too few.

    Reference: A. M. Abdelmoniem et al., MLSys 2021, section 2 and algorithm 1.

    Example:
        >>> import gradwire.kernels
        >>> x = torch.from_numpy(np.random.default_rng(0).exponential(size=100_000).astype(np.float32))
        >>> eta = tail_threshold(gradwire.kernels.get_kernels(), x, 0.01, "exponential", 1)
        >>> 0.9 < float((x > eta).float().mean()) / 0.01 < 1.1
        True
    """
    first, later = MODELS[model]
    left = _tail(kernels, x, 0.0)
    share = density * len(x) / max(1, left.count)
    if left.count < FEWEST or share >= 1:
        return None
    if stages == 1 or share >= FIRST_TAIL:
        return first(left, share)
    eta = first(left, FIRST_TAIL)
    each = (share / FIRST_TAIL) ** (1 / (stages - 1))
    for _ in range(stages - 1):
        if eta is None:
            return None
        left = _tail(kernels, x, eta)
        excess = later(left, each) if left.count >= FEWEST else None
        eta = None if excess is None else eta + excess
    return eta


TOLERANCE = 0.2
"""Relative distance from the target number of magnitudes within which the number of stages is not changed."""

USUAL_STAGES = 3


def adapted_threshold(kernels: Kernels, x: torch.Tensor, density: float, model: str) -> float | None:
    """Return the threshold of :func:`tail_threshold` for a number of stages that is adapted to what is kept.

    With k = density len(x) and n(M) the number of magnitudes above the threshold of M stages, M begins at
    :data:`USUAL_STAGES` and stays where n(M) is within 20 % of k. Else the neighbour with the lesser |ln(n(M) / k)|
    is next, in this direction for as long as that falls, within 1 to ceil(log2(1 / density)) stages. Which direction
    raises n depends on the tail: light ones need more stages to keep more, heavy ones fewer.

    The number above a threshold takes one more reading of the vector.

    Returns:
        The threshold of the best number of stages that was tried; None if no number of them gave a fit.
    """
    aim, most = density * len(x), max(1, math.ceil(-math.log2(density)))
    tried: dict[int, tuple[float, float | None]] = {}

    def share(stages: int) -> float:
        """Return n / k for a number of stages, 0 where there is no threshold."""
        if stages not in tried:
            eta = tail_threshold(kernels, x, density, model, stages) if 1 <= stages <= most else None
            tried[stages] = (0.0 if eta is None else _tail(kernels, x, eta).count / aim, eta)
        return tried[stages][0]

    def off(stages: int) -> float:
        return abs(math.log(share(stages))) if share(stages) else math.inf

    stages = min(USUAL_STAGES, most)
    if abs(share(stages) - 1) > TOLERANCE:
        step = 1 if off(stages + 1) < off(stages - 1) else -1
        while abs(share(stages) - 1) > TOLERANCE and off(stages + step) < off(stages):
            stages += step
    return tried[stages][1]


def _tail(kernels: Kernels, x: torch.Tensor, eta: float) -> Tail:
    """Return the moments of what magnitudes above ``eta`` exceed it by."""
    # A float32 is above eta if it is above the largest float32 that is not.
    least = np.float32(min(eta, float(np.finfo(np.float32).max)))
    if float(least) > eta:
        least = np.nextafter(least, np.float32(0))
    whole = SegmentTable([0], [len(x)], [0], [(0, 0)])
    found = kernels.excess_sums(x, whole, x.new_tensor([float(least)]), x.new_tensor([eta], dtype=torch.float64))
    count, total, squares = (float(part) for part in (found.count, found.total, found.squares))
    mean = total / max(1.0, count)
    variance = (squares - mean * total) / max(1.0, count - 1)

    def mean_log() -> float:
        magnitudes = x[x != 0].abs().double()
        return math.fsum(float(part.log().sum()) for part in magnitudes.split(PIECE)) / max(1, len(magnitudes))

    return Tail(int(count), mean, variance, mean_log)


def exponential_tail(tail: Tail, share: float) -> float | None:
    """Fit an exponential distribution: ``-mean ln(share)``.

    Example:
        >>> exponential_tail(Tail(2, 2.0, 2.0, lambda: 0.55), math.exp(-2))
        4.0
    """
    return _usable(-tail.mean * math.log(share))


def gamma_tail(tail: Tail, share: float) -> float | None:
    """Fit a gamma distribution, by the mean mu and the mean logarithm.

    With s = ln mu - mean ln x, the shape is a = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s), a closed form close to the
    most likely one, and the scale mu / a. The tail is inverted exactly; the authors' program approximates it by
    ``-ln(share) - ln Gamma(a)``, above which there is far less than ``share`` where a < 1.
    """
    if _usable(tail.mean) is None:
        return None
    s = math.log(tail.mean) - tail.mean_log()
    if not 1e-9 < s < math.inf:
        return None
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return _usable(tail.mean / shape * inverse_gamma_tail(shape, share))


def pareto_tail(tail: Tail, share: float) -> float | None:
    """Fit a generalised Pareto distribution to the excess, by its mean mu and its variance v.

    The shape is c = (1 - mu^2 / v) / 2, which is below 1/2, and the scale b = mu (1 + mu^2 / v) / 2. The excess is
    above the returned value with probability ``share``: b (share^-c - 1) / c, or its limit -b ln(share) for c = 0.
    """
    if _usable(tail.mean) is None or not tail.variance > 0:
        return None
    ratio = tail.mean * tail.mean / tail.variance
    shape, scale = (1 - ratio) / 2, tail.mean * (1 + ratio) / 2
    lengths = -math.log(share)
    # (share^-c - 1) / c, without cancellation.
    return _usable(scale * (lengths if shape == 0 else math.expm1(min(700.0, shape * lengths)) / shape))


def inverse_gamma_tail(shape: float, tail: float) -> float:
    """Return z with Q(shape, z) = tail, the regularised upper incomplete gamma function.

    It is found by bisection of ln z, to within 2^-50 of z given Q; ``torch.special.gammaincc`` has a relative error of
    about 1e-13.

    Args:
        shape: Above 0.
        tail: Above 0 and below 1.

    Example:
        >>> abs(inverse_gamma_tail(1.0, 0.01) + math.log(0.01)) < 1e-12
        True
    """
    a = torch.tensor(shape, dtype=torch.float64, device="cpu")
    low, high = -700.0, math.log(shape + 1.0) + 1.0
    while float(torch.special.gammaincc(a, a.new_tensor(math.exp(high)))) > tail:
        high += 1.0
    while high - low > 2.0**-51 and low < (low + high) / 2 < high:
        middle = (low + high) / 2
        above = float(torch.special.gammaincc(a, a.new_tensor(math.exp(middle)))) > tail
        low, high = (middle, high) if above else (low, middle)
    return math.exp((low + high) / 2)


MODELS: dict[str, tuple[Fit, Fit]] = {
    "exponential": (exponential_tail, exponential_tail),
    "gamma": (gamma_tail, pareto_tail),
    "pareto": (pareto_tail, pareto_tail),
}
"""Fit of the first stage, and of the excess in later stages."""


def _usable(value: float) -> float | None:
    return value if 0 < value < math.inf else None


SMALL_BLOCK = 100_000
"""Number of units of a block below which nothing is fitted: the last stage would have only a few dozen."""

MOST = 1.3
"""Largest number of kept elements over the target number."""


class FittedRule(Rule):
    """Rule that keeps all units of a block above an estimated threshold, at most 1.3 k.

    The threshold is that of :func:`tail_threshold`, or of :func:`adapted_threshold` without a number of stages. With
    k = max(1, floor(density n)) for a block of n units, the 1.3 k largest are kept if more are above. The k largest are
    kept if the block has fewer than :data:`SMALL_BLOCK` units, if a fit degenerates, and if nothing is above. The kept
    units are always exactly the largest.
    """

    def __init__(self, density: float, model: str, stages: int | None) -> None:
        self._largest = LargestRule(density)
        self._density, self._model, self._stages = density, model, stages

    def most(self, table: SegmentTable) -> torch.Tensor:
        aim, small = self._largest.most(table), torch.from_numpy(table.numel.copy()) < SMALL_BLOCK
        return torch.where(small, aim, (aim.to(torch.float32) * MOST).long())

    def choose(
        self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        threshold, most = self.thresholds(kernels, scores, table), self.most(table)
        positions, counts = choose_above(kernels, scores, table, threshold, most)
        unfitted = torch.isinf(threshold) | (counts == 0)
        if bool((unfitted | (counts == most)).any()):
            counts = torch.where(unfitted, self._largest.most(table), counts)
            positions = torch.empty(int(counts.sum()), dtype=torch.int32, device="cpu")
            kernels.select_largest(scores, table, counts, positions)
        return positions, counts

    def _threshold(self, kernels: Kernels, x: torch.Tensor) -> float | None:
        if self._stages is None:
            return adapted_threshold(kernels, x, self._density, self._model)
        return tail_threshold(kernels, x, self._density, self._model, self._stages)

    def thresholds(self, kernels: Kernels, scores: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        """Return the threshold of each block, float32 ``[blocks]``, +inf if none is estimated."""
        found = torch.full((len(table),), torch.inf, dtype=torch.float32, device="cpu")
        for i, (begin, numel) in enumerate(zip(table.offset.tolist(), table.numel.tolist())):
            if numel >= SMALL_BLOCK:
                eta = self._threshold(kernels, scores[begin : begin + numel])
                found[i] = torch.inf if eta is None else eta
        return found


@dataclass(frozen=True, kw_only=True)
class SIDCo(Sparse):
    r"""SIDCo: the elements above a threshold that is estimated by fitting a distribution to the magnitudes.

    About k = density d of a parameter's d elements are kept, without ordering them::

        C(x)_i = x_i  where |x_i| >= eta,  0 elsewhere            P(|x_i| > eta) = density  under the model

    ``eta`` is a closed form of moments of the magnitudes that are not zero. A single fit is poor far out in the tail,
    so it is repeated: the first stage has a target of a quarter, and each later stage fits the excess over the
    threshold so far, by equal factors. The number above depends on the data. For normal, gamma, Student and Pareto
    values and a density of 0.001, three stages of "exponential" keep 0.7 to 1.2 k, and of "pareto" 0.9 to 1.1 k; one
    stage may keep twenty times k, or nothing (``docs/methods/sparse.md``).

    At most the 1.3 k largest are kept. The k largest are kept, as by :class:`TopK`, if a parameter has fewer than 100
    000 elements, if its fit degenerates, or if no element reaches the threshold. So at least one element of every
    parameter is kept, and C is a contraction, though with delta = 1/d in the worst case. Use it as
    ``ErrorFeedback(compressor=SIDCo())``.

    **Stages.** The paper adapts their number to the share kept in the last five rounds, by one at a time, where it is
    off by more than 20 %. With ``stages=None`` that is done in each round for each parameter: from three stages on the
    number moves by one towards the neighbour that keeps nearer to k, until the share is within 20 %, or no neighbour is
    nearer. It needs no state, and in place of several rounds a few more readings of the vector, one to count for each
    number of stages that is tried and those of its fits.

    Args:
        density: Target share k/d, above 0 to 1; the paper: 0.001.
        model: Distribution of the magnitudes in the first stage and of the excess in later ones: "exponential" for both
            (the paper's SIDCo-E), "gamma" and generalised Pareto (SIDCo-GP), or generalised "pareto" for both
            (SIDCo-P).
        stages: 1 to 16; None: adapted to what is kept, as in the paper.
        blocks: "parameter"; or "model", all parameters as one vector, the default of the authors' program. This needs
            the whole gradient.
        values: Encoding of values, as for :class:`TopK`.

    Raises:
        HyperparameterError: a field is out of range.

    Gauges: ``density``, the share of the elements that this rank kept.

    Wire: as :class:`TopK`.

    Reference: A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An Efficient Statistical-based Gradient
    Compression Technique for Distributed Training Systems", MLSys 2021.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
        >>> kept = int(gw.simulate(g, gw.SIDCo(density=0.01, model="pareto")).mean.count_nonzero())
        >>> 0.8 < kept / 2000 <= 1.3
        True
    """

    density: float = 0.05
    model: str = "exponential"
    stages: int | None = USUAL_STAGES
    blocks: str = "parameter"
    values: Method = field(default_factory=FP32)

    unit: ClassVar[str] = "element"  # type: ignore[misc]
    name: ClassVar[str] = "sidco"
    tag: ClassVar[int] = 36
    properties: ClassVar[Properties] = Properties(
        summary="The elements above a threshold that is estimated by fitting a distribution, with their positions",
        paper="Abdelmoniem et al., SIDCo, MLSys 2021",
        bit_stable=True,
        bits_per_element=2 * 0.05 * (32 + 5.8),
        paper_settings={"density": 0.001, "stages": None},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("SIDCo", self.density))
        require(self.model in tuple(MODELS), "SIDCo", f"model is one of {', '.join(MODELS)}, not {self.model!r}")
        given = self.stages is None or is_whole(self.stages, 1, 16)
        require(given, "SIDCo", f"stages is a number from 1 to 16, or None, not {self.stages!r}")
        self.check_sparse()

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            gauges=("density",),
            unbiased=False,
        )

    def rule(self) -> FittedRule:
        return FittedRule(self.density, self.model, self.stages)

    @property
    def delta_formula(self) -> str | None:
        rounded = self.values.cast_dtype != torch.float32
        return "1/d, or k/d below 100 000 elements" + " times that of the values" * rounded

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the share of one element, or of the k largest of a parameter that is not fitted."""
        values = self.values.delta_of(None)
        if values is None:
            return None
        if numel is None or self.blocks == "model":
            return values / MOST_UNITS
        return values * (1 / numel if numel >= SMALL_BLOCK else max(1, int(self.density * numel)) / max(1, numel))

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        """Return the share of the target number of largest elements."""
        return self._exactly.delta_of(numel)

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        return self._exactly.typical_delta_of(numel)

    @property
    def _exactly(self) -> TopK:
        """Selection of exactly the target number of elements."""
        return TopK(density=self.density, blocks=self.blocks, values=self.values)
