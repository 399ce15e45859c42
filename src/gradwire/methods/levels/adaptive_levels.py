"""ALQ and AMQ: levels that are fitted to the gradients in some rounds."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from gradwire.exchange.method import Method, Properties, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context, gathered_values
from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting, SectionPlan
from gradwire.exchange.protocols.sections import Prepared
from gradwire.exchange.segments import Segment, divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import Grid
from gradwire.methods.levels.level_compressor import LevelCodec, check_blocks, re_encoded
from gradwire.methods.levels.level_fitting import Distribution, best_levels, best_ratio, powers
from gradwire.methods.levels.level_statistics import Histograms, Normals, Statistics

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


WHOLE = "all blocks"


class AdaptiveMethod(Operator, Protocol):
    """Interface of methods that :class:`AdaptiveLevelPlan` exchanges."""

    @property
    def overlap(self) -> bool:
        """True if fitted levels are used from the next round on, not in the round of the fit."""
        ...

    @property
    def statistics(self) -> Statistics:
        """Statistics that ranks exchange before a fit."""
        ...

    @property
    def purpose(self) -> torch.Tensor:
        """Settings for which levels are fitted, int64."""
        ...

    def is_update(self, round: int) -> bool:
        """Return whether the levels are fitted in ``round``."""
        ...

    def no_levels(self) -> torch.Tensor:
        """Return as many zeros as there are levels, float64."""
        ...

    def fit(self, distribution: Distribution, before: Sequence[float] | None) -> list[float]:
        """Return the best levels, ascending from -1 to 1."""
        ...


class AdaptiveLevelPlan(SectionPlan):
    """Plan of sections whose levels are fitted in some rounds: at the start for that round, or at the end.

    At the end, the statistics of all parameters are joined in the order of their names, so that the outcome does not
    depend on buckets.
    """

    def __init__(self, method: AdaptiveMethod, setting: PlanSetting) -> None:
        super().__init__(method, setting)
        self._method, self.finishes = method, method.overlap
        names = [s.parameter.name for s in divide(setting.segments)[0]]
        self._noted: list[tuple[str, slice]] = []
        if isinstance(self.codec, LevelCodec):
            cuts = [slice(a, b) for a, b in itertools.pairwise(self.codec.blocks.first.tolist())]
            whole = [(WHOLE, slice(0, self.codec.blocks.blocks))]
            self._noted = [(n, c) for n, c in zip(names, cuts) if c.stop > c.start] if self.finishes else whole

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[Prepared]:
        codec = self.codec
        if not isinstance(codec, LevelCodec):
            return []
        summary, levels = codec.summarise(flat), self._levels(context)
        if self._is_due(context, levels):
            parts: dict[str, Any] = {name: blocks.stop - blocks.start for name, blocks in self._noted}
            if not flat.is_meta:
                part = self._method.statistics.part
                parts = {name: part(codec, summary, flat, blocks) for name, blocks in self._noted}
            if not self.finishes:
                levels = yield from self._fit(context, list(parts.values()), levels)
            for name in parts if self.finishes else ():
                context.parts.put(name, parts[name])
        if levels is not None:
            summary = replace(summary, grid=Grid.ordered(levels.tolist()))
        return [(summary, None)]

    def finish(self, context: Context) -> Exchange[None]:
        parts, levels = context.parts.take(), self._levels(context)
        if parts and self._is_due(context, levels):
            yield from self._fit(context, parts, levels)

    def _levels(self, context: Context) -> torch.Tensor | None:
        """Return the fitted levels, or None if there are none or they were fitted for another purpose."""
        purpose = context.memory.value("levels_of")
        if purpose is None or not torch.equal(purpose, self._method.purpose):
            return None
        return context.memory.value("levels")

    def _is_due(self, context: Context, levels: torch.Tensor | None) -> bool:
        return self._method.is_update(context.round) or (levels is None and not _is_dry(context))

    def _fit(
        self, context: Context, parts: Sequence[Any], before: torch.Tensor | None
    ) -> Exchange[torch.Tensor | None]:
        """Gather all workers' statistics; store and return the levels that rank 0 fits to them, if they are not zeros.

        Only one rank fits, since error functions may differ in the last bit between machines.

        Args:
            parts: This rank's statistics, or numbers of blocks in a dry run.
        """
        statistics, levels = self._method.statistics, self._method.no_levels()
        if _is_dry(context):
            yield from self._gather(context, 2, statistics.room(sum(parts)).to("meta"))
            yield from self._gather(context, 3, levels.to("meta"))
            return None
        everyone = yield from self._gather(context, 2, statistics.joined(parts))
        if not everyone.any():
            # All ranks' values are zeros, to which any levels fit: those before stay.
            return before
        if context.rank == 0:
            found = self._method.fit(statistics.distribution(everyone), None if before is None else before.tolist())
            levels = torch.tensor(_apart(found), dtype=torch.float64, device="cpu")
        levels = (yield from self._gather(context, 3, levels))[0].clone()
        context.memory.stage_value("levels", levels)
        context.memory.stage_value("levels_of", self._method.purpose)
        return levels

    def _gather(self, context: Context, exchange: int, values: torch.Tensor) -> Exchange[torch.Tensor]:
        return gathered_values(replace(context, exchange=exchange), self._method.tag, values)


def _is_dry(context: Context) -> bool:
    return context.workspace.device == "meta"


def _apart(levels: Sequence[float]) -> list[float]:
    """Round to float32, with distinct neighbours and ends at -1 and 1."""
    rounded = torch.tensor(levels, dtype=torch.float32, device="cpu")
    rounded[0], rounded[-1] = -1.0, 1.0
    for i in range(1, len(rounded)):
        if not rounded[i] > rounded[i - 1]:
            rounded[i] = torch.nextafter(rounded[i - 1], torch.tensor(2.0, dtype=torch.float32, device="cpu"))
    if float(rounded[-1]) != 1.0:
        even = [-1 + 2 * j / (len(levels) - 1) for j in range(len(levels))]
        return even
    return [float(x) for x in rounded]


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Method):
    """The fields and the schedule of all four methods."""

    bits: int = 3
    norm: str = "l2"
    block_size: int | None = 8192
    blocks: str = "model"
    updates: tuple[int, ...] = (0, 100, 2000)
    every: int = 10_000
    kept: int = 350
    model: str = "normal"
    overlap: bool = False

    tag: ClassVar[int]
    weighted: ClassVar[bool]

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require(is_whole(self.bits, 2, 8), owner, f"bits is 2 to 8, not {self.bits!r}")
        require(self.norm in ("l2", "max"), owner, f"norm is 'l2' or 'max', not {self.norm!r}")
        check_blocks(owner, self.block_size, self.blocks)
        listed = isinstance(self.updates, (tuple, list)) and all(is_whole(u, 0) for u in self.updates)
        require(listed, owner, f"updates is a tuple of rounds, not {self.updates!r}")
        object.__setattr__(self, "updates", tuple(self.updates))
        require(is_whole(self.every, 1), owner, f"every is a number of rounds, not {self.every!r}")
        require(is_whole(self.kept, 1), owner, f"kept is a number of blocks, not {self.kept!r}")
        known = self.model in ("normal", "histogram")
        require(known, owner, f"model is 'normal' or 'histogram', not {self.model!r}")
        require(isinstance(self.overlap, bool), owner, f"overlap is True or False, not {self.overlap!r}")
        require(
            not self.overlap or self.blocks == "parameter",
            owner,
            "overlap=True lets buckets leave as they come, and a block of blocks='model' may lie in two of them: use "
            "blocks='parameter'",
        )

    def declare(self) -> Traits:
        return replace(
            re_encoded(super().declare(), self.block_size),
            # Levels that are used in the round of their fit need the whole gradient.
            whole_step=not self.overlap,
            joined=self.blocks == "model",
            # All parameters share the levels, which are fitted to what an update round exchanges.
            needs_every_round=True,
            kernels=("moments", "levels"),
            remembers=("levels", "levels_of"),
            unbiased=True,
        )

    def is_update(self, round: int) -> bool:
        """Return whether the levels are fitted in ``round``."""
        last = max(self.updates, default=0)
        return round in self.updates or (round > last and round % self.every == 0)

    @property
    def purpose(self) -> torch.Tensor:
        """Return the settings for which levels are fitted, int64; for other settings they are far from optimal."""
        fields = [self.tag, self.bits, self.norm == "max", self.block_size or 0, self.blocks == "model"]
        return torch.tensor([*fields, self.model == "histogram"], dtype=torch.int64, device="cpu")

    @property
    def statistics(self) -> Statistics:
        """Return the statistics that ranks exchange before a fit."""
        return Histograms(self.weighted) if self.model == "histogram" else Normals(self.weighted, self.kept)

    def no_levels(self) -> torch.Tensor:
        """Return as many zeros as there are levels, float64."""
        return torch.zeros(2**self.bits, dtype=torch.float64, device="cpu")

    @abstractmethod
    def fit(self, distribution: Distribution, before: Sequence[float] | None) -> list[float]:
        """Return the best levels, ascending from -1 to 1."""

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> LevelCodec:
        grid = Grid.ordered(powers(0.5, 2**self.bits))
        return LevelCodec(
            kernels, segments, world_size, seed, grid=grid, norm=self.norm, block_size=self.block_size, purpose="fitted"
        )

    def plan(self, setting: PlanSetting) -> BucketPlan:
        return AdaptiveLevelPlan(self, setting)


_FIELDS = """

    Args:
        bits: Code width b, 2 to 8: 2^b signed levels from -1 to 1.
        norm: Norm by which a block is divided: "l2", as in the authors' program, or "max".
        block_size: Number of values that share a norm, a multiple of 16; None: all of a parameter.
        blocks: "model", as in the authors' program: cut from all compressed parameters joined in the order of
            ``named_parameters``; or "parameter".
        updates: Rounds in which the levels are fitted.
        every: Number of rounds between later updates.
        kept: Number of blocks of a worker whose statistics are exchanged, three float32 each, under the normal model:
            those with the largest weight, which are those with the largest norms if blocks are equally long.
        model: Distribution to which levels are fitted: "normal", as in the paper, a truncated normal for each kept
            block, with the mean and the deviation of its values; or "histogram", counts of all blocks' values in 641
            fixed bins, an int64 each. If a block has values of many layers, these are far from normal, and the
            histogram's levels have by far the smaller variance, see docs/quantisers.md.
        overlap: False: the exchange begins when all gradients are computed, and rounds them to levels fitted to their
            statistics. True: buckets are sent while backward still runs, with the current levels, +-2^-j at first;
            levels of an update round are fitted while the optimizer steps, and used from the next round on. Needs
            ``blocks="parameter"``.

    Raises:
        HyperparameterError: a field is out of range.

    Payloads are gathered, as in the paper. With ``collective="two_shot"`` the owner of a share rounds the mean to the
    same levels once more, as for :class:`QSGD`.

    The whole gradient shares the levels. They are stored in checkpoints, and fitted anew if a checkpoint has another
    method, width, norm or blocks. Statistics are of the update round's gradients on all workers; the authors draw ten
    further minibatches. Random numbers are drawn from the rank's stream.

    Reference: F. Faghri et al., "Adaptive Gradient Quantization for Data-Parallel SGD", NeurIPS 2020.
    """


def _properties(summary: str) -> Properties:
    return Properties(
        summary=summary,
        paper="Faghri et al., AQSGD, NeurIPS 2020",
        bit_stable=True,
        bits_per_element=2 * (3.2 + 32 / 8192),
        state="levels, the same on all ranks",
        stream="rank",
    )


@dataclass(frozen=True, kw_only=True)
class ALQ(_Adaptive):
    __doc__ = (
        r"""ALQ: levels fitted one by one for the least expected variance of rounding.

    A value v of a block with scale R is rounded without bias to one of the two neighbours of r = v / R among 2^b levels
    l_j, as in :class:`QSGD`. The levels minimise the sum over j of the integral of (l_(j+1) - r) (r - l_j) dF(r) by
    coordinate descent with the closed form of the paper's section 3.2. F is a mixture of the blocks' distributions. A
    block of d values weighs R^2 d, since its error is R^2 times the sum of its values' errors in units of R. For
    Euclidean norms of equally long blocks that is the squared norm, as in the paper."""
        + _FIELDS
    )

    name: ClassVar[str] = "alq"
    tag: ClassVar[int] = 5
    weighted: ClassVar[bool] = True
    properties: ClassVar[Properties] = _properties("Levels fitted to the gradient, each by itself")

    def fit(self, distribution: Distribution, before: Sequence[float] | None) -> list[float]:
        return best_levels(distribution, 2**self.bits, [before] if before else [])


@dataclass(frozen=True, kw_only=True)
class ALQN(ALQ):
    __doc__ = (
        """ALQ-N: as :class:`ALQ`, but the weight of a block of d values is d, whatever its scale.

    Under the normal model all values of the kept blocks are one truncated normal."""
        + _FIELDS
    )

    name: ClassVar[str] = "alq_n"
    tag: ClassVar[int] = 6
    weighted: ClassVar[bool] = False
    properties: ClassVar[Properties] = _properties("Levels fitted to the gradient, norms of blocks left out")


@dataclass(frozen=True, kw_only=True)
class AMQ(_Adaptive):
    __doc__ = (
        """AMQ: levels +-p^j, j = 0 .. 2^(b-1) - 1, with the ratio p of least expected variance; no zero.

    The objective is that of :class:`ALQ`, over one number. At p = 1/2 this is NUQSGD without a zero."""
        + _FIELDS
    )

    name: ClassVar[str] = "amq"
    tag: ClassVar[int] = 7
    weighted: ClassVar[bool] = True
    properties: ClassVar[Properties] = _properties("An exponential grid whose ratio is fitted to the gradient")

    def fit(self, distribution: Distribution, before: Sequence[float] | None) -> list[float]:
        return powers(best_ratio(distribution, 2**self.bits), 2**self.bits)


@dataclass(frozen=True, kw_only=True)
class AMQN(AMQ):
    __doc__ = (
        """AMQ-N: as :class:`AMQ`, but the weight of a block of d values is d, whatever its scale.

    Under the normal model all values of the kept blocks are one truncated normal."""
        + _FIELDS
    )

    name: ClassVar[str] = "amq_n"
    tag: ClassVar[int] = 8
    weighted: ClassVar[bool] = False
    properties: ClassVar[Properties] = _properties("A fitted exponential grid, norms of blocks left out")
