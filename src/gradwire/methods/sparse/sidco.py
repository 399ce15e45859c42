"""SIDCo: the elements above a threshold that a fitted distribution gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.methods.casts.cast import FP32
from gradwire.methods.sparse.fitted_threshold import SMALL_BLOCK, FittedRule
from gradwire.methods.sparse.sparse import Sparse
from gradwire.methods.sparse.sparse_codec import MOST_UNITS
from gradwire.methods.sparse.tail_fits import MODELS
from gradwire.methods.sparse.top_k import TopK, check_density

__all__ = ["SIDCo"]


@dataclass(frozen=True, kw_only=True)
class SIDCo(Sparse):
    r"""SIDCo: the elements above a threshold that is estimated by fitting a distribution to the magnitudes.

    Of a parameter with d elements, about k = density d are kept, without ordering them::

        C(x)_i = x_i  where |x_i| >= eta,  0 elsewhere            P(|x_i| > eta) = density  under the model

    ``eta`` is a closed form of moments of the magnitudes that are not zero. A single fit is poor far out in the tail,
    so that it is repeated: the first stage aims at a quarter, and each of the others fits the excess of what is above
    the threshold so far, by equal factors. How many are above depends on the data. Of normal, gamma, Student and Pareto
    values, with a density of 0.001, three stages of "exponential" keep 0.7 to 1.2 k, of "pareto" 0.9 to 1.1 k; one
    stage may keep twenty times k, or nothing (``docs/methods/sparse.md``).

    No more than 1.3 k are kept, the largest. Where the fit says nothing, the k largest are kept, as by :class:`TopK`:
    of parameters with fewer than 100 000 elements, of those whose fit degenerates, and where no element reaches the
    threshold. So every parameter has at least one element kept, and C is a contraction, if only with delta = 1/d in the
    worst case; use it as ``ErrorFeedback(compressor=SIDCo())``.

    The paper adapts the number of stages to what was kept in earlier rounds. That would be a memory, which operators
    have not; ``stages`` is fixed here.

    Args:
        density: Share k/d that is aimed at, above 0 to 1; the paper: 0.001.
        model: Distribution of the magnitudes in the first stage and of the excess in later ones: "exponential" for both
            (the paper's SIDCo-E), "gamma" and generalised Pareto (SIDCo-GP), or generalised "pareto" for both
            (SIDCo-P).
        stages: 1 to 16.
        blocks: "parameter", or "model": all parameters are one vector, as by default in the authors' program. This
            needs the whole step.
        values: How values travel, as for :class:`TopK`.

    Raises:
        HyperparameterError: a field is out of range.

    Gauges: ``density``, the share of the elements that this rank kept.

    Wire: as for :class:`TopK`.

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
    stages: int = 3
    blocks: str = "parameter"
    values: Method = field(default_factory=FP32)

    unit: ClassVar[str] = "element"  # type: ignore[misc]
    name: ClassVar[str] = "sidco"
    tag: ClassVar[int] = 36
    unbiased: ClassVar[bool] = False
    gauges: ClassVar[tuple[str, ...]] = ("density",)
    properties: ClassVar[Properties] = Properties(
        summary="The elements above a threshold that is estimated by fitting a distribution, with their positions",
        paper="Abdelmoniem et al., SIDCo, MLSys 2021",
        bit_stable=True,
        bits_per_element=2 * 0.05 * (32 + 5.8),
        paper_settings={"density": 0.001},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("SIDCo", self.density))
        require(self.model in tuple(MODELS), "SIDCo", f"model is one of {', '.join(MODELS)}, not {self.model!r}")
        whole = is_whole(self.stages)
        require(whole and 1 <= self.stages <= 16, "SIDCo", f"stages is a number from 1 to 16, not {self.stages!r}")
        self.check_sparse()

    def rule(self) -> FittedRule:
        return FittedRule(self.density, self.model, self.stages)

    @property
    def delta_formula(self) -> str | None:
        return "1/d, or k/d below 100 000 elements" + " times that of the values" * (not isinstance(self.values, FP32))

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the share of one element, or that of the k largest of a parameter that is not fitted."""
        values = self.values.delta_of(None)
        if values is None:
            return None
        if numel is None or self.blocks == "model":
            return values / MOST_UNITS
        return values * (1 / numel if numel >= SMALL_BLOCK else max(1, int(self.density * numel)) / max(1, numel))

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        """Return that of as many of the largest as are aimed at."""
        return TopK(density=self.density, blocks=self.blocks, values=self.values).delta_of(numel)
