"""Random-k: random elements of every parameter, shared or private to each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.exchange.codecs.base import Codec, Constant, Draw, Summary
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.method import Method, Properties, operator_of, require
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting, SectionPlan
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.exchange.wire import padded
from gradwire.methods.casts.cast import FP32
from gradwire.methods.signs.sign_codec import sign_table
from gradwire.methods.sparse.chosen_elements import Chosen, ChosenElements
from gradwire.methods.sparse.random_places import RandomElements
from gradwire.methods.sparse.sparse import check_values, sparse_values
from gradwire.methods.sparse.sparse_values import KeptValues
from gradwire.methods.sparse.top_k import check_density
from gradwire.seeds import SHARED, parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


@dataclass(frozen=True)
class RandomSparseSummary:
    """Draw of a payload's choice."""

    draw: Draw | None = None
    shared: torch.Tensor | None = None

    def select(self, index: Constant, shared: torch.Tensor | None) -> RandomSparseSummary:
        return self


class RandomSparseCodec(Codec):
    """Codec of the values of elements that :class:`RandomElements` draws for the sender, as receivers do, too.

    If a parameter has an infinity or a NaN anywhere, drawn or not, its first value is +inf, and if a first value is not
    finite the whole mean of its parameter is +inf.

    Args:
        elements: Draws the elements.
        values: Encoding of the values.
        factor: Factor for the mean of each segment's elements.
    """

    grain = units = 1

    def __init__(
        self,
        kernels: Kernels,
        segments: Sequence[Segment],
        world_size: int,
        *,
        elements: RandomElements,
        values: KeptValues,
        factor: Sequence[float],
    ) -> None:
        self.kernels, self.world_size, self.elements, self.values = kernels, world_size, elements, values
        self.segments, self.table = list(segments), sign_table(segments)
        counts = torch.tensor(elements.slots, dtype=torch.int64, device="cpu")
        self._factor = torch.repeat_interleave(torch.tensor(factor, dtype=torch.float32, device="cpu"), counts)
        offset = torch.tensor([s.offset for s in segments], dtype=torch.int64, device="cpu")
        self._offset = torch.repeat_interleave(offset, counts)
        self._first = counts.cumsum(0) - counts

    def payload_bytes(self, units: int) -> int:
        return padded(self.values.bytes(self.elements.slots))

    def summarise(self, flat: torch.Tensor) -> RandomSparseSummary:
        return RandomSparseSummary()

    def remember(self, summary: Summary, flat: torch.Tensor, draw: Draw, wants_sent: bool) -> RandomSparseSummary:
        return RandomSparseSummary(draw)

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        values = flat[self._places(draw)]
        values[self._first[~self.kernels.finite(flat, self.table)]] = torch.inf
        used, counts = self.values.bytes(self.elements.slots), tuple(self.elements.slots)
        self.values.write(values, counts, draw, out[:used])
        out[used : self.payload_bytes(1)] = 0

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        draw, weight = _draw(summary), 1.0 / self.world_size
        for s in self.segments:
            flat[s.offset : s.offset + s.numel].zero_()
        for rank, row in enumerate(rows):
            values = self._add(row, Draw(draw.round, rank), weight, flat)
            spoilt = ~torch.isfinite(values[self._first])
            for i in torch.nonzero(spoilt).flatten().tolist():
                s = self.segments[i]
                flat[s.offset : s.offset + s.numel] = torch.inf

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        self._add(data, _draw(summary), weight, flat)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(flat[torch.tensor([s.offset for s in self.segments], device="cpu")])

    def _places(self, draw: Draw) -> torch.Tensor:
        return torch.from_numpy(self.elements.draw(draw.round, draw.stream)).add_(self._offset)

    def _read(self, row: torch.Tensor) -> torch.Tensor:
        return self.values.read(row[: self.values.bytes(self.elements.slots)], tuple(self.elements.slots))

    def _add(self, row: torch.Tensor, draw: Draw, weight: float, flat: torch.Tensor) -> torch.Tensor:
        """Add a payload's values, times the weight, to the elements of its sender, and return the values."""
        values = self._read(row) * (self._factor * weight)
        flat.index_add_(0, self._places(draw), values)
        return values


def _draw(summary: Summary) -> Draw:
    if not isinstance(summary, RandomSparseSummary) or summary.draw is None:
        raise TypeError(f"a codec of random elements cannot decode with a {type(summary).__name__} that tells no draw")
    return summary.draw


@dataclass(frozen=True, kw_only=True)
class RandK(Method):
    r"""Random-k: k random elements of every parameter, drawn anew in every round; the others become zero.

    For a parameter with d elements, k = max(1, floor(density d)) are drawn without replacement::

        C(x)_i = x_i  for i in S, |S| = k,  0 elsewhere         E |C(x) - x|^2 = (1 - k/d) |x|^2

    Positions are not sent: receivers draw them, too. With ``coordinates="shared"`` all workers draw the same, so the k
    values are exchanged as a parameter of k elements, by an all-reduce if they are float32. With ``"private"`` every
    worker draws its own, the mean of N workers has more elements, and all workers gather all values.

    ``rescale`` multiplies by d / k, which is unbiased, with a variance of (d/k - 1) |x|^2. Without it, use
    ``ErrorFeedback(compressor=RandK())``. Error feedback refuses rescaled elements, with which it would diverge.

    Unsent elements are checked, too: an infinity or a NaN anywhere in a parameter, on any worker, makes the whole
    parameter +inf on all workers.

    Args:
        density: Share k/d of the elements, above 0 to 1.
        coordinates: "shared" or "private".
        contiguous: True for a random block: consecutive elements from a random one on, wrapping at the end of the
            parameter.
        rescale: True to multiply the outcome by d / k.
        values: Encoding of values. With shared coordinates a cast, or an operator on one vector whose blocks do not
            cross parameters; with private ones ``FP32()``, ``BF16()`` or such an operator with levels, such as
            ``QSGDinf()``.

    Raises:
        HyperparameterError: a field is out of range.

    Wire: the values only (``docs/wire-format.md``). Draws from the shared stream, or the rank's.

    Reference: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; shared coordinates
    and blocks as in T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD", NeurIPS 2019, section 5.

    Example:
        >>> import torch, gradwire as gw
        >>> found = gw.simulate(torch.ones(2, 1000), gw.RandK(density=0.05)).mean
        >>> int(found.count_nonzero()), float(found.max())
        (50, 1.0)
    """

    density: float = 0.01
    coordinates: str = "shared"
    contiguous: bool = False
    rescale: bool = False
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "randk"
    tag: ClassVar[int] = 34
    properties: ClassVar[Properties] = Properties(
        summary="A random share of the elements in every round, by default the same on all workers",
        paper="Stich et al., Sparsified SGD with Memory, NeurIPS 2018",
        bit_stable=False,
        bits_per_element=0.32,
        stream="shared, or rank",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density("RandK", self.density))
        require(
            self.coordinates in ("shared", "private"),
            "RandK",
            f"coordinates is 'shared' (the same elements on all workers) or 'private', not {self.coordinates!r}",
        )
        for name in ("contiguous", "rescale"):
            value = getattr(self, name)
            require(isinstance(value, bool), "RandK", f"{name} is True or False, not {value!r}")
        if self.private:
            check_values("RandK", self.values)
            return
        require(
            operator_of(self.values) is not None and not self.values.traits.joined,
            "RandK",
            f"values is a cast, or an operator on one vector whose blocks are of a parameter, not {self.values!r}",
        )

    def refusal_of_feedback(self, unseen: str) -> str | None:
        if not self.rescale:
            return None
        return (
            f"{self!r} multiplies what it keeps by d/k, and with it the residual's error: it diverges; use "
            "rescale=False"
        )

    def check_between_two(self, owner: str) -> None:
        check_values(owner, self.values)

    def codec_between_two(self, kernels: Kernels, segments: Sequence[Segment], seed: int) -> Codec:
        return self.codec(kernels, segments, 1, seed)

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            same_elements=not self.private,
            # Private elements are gathered.
            collectives=("all_gather",) if self.private else self.values.traits.collectives,
            re_encoding=not self.private and self.values.traits.re_encoding,
            # A threshold of the values is in the gradient's unit, and their number may depend on a message's cost.
            needs_loss_scale=self.values.traits.needs_loss_scale,
            needs_link_cost=self.values.traits.needs_link_cost,
            rounds_sums=not self.private and self.values.traits.rounds_sums,
            cut=1 << 40,
            share_cut=1 << 40,
            # The family "signs" finds values that are not finite.
            kernels=tuple(dict.fromkeys((*self.values.traits.kernels, "signs"))),
            # Unbiased if rescaled with unbiased values.
            unbiased=self.rescale and self.values.traits.unbiased,
            # If ``rescale`` is not set, the note says that it makes the method unbiased.
            unbiased_note=None if self.rescale else "no; with rescale=True",
            omega_formula="(1 + omega of the values) d/k - 1" if self.rescale else None,
        )

    @property
    def private(self) -> bool:
        """True if each worker draws its own elements."""
        return self.coordinates == "private"

    @property
    def delta_formula(self) -> str | None:
        return None if self.rescale else "k/d times that of the values"

    def kept(self, numel: int) -> int:
        """Return k, the number of elements kept of ``numel``."""
        return max(1, int(self.density * numel))

    def omega_of(self, numel: int | None = None) -> float | None:
        if not self.rescale:
            return None
        # For an unknown number of elements, floor(y) > y / 2 are kept if y = density d is above 1.
        share = (self.density / 2 if self.density < 1 else 1.0) if numel is None else self.kept(numel) / numel
        inner = self.values.omega_of(None if numel is None else self.kept(numel))
        return None if inner is None else (1 + inner) / share - 1

    def delta_of(self, numel: int | None = None) -> float | None:
        if self.rescale:
            return None
        share = (self.density / 2 if self.density < 1 else 1.0) if numel is None else self.kept(numel) / numel
        inner = self.values.delta_of(None if numel is None else self.kept(numel))
        return None if inner is None else share * inner

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        """Return the share of the elements, 1 if they are rescaled, times that of the values."""
        values = self.values.typical_delta_of()
        share = self.density if numel is None else self.kept(numel) / numel
        return None if values is None else values * (1.0 if self.rescale else share)

    def plan(self, setting: PlanSetting) -> BucketPlan:
        if self.private:
            return SectionPlan(self, setting)
        return ChosenElements(setting, self.values, self._chooser)

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        if self.private:
            return SectionPlan(self, replace(setting, segments=[replace(s, dense=True) for s in setting.segments]))
        return self.values.dense_plan(setting)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> RandomSparseCodec:
        """Bind private elements to segments."""
        numel = [s.numel for s in segments]
        key = [parameter_key(seed, s.parameter.name, "choice") for s in segments]
        return RandomSparseCodec(
            kernels,
            segments,
            world_size,
            elements=self._elements(numel, key),
            values=sparse_values(self.values, kernels, segments, seed),
            factor=self._factors(numel),
        )

    def _elements(self, numel: Sequence[int], key: Sequence[tuple[int, int]]) -> RandomElements:
        return RandomElements(numel, key, [self.kept(n) for n in numel], self.contiguous)

    def _chooser(self, numel: Sequence[int], key: Sequence[tuple[int, int]]) -> _SharedElements:
        return _SharedElements(self._elements(numel, key), self._factors(numel))

    def _factors(self, numel: Sequence[int]) -> list[float]:
        return [n / self.kept(n) if self.rescale else 1.0 for n in numel]


class _SharedElements:
    """Choice of the same elements on all workers, anew in every round."""

    def __init__(self, elements: RandomElements, factor: list[float]) -> None:
        self._elements, self.slots, self.factor = elements, elements.slots, factor

    def choose(self, round: int) -> Chosen:
        """Return the elements of a round, one for each slot."""
        return self._elements.draw(round, SHARED), None
