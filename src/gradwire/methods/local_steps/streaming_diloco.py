"""Streaming DiLoCo: DiLoCo by fragments, whose exchanges overlap with the next steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.exchange.method import Properties, is_whole, require
from gradwire.methods.local_steps.diloco import DiLoCo

__all__ = ["StreamingDiLoCo"]

ORDERS = ("strided", "sequential")


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    r"""Streaming DiLoCo: fragments of the model exchanged in turn, while the training goes on.

    The elements are cut into F = ``fragments`` parts. Fragment f, counted from 0, is exchanged after every optimizer
    step t with t mod H = floor((f + 1) H / F) mod H, where H = ``every``: each once in H steps, and one of them about
    every H / F steps. With x the global parameters of the fragment and x_i worker i's::

        after step t            d_i = x - x_i, and the exchange of C(d_i) begins
        after step t + delay    x <- OuterOpt(x, d)        x_i <- mixing x_i + (1 - mixing) x

    d = (1 / N) sum_i C(d_i), and OuterOpt is the outer step of :class:`DiLoCo`. The steps between t and t + ``delay``
    do not wait for the exchange. What they have changed stays in the worker's own share of the mix, ``mixing``; with 0
    it is lost. With one fragment, no delay and ``mixing=0.0`` this is :class:`DiLoCo`, bit for bit.

    At most 1 / F of the elements travel in one step, up to a row of a parameter for each run of neighbours:
    large parameters are cut between rows, and pieces are encoded as parameters of their own, such as ``weight[0:64]``.
    Which parameters travel in float32 is decided before they are cut.

    ``link.synchronise()`` ends the exchange in flight, then exchanges all fragments at once and leaves every worker
    with the global parameters. A checkpoint holds what has arrived and is not in effect yet.

    Args:
        inner: As for :class:`DiLoCo`.
        every: As for :class:`DiLoCo`.
        nesterov: As for :class:`DiLoCo`.
        outer_lr: Learning rate of the outer step, above 0; the paper's is 0.4.
        outer_momentum: At least 0 and below 1.
        fragments: F, from 1 to ``every``.
        delay: Steps from the beginning of an exchange to its effect, from 0 to floor(H / F), so that no two exchanges
            are in flight.
        mixing: Share of the worker's own parameters, from 0 to below 1; 0 takes the global ones.
        order: "strided", as in the paper: a fragment has four runs of neighbours, spread over the model; or
            "sequential": one.

    Raises:
        HyperparameterError: a field is out of range, or the inner method needs the whole model in one exchange.

    Memory: as for :class:`DiLoCo`, and what is in flight.

    Reference: A. Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
    2025 (arXiv:2501.18512), algorithm 2. Its fragments are groups of layers; these are equal in elements.

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
            is_whole(count) and 1 <= count <= self.every,
            owner,
            f"fragments is a number from 1 to every={self.every}, not {count!r}",
        )
        most = self.every // count
        require(
            is_whole(delay) and 0 <= delay <= most,
            owner,
            f"delay is a number of steps from 0 to every // fragments = {most}, the time from one exchange to the next,"
            f" not {delay!r}",
        )
        share = self.mixing
        number = isinstance(share, int | float) and not isinstance(share, bool)
        require(number and 0 <= share < 1, owner, f"mixing is at least 0 and below 1, not {share!r}")
        object.__setattr__(self, "mixing", float(share))
        require(self.order in ORDERS, owner, f"order is one of {', '.join(ORDERS)}, not {self.order!r}")
        require(
            count == 1 or not self.inner.whole_step,
            owner,
            f"{self.inner!r} compares elements of the whole model, and a fragment has a part of it: use fragments=1, or"
            " a method that works parameter by parameter",
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
