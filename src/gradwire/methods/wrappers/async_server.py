"""AsyncServer: workers that push to a server at their own pace, and are a bounded number of steps apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from gradwire.exchange.method import Inherited, Method, cast_of, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.traits import Traits
from gradwire.methods.casts.cast import FP32
from gradwire.methods.feedback.contraction import check_contraction
from gradwire.methods.feedback.error_feedback import ErrorFeedback
from gradwire.methods.wrappers.wrapper import Around


@dataclass(frozen=True, kw_only=True)
class AsyncServer(Around):
    r"""Asynchronous training by a parameter server, with bounded staleness: workers do not wait for each other's steps.

    The server holds the parameters x. Worker i has taken c_i steps, its *clock*, and begins the next one when::

        c_i - min_j c_j <= staleness                                (None: at once)

    It fetches x, computes a gradient g_i there, and pushes C(g_i). The server applies each push as it comes, of N
    workers, by its own optimizer; with SGD::

        x <- x - (lr / N) C_i(g_i)

    C_i is the inner method with a single worker: each worker has its own state, such as a residual, and its own random
    numbers. With ``ErrorFeedback(...)`` nothing is lost: the sum of a worker's pushes and its residual is the
    sum of its gradients. With ``fetch`` not ``FP32()``, worker i receives changes, and the server keeps its copy k_i::

        k_i <- k_i + D(x - k_i)                                     the worker computes at k_i

    so that what D leaves out is in the next change. The first fetch is exact.

    ``staleness=0`` is the synchronous method (all workers compute at the same x, and SGD's N steps add up to that of
    the mean), ``staleness=None`` has no bound, as DistBelief's Downpour SGD and, on one machine, Hogwild.

    **Where it runs.** :class:`gradwire.SimulatedServer` runs it with workers of any speed, in the order of events, and
    ``gradwire plan`` predicts its bytes and time. There is no server over a network yet. The workers of a link step
    together: there each round is one of all workers, which the bound allows whatever it is, and the exchange is the
    inner method's own among all of them, without a server. The link warns of that.

    Args:
        inner: Method that compresses gradients; one whose outcome is a mean, and which does not act on an optimizer.
        staleness: Number of clocks that a worker may be ahead of the slowest, at least 0; None for any number.
        fetch: Operator that compresses the changes of the parameters on their way to a worker, a contraction.

    Raises:
        HyperparameterError: a field is out of range.

    Memory: that of the inner method on each worker. A server has a copy of the parameters for each worker if ``fetch``
    is not ``FP32()``.

    Reference: J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (DistBelief), section 4.1; F. Niu et
    al., "Hogwild!", NIPS 2011; Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NIPS 2013, section 2, for the bound. Their servers hold sums of uncompressed updates; a factor of 1 / N, an
    optimizer on the server, and compression each way are choices of ours.

    Example:
        >>> import gradwire as gw
        >>> gw.method("AsyncServer(ErrorFeedback(TopK(density=0.01)), staleness=3)").staleness
        3
    """

    inner: Method = field(default_factory=ErrorFeedback, kw_only=False)
    staleness: int | None = 4
    fetch: Method = field(default_factory=FP32)

    wrapped_field: ClassVar[str] = "inner"
    name: ClassVar[str] = "async_server"
    properties: ClassVar[Inherited] = Inherited(
        "inner",
        replace(
            ErrorFeedback.properties,
            summary="Workers push to a server at their own pace, a bounded number of steps apart; simulated",
            paper="Dean et al., NIPS 2012; Ho et al., NIPS 2013",
            state="the method's",
            stream="the method's",
        ),
    )

    def __post_init__(self) -> None:
        owner, inner, staleness = type(self).__name__, self.inner, self.staleness
        require(
            isinstance(inner, Method)
            and bool(inner.traits.collectives)
            and not (inner.traits.local_steps or inner.traits.direction or inner.traits.at_own_pace),
            owner,
            f"inner is a method whose outcome is a mean, such as ErrorFeedback() or EDEN(bits=4), not {inner!r}",
        )
        require(
            not inner.traits.needs_optimizer, owner, f"{inner!r} acts on an optimizer's steps: use it without {owner}"
        )
        require(
            staleness is None or is_whole(staleness, 0),
            owner,
            f"staleness is a whole number of steps from 0 on, or None for no bound, not {staleness!r}",
        )
        if cast_of(self.fetch) is None:
            check_contraction(owner, self.fetch, "so that a worker's copy may run away from the server's", "no copy")

    @property
    def wrapped(self) -> Method:
        """Inner method."""
        return self.inner

    def declare(self) -> Traits:
        # The inner method's exchange is not changed, so that all that holds for it holds.
        return replace(self.inner.traits, at_own_pace=True)

    def omega_of(self, numel: int | None = None) -> float | None:
        return self.inner.omega_of(numel)

    def delta_of(self, numel: int | None = None) -> float | None:
        return self.inner.delta_of(numel)

    @property
    def delta_formula(self) -> str | None:
        """That of the inner method."""
        return self.inner.delta_formula

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        return self.inner.usual_delta_of(numel)

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        return self.inner.typical_delta_of(numel)

    def refusal_of_collective(self, collective: str) -> str | None:
        return self.inner.refusal_of_collective(collective)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        inner = self.inner.caution(optimizer, parameters)
        own = (
            f"{self!r}: the workers of a link step together, and exchange by {self.inner!r}; workers with a pace of "
            "their own are simulated by gradwire.SimulatedServer"
        )
        return own if inner is None else f"{own}\n{inner}"

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return self.inner.plan(setting)
