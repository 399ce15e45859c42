"""The steps of the protocol that wait for records of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from gradwire.errors import ExchangeError
from gradwire.link.failures import WarnOnce
from gradwire.link.membership.board import MOST_AT_ONCE
from gradwire.link.membership.epoch_group import LOOK_S, EpochGroup
from gradwire.link.membership.preparation import candidate_of
from gradwire.link.membership.records import Epoch, EpochReport, Member, Request
from gradwire.link.membership.serving_link import ServingLink
from gradwire.link.membership.steps import FIRST, candidate_key, epoch_key, invited_key, report_key

POLL_S = 0.02
"""Time between two looks for a record that is waited for."""

MINORITY_S = 5.0
"""Time beyond the grace that members wait for the reports of others if fewer than half of all have reported, or if they
were cut off."""

RECENT_S = 4 * LOOK_S
"""Time for which requests count that were read from a store at the end of a long link."""

LAST_EPOCHS = 8
"""Number of epochs of which requests that were read before they began may still be at hand."""

ASK_S = 0.5
"""Time between two requests of a worker that is connected to the members, and looks whether it is named."""

TOLD_S = 5.0
"""Time after which a worker that waits to be taken in says so."""

VANISHED_S = 0.2
"""Time that members wait, once all others have reported, for those that ended or fell silent without a word: one that
lives on, and was cut off from them, may reach the store."""


class StoreSteps(ServingLink):
    """Waits for reports, epochs and requests, in the store of a membership."""

    _warnings: WarnOnce
    _asked_s: tuple[float, tuple[Member, ...]]
    """When requests were heeded for the last time, and from whom they were."""
    _read: tuple[float, list[Request]]
    """When they were read between two rounds, or in one, by the thread that watches; and those that there were."""
    _attempts = 0
    """Number of candidates that this member has written."""
    _prepares = True
    """Whether members connect to newcomers before they take them in."""

    def _collect(self, keys: Sequence[str]) -> tuple[EpochReport, ...]:
        board, epoch = self._party.board, self._seat.current
        began_s, following = time.monotonic(), epoch_key(epoch.number + 1)
        silent = [key for key in keys if key in {report_key(epoch.number, id) for id in self._vanished}]
        alive = [key for key in keys if key not in silent]
        found: dict[str, EpochReport] = {}
        while True:
            waited_s = time.monotonic() - began_s
            # From now on reports count one by one, also where all that live were asked for together.
            is_late = waited_s > self._grace_s(1, 1, found.keys() >= set(alive))
            missing = [key for key in keys if key not in found]
            # Elsewhere one question tells whether all that live have written.
            few = board.is_far and len(missing) <= MOST_AT_ONCE
            for some in [missing] if few else [[key for key in part if key in missing] for part in (alive, silent)]:
                found |= board.get_all(some, EpochReport, each=is_late or few)
            # Most others were out of reach, and live: they know better than this member who of them is only late.
            cut_off = 2 * len(silent) > len(keys) > 1 and not found.keys().isdisjoint(silent)
            # One that lacks the state waits longer, too, until a member that has it has reported.
            has_state = self._seat.holds or epoch.round == 0 or any(report.holds for report in found.values())
            reported = 0 if not has_state else 1 if cut_off else 1 + len(found)
            is_last = is_late and waited_s > self._grace_s(reported, 1 + len(keys), found.keys() >= set(alive))
            if is_last or len(found) == len(keys) or board.get(following, Epoch) is not None:
                break
            time.sleep(POLL_S)
        names = {member.id: member.name for member in epoch.members}
        told = {names[r.id]: (r.held, r.holds, r.leaving, [names.get(id) for id in r.missed]) for r in found.values()}
        logging.getLogger("gradwire").debug("epoch %d: reported (held, holds, leaving, missed): %s", epoch.number, told)
        return tuple(found.values())

    def _grace_s(self, reported: int, members: int, has_all_that_live: bool) -> float:
        """Return how long to wait for further reports."""
        if 2 * reported < members:
            # It is more likely that the others are late, or that this member was cut off, than that they all are gone:
            # on its own it would go on without those who have the state, too, and the training would end with it.
            return self._party.grace_s + MINORITY_S
        return min(self._party.grace_s, VANISHED_S) if has_all_that_live else self._party.grace_s

    def _is_deserted(self, group: EpochGroup) -> bool:
        """Return whether a member of an epoch that others meet has left instead of coming to it."""
        epoch, board = group.epoch, self._party.board
        absent = () if self._linked is group or board.is_away else group.absent()
        found = board.get_all([report_key(epoch.number, id) for id in absent], EpochReport, each=True)
        left = [report.id for report in found.values() if report.leaving]
        for id in left:
            group.count_out(id)
        return bool(left)

    def _awaited(self, key: str) -> Epoch | None:
        group = self._epoch_group
        while True:
            gone = group is None or group.gone()
            found = self._party.board.get(key, Epoch)
            if found is not None or gone:
                return found
            time.sleep(POLL_S)

    def _named(self, key: str) -> Epoch:
        board, began_s = self._party.board, time.monotonic()
        asked_s, has_told = 0.0, False
        with board.heeding(self._heed_leave):
            while (waited_s := time.monotonic() - began_s) < self._party.patience_s:
                invited = invited_key(self._seat.me.id)
                told = board.get_all([key, invited], Epoch, each=True)
                if key in told:
                    return told[key]
                self._heed_leave()
                self._prepare(told.get(invited))
                # Once it is connected to the others, it is named soon, and then they wait for it.
                is_near = self._preparation is not None and self._preparation.is_whole()
                if not is_near or time.monotonic() - asked_s > ASK_S:
                    asked_s = time.monotonic()
                    board.ask(Request(self._seat.me, self._terms))
                if waited_s > TOLD_S and not has_told:
                    has_told = True
                    logging.getLogger("gradwire").info("waiting for the members to take this worker in")
                self._catch_up()
                time.sleep(POLL_S if self._preparation else 5 * POLL_S)
        raise ExchangeError(
            f"no member took this worker ({self._seat.me.name}) in within {self._party.patience_s:.0f} s: the members "
            "are gone (start the coordinator again without its state, and all workers from a checkpoint), take long "
            "for a round (join with a larger patience_s), or refused it since it has another version, method, "
            "option or parameter (their logs say so)"
        )

    def _founders(self) -> tuple[Member, ...]:
        board, end_s = self._party.board, time.monotonic() + self._party.patience_s
        least, told = self._party.least, tuple[Member, ...]()
        with board.heeding(self._heed_leave):
            while board.get(FIRST, Epoch) is None:
                asked = self._requests()
                if len(asked) >= least:
                    return asked
                self._heed_leave()
                if time.monotonic() > end_s:
                    raise ExchangeError(
                        f"{len(asked)} workers came within {self._party.patience_s:.0f} s, and {least} are needed to "
                        "begin: start the others, or join with least=1"
                    )
                if asked not in ((), told):
                    told, names = asked, ", ".join(member.name for member in asked)
                    text = "%d of the %d workers that begin together have come (%s): waiting for the others"
                    logging.getLogger("gradwire").info(text, len(asked), least, names)
                board.ask(Request(self._seat.me, self._terms))
                time.sleep(2 * POLL_S)
        return ()

    def _requests(self) -> tuple[Member, ...]:
        """Return the workers that have asked and have the same terms; warn of others."""
        # Members of the last epochs may have been read as workers that ask. One of them that has left never comes.
        known = self._seat.history.members(LAST_EPOCHS)
        if time.monotonic() - self._asked_s[0] < LOOK_S:
            return tuple(member for member in self._asked_s[1] if member.id not in known)
        found, asking = list[Member](), list[Member]()
        for request in self._recent():
            if request.terms == self._terms:
                (asking if request.state else found).append(request.member)
            else:
                self._warnings.here(
                    f"refused {request.member.id}",
                    f"{request.member.name} asked to come in, and has another version of gradwire, method, option or "
                    "parameter than this member: it was refused",
                )
        # Asked in every round, the store would be part of its time.
        wanted = tuple(member for member in found if member.id not in known)
        self._asked_s = (time.monotonic(), self._prepared(wanted) if self._prepares else wanted)
        self._answer_asking(asking)
        return self._asked_s[1]

    def _recent(self) -> list[Request]:
        """Return the requests that there are, or that there were when the thread that watches looked."""
        board, (read_s, found) = self._party.board, self._read
        # The votes of all wait for the first member: they would be later by two delays of the network and more.
        return found if board.is_far and time.monotonic() - read_s < RECENT_S else board.requests()

    def _prepared(self, wanted: tuple[Member, ...]) -> tuple[Member, ...]:
        """Return those of some workers with which all members are connected; have them connect to others."""
        epoch, found, board = self._seat.epoch, self._preparation, self._party.board
        if epoch is None or not wanted:
            return wanted
        ids = {member.id for member in wanted}
        new = () if found is None or found.is_over() else found.candidate.new
        if found is None or not new or found.candidate.previous != epoch.digest() or not ids.issuperset(new):
            self._attempts += 1
            candidate = candidate_of(epoch, wanted, self._attempts)
            board.put_unless_away(candidate_key(candidate.number), candidate)
            for member in wanted:
                board.put_unless_away(invited_key(member.id), candidate)
            self._prepare(candidate)
            return ()
        return tuple(member for member in wanted if member.id in new) if found.all_are_ready() else ()

    def _look_for_requests(self) -> None:
        self._asked_s = (-LOOK_S, ())
        self._requests()
