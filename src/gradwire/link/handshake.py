"""The agreement of all ranks on versions, options and parameters before an exchange, and checks of replicas later."""

from __future__ import annotations

import re
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire.errors import GradwireError, IncompatibleError, RankMismatchError
from gradwire.exchange.drivers import Group, TorchGroup, group_of
from gradwire.exchange.drivers.tables import Plain, all_gather_tables, plain
from gradwire.exchange.method import Method
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.segments import flat_view, local_shard
from gradwire.link.peers.circle import Circle
from gradwire.link.selection.control_channel import ControlChannel
from gradwire.version import __version__

Told: TypeAlias = dict[str, dict[str, float]]

ABSENT = -1
"""In place of the digests of a rank whose parameters are not compared."""


@dataclass
class Terms:
    """The terms of a rank in an agreement, and its result.

    Attributes:
        circle: The ranks that agree; has the token once the agreement is reached.
        fields: Fields that must be equal on all ranks, with values for :func:`gradwire.exchange.drivers.tables.plain`;
            lists are compared item by item.
        told: Measurements of this rank, which are sent to the others but not compared.
        everyone: The measurements of each rank, by rank; set once the agreement is reached.
        open_links: Numbers of the links that are open on this rank; once the agreement is reached, on any rank.
    """

    circle: Circle
    fields: dict[str, object] = field(default_factory=dict)
    told: Told = field(default_factory=dict)
    everyone: list[Told] = field(default_factory=list)
    open_links: set[int] = field(default_factory=set)

    @property
    def token(self) -> str:
        """The token of this agreement: unique, and the same on all ranks."""
        return self.circle.token


def compared(
    method: Method, options: Options, parameters: Mapping[str, torch.Tensor], more: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields in which all ranks of a link must agree."""
    return {
        "gradwire version": __version__,
        "method": repr(method),
        **more,
        **{k: getattr(options, k) for k in options.__dataclass_fields__ if k != "link_cost"},
        "link_cost": None if options.link_cost is None else repr(options.link_cost),
        "parameters": [f"{n} {tuple(p.shape)} {p.dtype} {p.stride()}" for n, p in parameters.items()],
    }


def code_terms(planner: Planner) -> dict[str, object]:
    """Return fields in which ranks differ if they have different code for the same spec.

    The package's own methods are compared by its version. A method from elsewhere has none, and ranks that expect
    payloads of other sizes would wait for one another until the group's timeout.
    """
    if not _is_from_elsewhere(planner.method):
        return {}
    traits = {f.name: getattr(planner.method.traits, f.name) for f in fields(planner.method.traits)}
    found: dict[str, object] = {f"trait {name!r} of the method": repr(value) for name, value in traits.items()}
    try:
        found["bytes that a rank sends in a round"] = planner.sent_bytes(planner.step_order())
    except Exception as error:
        # What has no dry run may be exchanged all the same, and raises there if not.
        found["bytes that a rank sends in a round"] = f"unknown ({type(error).__name__})"
    return found


def _is_from_elsewhere(method: Method) -> bool:
    """Return whether the class of a method, or of one inside it, is not the package's."""
    inside = [value for f in fields(method) if isinstance(value := getattr(method, f.name), Method)]
    return type(method).__module__.partition(".")[0] != "gradwire" or any(map(_is_from_elsewhere, inside))


@contextmanager
def agreement(group: Group, beside: Iterable[int] = ()) -> Iterator[Terms]:
    """Yield terms to fill in the ``with`` block, then compare them over the ranks of a group (collective call).

    A rank whose block raises still takes part, so that the others learn of it instead of waiting for it.

    Args:
        group: The ranks that agree.
        beside: Global ranks outside the group whose end also breaks the agreement.

    Raises:
        Exception: the exception of this rank's block.
        IncompatibleError: another rank's block raised; the message has the rank and the reason.
        PayloadError: a rank sent an invalid message; the error names the rank.
        RankMismatchError: fields differ; on all ranks the message names the first rank and field that differ from the
            first rank of the group.
        ExchangeError: a rank is gone.
    """
    terms = Terms(Circle(group, beside))
    own: Exception | None = None
    fields: Plain = {}
    try:
        yield terms
        fields = plain(terms.fields)
    except Exception as error:
        own = error
    if group.world_size == 1:
        if own is not None:
            raise own
        terms.everyone = [terms.told]
        return
    mine = {
        "token": uuid.uuid4().hex,
        "fields": fields,
        "problem": _text(own),
        "told": terms.told if own is None else {},
        "open_links": sorted(terms.open_links),
    }
    with terms.circle.naming("the comparison of what ranks were started with") as wait:
        gathered = all_gather_tables(mine, "handshake", group, _Message.read, wait=wait)
    if own is not None:
        raise own
    ranks = terms.circle.ranks
    for rank, theirs in zip(ranks, gathered):
        if theirs.problem:
            raise IncompatibleError(f"rank {rank}: {theirs.problem}")
    first = gathered[0].fields
    for rank, theirs in zip(ranks[1:], gathered[1:]):
        for name in {**first, **theirs.fields}:
            if theirs.fields.get(name) != first.get(name):
                difference = theirs.fields.get(name), first.get(name)
                raise RankMismatchError(_sentence(ranks[0], rank, name, *difference))
        if _keys(theirs.told) != _keys(gathered[0].told):
            difference = _keys(theirs.told), _keys(gathered[0].told)
            raise RankMismatchError(_sentence(ranks[0], rank, "coders", *difference))
    terms.circle.token = gathered[0].token
    terms.everyone = [theirs.told for theirs in gathered]
    terms.open_links = {number for theirs in gathered for number in theirs.open_links}


@dataclass(frozen=True)
class _Message:
    """The message of a rank in an agreement."""

    token: str
    fields: dict[str, object]
    problem: str
    told: Told
    open_links: list[int]

    @classmethod
    def read(cls, table: Any) -> _Message:
        """Return the message of a table.

        Raises:
            KeyError, TypeError, ValueError: the table is not a message.
        """
        found = cls(**table)
        if not re.fullmatch("[0-9a-f]{32}", found.token):
            raise ValueError(f"token {found.token!r}")
        if not isinstance(found.fields, dict) or not isinstance(found.problem, str):
            raise TypeError("fields or problem")
        if not all(isinstance(number, int) and number >= 0 for number in found.open_links):
            raise ValueError(f"open links {found.open_links!r}")
        for times in found.told.values():
            if not all(isinstance(time, int | float) for time in times.values()):
                raise ValueError(f"times {times!r}")
        return found


def _keys(told: Told) -> list[object]:
    return [[name, sorted(times)] for name, times in sorted(told.items())]


def _text(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"


def _sentence(first: int, rank: int, name: str, found: object, wanted: object) -> str:
    if isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            found, wanted = f"{len(found)} entries", f"{len(wanted)} entries"
        else:
            found, wanted = next((f, w) for f, w in zip(found, wanted) if f != w)
    return (
        f"rank {rank} differs from rank {first} in {name!r}: rank {rank} has {found}, rank {first} has {wanted}; "
        "start all ranks with the same"
    )


def default_group() -> Group:
    """Return the group of all ranks.

    Raises:
        IncompatibleError: there is no group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise IncompatibleError("no process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD
    if group is None:
        raise IncompatibleError("this process is in no group")
    return TorchGroup(group)


def digest(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes in memory order; for a DTensor, of this rank's shard."""
    values = flat_view(local_shard(tensor.detach())).contiguous()
    return zlib.crc32(values.view(torch.uint8).cpu().numpy().data)


def value_terms(parameters: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Return digests of parameters as fields in which all ranks of a link must agree."""
    return {f"values of parameter {name!r}": f"checksum {digest(p):08x}" for name, p in parameters.items()}


def compare_values(parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup, beside: Iterable[int]) -> None:
    """Compare parameters over the ranks of a group (collective call).

    Args:
        parameters: Parameters by name.
        group, beside: See :func:`agreement`.

    Raises:
        RankMismatchError: ranks have different ones.
        ExchangeError: a rank is gone.
    """
    with agreement(group_of(group), beside) as mine:
        mine.fields = value_terms(parameters)


class ReplicaCheck:
    """Compares digests of all parameters over ranks at regular rounds.

    The digests are computed when a round begins, before it changes a parameter, and gathered while it runs. All ranks
    compare them when the next round begins. So no rank waits for a rank that has not begun the round: that rank could
    itself be waiting for the first one, in another collective of the backward pass.

    Args:
        every: Number of rounds between two comparisons; 0: never.
        ranks: Numbers of the ranks, for messages.

    Attributes:
        takes_part: False while this rank's parameters are not compared, since it has run out of data.
    """

    def __init__(self, every: int, ranks: Sequence[int]) -> None:
        self._every, self._ranks, self.takes_part = every, ranks, True
        self._told: Callable[[], None] | None = None

    def begin(self, round: int, channel: ControlChannel, parameters: Mapping[str, torch.Tensor]) -> None:
        """Compare the digests of an earlier round, and start to gather this one's if due; call it on all ranks.

        Args:
            round: The round that begins.
            channel: The control channel, idle as it is when a round begins.
            parameters: The parameters that must be equal on all ranks now, by name.

        Raises:
            RankMismatchError: parameters differed; the message names them, the ranks and the round.
            ExchangeError: a rank is gone.
        """
        told, self._told = self._told, None
        if told is not None:
            told()
        if self._every and round and round % self._every == 0:
            names = list(parameters)
            told_here = [digest(p) if self.takes_part else ABSENT for p in parameters.values()]
            gathered = channel.gathering(told_here, "the check of replicas")
            self._told = lambda: self._judge(names, gathered(), round)

    def forget(self) -> None:
        """Drop gathered digests, after other parameters were loaded."""
        self._told = None

    def _judge(self, names: Sequence[str], rows: Sequence[Sequence[float]], round: int) -> None:
        present = [(rank, row) for rank, row in zip(self._ranks, rows) if ABSENT not in row]
        differing = [name for name, found in zip(names, zip(*(row for _, row in present))) if len(set(found)) > 1]
        if not differing:
            return
        found = [(rank, row[names.index(differing[0])]) for rank, row in present]
        # If several values are equally frequent, that of the lowest rank counts as the right one.
        usual = Counter(value for _, value in found).most_common(1)[0][0]
        odd, others = ([rank for rank, value in found if (value != usual) is wanted] for wanted in (True, False))
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise RankMismatchError(
            f"check_every={self._every}: at the beginning of round {round}, parameter {differing[0]!r}{more} of "
            f"{_ranks(odd)} differed from that of {_ranks(others)}. A rank has left out an optimizer step, has changed "
            "or loaded parameters by itself, or runs on another processor or version: let all ranks do the same, and "
            "load a checkpoint on all of them"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
