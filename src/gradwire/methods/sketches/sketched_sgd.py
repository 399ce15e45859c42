"""Sketched-SGD: the large elements of the mean, found in a sum of count sketches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Properties
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum, forget_momentum
from gradwire.methods.feedback.waiting import expected_wait, longest, momentum_beside_residual, share_of_largest
from gradwire.methods.sketches.sketch_exchange import COLUMNS_EACH, SketchAlgorithm, SketchExchange, largest


@dataclass(frozen=True, kw_only=True)
class SketchedSGD(ResidualAlgorithm, SketchAlgorithm):
    r"""Sketched-SGD: the sum of workers' count sketches shows which elements of the sum are large.

    With u_i worker i's momentum and v_i its accumulated vector of d elements, all parameters joined, zero at first,
    and k = max(1, floor(density d))::

        u_i <- momentum u_i + g_i        v_i <- v_i + u_i
        S = (1 / N) sum_i sketch(v_i)        x_j = median over rows of S's estimates of element j
        P = the ``candidates`` k elements with the largest |x_j|        y_j = (1 / N) sum_i v_ij  for j in P
        mean_j = y_j  for the k of P with the largest |y_j|, 0 elsewhere        u_ij, v_ij <- 0  for these j

    A sketch is ``rows`` rows of ``columns`` sums. Each sum is over the elements that a hash maps to it, with random
    signs; hashes and signs are the same in all rounds and on all workers. The sketch is linear: the sketch of a sum is
    the sum of the sketches. An estimate from one row is the element plus noise of variance |v|^2 / columns over draws
    of the hashes; the median of rows is rarely far off. So an element is found if it is large compared to
    |v| / sqrt(columns); other elements stay in v_i until they are large.

    All workers compute the same candidates from the sum, and exchange their exact values. With estimates instead of
    values mass would be lost, since v_i is cleared where the outcome is not the mean of v_i.

    Args:
        rows: Number of rows of the sketch, odd and at most 31.
        columns: Number of sums in a row, up to 2^23; None for 10 k.
        density: Share k/d of the elements, above 0 to 1; the paper: 0.001.
        candidates: Number of elements whose values are exchanged, divided by k; 1 or more.
        momentum: Momentum of each worker, cleared where elements were sent; if above 0 the optimizer must have none.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: the sketch, then the candidates' values and uncompressed parameters, in float32 by two-shot or a gather
    (``docs/wire-format.md``). Hashes are drawn from the shared stream.

    Reference: N. Ivkin et al., "Communication-efficient Distributed SGD with Sketching", NeurIPS 2019, with a second
    round; momentum as in the authors' program.

    Example:
        >>> import torch, gradwire as gw
        >>> g = 0.01 * torch.ones(2, 5000)
        >>> g[0, 7], g[1, 4000] = 3.0, -4.0
        >>> found = gw.simulate(g, gw.SketchedSGD(density=2 / 5000, columns=500)).mean
        >>> found.nonzero().flatten().tolist(), found[7].item(), found[4000].item()
        ([7, 4000], 1.5049999952316284, -1.9950000047683716)
    """

    rows: int = 5
    columns: int | None = None
    density: float = 0.01
    candidates: int = 4
    momentum: float = 0.0

    name: ClassVar[str] = "sketched_sgd"
    tag: ClassVar[int] = 42
    properties: ClassVar[Properties] = Properties(
        summary="The largest elements of the mean, found in a sum of count sketches, with error feedback",
        paper="Ivkin et al., Sketched-SGD, NeurIPS 2019",
        bit_stable=True,
        bits_per_element=32 * (5 * COLUMNS_EACH + 4) * 0.01,
        state="a residual per parameter and rank",
        state_bytes_per_element=4.0,
        stream="shared, the same in all rounds",
        paper_settings={"density": 0.001},
    )

    def __post_init__(self) -> None:
        self.check_sketch()
        object.__setattr__(self, "momentum", checked_momentum("SketchedSGD", self.momentum))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased_note="no; nothing is lost",
        )

    def wait_of(self, numel: int | None = None) -> float | None:
        # The largest elements of the mean, if the sketch finds them.
        return expected_wait(share_of_largest(self.density))

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        # For elements of equal magnitude, k of d are sent.
        wait = self.wait_of(longest(parameters))
        return momentum_beside_residual(self, optimizer, wait=wait, delta=self.density)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.fed_back(_SketchPlan(self, setting), setting)


class _SketchPlan(BucketPlan):
    """Plan that keeps the largest of the candidates found in a sketch."""

    chunks = 1

    def __init__(self, method: SketchedSGD, setting: PlanSetting) -> None:
        self.method, self.setting, self.collective = method, setting, setting.collective
        self.exchange = SketchExchange(method, setting)
        self.runs = [self.exchange.runs]

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        return
        yield

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        asked = yield from self.exchange.run(context, [flat], flat)
        if flat.is_meta:
            return Outcome()

        beside, (values,) = self.exchange.beside, asked.means
        beside.put(asked.beside, flat)
        chosen = largest(self.setting.kernels, values, self.exchange.kept)
        places = asked.places[chosen]
        for a, b in self.runs[0]:
            flat[a:b].fill_(0.0 if asked.readable else torch.inf)
        if asked.readable:
            flat.index_copy_(0, places, values[chosen])
        if self.method.momentum and self.exchange.numel:
            forget_momentum(context, self.setting.segments, places)
        if asked.own is None:
            return Outcome(asked.finite)
        own, own_beside = asked.own

        def sent(out: torch.Tensor, weight: float) -> None:
            out.index_add_(0, places, own[chosen], alpha=weight)
            beside.add(own_beside, weight, out)

        return Outcome(asked.finite, sent)
