"""The protocol of a membership: how members take a round together, and who goes on after one of them is gone.

Like every protocol of gradwire it does no input or output. It yields requests, and whoever runs it sends back their
replies: a real member with a store and connections, or a test that explores all orders and faults.

A round has two phases. First the members exchange; then each that holds the mean tells all others so, by its *vote*.
The round *counts* for a member when it has the votes of all, and only then is anything applied. If either phase breaks,
the member writes a *report*, how many rounds it holds, and closes its connections, so that the phase breaks for all
who have not ended it. The next *epoch* is agreed by a comparison and exchange in the store: it has the members of which
reports were found within a grace, and its first round is the least number of rounds that any of them holds.

- A round that counted for one member is held by all, since all have voted. So it counts for all members of the next
  epoch, too: nobody has to take back what it has applied.
- A round that not all members of the next epoch hold has counted for nobody. They take it again, without those that
  are gone, each with the gradient that it still has.
- A member that finds itself left out (it was stopped, or cut off, for longer than the grace) has to come again, and
  receives the state of the others in place of its own.

Under a *quorum* members call the roll before they exchange: each tells all others whether it has a difference to
contribute, and all decide by the same answers whether the round begins. All members take part in it. Those that still
compute contribute nothing, and hold its mean as the others do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from gradwire.link.membership.epochs import changed_epoch, next_epoch
from gradwire.link.membership.quorum import Presence, Quorum
from gradwire.link.membership.records import Epoch, EpochReport, Member, new_id
from gradwire.link.membership.steps import (
    FIRST,
    Ask,
    Await,
    Break,
    Collect,
    Count,
    Exchange,
    Founders,
    Hand,
    LeftOut,
    Meet,
    Propose,
    Put,
    Requests,
    Rest,
    Roll,
    Serve,
    Steps,
    Undo,
    Vote,
    Word,
    epoch_key,
    named_key,
    report_key,
)
from gradwire.link.membership.trace import History

MOST_ADOPTED = 256
"""Number of epochs that a member remembers."""


class Seat:
    """The place of one worker in a training: what it knows, and the steps by which it changes.

    Attributes:
        me: This worker; another member each time it comes in.
        epoch: The epoch that it belongs to; None before the first.
        rounds: Number of rounds that count.
        held: Number of rounds whose outcome it holds: ``rounds``, or one more.
        holds: True if it has the state of the training.
        leaving: Set it to leave after the current round.
        left: True once it has left.
        offers: Set it on the first member to let all offer their state to newcomers after the current round.
        position: Samples of the data that were handed out, over all members.
        reserve: Samples to hand out to each worker that is taken in, for the round that the others have begun.
        adopted: The latest epochs that it has adopted, the last one last.
        history: All epochs that it knows of, for a trace.
        parted: Ids of members that leave with the next epoch, and whose unsent parts were handed over.
        quorum: The rule by which rounds begin without some members; None: they have all.
        since: Number of rounds that counted when this member took over the global parameters from which it computes.
    """

    def __init__(self, me: Member, quorum: Quorum | None = None) -> None:
        self.me, self.quorum = me, quorum
        self.epoch: Epoch | None = None
        self.adopted: deque[Epoch] = deque(maxlen=MOST_ADOPTED)
        self.history = History()
        self.parted: tuple[str, ...] = ()
        self.rounds = self.held = self.position = self.reserve = 0
        self.holds = self.leaving = self.left = self.offers = False
        self.since = self._rolls = 0
        self._contributes = True
        self._changes: tuple[str, ...] | None = None
        self._has_met = self._serves = False

    @property
    def current(self) -> Epoch:
        """The epoch that it belongs to.

        Raises:
            LeftOut: it belongs to none.
        """
        if self.epoch is None:
            raise LeftOut
        return self.epoch

    def again(self, id: str | None = None) -> None:
        """Become another member, without state, in order to come in again; what was told to leave still leaves."""
        self.me = replace(self.me, id=new_id() if id is None else id)
        self.epoch, self._changes, self._has_met = None, None, False
        self.rounds = self.held = self.since = 0
        # What it drew for a round in which it has no part counts for nobody.
        self.position = self.reserve = 0
        self.holds = self.offers = self._serves = False
        self.adopted.clear()
        self.history, self.parted = History(), ()

    # ------------------------------------------------------------------ coming in

    def enter(self) -> Steps[None]:
        """Found a training with the others that have asked, or be taken into one.

        Raises:
            LeftOut: it was named, but the members went on without it before it had met them.
        """
        yield Ask(self.me)
        epoch: Epoch | None = None
        founders: tuple[Member, ...] = yield Founders()
        if founders:
            first = Epoch(1, founders, tuple(member.id for member in founders[1:]))
            epoch = yield Propose(FIRST, first)
        else:
            # Another founder may have named this one.
            epoch = yield Await(FIRST, for_ever=True)
        if epoch is None or self.me.id not in epoch.ids():
            epoch = yield Await(named_key(self.me.id), for_ever=True)
        if epoch is None:
            raise LeftOut
        yield from self._adopt(epoch)
        yield from self._meet()

    # ------------------------------------------------------------------ a round

    def round(self) -> Steps[None]:
        """Take the next round with the others; when it returns the round counts, or this member has left.

        Raises:
            LeftOut: the members go on without this one; :meth:`again` and :meth:`enter` bring it back.
        """
        yield from self.change()
        yield from self.meet()
        wanted = self.rounds + 1
        while True:
            words: tuple[Word, ...] | None = None
            if (yield from self._exchange()):
                self.held = wanted
                words = yield Vote(self.rounds, (yield from self._word()))
            if words is not None:
                yield from self._count(wanted)
                self.position = max(self.position, *(word.position for word in words))
                yield from self._note(words)
                return
            yield from self._recover()
            if self.rounds == wanted:
                # Others have counted the round and may have applied it: this member meets them when it has, too.
                return
            yield from self._meet()

    @property
    def has_met(self) -> bool:
        """True once all members of the epoch have met."""
        return self._has_met

    def meet(self) -> Steps[None]:
        """Between two rounds, meet the members of the epoch, if they have not met.

        Raises:
            LeftOut: as :meth:`round`.
        """
        if not self._has_met:
            yield from self._meet()

    def recover(self) -> Steps[None]:
        """Between two rounds, agree on the next epoch when this one has broken; the next round meets in it.

        Raises:
            LeftOut: as :meth:`round`.
        """
        yield from self._recover()

    def follow(self, epoch: Epoch) -> Steps[None]:
        """Between two rounds, adopt the next epoch when others have begun it; the next round meets in it.

        Raises:
            LeftOut: as :meth:`round`.
        """
        yield Break()
        yield from self._adopt(epoch)

    def change(self) -> Steps[None]:
        """Go into the next epoch, if the last round's votes said so; call it when that round has been applied.

        If somebody is new there, who waits for the state, meet at once; else the next round does, or :meth:`meet`.

        Raises:
            LeftOut: as :meth:`round`.
        """
        if self._serves:
            self._serves = False
            yield Serve(self.rounds)
        leavers, self._changes = self._changes, None
        if leavers is not None:
            yield from self._go_on_without(leavers)
        if self.epoch is not None and self.epoch.new:
            yield from self.meet()

    # ------------------------------------------------------------------ parts

    def _go_on_without(self, leavers: tuple[str, ...]) -> Steps[None]:
        """Go into the next epoch, which has those that asked, and others no longer."""
        epoch = self.current
        stay = [member.id for member in epoch.members if member.id not in leavers]
        yield Put(report_key(epoch.number, self.me.id), self.report())
        following: Epoch | None
        if stay[0] == self.me.id:
            joining: tuple[Member, ...] = yield Requests()
            changed = changed_epoch(epoch, leavers, joining, self.rounds, self.position, self.reserve)
            following = yield Propose(epoch_key(changed.number), changed)
        else:
            following = yield Await(epoch_key(epoch.number + 1))
        yield Break()
        if following is None:
            yield from self._agree(self.report())
        else:
            yield from self._adopt(following)

    def _exchange(self) -> Steps[bool]:
        """Exchange a round; under a quorum, as soon as there is one."""
        while self.quorum is not None:
            present: tuple[Presence, ...] | None = yield Roll(self.rounds, self.rounds - self.since, self._rolls)
            self._rolls += 1
            if present is None:
                return False
            if self.quorum.begins(present):
                self._contributes = present[self.current.ids().index(self.me.id)].weight > 0
                return bool((yield Exchange(self.rounds, present)))
            yield Rest()
        return bool((yield Exchange(self.rounds)))

    def _word(self) -> Steps[Word]:
        joins = False
        if self.current.members[0].id == self.me.id:
            joins = bool((yield Requests()))
        # Who leaves has handed in all it has.
        return Word(self.leaving and self._contributes, joins, self.position, self.offers)

    def _note(self, words: Sequence[Word]) -> Steps[None]:
        """Note the changes that the votes of a round announce; if this member leaves, leave."""
        self._serves = words[0].offers
        members = self.current.members
        leavers = tuple(member.id for member, word in zip(members, words) if word.leaving)
        if not leavers and not words[0].joins:
            return
        heir = next((member.id for member in members if member.id not in leavers), None)
        self.parted = leavers
        if leavers and heir is not None:
            yield Hand(leavers, heir)
        if self.me.id in leavers:
            # All it has is handed over: without the report it counts as lost, and loses nothing.
            yield Put(report_key(self.current.number, self.me.id), self.report(), waits=False)
            yield Break()
            self.left = True
            return
        self._changes = leavers

    def _count(self, rounds: int) -> Steps[None]:
        yield Count(rounds - 1)
        self.rounds = rounds
        if self._contributes:
            self.since = rounds

    def _recover(self, missed: tuple[str, ...] = ()) -> Steps[None]:
        """Agree with the members that are left on the next epoch, and adopt it."""
        report = self.report(missed)
        # A busy machine takes seconds to hang up: the others would go on without a member that reports after that.
        yield Put(report_key(report.number, self.me.id), report)
        yield Break()
        yield from self._agree(report)

    def _agree(self, report: EpochReport) -> Steps[None]:
        epoch = self.current
        keys = tuple(report_key(epoch.number, id) for id in epoch.ids() if id != self.me.id)
        found: tuple[EpochReport, ...] = yield Collect(keys)
        proposed = next_epoch(epoch, {told.id: told for told in (report, *found)})
        if proposed.members:
            following: Epoch | None = yield Propose(epoch_key(proposed.number), proposed)
        else:
            # Those that hold the state may only be late. An epoch to which nobody belongs would end the training for
            # them: a newcomer whose connections broke comes again instead, unless they have gone on with it.
            following = yield Await(epoch_key(proposed.number))
            if following is None:
                # If they name it from now on, they need not wait for it.
                gone = replace(report, number=proposed.number, leaving=True, met=False)
                yield Put(report_key(gone.number, self.me.id), gone, waits=False)
        yield from self._adopt(following)

    def _adopt(self, epoch: Epoch | None) -> Steps[None]:
        if epoch is None or self._has_no_part_in(epoch):
            raise LeftOut
        if self.me.id not in epoch.ids():
            raise LeftOut
        if self.holds and self.held < epoch.round:
            raise LeftOut
        self.epoch, self._changes, self._has_met = epoch, None, False
        self._rolls = 0
        self.adopted.append(epoch)
        self.history.add(epoch, self.parted)
        self.parted = ()
        # The one that took them in may end before it tells them. Founders are named, too: their requests are answered.
        for id in epoch.ids() if epoch.number == 1 else epoch.new:
            yield Put(named_key(id), epoch)
        if self.holds and self.held > epoch.round:
            yield Undo(epoch.round)
            self.held = epoch.round
        elif self.holds and self.rounds < epoch.round:
            yield from self._count(epoch.round)
        self.position = max(self.position, epoch.position)

    def _has_no_part_in(self, epoch: Epoch) -> bool:
        """Return whether an epoch has the number of this member's next one, and follows another than this member's."""
        own = self.epoch
        return own is not None and epoch.number == own.number + 1 and epoch.previous != own.digest()

    def _meet(self) -> Steps[None]:
        """Meet the members of the epoch, or those that are left of them."""
        while True:
            epoch = self.current
            missed: tuple[str, ...] | None = yield Meet(epoch)
            if missed is None:
                if not self.holds:
                    self.since = epoch.round
                self.holds, self.rounds, self.held, self._has_met = True, epoch.round, epoch.round, True
                return
            yield from self._recover(missed)

    def part(self) -> tuple[EpochReport, ...]:
        """Leave between two rounds, without the others; return what they have to know.

        If the last round's votes have announced the next epoch, it has this member, which never comes to it.
        """
        announced, self.leaving, self.left = self._changes is not None, True, True
        # Nobody can take the state from it any more.
        report = replace(self.report(), holds=False)
        return (report, replace(report, number=report.number + 1, met=False)) if announced else (report,)

    def report(self, missed: tuple[str, ...] = ()) -> EpochReport:
        """Return this member's report about the end of its epoch."""
        return EpochReport(
            self.current.number, self.me.id, self.held, self.holds, self.leaving, self._has_met, self.position, missed
        )
