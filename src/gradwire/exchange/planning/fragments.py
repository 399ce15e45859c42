"""Fragments of a model, which are exchanged separately, and the schedule of their exchanges."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from gradwire.exchange.method import Method
from gradwire.exchange.planning.options import Options, dense_names
from gradwire.exchange.protocols import REDUCE_SCATTER
from gradwire.exchange.segments import local_shard
from gradwire.exchange.steps_locally import StepsLocally

LEAST = 1024
"""Least number of elements of a parameter that is divided."""

RUNS = {"sequential": 1, "strided": 4}
"""Number of contiguous runs of a fragment's elements, by order."""


@dataclass(frozen=True)
class _Piece:
    """Rows of a parameter between two indices of its outermost dimension in memory."""

    parameter: str
    dim: int
    begin: int
    rows: int


class FragmentPieces(Mapping[str, torch.Tensor]):
    """Pieces of a model, by name: views of whole parameters, or of blocks of rows of large ones, assigned to fragments.

    The elements, in the order of the parameters, are divided into runs of about equal length, which are assigned to the
    fragments in turn. A parameter is divided between rows, and not at all if it has fewer than 1024 elements. So a
    fragment has at most its share of the elements, plus that many and a row at each end of a run.

    Args:
        parameters: Parameters by name.
        count: Number of fragments; with 1 the pieces are the parameters.
        order: "sequential": a fragment is one run; "strided": it is four, spread over the model.

    Attributes:
        fragments: The names of each fragment's pieces.

    Example:
        >>> pieces = FragmentPieces({"w": torch.zeros(100, 30), "b": torch.zeros(100)}, 2, "sequential")
        >>> pieces.fragments, pieces["w[52:100]"].shape
        ([['w[0:52]'], ['w[52:100]', 'b']], torch.Size([48, 30]))
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], count: int, order: str) -> None:
        self._parameters = dict(parameters)
        self._pieces: dict[str, _Piece | None] = {}
        self.fragments: list[list[str]] = [[] for _ in range(count)]
        self._of: dict[str, list[str]] = {}
        runs, total = RUNS[order] * count if count > 1 else 1, sum(p.numel() for p in parameters.values())
        bounds, at = [total * j / runs for j in range(1, runs)], 0
        for name, p in parameters.items():
            self._of[name] = []
            for piece, numel in _cut(name, p, [b - at for b in bounds]):
                label = name if piece is None else f"{name}[{piece.begin}:{piece.begin + piece.rows}]"
                run = sum(b <= at + numel / 2 for b in bounds)
                self._pieces[label] = piece
                self._of[name].append(label)
                self.fragments[run % count].append(label)
                at += numel

    def __getitem__(self, name: str) -> torch.Tensor:
        piece = self._pieces[name]
        if piece is None:
            return self._parameters[name].detach()
        return self._parameters[piece.parameter].detach().narrow(piece.dim, piece.begin, piece.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def of(self, parameters: Sequence[str]) -> list[str]:
        """Return the names of the pieces of whole parameters, in memory order."""
        return [label for name in parameters for label in self._of[name]]

    def options(self, options: Options, method: Method) -> Options:
        """Return a link's options for pieces: all pieces of a parameter that is sent in float32 are sent so, too."""
        if all(piece is None for piece in self._pieces.values()):
            return options
        dense = dense_names({name: p.numel() for name, p in self._parameters.items()}, options, method)
        names = self.of([name for name in self._parameters if name in dense])
        return replace(options, exclude=tuple(glob.escape(name) for name in names), min_numel=0)


def _cut(name: str, p: torch.Tensor, bounds: Sequence[float]) -> Iterator[tuple[_Piece | None, int]]:
    """Yield the pieces of a parameter between bounds, which are element indices, and their numbers of elements."""
    dim = max(range(p.dim()), key=lambda d: (p.stride(d) * (p.shape[d] > 1), -d), default=0)
    rows = p.shape[dim] if p.dim() else 1
    row = p.numel() // max(rows, 1)
    inside = {round(b / row) for b in bounds if 0 < b < p.numel()} if p.numel() >= LEAST else set()
    ends = [*sorted(inside - {0, rows}), rows]
    if len(ends) == 1:
        yield None, p.numel()
        return
    for begin, end in zip([0, *ends], ends):
        yield _Piece(name, dim, begin, end - begin), (end - begin) * row


def cut_fragments(parameters: Mapping[str, torch.Tensor], method: StepsLocally) -> FragmentPieces:
    """Return the pieces in which a method with local steps exchanges parameters."""
    return FragmentPieces(parameters, method.fragments, method.order)


def exchanged(
    method: Method, parameters: Mapping[str, torch.Tensor], options: Options
) -> tuple[Mapping[str, torch.Tensor], Options]:
    """Return the units that a link of any method exchanges as parameters, and the link's options for them."""
    if not method.traits.local_steps or method.traits.outcomes_differ:
        if options.collective != REDUCE_SCATTER:
            # Replicas of a shard exchange the shard; a reduce-scatter exchanges whole parameters.
            parameters = {name: local_shard(p) for name, p in parameters.items()}
        return parameters, options
    pieces = cut_fragments(parameters, cast(StepsLocally, method))
    return pieces, pieces.options(options, method)


class FragmentClock:
    """Schedules the exchange of each of F fragments, and the step at which it takes effect.

    The exchange of fragment f begins after step floor((f + 1) H / F) of every H steps, so that the last one begins
    after step H, and ends ``delay`` steps later. At most one is in flight.

    Attributes:
        steps: Number of steps since the last exchange of the last fragment.
        flying: The fragment in flight; None if there is none.
        left: Number of steps until it ends.

    Example:
        >>> clock = FragmentClock(6, 2, 1)
        >>> [clock.step() for _ in range(8)]
        [(None, None), (None, None), (None, 0), (0, None), (None, None), (None, 1), (1, None), (None, None)]
    """

    def __init__(self, every: int, count: int, delay: int) -> None:
        self.every, self.count, self.delay = every, count, delay
        self._begins = {(f + 1) * every // count: f for f in range(count)}
        self.reset()

    def reset(self) -> None:
        """Start again, with nothing in flight."""
        self.steps, self.left = 0, 0
        self.flying: int | None = None

    def go_on(self, steps: int, flying: int | None = None, left: int = 0) -> None:
        """Go on from a state, which may be one of more steps between exchanges."""
        self.steps, self.flying, self.left = steps % self.every, flying, left

    def overtakes(self, steps: int, left: int) -> bool:
        """Return whether an exchange begins before the one in flight ends, in a state of these steps.

        Args:
            steps: Steps since the last exchange of the last fragment.
            left: Steps until the one in flight ends.
        """
        return any((steps + n - 1) % self.every + 1 in self._begins for n in range(1, left))

    def step(self) -> tuple[int | None, int | None]:
        """Count a step; return the fragment whose exchange ends after it, and the one whose exchange then begins.

        With a delay of 0 an exchange ends at once, and is returned only as the one that begins.
        """
        self.steps += 1
        ends = None
        if self.flying is not None:
            self.left -= 1
            if self.left == 0:
                ends, self.flying = self.flying, None
        begins = self._begins.get(self.steps)
        if begins is not None and self.delay:
            self.flying, self.left = begins, self.delay
        if self.steps == self.every:
            self.steps = 0
        return ends, begins
