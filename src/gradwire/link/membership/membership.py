"""The membership of a worker, for users, and how it gets one."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.method import is_number, is_whole, require
from gradwire.link.membership.board import Board, address_of
from gradwire.link.membership.coordinator_connection import PATIENCE_S
from gradwire.link.membership.epoch_group import LOOK_S
from gradwire.link.membership.membership_link import MembershipLink
from gradwire.link.membership.party import Party
from gradwire.link.membership.quorum import STALENESS, Quorum
from gradwire.link.membership.quorum_link import QuorumLink
from gradwire.link.membership.trace import MembershipTrace

JOIN, SECRET = "GRADWIRE_JOIN", "GRADWIRE_SECRET"
"""Variables with the coordinator's address and the secret."""

GRACE_S, SILENCE_S, LATE_S = 1.0, 5.0, 1.0


class Membership(Party):
    """A training that this worker belongs to, or asks to belong to; :func:`gradwire.join` makes one.

    It is a context manager, at whose end the worker leaves.
    """

    _handlers: tuple[_Leaves, ...] = ()

    @property
    def link_type(self) -> type[MembershipLink]:
        """The kind of link that ``gradwire.Link`` makes on it."""
        return MembershipLink if self.seat.quorum is None else QuorumLink

    @property
    def name(self) -> str:
        """Name of this worker in messages and traces."""
        return self.seat.me.name

    @property
    def epoch(self) -> int:
        """Number of the current epoch; 0 before the first."""
        return 0 if self.seat.epoch is None else self.seat.epoch.number

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members by rank; empty before the first epoch."""
        return () if self.seat.epoch is None else tuple(member.name for member in self.seat.epoch.members)

    @property
    def rank(self) -> int:
        """This worker's place among the members; 0 before the first epoch."""
        return 0 if self.seat.epoch is None else self.seat.epoch.ids().index(self.seat.me.id)

    @property
    def world_size(self) -> int:
        """Number of members; 1 before the first epoch."""
        return 1 if self.seat.epoch is None else len(self.seat.epoch.members)

    @property
    def left(self) -> bool:
        """True once this worker has left: its last round counts, and it takes part in no other.

        False if an error ended its part: the link raises that where it exchanges next.
        """
        return self.seat.left and self.failure is None

    def leave(self) -> None:
        """Leave after the current round, or the next one if none is under way: go on until :attr:`left` is true.

        The round is finished, and what this worker has not sent yet is handed to another one. While it waits to be
        taken in, it stops waiting: what waits raises :class:`gradwire.LeftOutError`.
        """
        self.seat.leaving = True

    def trace(self) -> MembershipTrace:
        """Return who took part in which rounds so far, since the training began; see :func:`gradwire.replay`.

        A worker that was left out, and left before it was in again, knows of none.

        Raises:
            IncompatibleError: this worker has not been a member yet, or rounds go on with a quorum.
        """
        if self.seat.quorum is not None:
            raise IncompatibleError("a trace does not tell which members a quorum's rounds went on without")
        with self.lock:
            return MembershipTrace.of(self.seat.history)

    def close(self) -> None:
        """Leave at once, unless this worker has left already, and close all connections.

        Raises:
            GradwireError: what ended this worker's part, if nothing has raised it yet.
        """
        self._end()
        if self.failure is not None and self.problem is self.failure:
            self.problem = None
            raise self.failure

    def _end(self) -> None:
        for handler in self._handlers:
            handler.end()
        link = self.link
        if link is not None:
            while not self.lock.acquire(timeout=LOOK_S):
                # A thread of the link waits with the lock until the coordinator is back. A program that ends does not.
                if self.board.is_away:
                    self.board.close()
            try:
                link.depart()
            finally:
                self.lock.release()
            # A link that could not be opened has nothing to close.
            getattr(link, "close", lambda: None)()
        self.board.close()

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error that ends the program is not replaced by another.
        (self.close if error is None else self._end)()


def join(
    address: str | None = None,
    *,
    secret: str | None = None,
    name: str | None = None,
    least: int = 1,
    grace_s: float = GRACE_S,
    silence_s: float = SILENCE_S,
    patience_s: float = PATIENCE_S,
    quorum: int | None = None,
    late_s: float = LATE_S,
    staleness: int = STALENESS,
    keyed: bool = True,
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
) -> Membership:
    """Join a training whose workers come and go.

    The worker belongs to it as soon as it has made its link, on as many machines as there are::

        with gw.join("10.0.0.1:29400", secret=...) as membership:
            link = gw.Link(model.named_parameters(), "terngrad", group=membership, optimizer=optimizer)
            for batch in batches:
                if membership.left:
                    break
                optimizer.zero_grad()
                loss(model, batch).backward()
                try:
                    link.reduce_()
                except gw.LeftOutError:
                    continue
                optimizer.step()

    Args:
        address: Address of ``gradwire coordinate``, such as ``"10.0.0.1:29400"``; by default the variable
            ``GRADWIRE_JOIN``, which ``gradwire run --join`` sets.
        secret: The secret that it printed; by default the variable ``GRADWIRE_SECRET``.
        name: Name of this worker in messages; host and process by default.
        least: Number of workers that begin the training together. Later ones are taken in one by one.
        grace_s: Seconds that members wait for one another's reports when a member is gone, and five more if fewer than
            half have reported or this worker was cut off from most. Who has not reported then is left out, and comes
            again.
        silence_s: Seconds without a sign of life after which a member counts as gone: stopped, or cut off. The end of
            a process is noticed at once.
        patience_s: Seconds that this worker waits to be taken in, and, when members change, for a coordinator that is
            away.
        quorum: For methods with local steps: number of members that have taken all their local steps, with which a
            round goes on. The others are asked to contribute, after their current step, what they have; those that
            still compute ``late_s`` later contribute to a later round. Means are weighted by numbers of local steps, or
            by what :meth:`gradwire.Link.weigh` was told. None: a round waits for all members. The same on all members.
        late_s: Seconds that a round waits for further members once there is a quorum. The first member's value applies.
        staleness: Largest number of rounds in a row that a member may miss: when it would miss one more, the others
            wait for it. With 0 a round waits for all, but for none longer than one local step. The same on all members.
        keyed: True: every message between members carries a digest under the secret (BLAKE2b), so that one that
            somebody else sent or altered is refused. False, where the network is private: checksums alone, which
            detect accidents. All members must have the same.
        signals: Signals that call :meth:`Membership.leave`, the first time and until the membership is closed; they are
            handled only if this is the main thread.

    Raises:
        HyperparameterError: a value is wrong, or the address or the secret is missing.
        IncompatibleError: the secret is not that of the run.
        ExchangeError: the coordinator cannot be reached.
    """
    address = os.environ.get(JOIN) if address is None else address
    if address is None:
        raise HyperparameterError(f"address: none was given, and {JOIN} is not set: take the coordinator's")
    host, port = address_of(address)
    require(is_whole(least, 1), "least", f"a whole number of at least 1 is needed, not {least!r}")
    times = {"grace_s": grace_s, "silence_s": silence_s, "patience_s": patience_s, "late_s": late_s}
    for field, value in times.items():
        require(is_number(value, above=0), field, f"a number of seconds above 0 is needed, not {value!r}")
    rule = None if quorum is None else Quorum(quorum, staleness)
    require(isinstance(keyed, bool), "keyed", f"True or False is needed, not {keyed!r}")
    secret = os.environ.get(SECRET) if secret is None else secret
    if secret is None:
        raise HyperparameterError(f"secret: none was given, and {SECRET} is not set: take the coordinator's")
    board = Board(host, port, secret, patience_s)
    made = Membership(board, name=name, least=least, quorum=rule, keyed=keyed, **times)
    if threading.current_thread() is threading.main_thread():
        made._handlers = tuple(_Leaves(made, number) for number in signals)
    return made


class _Leaves:
    """Lets a membership leave when a signal comes. A second signal, and one after its end, does what it did before."""

    def __init__(self, membership: Membership, number: signal.Signals) -> None:
        self.number, self.ended = number, False
        self.before: Any = signal.getsignal(number)
        self._held = weakref.ref(membership)
        signal.signal(number, self)

    def __call__(self, got: int, frame: FrameType | None) -> None:
        had_ended, membership = self.ended, self._held()
        before = self.end()
        if had_ended or membership is None:
            if callable(before):
                before(got, frame)
            elif before is not signal.SIG_IGN:
                signal.signal(self.number, signal.SIG_DFL)
                signal.raise_signal(self.number)
            return
        membership.leave()
        if isinstance(before, _Leaves):
            # A process may belong to several trainings.
            before(got, frame)

    def end(self) -> Any:
        """Handle no further signal; return what handles it from now on."""
        self.ended = True
        before = self.before
        while isinstance(before, _Leaves) and (before.ended or before._held() is None):
            before = before.before
        number = self.number
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is self:
            signal.signal(number, signal.SIG_DFL if before is None else before)
        return before
