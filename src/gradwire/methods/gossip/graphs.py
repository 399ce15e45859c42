"""Graphs of workers by name or from a file of edges, their mixing weights, and the order of messages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.protocols.direct import Move

MOST_BYTES = 1 << 24
"""Largest size of a file in bytes, for some million edges."""


def is_special(name: str) -> bool:
    """Return whether a name is that of a folder, a device or a pipe, which cannot have a graph."""
    try:
        return Path(name).exists() and not Path(name).is_file()
    except (OSError, ValueError):
        # An invalid file name is reported when the file is read.
        return False


def read_file(name: str) -> str:
    """Return the text of a file that describes a graph.

    Raises:
        OSError, ValueError: it does not exist, is a device, a pipe or a folder, is too large, or is not UTF-8 text.
    """
    if is_special(name):
        raise ValueError("it is a folder, a device or a pipe")
    with Path(name).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return data.decode("utf-8-sig")


def read_weights(text: str, name: str, workers: int) -> tuple[set[tuple[int, int]], dict[tuple[int, int], float]]:
    """Parse the edges of a graph, and their weights if it has any.

    A line is ``i j`` or ``i j weight``: two ranks, counted from 0, that exchange with each other, and their weight,
    above 0 and at most 1. Either all lines have a weight or none. An edge is written once, or in both directions with
    the same weight. Comments after ``#`` and empty lines are ignored.

    Args:
        name: Name of the file, for messages.
        workers: Number of workers.

    Returns:
        The edges (lower rank, higher rank), and their weights, empty if there are none.

    Raises:
        IncompatibleError: a line is malformed, has a rank that does not exist, or contradicts another.

    Example:
        >>> read_weights("0 1  # next door\\n1 2\\n", "a file", 3)
        ({(0, 1), (1, 2)}, {})
    """
    found: dict[tuple[int, int], float | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}, line {number}"
        i, j, weight = _edge(words, where, line, workers)
        if (i, j) in found:
            raise IncompatibleError(f"{where}: the edge from worker {i} to worker {j} is there already")
        back = found.get((j, i), weight)
        if back != weight:
            raise IncompatibleError(
                f"{where}: the weights are not symmetric: {weight} from worker {i} to worker {j}, and {back} back"
            )
        found[i, j] = weight
    weights = {(min(pair), max(pair)): weight for pair, weight in found.items()}
    given = {pair: weight for pair, weight in weights.items() if weight is not None}
    if given and len(given) < len(weights):
        low, high = min(set(weights) - set(given))
        raise IncompatibleError(
            f"{name}: the edge between workers {low} and {high} has no weight, and others have one: give all of them "
            "one, or none"
        )
    return set(weights), given


def _edge(words: list[str], where: str, line: str, workers: int) -> tuple[int, int, float | None]:
    try:
        if len(words) not in (2, 3):
            raise ValueError
        i, j, weight = int(words[0]), int(words[1]), float(words[2]) if len(words) == 3 else None
    except ValueError:
        raise IncompatibleError(f"{where}: {line.strip()!r} is not 'i j' or 'i j weight'") from None
    for rank in (i, j):
        if not 0 <= rank < workers:
            raise IncompatibleError(f"{where}: there is no worker {rank}: {workers} workers are 0 to {workers - 1}")
    if i == j:
        raise IncompatibleError(f"{where}: a worker's own weight is what its edges leave of 1: leave {i} {j} out")
    if weight is not None and not (math.isfinite(weight) and 0 < weight <= 1):
        raise IncompatibleError(f"{where}: a weight is above 0 and at most 1, not {words[2]}")
    return i, j, weight


MIXES = 1e-9
"""Least distance from 1 of the second largest magnitude of an eigenvalue, so that exchanges reduce differences."""

Edges = set[tuple[int, int]]


class MixingMatrix:
    """Symmetric, doubly stochastic weights of a connected graph of workers.

    Args:
        weights: Weight of each edge (lower rank, higher rank), above 0; the rest to 1 is a worker's own weight.
        workers: Number of workers.
        source: Source of the weights, for messages.

    Raises:
        IncompatibleError: weights of a worker add up to more than 1, the graph is not connected, or differences between
            workers would never decrease.

    Example:
        >>> graph = MixingMatrix({(0, 1): 0.5, (1, 2): 0.25}, 3, "an example")
        >>> graph.weights.tolist()
        [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]
        >>> graph.neighbours(1)
        (0, 2)
    """

    def __init__(self, weights: Mapping[tuple[int, int], float], workers: int, source: str) -> None:
        self.workers, self._edges = workers, dict(weights)
        found = torch.zeros(workers, workers, dtype=torch.float64, device="cpu")
        for (low, high), weight in sorted(weights.items()):
            found[low, high] = found[high, low] = weight
        own = 1 - found.sum(1)
        if bool((own < -MIXES).any()):
            worst = int(own.argmin())
            raise IncompatibleError(
                f"{source}: the weights of worker {worst} add up to {1 - float(own[worst]):.6g}: rows of a doubly "
                "stochastic matrix add up to 1; use smaller weights, or none"
            )
        self.weights = found + torch.diag(own.clamp(min=0))
        """Matrix of weights, float64 ``[workers, workers]``."""
        self._rows: list[list[float]] = self.weights.tolist()
        self._check(source)

    def _check(self, source: str) -> None:
        reached, added = {0}, [0]
        while added:
            added = [n for rank in added for n in self.neighbours(rank) if n not in reached]
            reached.update(added)
        if len(reached) < self.workers:
            lost = min(set(range(self.workers)) - reached)
            raise IncompatibleError(
                f"{source}: no path leads from worker 0 to worker {lost}: what one of them learns never reaches the "
                "other; connect them"
            )
        if self.workers > 1 and float(self._eigenvalues[0]) < MIXES - 1:
            raise IncompatibleError(
                f"{source}: its workers swap their parameters for ever instead of averaging them (the matrix of "
                "weights has the eigenvalue -1): leave workers a weight of their own, by smaller weights"
            )
        if self.second_eigenvalue > 1 - MIXES:
            raise IncompatibleError(
                f"{source}: differences between its workers would hardly become smaller (the matrix of weights has the "
                f"eigenvalue 1 - {1 - self.second_eigenvalue:.1g} beside 1): use larger weights, or none"
            )

    @cached_property
    def _eigenvalues(self) -> torch.Tensor:
        """All eigenvalues of the weights, ascending."""
        found: torch.Tensor = torch.linalg.eigvalsh(self.weights)
        return found

    @cached_property
    def second_eigenvalue(self) -> float:
        """Second largest magnitude of an eigenvalue, by which an exchange multiplies differences at most."""
        return float(self._eigenvalues.abs().sort().values[-2]) if self.workers > 1 else 0.0

    def weight(self, rank: int, other: int) -> float:
        """Return the weight between two workers, or a worker's own."""
        return self._rows[rank][other]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with which a rank exchanges, ascending."""
        row = self.weights[rank]
        return tuple(j for j in torch.nonzero(row).flatten().tolist() if j != rank)

    def digest(self) -> int:
        """Return a hash of the weights from 0 to 2^63 - 1, which differs for graphs with other weights."""
        text = f"{self.workers} {sorted(self._edges.items())!r}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def moves(self, rank: int) -> list[Move]:
        """Return whom a rank sends to and receives from in each round of messages, see :func:`rounds`."""
        return self._moves[rank]

    @cached_property
    def _moves(self) -> list[list[Move]]:
        messages = [(i, j) for i in range(self.workers) for j in self.neighbours(i)]
        to, source = rounds(messages, self.workers)
        return [[Move(*pair) for pair in zip(to[rank], source[rank])] for rank in range(self.workers)]


def rounds(messages: Iterable[tuple[int, int]], workers: int) -> tuple[list[list[int | None]], list[list[int | None]]]:
    """Order messages (sender, receiver) so that in no round a rank sends, or receives, more than one.

    The number of rounds is the largest number of messages that a rank sends or receives, which is optimal: messages are
    edges of a bipartite graph of senders and receivers, which can be coloured with so many colours (Kőnig).

    Returns:
        For each rank and round, the rank to which it sends and the rank from which it receives; None for no rank.

    Example:
        >>> to, source = rounds([(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)], 3)
        >>> [sorted(filter(None, row)) for row in to], len(to[0])
        ([[1, 2], [2], [1]], 2)
    """
    listed = list(messages)
    count = max(
        [0, *(sum(pair[side] == rank for pair in listed) for side in (0, 1) for rank in range(workers))],
    )
    to: list[list[int | None]] = [[None] * count for _ in range(workers)]
    source: list[list[int | None]] = [[None] * count for _ in range(workers)]
    for sender, receiver in listed:
        a, b = to[sender].index(None), source[receiver].index(None)
        _make_free(a, b, receiver, to, source)
        to[sender][a], source[receiver][a] = receiver, sender
    return to, source


def _make_free(a: int, b: int, receiver: int, to: list[list[int | None]], source: list[list[int | None]]) -> None:
    """Exchange rounds ``a`` and ``b`` along the messages that start with the one to ``receiver`` in round ``a``.

    Afterwards ``receiver`` receives nothing in round ``a``. A sender who is free in round ``a`` is not reached.
    """
    path, at, colour, other = [], receiver, a, b
    while True:
        sender = source[at][colour]
        if sender is None:
            break
        path.append((sender, at, colour))
        following = to[sender][other]
        if following is None:
            break
        path.append((sender, following, other))
        at = following
    for sender, reached, old in path:
        to[sender][old] = source[reached][old] = None
    for sender, reached, old in path:
        new = a + b - old
        to[sender][new], source[reached][new] = reached, sender


def metropolis_hastings(edges: Edges, workers: int) -> dict[tuple[int, int], float]:
    """Return the weight 1 / (1 + max(degree i, degree j)) of each edge, with which any graph mixes.

    L. Xiao, S. Boyd, S. Lall, "Distributed average consensus with time-varying Metropolis weights", 2006.
    """
    degree = [sum(rank in edge for edge in edges) for rank in range(workers)]
    return {(i, j): 1 / (1 + max(degree[i], degree[j])) for i, j in edges}


def _ring(workers: int) -> Edges:
    return _steps(workers, [1])


def _exponential(workers: int) -> Edges:
    return _steps(workers, [1 << k for k in range((workers // 2).bit_length())])


def _steps(workers: int, distances: Iterable[int]) -> Edges:
    """Connect each worker with those at the given distances in either direction round a ring."""
    pairs = ((i, (i + d) % workers) for i in range(workers) for d in distances)
    return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def _torus(workers: int) -> Edges:
    rows = next((r for r in range(int(workers**0.5), 1, -1) if workers % r == 0), 1)
    if rows == 1:
        raise IncompatibleError(
            f'graph="torus": {workers} workers make no rectangle of at least 2 by 2: use a number that is a product, '
            'graph="ring", or a file'
        )
    columns = workers // rows
    found: Edges = set()
    for i in range(workers):
        row, column = divmod(i, columns)
        for j in (row * columns + (column + 1) % columns, (row + 1) % rows * columns + column):
            found.add((min(i, j), max(i, j)))
    return found


GRAPHS: Mapping[str, Callable[[int], Edges]] = {"ring": _ring, "torus": _torus, "exponential": _exponential}
"""Named graphs, as functions from a number of workers to edges."""


@lru_cache(maxsize=64)
def _named(name: str, workers: int) -> MixingMatrix:
    edges = GRAPHS[name](workers) if workers > 1 else set()
    return MixingMatrix(metropolis_hastings(edges, workers), workers, f'graph="{name}"')


def graph_of(graph: str, workers: int) -> MixingMatrix:
    """Return the weights of a graph, given its name or the path to its file.

    A single worker, as after an elastic restart, has no neighbour in any graph.

    Raises:
        IncompatibleError: there is no such graph of so many workers, or no such file, or its weights are invalid.
    """
    if graph in GRAPHS:
        return _named(graph, workers)
    path = Path(graph)
    try:
        text = read_file(graph)
    except (OSError, ValueError) as error:
        known = ", ".join(GRAPHS)
        raise IncompatibleError(f"graph={graph!r} is none of {known}, and no file that can be read: {error}") from None
    if workers == 1:
        return MixingMatrix({}, 1, path.name)
    edges, weights = read_weights(text, path.name, workers)
    return MixingMatrix(weights or metropolis_hastings(edges, workers), workers, path.name)
