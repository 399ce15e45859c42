"""LGC: an autoencoder for the largest elements of gradients, trained inside the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Properties, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.segments import divide
from gradwire.exchange.traits import Traits
from gradwire.methods.feedback.error_feedback import ResidualAlgorithm
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.feedback.waiting import longest, momentum_beside_residual
from gradwire.methods.learned.autoencoder import REMEMBERED, ROUNDS, TOLD, Autoencoder, ElementScales, Training
from gradwire.methods.learned.lgc_all_reduce import CodedMean, WatchedSum
from gradwire.methods.learned.lgc_server import CommonCode, WatchedTopK
from gradwire.methods.learned.phases import PhasedPlan
from gradwire.methods.sparse.clt_k import LeadersElements
from gradwire.methods.sparse.top_k import TopK, check_density


@dataclass(frozen=True, kw_only=True)
class LGC(ResidualAlgorithm):
    r"""Learned Gradient Compression: the largest elements, encoded by an autoencoder that is trained inside the job.

    A training has three phases, determined by the round:

    1. ``full_rounds`` rounds are sent in float32. 2. In the next ``training_rounds``, the largest elements are sent
    with error feedback, and after each round rank 0 takes a step of the autoencoder's training on all workers'
    elements. 3. Rank 0 sends the autoencoder to all others once; it is constant from then on. In each round a leader,
    each worker in turn, sends the places of its k = max(1, floor(density d)) largest elements of each parameter to all
    others. With E the encoder and D the decoder:

    ``instance="all_reduce"``: p_i = g_i + e_i, and x_i are the values of p_i at the leader's elements, each parameter's
    divided by s, their largest root mean square on any worker::

        phase 2     mean = (1 / N) sum_i p_i      at the leader's elements, 0 elsewhere: as CLTk
        phase 3     mean = s D((1 / N) sum_i E(x_i))   there, 0 elsewhere

    ``instance="parameter_server"``: only the leader sends a code, and each worker sends its innovation v_i, the max(1,
    floor(innovation d)) largest elements of each parameter with their positions. Rank 0 is the server::

        phase 2     mean = (1 / N) sum_i TopK_k(p_i)           as ErrorFeedback(TopK)
        phase 3     r_i = s D(E(x_leader), v_i / s) at the leader's elements, v_i at those of v_i, 0 elsewhere
                    mean = (1 / N) sum_i r_i                   computed by the server, sent to all

    A code has a quarter of the vector's numbers. Convolutions combine neighbours, so the order matters: with
    ``order="value"`` elements are in descending order of the leader's values, a smooth curve, and the order is sent
    with the places, in log2(k) bits an element. With "index" the order is not sent, and signs alternate at random.

    **Residual.** With ``feedback="selection"`` e_i <- p_i with zeros at the chosen elements (the leader's, or with a
    server each worker's own): the autoencoder's error is lost, as in a public implementation. With "reconstruction" e_i
    <- p_i - mean: nothing is lost, and differences between workers stay in their residuals.
    But an autoencoder is not a contraction: it was trained on values with smaller differences, and if its error is as
    large as its input, residuals grow without bound, as tests and measurements show.

    **Determinism.** Encoder and decoder give the same bits on every machine, so each rank can decode; training runs on
    one rank, in one thread. See :class:`gradwire.methods.learned.autoencoder.Autoencoder`.

    **Memory.** A residual as long as the parameters on every rank, without the loss scale under automatic mixed
    precision. The autoencoder has 216 677 weights and biases, with a server one more. Rank 0 stores them with two
    moments of its optimizer from the second phase on, and all ranks store them from the third.

    Args:
        density: Share k/d of each parameter's elements that are chosen, above 0 to 1. If fewer than 31 elements are
            chosen in all, they are padded with zeros before they are encoded.
        instance: "all_reduce" or "parameter_server".
        full_rounds: Rounds of the first phase, 0 or more, including rounds in float32 at the start (``warmup_steps`` of
            :func:`attach`).
        training_rounds: Rounds of the second phase, 1 or more; it lasts until so many have been trained on.
        feedback: "selection" or "reconstruction".
        order: "value" or "index".
        innovation: Share of each parameter that a worker sends to a server without encoding, above 0 to 1.
        optimizer: Optimizer of the autoencoder: "adam" (with moments 0.9 and 0.999) or "sgd".
        learning_rate: Learning rate of that optimizer.
        similarity: Weight of the loss that makes workers' codes alike, with a server; at least 0 and below 1.
        momentum: Momentum applied before compression, see :class:`ErrorFeedback`; if above 0 the optimizer must have
            none.

    Raises:
        HyperparameterError: a field is out of range.

    The exchange begins when all gradients are computed. The papers send the first and last layers uncompressed; choose
    these with ``exclude`` and ``min_numel``.

    Wire: ``docs/wire-format.md``. For differences from the paper see ``docs/methods/learned.md``.

    Reference: L. Abrahamyan, Y. Chen, G. Bekoulis, N. Deligiannis, "Learned Gradient Compression for Distributed Deep
    Learning", IEEE Transactions on Neural Networks and Learning Systems, 2021.

    Example:
        >>> import torch, gradwire as gw
        >>> method = gw.LGC(density=0.1, full_rounds=0, training_rounds=1)
        >>> link = gw.SimulatedLink([("w", torch.empty(2000))], method, 2)
        >>> g = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0))
        >>> [int(link.reduce_(g.clone()).count_nonzero()) for _ in range(2)]
        [200, 200]
        >>> link.state_dict()["global"]["autoencoder"].shape
        torch.Size([216677])
    """

    density: float = 0.001
    instance: str = "all_reduce"
    full_rounds: int = 200
    training_rounds: int = 300
    feedback: str = "selection"
    order: str = "value"
    innovation: float = 1e-5
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    similarity: float = 0.5
    momentum: float = 0.0

    name: ClassVar[str] = "lgc"
    tag: ClassVar[int] = 55
    properties: ClassVar[Properties] = Properties(
        summary="Codes of the largest elements by an autoencoder that is trained inside the job, with error feedback",
        paper="Abrahamyan et al., Learned Gradient Compression, IEEE TNNLS 2021",
        bit_stable=True,
        bits_per_element=0.001 * (8 + (11.5 + 10) * 2 * 2 / 3),
        state="a residual per parameter and rank, an autoencoder",
        state_bytes_per_element=4.0,
        stream="shared",
    )

    def __post_init__(self) -> None:
        for name in ("density", "innovation"):
            object.__setattr__(self, name, check_density("LGC", getattr(self, name)))
        object.__setattr__(self, "momentum", checked_momentum("LGC", self.momentum))
        for name, known in CHOICES.items():
            value = getattr(self, name)
            require(value in known, "LGC", f"{name} is {' or '.join(map(repr, known))}, not {value!r}")
        for name, least in (("full_rounds", 0), ("training_rounds", 1)):
            value = getattr(self, name)
            require(is_whole(value, least), "LGC", f"{name} is a number of rounds, at least {least}, not {value!r}")
        rate, share = self.learning_rate, self.similarity
        for name, value in (("learning_rate", rate), ("similarity", share)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            require(number, "LGC", f"{name} is a number, not {value!r}")
            object.__setattr__(self, name, float(value))
        require(0 < rate < float("inf"), "LGC", f"learning_rate is above 0, not {rate!r}")
        require(0 <= share < 1, "LGC", f"similarity is at least 0 and below 1, not {share!r}")

    def declare(self) -> Traits:
        traits = super().declare()
        return replace(
            traits,
            collectives=("two_shot", "all_gather") if self.instance == "all_reduce" else ("all_gather",),
            whole_step=True,
            kernels=("selection", "indices", "signs"),
            # The autoencoder, and the state of every residual algorithm.
            remembers=(*traits.remembers, *REMEMBERED),
            of_first=REMEMBERED,
            sent_by_first=TOLD,
            subtracts_mean=self.feedback == "reconstruction" and self.instance == "all_reduce",
            unbiased=False,
        )

    @property
    def first_compressed(self) -> int:
        """First round of the third phase."""
        return self.full_rounds + self.training_rounds

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        delta = TopK(density=self.density).delta_of(longest(parameters)) or 0.0
        return momentum_beside_residual(self, optimizer, delta=delta)

    def training(self) -> Training:
        """Return the settings of the autoencoder's training."""
        mean = self.instance == "all_reduce"
        return Training(Autoencoder(innovation=not mean), self.optimizer, self.learning_rate, self.similarity, mean)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        if not divide(setting.segments)[0]:
            return self.dense_plan(setting)
        setting = replace(setting, chunk_numel=max(1, sum(s.numel for s in setting.segments)))
        return self._after_momentum(_TrainingPlan(self, setting), setting)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        return super().dense_plan(replace(setting, collective="two_shot"))


CHOICES = {
    "instance": ("all_reduce", "parameter_server"),
    "feedback": ("selection", "reconstruction"),
    "order": ("value", "index"),
    "optimizer": ("adam", "sgd"),
}


class _TrainingPlan(PhasedPlan):
    """Plan that trains the autoencoder in the second phase."""

    finishes = True

    def __init__(self, method: LGC, setting: PlanSetting) -> None:
        self._setting, self._training, self._rounds = setting, method.training(), method.training_rounds
        if method.instance == "all_reduce":
            plans: tuple[BucketPlan, BucketPlan] = (
                WatchedSum(method, setting),
                CodedMean(method, setting, self._training),
            )
        else:
            plans = WatchedTopK(method, setting), CommonCode(method, setting, self._training)
        super().__init__(method, setting, *plans)
        self._scales = ElementScales(LeadersElements(setting, method.density).counts)

    def phase(self, context: Context) -> int:
        found, memory = super().phase(context), context.memory
        # Another method, or warm-up, may have taken the rounds in which it was to be trained. Older states have no
        # number of rounds.
        if found < 2 or context.workspace.device == "meta" or memory.value(TOLD) is not None:
            return found
        return 2 if _trained_on(context) >= self._rounds else 1

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        outcome = yield from super().run(context, flat, prepared)
        if not flat.is_meta and self.phase(context) == 1:
            context.memory.stage_value(ROUNDS, torch.tensor(_trained_on(context) + 1, device="cpu"))
        return outcome

    def finish(self, context: Context) -> Exchange[None]:
        for vectors, innovation in context.parts.take():
            each = torch.stack([self._scales.of(row) for row in vectors])
            # Codes that are added up share a scale; each of the others has its worker's.
            each = each.amax(0).expand_as(each) if innovation is None else each
            rows = torch.stack([self._scales.normal(*pair) for pair in zip(vectors, each)])
            if innovation is not None:
                innovation = torch.stack([self._scales.normal(*pair) for pair in zip(innovation, each)])
            self._training.step(context, self._setting.seed, rows, innovation)
        yield from ()


def _trained_on(context: Context) -> int:
    """Return the number of rounds that the autoencoder has been trained on."""
    rounds = context.memory.value(ROUNDS)
    return 0 if rounds is None else int(rounds)
