"""Digests of parameters, compared over ranks whose parameters are meant to be equal."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from gradwire.errors import RankMismatchError
from gradwire.exchange.segments import flat_view, local_shard
from gradwire.link.selection.control_channel import ControlChannel

__all__ = ["ReplicaCheck", "digest", "value_terms"]


def digest(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes in memory order; of a DTensor, of this rank's shard."""
    values = flat_view(local_shard(tensor.detach())).contiguous()
    return zlib.crc32(values.view(torch.uint8).cpu().numpy().data)


def value_terms(parameters: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Return the values of parameters as fields in which all ranks of a link agree."""
    return {f"values of parameter {name!r}": f"checksum {digest(p):08x}" for name, p in parameters.items()}


class ReplicaCheck:
    """Compares digests of all parameters over ranks every so many rounds.

    The digests of a round are computed when it begins, before anything of it has changed a parameter, and gathered
    beside its exchange: nobody waits for a rank that is not in this round yet, which could wait for this one in another
    collective of the backward pass. They are judged when the next round begins, on all ranks alike.

    Args:
        every: Rounds from one comparison to the next; 0: never.
        ranks: The ranks that are compared, as a message names them.
    """

    def __init__(self, every: int, ranks: Sequence[int]) -> None:
        self._every, self._ranks = every, ranks
        self._told: Callable[[], None] | None = None

    def begin(self, round: int, channel: ControlChannel, parameters: Mapping[str, torch.Tensor]) -> None:
        """Judge what was gathered in an earlier round, and gather if this one is due; call it on all ranks.

        Args:
            round: The round that begins.
            channel: Idle, as at the beginning of a round.
            parameters: Those that are equal on all ranks at this time, by name.

        Raises:
            RankMismatchError: parameters differed; the message names them, the ranks and the round.
            ExchangeError: a rank is gone.
        """
        told, self._told = self._told, None
        if told is not None:
            told()
        if self._every and round and round % self._every == 0:
            names = list(parameters)
            gathered = channel.gathering([digest(p) for p in parameters.values()], "the check of replicas")
            self._told = lambda: self._judge(names, gathered(), round)

    def forget(self) -> None:
        """Drop what was gathered: other parameters have been loaded since."""
        self._told = None

    def _judge(self, names: Sequence[str], rows: Sequence[Sequence[float]], round: int) -> None:
        differing = [name for name, found in zip(names, zip(*rows)) if len(set(found)) > 1]
        if not differing:
            return
        found = [row[names.index(differing[0])] for row in rows]
        # Of equally many the value of the lowest rank counts as the others'.
        usual = Counter(found).most_common(1)[0][0]
        odd, others = ([r for r, v in zip(self._ranks, found) if (v != usual) is wanted] for wanted in (True, False))
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise RankMismatchError(
            f"check_every={self._every}: at the beginning of round {round}, parameter {differing[0]!r}{more} of "
            f"{_ranks(odd)} differed from that of {_ranks(others)}. A rank has left out an optimizer step, has changed "
            "or loaded parameters by itself, or runs on another processor or version: let all ranks do the same, and "
            "load a checkpoint on all of them"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
