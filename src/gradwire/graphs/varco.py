"""VARCO: sends random entries of the rows, few at first and more with every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method, is_number, is_whole, require
from gradwire.exchange.protocols import Context
from gradwire.graphs.halo_method import ChannelSetting, HaloMethod, RowChannel, checked_operator
from gradwire.methods.casts.cast import FP32
from gradwire.methods.gossip.vector_coder import VectorCoder
from gradwire.methods.sparse.random_places import RandomElements
from gradwire.methods.wrappers.scheduled import CURVES
from gradwire.seeds import SHARED, parameter_key


@dataclass(frozen=True, kw_only=True)
class VARCO(HaloMethod):
    r"""Variable compression: send a random share 1 / c_t of the entries of a boundary's rows; the others are zeros.

    In step t of T, counted from 0, with c_max = ``start``, c_min = ``end`` and a = ``slope``::

        c_t = max(c_max - a t (c_max - c_min) / (T - 2), c_min)

    max(1, floor(d / c_t)) of the d = rows times width entries are sent, drawn without replacement from a key that both
    ends know, so that no byte says which. The backward pass sends the gradients of the same entries: an entry that was
    not sent forward has no gradient. Entries are not scaled: ``E |x - C(x)|^2 = (1 - k / d) |x|^2`` for k of d. With c
    = 1 all entries are sent in order: with ``values=FP32()`` this is full communication, bit for bit.

    The entries are drawn like those of :class:`RandK` with shared coordinates: a new permutation in every step.

    Args:
        start: c_max, at least 1.
        end: c_min, at least 1 and at most ``start``. With ``start == end`` the rate is fixed.
        slope: a, above 0: the ratio reaches c_min by step (T - 2) / a.
        steps: T, at least 3; None: as many as the training has.
        values: How the entries travel: any operator that :class:`Halo` takes.

    Raises:
        HyperparameterError: a field is out of range.
        IncompatibleError: one sender and one receiver cannot use ``values``, or, when a link is built, the number of
            steps is unknown.

    Reference: J. Cervino, M. A. Turja, H. Mostafa, N. Himayat, A. Ribeiro, "Distributed Training of Large Graph Neural
    Networks with Variable Communication Rates", 2024.

    Example:
        >>> method = VARCO(start=128, end=1.0, slope=5, steps=302)
        >>> [method.ratio(t) for t in (0, 30, 60, 300)]
        [128.0, 64.5, 1.0, 1.0]
    """

    start: float = 128.0
    end: float = 1.0
    slope: float = 5.0
    steps: int | None = None
    values: Method = field(default_factory=FP32)

    name: ClassVar[str] = "varco"
    tag: ClassVar[int] = 101

    def __post_init__(self) -> None:
        for name in ("start", "end", "slope"):
            require(is_number(getattr(self, name)), "VARCO", f"{name} is a number, not {getattr(self, name)!r}")
            object.__setattr__(self, name, float(getattr(self, name)))
        require(
            1 <= self.end <= self.start, "VARCO", f"1 <= end <= start is needed, not end={self.end}, start={self.start}"
        )
        require(self.slope > 0, "VARCO", f"slope is above 0, not {self.slope!r}")
        require(
            self.steps is None or is_whole(self.steps, 3),
            "VARCO",
            f"steps is at least 3, or None for those of the training, not {self.steps!r}",
        )
        checked_operator("VARCO", self.values)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Families of kernels that the operator for the values calls."""
        return self.values.traits.kernels

    def check_steps(self, steps: int | None) -> None:
        if self.start != self.end and (self.steps or steps or 0) < 3:
            raise IncompatibleError(
                f"{self!r} reaches its last ratio after a share of all steps: give their number as steps=, at least 3"
            )

    def ratio(self, round: int, steps: int | None = None) -> float:
        """Return c_t.

        Args:
            round: t, counted from 0.
            steps: Number of steps of the training; the field ``steps`` takes precedence.
        """
        if self.start == self.end:
            return self.end
        self.check_steps(steps)
        passed = self.slope * round / ((self.steps or steps or 0) - 2)
        return max(CURVES["linear"](self.start, self.end, passed), self.end)

    def channel(self, setting: ChannelSetting) -> RowChannel:
        return _Masked(self, setting)


def _drawn(key: tuple[int, int], numel: int, count: int, round: int) -> torch.Tensor:
    """Return ``count`` of ``numel`` places, which depend on the key and the round only."""
    return torch.from_numpy(RandomElements([numel], [key], [count], contiguous=False).draw(round, SHARED))


class _Masked(RowChannel):
    """Sends random entries of the rows as one vector."""

    def __init__(self, method: VARCO, setting: ChannelSetting) -> None:
        self._method, self._steps = method, setting.steps
        self._shape, self._drawn = (setting.rows, setting.width), setting.drawn
        self._numel = setting.rows * setting.width
        self._key = parameter_key(setting.seed, setting.boundary, "choice")
        self._coder = VectorCoder(method.values, setting.kernels, setting.name, setting.seed)

    def count(self, round: int) -> int:
        """Return the number of entries that are sent in a round."""
        return max(1, int(self._numel / self._method.ratio(round, self._steps))) if self._numel else 0

    def places(self, round: int) -> torch.Tensor | None:
        """Return the places of the entries that are sent in a round; None: all entries, in order."""
        count = self.count(round)
        if count == self._numel:
            return None
        # Sender and receiver use the same draw in both directions, and a simulation plays all of them. No later step
        # needs it.
        key = self._key, self._numel, count, round
        found = self._drawn.get(key)
        if found is None:
            found = self._drawn[key] = _drawn(*key)
        return found

    def most_bytes(self, round: int) -> int:
        return self._coder.most_bytes(self.count(round))

    def encode(self, context: Context, rows: torch.Tensor) -> torch.Tensor:
        places, flat = self.places(context.round), rows.reshape(-1)
        return self._coder.encode(flat if places is None else flat[places], context.round)

    def decode(self, context: Context, data: torch.Tensor) -> torch.Tensor:
        places = self.places(context.round)
        values = self._coder.decode(data, self.count(context.round), context.round)
        if places is not None:
            values = torch.zeros(self._numel, dtype=torch.float32, device="cpu").index_copy_(0, places, values)
        return values.view(self._shape)
