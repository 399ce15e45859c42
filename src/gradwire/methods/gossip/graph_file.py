"""Files that describe a graph of workers: an edge a line."""

from __future__ import annotations

import math
from pathlib import Path

from gradwire.errors import IncompatibleError

__all__ = ["is_special", "read_file", "read_weights"]

MOST_BYTES = 1 << 24
"""Bytes of a file at most: some million edges."""


def is_special(name: str) -> bool:
    """Return whether a name is that of a folder, a device or a pipe, none of which holds a graph."""
    try:
        return Path(name).exists() and not Path(name).is_file()
    except (OSError, ValueError):
        # A name that cannot be one of a file is told as such when the file is read.
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
    return data.decode()


def read_weights(text: str, name: str, workers: int) -> tuple[set[tuple[int, int]], dict[tuple[int, int], float]]:
    """Read the edges of a graph, and their weights where it states any.

    A line is ``i j`` or ``i j weight``: two ranks, counted from 0, that exchange with each other, and by which weight,
    above 0 and at most 1. Either all lines have a weight or none. An edge is written once, or in both directions with
    one weight. What follows a ``#``, and empty lines, are left out.

    Args:
        name: Of the file, for messages.
        workers: How many there are.

    Returns:
        The edges (lower rank, higher rank), and the weight of each, or no weights at all.

    Raises:
        IncompatibleError: a line is none of these, names a rank that there is not, or contradicts another.

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
