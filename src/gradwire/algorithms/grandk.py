"""GRandK: a random part of the elements in each round, the same on all workers, all of them within a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from gradwire.algorithms.feistel_permutation import FeistelPermutation
from gradwire.algorithms.multi_scale import MultiScale
from gradwire.compressors import Compressor, QSGDMaxNorm
from gradwire.kernels import SegmentTable
from gradwire.methods import Method, Properties, require
from gradwire.protocols import Context, Outcome
from gradwire.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.protocols.pieces import join
from gradwire.seeds import parameter_key
from gradwire.segments import Parameter, Segment
from gradwire.wrappers.wrapper import Wrapper

if TYPE_CHECKING:
    from gradwire.ops import Exchange

__all__ = ["GRandK"]

MOST_ROUNDS = 1 << 20

Choice: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""The places in the bucket of the elements of one part, and the slots that they go to; None: all slots, in order."""


@dataclass(frozen=True, kw_only=True)
class GRandK(Wrapper):
    r"""GRandK: one of ``cycle`` random parts of every parameter a round, the same part on all workers, quantised.

    A permutation of a parameter's d elements, fresh in every cycle and the same on all workers, is cut into C =
    ``cycle`` parts of d / C elements, to within one. In round t all workers send part S = t mod C, and nothing says
    which elements these are::

        mean_k = (1 / N) sum_i Q(g_i[S])_k   for k in S        0 elsewhere

    By itself this loses most of the gradient: over a cycle, the outcomes of a constant gradient add up to one gradient,
    not to C of them. ``rescale=True`` multiplies by C: over a cycle unbiased, with a variance of (C - 1) |g|^2 and C
    times that of Q. The useful form is ``ErrorFeedback(compressor=GRandK())``: what is not sent is added up until it
    is, so that an element moves once in C rounds, by C gradients, which are 7 C / 12 rounds old on average.

    Error feedback is stable here though no single round is a contraction. If Q errs in no element by more than c times
    the largest magnitude of all workers (c = 1 / s for s levels of a maximum), then, since an element waits 2 C - 1
    rounds at most, residuals of gradients with entries up to B stay below (2 C - 1) B / (1 - c), for every draw, in
    rounds of which none is skipped. Without such a c below 1, and with ``rescale``, error feedback refuses it.

    What is not sent is looked at all the same: an infinity or a NaN anywhere in a parameter, on any worker, makes its
    outcome +inf everywhere on all. A round that is skipped for that reason takes its turn with it; rounds of warm-up
    count, too.

    Args:
        compressor: Q, an unbiased operator on one vector, or :class:`MultiScale`. It sees the part of a parameter as a
            parameter of its own; ``QSGDMaxNorm(blocks="model")`` joins all before they are cut, as in the paper.
        cycle: Rounds C in which every element is sent once, 1 to 2^20. The paper's K elements of d are C = d / K.
        rescale: Whether the outcome is multiplied by C.

    Raises:
        HyperparameterError: ``compressor`` is no such operator, or ``cycle`` out of range.

    Wire: as the compressor for ``ceil(d / C)`` elements of every parameter (``docs/wire-format.md``). Draws the
    permutations from the shared stream, in O(d / C) time and memory, and keeps none of them.

    Reference: S. Vineeth, "Quantization for Distributed Optimization", arXiv 2109.12497, 2021, "Global Random-K". Its
    program leaves each worker's own gradient in the elements that are not sent, so that replicas drift apart.

    Example:
        >>> import torch, gradwire as gw
        >>> g = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
        >>> link = gw.SimulatedLink([("w", torch.empty(6))], gw.GRandK(cycle=3), 1, min_numel=0)
        >>> rounds = [link.reduce_(g.clone()).clone() for _ in range(3)]
        >>> [int(r.count_nonzero()) for r in rounds], torch.equal(sum(rounds), g[0])
        ([2, 2, 2], True)
    """

    compressor: Method = field(default_factory=QSGDMaxNorm)
    cycle: int = 64
    rescale: bool = False

    name: ClassVar[str] = "grandk"
    unbiased: ClassVar[bool] = False
    unbiased_note: ClassVar[str | None] = "no; with rescale=True over a cycle"
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
            isinstance(inner, Compressor | MultiScale) and inner.unbiased,
            "GRandK",
            f"compressor is an unbiased operator on one vector, such as QSGDMaxNorm(), or MultiScale(), not {inner!r}",
        )
        whole = isinstance(self.cycle, int) and not isinstance(self.cycle, bool)
        require(
            whole and 1 <= self.cycle <= MOST_ROUNDS,
            "GRandK",
            f"cycle is a number of rounds, in which every element is sent once, 1 to {MOST_ROUNDS}, not {self.cycle!r}",
        )
        require(isinstance(self.rescale, bool), "GRandK", f"rescale is True or False, not {self.rescale!r}")

    @property
    def kernels(self) -> tuple[str, ...]:  # type: ignore[override]
        """The compressor's, and the one that looks for what is not finite."""
        return tuple(dict.fromkeys((*self.compressor.kernels, "signs")))

    @property
    def worst_step(self) -> float | None:  # type: ignore[override]
        """The compressor's, of an element when it is sent; None where it is multiplied."""
        return None if self.rescale else self.compressor.worst_step

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return _Parts(self, setting)


class _Parts(BucketPlan):
    """Gathers a part of each parameter into a short vector, lets an inner plan exchange that, and scatters its mean.

    The short vector holds the slots of all compressed segments, then dense segments whole. It is one chunk.
    """

    def __init__(self, method: GRandK, setting: PlanSetting) -> None:
        self._method, self._kernels = method, setting.kernels
        self._light = [s for s in setting.segments if not s.dense and s.numel]
        dense = [s for s in setting.segments if s.dense and s.numel]
        names, numel = [s.parameter.name for s in self._light], [s.numel for s in self._light]
        key = [parameter_key(setting.seed, name, "choice") for name in names]
        offset = [s.offset for s in self._light]
        self._table = SegmentTable(offset, numel, [0] * len(numel), key)
        self._shuffle = FeistelPermutation(numel, key, method.cycle)
        slots = self._shuffle.slots
        self._offset = torch.repeat_interleave(torch.tensor(offset, dtype=torch.int64), torch.tensor(slots).long())
        self._slots, self._numel = sum(slots), sum(slots) + sum(s.numel for s in dense)
        short: list[Segment] = []
        for name, k in zip(names, slots):
            short.append(Segment(Parameter(name, (k,), (1,)), _end(short), 0, k))
        self._first = torch.tensor([s.offset for s in short], dtype=torch.int64)
        self._dense: list[tuple[Segment, Segment]] = []
        for s in dense:
            short.append(replace(s, offset=_end(short)))
            self._dense.append((s, short[-1]))
        self._inner = replace(setting, segments=short, chunk_numel=max(1, self._numel)).plan(method.compressor)
        self.chunks, self.collective = self._inner.chunks, self._inner.collective
        self.runs = [join((s.offset, s.offset + s.numel) for s in self._light)] * self.chunks
        self._latest: tuple[int, Choice] | None = None

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Any]:
        short = context.workspace.get("chosen", 4 * self._numel).view(torch.float32)
        choice = None
        if not flat.is_meta:
            choice = self._choice(context.round)
            self._gather(flat, choice, short)
        inner = yield from self._inner.prepare(context, short)
        return short, choice, inner

    def run(self, context: Context, flat: torch.Tensor, prepared: Any) -> Exchange[Outcome]:
        short, choice, inner = prepared
        outcome = yield from self._inner.run(context, short, inner)
        if flat.is_meta:
            return outcome
        for a, b in self.runs[0]:
            flat[a:b].zero_()
        self._scatter(short, choice, flat)
        spoilt = ~torch.isfinite(short[self._first])
        for i in torch.nonzero(spoilt).flatten().tolist():
            s = self._light[i]
            flat[s.offset : s.offset + s.numel] = torch.inf
        own = outcome.sent
        if own is None:
            return outcome

        def sent(out: torch.Tensor, weight: float) -> None:
            part = torch.zeros(self._numel)
            own(part, weight)
            self._scatter(part, choice, out, add=True)

        return replace(outcome, sent=sent)

    def _choice(self, round: int) -> Choice:
        if self._latest is None or self._latest[0] != round:
            elements, full = self._shuffle.part(*divmod(round, self._method.cycle))
            places = torch.from_numpy(elements).add_(self._offset)
            slots = None if full is None else torch.from_numpy(full)
            self._latest = round, (places if slots is None else places[slots], slots)
        return self._latest[1]

    def _gather(self, flat: torch.Tensor, choice: Choice, short: torch.Tensor) -> None:
        places, slots = choice
        part = short[: self._slots]
        if slots is None:
            torch.index_select(flat, 0, places, out=part)
        else:
            part.zero_().index_copy_(0, slots, flat[places])
        # What is not sent is seen through what is: every codec carries an infinity to all ranks.
        finite = self._kernels.finite(flat, self._table)
        part[self._first[~finite]] = torch.inf
        for s, at in self._dense:
            short[at.offset : at.offset + at.numel] = flat[s.offset : s.offset + s.numel]

    def _scatter(self, short: torch.Tensor, choice: Choice, flat: torch.Tensor, add: bool = False) -> None:
        places, slots = choice
        part = short[: self._slots] if slots is None else short[slots]
        if self._method.rescale:
            part = part * self._method.cycle
        flat.index_add_(0, places, part) if add else flat.index_copy_(0, places, part)
        for s, at in self._dense:
            target, values = flat[s.offset : s.offset + s.numel], short[at.offset : at.offset + at.numel]
            target.add_(values) if add else target.copy_(values)


def _end(segments: Sequence[Segment]) -> int:
    return segments[-1].offset + segments[-1].numel if segments else 0
