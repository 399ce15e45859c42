"""SketchedAMSGrad: AMSGrad's steps for the large elements of the mean momentum, found by sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.deferred_checks import all_finite, both
from gradwire.exchange.method import Properties, is_number, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import divide
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.optimizers import not_stepped
from gradwire.methods.sketches.second_moments import LEARNING_RATE, SECOND_MOMENTS, RateRatios, SecondMoments
from gradwire.methods.sketches.sketch_exchange import COLUMNS_EACH, SketchAlgorithm, SketchExchange, largest
from gradwire.methods.wrappers.wrapper import pieces

WARM_UP = "warm_up"


@dataclass(frozen=True, kw_only=True)
class SketchedAMSGrad(SketchAlgorithm):
    r"""SketchedAMSGrad: the sum of workers' sketched momenta shows the elements with the largest AMSGrad steps.

    With m_i worker i's momentum and e_i its residual of d elements, all parameters joined, zero at first, v and w the
    second moment and its running maximum, the same on all workers, eps at first, alpha_t the learning rate of round t,
    and k = max(1, floor(density d))::

        m_i <- beta1 m_i + (1 - beta1) g_i        p_i = m_i + (alpha_{t-1} / alpha_t) e_i
        S = (1 / N) sum_i sketch(p_i)        x_j = median over rows of S's estimates of element j
        P = the ``candidates`` k elements with the largest |x_j| / sqrt(w_j)
        y_j = (1 / N) sum_i p_ij,  h_j = (1 / N) sum_i g_ij        for j in P
        v_j <- beta2 v_j + (1 - beta2) h_j^2,  w_j <- max(w_j, v_j)        for j in P
        D_j = y_j / sqrt(w_j)  for the k of P with the largest |D_j|, 0 elsewhere        e_i <- p_i, 0 for these j

    The outcome D is a *direction*, the whole step of AMSGrad: x <- x - alpha_t D. Use ``torch.optim.SGD`` without
    momentum, with a learning rate as for Adam; its ``weight_decay``, which is added after the exchange, is decoupled,
    as in AdamW. With ``density=1`` and a constant learning rate this is AMSGrad on the mean gradient, without bias
    correction and with eps inside the root.

    **Residual.** The residual is the part of p_i that was not applied, so it has the unit of a momentum: a step with D
    subtracts sqrt(w) D = y from it. The paper's recursion subtracts D itself, which leaves a residual that matches no
    step. The ratio of learning rates gives the residual the effect that it would have had at once. With constant w and
    exact y, x_t - alpha_{t-1} mean_i e_i / sqrt(w) changes by exactly -alpha_t mean_i m_i / sqrt(w) in each round,
    whatever the rates.

    **Learning rates** of each parameter are those of the link's optimizer. Attaching fails if they differ between
    ranks; the outcome is the same on all ranks, whatever the rates. Without an optimizer, as in
    :func:`gradwire.simulate`, the ratio is 1. A parameter whose rate is 0 is not changed: its residual is kept, with
    its rate, while its momentum and second moment are updated. The last rate is part of the state.

    **Second moment.** The gradient of an element that is not a candidate is unknown, so v_j is not changed: it is the
    moment over the rounds in which the element was a candidate. With zeros for the other rounds, an element that is a
    candidate in a hundredth of the rounds would have a v_j of a hundredth of its square, and steps ten times too long.
    Still, v_j is too small until an element has been a candidate about 1 / (1 - beta2) times, and a long accumulated
    residual is applied in one step, which eps bounds. With a small eps, send the first rounds in float32
    (``warmup_steps``): these initialise v for all elements.

    **In float32.** For uncompressed elements, and for all elements in warm-up rounds, gradients are sent, and all ranks
    keep the momentum of their mean and take AMSGrad's exact step. m_i starts from that momentum when the warm-up ends.
    Rounds with a value that is not finite return such values and do not change the state.

    All state is without the loss scale under automatic mixed precision. Squares above float32's range are clamped to
    its largest number.

    Args:
        beta1: Decay of the momentum, at least 0 and below 1.
        beta2: Decay of the second moment, at least 0 and below 1.
        eps: First value of v and w, in the unit of a squared gradient, 1e-30 to 1e30.
        rows: Number of rows of the sketch, odd and at most 31.
        columns: Number of sums in a row, up to 2^23; None for 10 k.
        density: Share k/d of the elements, above 0 to 1; the paper: 0.001.
        candidates: Number of elements whose values are exchanged, divided by k; 1 or more.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: when attached, if the optimizer is not ``torch.optim.SGD``, has a momentum, or lacks a
            parameter.

    Wire: the sketch, then p and g of the candidates and gradients of uncompressed parameters, in float32 by two-shot or
    a gather (``docs/wire-format.md``). Hashes are drawn from the shared stream.

    Reference: W. Xian, F. Huang, H. Huang, "Communication-Efficient Adam-Type Algorithms for Distributed Data Mining",
    ICDM 2022, with averaged gradients. The second exchange, h of the candidates, and the unit of the residual are
    particular to this package.

    Example:
        >>> import torch, gradwire as gw
        >>> method = gw.SketchedAMSGrad(beta1=0.5, beta2=0.75, eps=1.0, density=0.25, columns=64)
        >>> link = gw.SimulatedLink([("w", torch.empty(4))], method, 1, min_numel=0)
        >>> for _ in range(3):
        ...     print(link.reduce_(torch.tensor([[0.0, 8.0, 0.0, 6.0]])))
        tensor([0.0000, 0.9774, 0.0000, 0.0000])
        tensor([0.0000, 0.0000, 0.0000, 1.8570])
        tensor([0.0000, 2.1251, 0.0000, 0.0000])
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-4
    rows: int = 5
    columns: int | None = None
    density: float = 0.01
    candidates: int = 4

    name: ClassVar[str] = "sketched_amsgrad"
    tag: ClassVar[int] = 43
    properties: ClassVar[Properties] = Properties(
        summary="AMSGrad's steps for large elements of the mean momentum, found in a sum of sketches; a direction",
        paper="Xian et al., SketchedAMSGrad, ICDM 2022",
        bit_stable=True,
        bits_per_element=32 * (5 * COLUMNS_EACH + 2 * 4) * 0.01,
        state="a momentum and a residual per parameter and rank, two second moments, learning rates",
        state_bytes_per_element=16.0,
        stream="shared, the same in all rounds",
        paper_settings={"density": 0.001},
    )

    def __post_init__(self) -> None:
        self.check_sketch()
        for name, low, high, told in (
            ("beta1", 0.0, 1.0, "at least 0 and below 1"),
            ("beta2", 0.0, 1.0, "at least 0 and below 1"),
            ("eps", 1e-30, 1.0000001e30, "from 1e-30 to 1e30"),
        ):
            value = getattr(self, name)
            require(
                is_number(value, least=low, below=high), "SketchedAMSGrad", f"{name} is a number {told}, not {value!r}"
            )
            object.__setattr__(self, name, float(value))

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            direction=True,
            owns_momentum=True,
            needs_loss_scale=True,
            remembers=(
                "momentum",
                "residual",
                "mean_momentum",
                *SECOND_MOMENTS,
                LEARNING_RATE,
                WARM_UP,
            ),
            own=("momentum", "residual"),
            needs_learning_rates=True,
            unbiased_note="no; nothing is lost",
        )

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        if optimizer is None:
            return
        if type(optimizer) is not torch.optim.SGD:
            raise IncompatibleError(
                f"SketchedAMSGrad gives AMSGrad's whole step, and {type(optimizer).__name__} would change it: use "
                "torch.optim.SGD without momentum, with the learning rate that Adam would have"
            )
        missed = not_stepped(optimizer, parameters)
        if missed:
            raise IncompatibleError(
                "SketchedAMSGrad needs the learning rate of each parameter, and the optimizer that was given does not "
                f"step {missed[0]!r} ({len(missed)} of {len(parameters)} are not its own): pass the optimizer of all"
            )

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        if optimizer is not None:
            return None
        return (
            f"{self!r} knows no learning rates: what waits in its residual is not rescaled when they change; hand the "
            "optimizer over, optimizer=..."
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _AMSGradPlan(self, setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return _AMSGradPlan(self, setting.whole(), warm_up=True)


class _AMSGradPlan(BucketPlan):
    """Plan of the steps of candidates found in a sketch, and of all elements that are sent in float32."""

    chunks = 1

    def __init__(self, method: SketchedAMSGrad, setting: PlanSetting, *, warm_up: bool = False) -> None:
        self.method, self.setting, self.collective, self.warm_up = method, setting, setting.collective, warm_up
        self.exchange = SketchExchange(method, setting)
        self.runs = [self.exchange.runs]
        self._compressed, dense = divide(setting.segments)
        # Marked as not dense, since moments of these segments are stored, too.
        self._dense = [replace(s, dense=False) for s in dense]
        self._all = [*self._compressed, *self._dense]
        self._dense_runs = join((s.offset, s.offset + s.numel) for s in dense)
        self._ratios = RateRatios([] if warm_up else setting.compressed)

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        return
        yield

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        if flat.is_meta:
            yield from self.exchange.run(context, [flat, flat], flat)
            return Outcome()
        moments = SecondMoments(self.method.beta2, self.method.eps, context, self._all)
        waiting = self._move(context, flat)
        vector = context.memory.stage("residual", self._compressed)
        divisor = context.workspace.get("divisor", 4 * flat.numel()).view(torch.float32)
        for a, b in pieces(self.runs[0]):
            divisor[a:b] = moments.root(moments.highest[a:b])
        asked = yield from self.exchange.run(context, [vector, flat], flat, divisor)

        scale, places, (values, gradients) = context.loss_scale, asked.places, asked.means
        steps = values / moments.update(places, gradients / scale)
        chosen = largest(self.setting.kernels, steps, self.exchange.kept)
        places, steps = places[chosen], steps[chosen].mul_(scale)
        vector[places] = 0
        held = context.memory.read("residual", self._compressed)
        for a, b in waiting:
            vector[a:b] = held[a:b]
        for a, b in self.runs[0]:
            flat[a:b].fill_(0.0 if asked.readable else torch.inf)
        if asked.readable:
            flat.index_copy_(0, places, steps)

        self.exchange.beside.put(asked.beside, flat)
        self._step(context, flat, moments)
        finite = both(asked.finite, all_finite(steps, *(flat[a:b] for a, b in self._dense_runs)))
        if asked.own is None:
            return Outcome(finite)
        own, _, own_beside = asked.own

        def sent(out: torch.Tensor, weight: float) -> None:
            out.index_add_(0, places, own[chosen], alpha=weight * scale)
            self.exchange.beside.add(own_beside, weight, out)

        return Outcome(finite, sent)

    def target_(self, context: Context, gradient: torch.Tensor) -> None:
        momentum = context.memory.stage("momentum", self._compressed)
        for a, b in pieces(self.runs[0]):
            torch.mul(momentum[a:b], context.loss_scale, out=gradient[a:b])

    def _move(self, context: Context, flat: torch.Tensor) -> Sequence[tuple[int, int]]:
        """Stage this rank's momentum and, during the exchange, p_i in the place of its residual.

        Returns:
            The runs whose learning rate is 0, where p_i is 0, too.
        """
        method, memory, segments = self.method, context.memory, self._compressed
        momentum, moved = memory.read("momentum", segments), memory.stage("momentum", segments)
        residual, vector = memory.read("residual", segments), memory.stage("residual", segments)
        before = memory.value(WARM_UP)
        common = None
        if self.warm_up:
            memory.stage_value(WARM_UP, torch.tensor(1, device="cpu"))
        elif segments and before is not None and int(before):
            memory.stage_value(WARM_UP, torch.tensor(0, device="cpu"))
            common = memory.read("mean_momentum", segments, replicated=True)
            memory.stage("mean_momentum", segments, replicated=True).zero_()
        waiting = []
        for begin, end, ratio in self._ratios.read(context):
            for a, b in pieces([(begin, end)]):
                m, p = moved[a:b], vector[a:b]
                torch.mul(momentum[a:b] if common is None else momentum[a:b] + common[a:b], method.beta1, out=m)
                m.add_(flat[a:b], alpha=(1 - method.beta1) / context.loss_scale)
                # Zero if the rate is 0, except for values that are not finite, which all ranks must detect.
                torch.mul(residual[a:b] if ratio else m, ratio, out=p)
                if ratio:
                    p.add_(m)
            if not ratio:
                waiting.append((begin, end))
        return waiting

    def _step(self, context: Context, flat: torch.Tensor, moments: SecondMoments) -> None:
        """Replace mean gradients that were sent in float32 by AMSGrad's steps."""
        held = context.memory.read("mean_momentum", self._dense, replicated=True)
        moved = context.memory.stage("mean_momentum", self._dense, replicated=True)
        for a, b in pieces(self._dense_runs):
            gradient, m = flat[a:b] / context.loss_scale, moved[a:b]
            torch.mul(held[a:b], self.method.beta1, out=m)
            m.add_(gradient * (1 - self.method.beta1))
            steps = (m / moments.update(slice(a, b), gradient)).mul_(context.loss_scale)
            flat[a:b] = torch.where(steps.isfinite(), steps, torch.inf)
