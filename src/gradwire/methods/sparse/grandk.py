"""GRandK: in each round a random part of the elements, the same on all workers; a cycle has all parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.traits import Traits
from gradwire.methods.levels.qsgd_max_norm import QSGDMaxNorm
from gradwire.methods.sparse.chosen_elements import Chosen, ChosenElements
from gradwire.methods.sparse.random_places import FeistelPermutation
from gradwire.methods.wrappers.wrapper import Wrapper

MOST_ROUNDS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GRandK(Wrapper):
    r"""GRandK: in each round one of ``cycle`` random parts of every parameter, the same on all workers, quantised.

    A permutation of a parameter's d elements, new in every cycle and the same on all workers, is cut into C = ``cycle``
    parts of d / C elements, to within one. In round t all workers send part S = t mod C, without positions::

        mean_k = (1 / N) sum_i Q(g_i[S])_k   for k in S        0 elsewhere

    Without error feedback most of the gradient is lost: over a cycle, the outcomes of a constant gradient add up to one
    gradient, not to C. ``rescale=True`` multiplies by C, which is unbiased over a cycle, with a variance of (C - 1)
    |g|^2 plus C times that of Q. The useful form is ``ErrorFeedback(compressor=GRandK())``: unsent elements are added
    up until they are sent, so that an element moves once in C rounds, by C gradients, which are 7 C / 12 rounds old on
    average.

    Error feedback is stable here though no single round is a contraction. If Q errs in no element by more than c times
    the largest magnitude of all workers (c = 1 / s for s levels of a maximum), then, since an element waits 2 C - 1
    rounds at most, residuals of gradients with entries up to B stay below (2 C - 1) B / (1 - c), for every draw, if no
    round is skipped. Without such a c below 1, or with ``rescale``, error feedback refuses the method.

    Unsent elements are checked, too: an infinity or a NaN anywhere in a parameter, on any worker, makes the whole
    parameter +inf on all workers. A round that is skipped for that reason, and a warm-up round, uses up its part of the
    cycle.

    Args:
        compressor: Q, an unbiased operator on one vector, or :class:`MultiScale`. It compresses the part of a parameter
            as a parameter; ``QSGDMaxNorm(blocks="model")`` joins all parts before they are cut into blocks, as in the
            paper.
        cycle: Rounds C in which every element is sent once, 1 to 2^20. The paper's K elements of d are C = d / K.
        rescale: True to multiply the outcome by C.

    Raises:
        HyperparameterError: ``compressor`` is not such an operator, or ``cycle`` is out of range.

    Wire: as the compressor for ``ceil(d / C)`` elements of every parameter (``docs/wire-format.md``). Permutations are
    drawn from the shared stream, in O(d / C) time and memory, and are not stored.

    Reference: S. Vineeth, "Unbiased Single-scale and Multi-scale Quantizers for Distributed Optimization",
    arXiv 2109.12497, 2021, "Global Random-K". The paper's program leaves each worker's own gradient in the unsent
    elements, so that replicas diverge.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
        >>> link = gw.SimulatedLink([("w", torch.empty(6))], gw.GRandK(cycle=3), 1, min_numel=0)
        >>> rounds = [link.reduce_(g.clone()).clone() for _ in range(3)]
        >>> [int(r.count_nonzero()) for r in rounds], torch.equal(sum(rounds), g[0])
        ([2, 2, 2], True)
    """

    compressor: Method = field(default_factory=QSGDMaxNorm, kw_only=False)
    cycle: int = 64
    rescale: bool = False

    name: ClassVar[str] = "grandk"
    properties: ClassVar[Properties] = Properties(
        summary="A random part of the elements a round, the same on all workers; each once in a cycle",
        paper="Vineeth, Quantization for Distributed Optimization, 2021",
        bit_stable=True,
        bits_per_element=(16 / 3 + 8) / 2 / 64,
        stream="shared, and the compressor's",
    )

    def __post_init__(self) -> None:
        inner = self.compressor
        require(
            _draws_alone(inner) and inner.traits.unbiased,
            "GRandK",
            f"compressor is an unbiased operator on one vector, such as QSGDMaxNorm(), or MultiScale(), not {inner!r}",
        )
        require(
            is_whole(self.cycle, 1, MOST_ROUNDS),
            "GRandK",
            f"cycle is a number of rounds, in which every element is sent once, 1 to {MOST_ROUNDS}, not {self.cycle!r}",
        )
        require(isinstance(self.rescale, bool), "GRandK", f"rescale is True or False, not {self.rescale!r}")

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            # The parts of a cycle are sent in consecutive rounds.
            needs_every_round=True,
            # The family "signs" finds values that are not finite.
            kernels=tuple(dict.fromkeys((*self.compressor.traits.kernels, "signs"))),
            parts=self.cycle,
            unbiased=False,
            unbiased_note="no; with rescale=True over a cycle",
            # The compressor's bound, when an element is sent; None if it is multiplied.
            worst_step=None if self.rescale else self.compressor.traits.worst_step,
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return ChosenElements(
            setting,
            self.compressor,
            lambda numel, key: _PartsOfCycles(FeistelPermutation(numel, key, self.cycle), self.rescale),
        )


class _PartsOfCycles:
    """Choice of part t mod C of a permutation in round t, with a new permutation after C rounds."""

    def __init__(self, shuffle: FeistelPermutation, rescale: bool) -> None:
        self._shuffle, self.slots = shuffle, shuffle.slots
        self.factor = [shuffle.parts if rescale else 1.0] * len(shuffle.slots)

    def choose(self, round: int) -> Chosen:
        """Return the elements of a round, and their slots."""
        return self._shuffle.part(*divmod(round, self._shuffle.parts))


def _draws_alone(inner: object) -> bool:
    """Return whether a method is an operator on one vector, with its own payload or with shared scales."""
    if not isinstance(inner, Method):
        return False
    return inner.traits.shares_scales or (inner.as_operator is not None and inner.cast_dtype is None)
