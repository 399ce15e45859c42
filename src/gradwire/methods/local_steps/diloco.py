"""DiLoCo and Streaming DiLoCo: local steps, and an outer optimizer that steps by their mean change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from gradwire.exchange.method import Method, Properties, is_number, is_whole, require
from gradwire.exchange.steps_locally import GLOBAL, VELOCITY
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.feedback.local_momentum import checked_momentum
from gradwire.methods.local_steps.local_sgd import LocalStepsMethod


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalStepsMethod):
    r"""DiLoCo: local steps, and an outer SGD with Nesterov momentum that steps by the mean difference.

    With x the global parameters, the same on all workers, and x_i worker i's after ``every`` optimizer steps from x::

        d_i = x - x_i        d = (1 / N) sum_i C(d_i)
        v <- outer_momentum v + d
        x <- x - outer_lr (d + outer_momentum v)        without ``nesterov``: x <- x - outer_lr v
        x_i <- x

    The outer step is that of ``torch.optim.SGD`` with d as the gradient. C is the inner method. With ``outer_lr=1.0``
    and ``outer_momentum=0.0`` it is :class:`LocalSGD`. The inner optimizer, AdamW in the paper, keeps its state, which
    is never sent.

    Args:
        inner: Method that exchanges the differences.
        every: Number of optimizer steps between exchanges: 500 in the paper, ten to a hundred for small models.
        outer_lr: Learning rate of the outer step, above 0.
        outer_momentum: Momentum of the outer step, at least 0 and below 1.
        nesterov: True for Nesterov momentum, as in the paper.

    Raises:
        HyperparameterError: a field is out of range, or ``inner`` does not exchange a mean, or acts on an optimizer's
            steps.

    Memory: the global parameters and the outer momentum, 8 bytes an element, and the state of the inner method.

    Reference: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
    (arXiv:2311.08105), algorithm 1.

    Example:
        >>> import gradwire as gw
        >>> gw.DiLoCo(every=30, inner=gw.EDEN(bits=4)).traits.remembers
        ('global', 'outer_momentum')
    """

    inner: Method = field(default_factory=FP32, kw_only=False)
    every: int = 30
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    name: ClassVar[str] = "diloco"
    properties: ClassVar[Properties] = Properties(
        summary="Workers step by themselves; an outer optimizer steps by the mean of what they changed",
        paper="Douillard et al., 2023",
        bit_stable=False,
        bits_per_element=32.0,
        state="the global parameters, an outer momentum",
        state_bytes_per_element=8.0,
    )
    remembers_beside: ClassVar[tuple[str, ...]] = (GLOBAL, VELOCITY)

    def __post_init__(self) -> None:
        owner, rate = type(self).__name__, self.outer_lr
        self.check_inner()
        require(is_number(rate, above=0), owner, f"outer_lr is above 0, not {rate!r}")
        object.__setattr__(self, "outer_lr", float(rate))
        object.__setattr__(self, "outer_momentum", checked_momentum(owner, self.outer_momentum, "outer_momentum"))
        require(isinstance(self.nesterov, bool), owner, f"nesterov is True or False, not {self.nesterov!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            unbiased=False,
            unbiased_note="no, an outer step",
        )

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        difference = held - mean
        if velocity is None:
            raise TypeError("the outer momentum is missing")
        velocity.mul_(self.outer_momentum).add_(difference)
        if not self.nesterov:
            difference = velocity
        elif self.outer_momentum:
            difference.add_(velocity, alpha=self.outer_momentum)
        held.sub_(difference, alpha=self.outer_lr)
        own.copy_(held)


ORDERS = ("strided", "sequential")


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    r"""Streaming DiLoCo: fragments of the model are exchanged in turn while training continues.

    The elements are cut into F = ``fragments`` parts. Fragment f, counted from 0, is exchanged after every optimizer
    step t with t mod H = floor((f + 1) H / F) mod H, where H = ``every``: each once in H steps, so one about every
    H / F steps. With x the global parameters of the fragment and x_i worker i's::

        after step t            d_i = x - x_i, and the exchange of C(d_i) begins
        after step t + delay    x <- OuterOpt(x, d)        x_i <- mixing x_i + (1 - mixing) x

    d = (1 / N) sum_i C(d_i), and OuterOpt is the outer step of :class:`DiLoCo`. The steps between t and t + ``delay``
    do not wait for the exchange. Their changes are kept in the worker's own share of the mix, ``mixing``; with 0 they
    are lost. With one fragment, no delay and ``mixing=0.0`` this is :class:`DiLoCo`, bit for bit.

    At most 1 / F of the elements are sent in one step, up to one row of a parameter for each run of neighbours: large
    parameters are cut between rows, and pieces are encoded as parameters, with names such as ``weight[0:64]``. Whether
    a parameter is sent in float32 is decided before it is cut.

    The exchange of each fragment is a round, so that a parameter takes part in one of F rounds. Methods that need every
    parameter in every round are refused as ``inner`` unless F is 1: those that take turns by the number of the round
    (:class:`GRandK`, :class:`ACPSGD`, :class:`CLTk`), and those that fit levels for all parameters in some rounds
    (:class:`ALQ`, :class:`AMQ`). :class:`Scheduled` is not refused: its rounds are the exchanges of all fragments.

    ``link.synchronise()`` ends the exchange in flight, then exchanges all fragments at once, after which every worker
    has the global parameters. A checkpoint includes received values that are not yet in effect.

    Args:
        inner: See :class:`DiLoCo`.
        every: See :class:`DiLoCo`.
        nesterov: See :class:`DiLoCo`.
        outer_lr: Learning rate of the outer step, above 0; the paper's is 0.4.
        outer_momentum: Momentum of the outer step, at least 0 and below 1.
        fragments: F, from 1 to ``every``.
        delay: Steps from the start of an exchange to its effect, from 0 to floor(H / F), so that no two exchanges are
            in flight.
        mixing: Share of the worker's own parameters, at least 0 and below 1; with 0 it takes the global ones.
        order: "strided", as in the paper, where a fragment has four runs of neighbours, spread over the model; or
            "sequential", where it has one.

    Raises:
        HyperparameterError: a field is out of range, or with several fragments the inner method needs the whole model
            in one exchange, or every parameter in every round.

    Memory: as :class:`DiLoCo`, and the exchange in flight.

    Reference: A. Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
    2025 (arXiv:2501.18512), algorithm 2. The paper's fragments are groups of layers; these have equal numbers of
    elements.

    Example:
        >>> import gradwire as gw
        >>> gw.method("StreamingDiLoCo(every=40, fragments=4, delay=5, inner=EDEN(bits=4))").fragments
        4
    """

    outer_lr: float = 0.4
    fragments: int = 4
    delay: int = 5
    mixing: float = 0.5
    order: str = "strided"

    name: ClassVar[str] = "streaming_diloco"
    properties: ClassVar[Properties] = Properties(
        summary="DiLoCo by fragments in turn, each exchanged while the training goes on",
        paper="Douillard et al., 2025",
        bit_stable=False,
        bits_per_element=32.0,
        state="the global parameters, an outer momentum",
        state_bytes_per_element=8.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        owner, count, delay = "StreamingDiLoCo", self.fragments, self.delay
        require(
            is_whole(count, 1, self.every),
            owner,
            f"fragments is a number from 1 to every={self.every}, not {count!r}",
        )
        most = self.every // count
        require(
            is_whole(delay, 0, most),
            owner,
            f"delay is a number of steps from 0 to every // fragments = {most}, the time from one exchange to the next,"
            f" not {delay!r}",
        )
        share = self.mixing
        require(is_number(share, least=0, below=1), owner, f"mixing is at least 0 and below 1, not {share!r}")
        object.__setattr__(self, "mixing", float(share))
        require(self.order in ORDERS, owner, f"order is one of {', '.join(ORDERS)}, not {self.order!r}")
        require(
            count == 1 or not self.inner.traits.whole_step,
            owner,
            f"{self.inner!r} compares elements of the whole model, and a fragment has a part of it: use fragments=1, or"
            " a method that works parameter by parameter",
        )
        require(
            count == 1 or not self.inner.traits.needs_every_round,
            owner,
            f"{self.inner!r} goes by the number of the round and needs every parameter in each, and a round exchanges "
            f"one of {count} fragments: use fragments=1, or a method that does the same in every round, such as "
            "PowerSGD() or ErrorFeedback(TopK())",
        )

    def step_(
        self, own: torch.Tensor, held: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None, workers: int
    ) -> None:
        if not self.mixing:
            super().step_(own, held, mean, velocity, workers)
            return
        before = own.clone()
        super().step_(own, held, mean, velocity, workers)
        own.lerp_(before, self.mixing)
