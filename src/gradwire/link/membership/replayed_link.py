"""The link and the membership of a worker in a replay: the real ones, whose epochs come from a trace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.errors import ExchangeError, IncompatibleError, LeftOutError
from gradwire.exchange.drivers import Meetings
from gradwire.exchange.drivers.transports.in_process import InProcessBackend
from gradwire.link.handshake import Terms
from gradwire.link.membership.board import Board
from gradwire.link.membership.epoch_group import TIMEOUT, EpochGroup
from gradwire.link.membership.membership import GRACE_S, SILENCE_S, Membership
from gradwire.link.membership.membership_link import MembershipLink
from gradwire.link.membership.records import Epoch, EpochReport, Seal
from gradwire.link.membership.steps import Hand
from gradwire.link.peers.circle import Circle
from gradwire.link.round import Mean
from gradwire.link.site import numbers_in_use

if TYPE_CHECKING:
    pass

T = TypeVar("T")

ENTER, EXCHANGE, CHANGE, PROGRAM, ENDED = "enter", "exchange", "change", "program", "ended"
"""Where a worker stands: its link is being made; it has a gradient or difference to exchange; its exchange was applied
and its steps were local ones; its program may go on; its program has ended."""

RUN, END = "run", "end"
"""Orders to go on with the program, and to end."""


@dataclass(frozen=True)
class MeetOrder:
    """Order to meet the members of an epoch."""

    epoch: Epoch
    meetings: Meetings
    parted: tuple[str, ...]


@dataclass(frozen=True)
class RoundOrder:
    """Order to exchange; then members with some names leave, and the heir takes over what they have not sent."""

    leavers: tuple[str, ...]
    heir: str | None


class Gone(BaseException):
    """The trace has this worker no longer: its program is unwound."""


SEAL = Seal("the secret of a replay")

_RUNNING = threading.Lock()


@contextlib.contextmanager
def the_only_replay() -> Iterator[None]:
    """Let no other replay of this process run meanwhile.

    Raises:
        IncompatibleError: another one runs.
    """
    if not _RUNNING.acquire(blocking=False):
        raise IncompatibleError(
            "another replay runs in this process, and replays share the generators of torch, NumPy and Python: run one "
            "after the other, or each in a process of its own"
        )
    try:
        yield
    finally:
        _RUNNING.release()


class InProcessGroup(EpochGroup):
    """The members of an epoch that are threads of one process, seen from one of them."""

    def __init__(self, epoch: Epoch, place: int, meetings: Meetings) -> None:
        self.epoch, self.place, self.store, self._key = epoch, place, dist.HashStore(), b""
        self.ranks, self.timeout = tuple(range(len(epoch.members))), TIMEOUT
        self.has_nccl, self.device, self.meetings = False, torch.device("cpu"), meetings
        self._backend: Any = InProcessBackend(meetings, place)
        self.watch = None
        self.circle = Circle(self)

    def connect(self, lanes: int) -> None:
        """Do nothing: threads of one process are connected."""

    def abort(self) -> None:
        """Let everything that waits for another member raise."""
        if self.meetings is not None:
            self.meetings.break_off()

    def leave(self, how: str) -> None:
        """Do nothing: nobody waits for a member of an epoch that has ended."""
        self._backend = None


class ReplayBoard(Board):
    """The records of a replay: which members have left by their own word."""

    def __init__(self) -> None:
        self.parted: tuple[str, ...] = ()

    @property
    def seal(self) -> Seal:
        """The seal of all replays."""
        return SEAL

    def get(self, key: str, kind: type[Any]) -> Any:
        """Return the report of a member that has left; None for any other record."""
        _, number, id = key.split("/")
        told = kind is EpochReport and id in self.parted
        return EpochReport(int(number), id, 0, holds=True, leaving=True) if told else None

    def get_all(self, keys: Collection[str], kind: type[Any], *, each: bool = False) -> dict[str, Any]:
        """Return the reports of members that have left."""
        found = {key: self.get(key, kind) for key in keys}
        return {key: record for key, record in found.items() if record is not None}

    def close(self) -> None:
        """Do nothing."""


class ReplayedLink(MembershipLink):
    """The link of a worker in a replay, whose members change when the trace says so."""

    _party: ReplayedMembership

    def _enter(self) -> None:
        """Meet the first members that the trace has this worker meet."""
        self._go(self._party.stop(ENTER))
        self._party.stop(PROGRAM)

    def _take_terms(self, mine: Terms) -> int:
        count = super()._take_terms(mine)
        mine.open_links = numbers_in_use()
        return count

    def _group_of(self, epoch: Epoch) -> EpochGroup:
        return InProcessGroup(epoch, epoch.ids().index(self._seat.me.id), self._party.meetings)

    def _look(self) -> None:
        """Do nothing: the trace says what changes."""

    def settle(self) -> None:
        """Do nothing: the trace says what changes."""

    def depart(self) -> None:
        """Leave: what was not sent yet is lost."""
        self._seat.left = True

    def _hang_up(self, how: str) -> None:
        # Nobody waits for messages: connections are not broken off.
        self._epoch_group = None
        for lane in self._lanes():
            lane.close()
        self._round = self._step = None

    def _go(self, order: MeetOrder) -> None:
        """Meet the members of an epoch."""
        seat, party = self._seat, self._party
        party.meetings, party.records.parted = order.meetings, order.parted
        seat.epoch = order.epoch
        missed = self._meet(order.epoch)
        if missed is not None:
            raise ExchangeError(f"epoch {order.epoch.number} of the trace: not all members met")
        seat.holds, seat.rounds, seat.held = True, order.epoch.round, order.epoch.round

    def exchange_all(self, start: Callable[[], Iterable[tuple[T, Mean]]]) -> list[tuple[T, torch.Tensor]]:
        self._refuse_after_the_end()
        party, seat = self._party, self._seat
        while isinstance(order := party.stop(EXCHANGE), MeetOrder):
            comes_again = seat.me.id in order.epoch.new
            if comes_again:
                party.counts["left_out"] += 1
                self._hang_up("comes again")
            self._go(order)
            if comes_again:
                if self.method.traits.local_steps:
                    return []
                party.stop(PROGRAM)
                raise LeftOutError(
                    f"the trace has this worker ({party.name}) come in again in epoch {order.epoch.number} at round "
                    f"{order.epoch.round}: its parameters are the others' now; compute the gradient again"
                )
        means = self.wait_for(list(start()))
        self._settle()
        seat.rounds = seat.held = seat.rounds + 1
        seat.reserve = 0
        if order.leavers and order.heir is not None:
            self._hand(Hand(order.leavers, order.heir), seat.current)
        seat.left = seat.me.id in order.leavers
        if not self.method.traits.local_steps:
            party.stop(PROGRAM)
        return means

    def after_exchange(self) -> None:
        party = self._party
        if self._seat.left or self._seat.epoch is None:
            party.stop(PROGRAM)
            return
        while isinstance(order := party.stop(CHANGE), MeetOrder):
            self._go(order)


class ReplayedMembership(Membership):
    """The membership of a worker in a replay; :func:`gradwire.replay` makes one for each."""

    def __init__(self, name: str, stop: Callable[[str], Any]) -> None:
        self.records = ReplayBoard()
        super().__init__(
            self.records, name=name, least=1, grace_s=GRACE_S, silence_s=SILENCE_S, patience_s=GRACE_S, keyed=False
        )
        self.stop = stop
        self.meetings = Meetings(1)

    @property
    def link_type(self) -> type[ReplayedLink]:
        """The kind of link that ``gradwire.Link`` makes on it."""
        return ReplayedLink

    def leave(self) -> None:
        """Do nothing: the trace says when a worker leaves."""
