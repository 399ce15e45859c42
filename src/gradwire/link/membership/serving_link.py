"""A link that gives its state to newcomers while the training goes on, and takes it as one.

Large state would let all members wait for as long as it travels. So a newcomer asks for state before it asks to be
named. The members copy theirs between two rounds, serve the copy from threads of their own, and go on; the newcomer
takes pieces of it from all of them. Meanwhile the first member logs the steps of its optimizer, and the newcomer takes
them again until it has come close. Then it asks to be named. When the members meet it they stand still: it takes the
last steps, compares digests of all pieces with the first member, and takes again those that differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from gradwire.errors import ExchangeError, IncompatibleError, PayloadError
from gradwire.kernels.pieces import warm_up as warm_up_pieces
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.passing_link import PassingLink
from gradwire.link.membership.records import Epoch, Member, Offer, Request
from gradwire.link.membership.replay import StepLog, replay
from gradwire.link.membership.snapshot import Snapshot
from gradwire.link.membership.state_fetch import Address, StateFetch
from gradwire.link.membership.state_server import ENTRY, StateConnection, StateServer, served_key
from gradwire.link.membership.steps import FIRST, LeftOut, Serve, offer_key, told_key
from gradwire.link.membership.transfer import receive_state, send_state
from gradwire.link.parameters import named_parameters

LARGE_BYTES = 1 << 20
"""Bytes of parameters from which on state is served. Less is sent by one member, when the newcomer meets the others."""

TRIES = 3
"""How often a newcomer begins again after the members that served it were lost."""

OFFERS_S = 1.0
"""Time that a newcomer waits for the offers of all members, after that of the first."""

LAG_S = 10.0
"""Time that it waits for the last step, which the first member may still have to code."""

POLL_S = 0.05
ADDRESS_BYTES = 256


class ServingLink(PassingLink):
    """Serves state to newcomers, and takes it as a newcomer."""

    _terms: str
    _server: StateServer | None = None
    _log: StepLog | None = None
    _offer: Offer | None = None
    _brought: Snapshot | None = None
    """State that this worker took before it was named."""
    _steps: StateConnection | None = None
    """Connection to the log of the member that served it."""
    _replayed = 0
    _reached = -1
    """Number of rounds that the state of this newcomer has."""

    def _is_large(self) -> bool:
        """Return whether state is served: the same on all members, and on newcomers."""
        parameters = named_parameters(self._asked[0])
        return sum(x.numel() * x.element_size() for x in parameters.values()) >= LARGE_BYTES

    def _served_key(self) -> bytes:
        seal = self._party.board.seal
        return served_key(seal.secret, seal.run)

    def _own_parts(self) -> tuple[str, ...]:
        """Return the parts of state of which each member has a version of its own."""
        return ("optimizer",) if self.method.traits.local_steps else ()

    # ------------------------------------------------------------------ members

    def _answer_asking(self, asking: Sequence[Member]) -> None:
        """Show workers that ask for state where it is served, or let all members serve it; for the first member."""
        if not asking:
            return
        served = self._server is not None and self._server.alive and (self._log is None or self._log.goes_on)
        if not served or self._offer is None:
            self._seat.offers = True
            return
        for member in asking:
            self._party.board.put_unless_away(told_key(member.id), self._offer)

    def _serve(self, step: Serve) -> None:
        """Offer a copy of the state as it is now."""
        epoch, group, key = self._seat.current, self._epoch_group, self._served_key()
        self._seat.offers = False
        self._stop_serving()
        if group is None:
            return
        place = epoch.ids().index(self._seat.me.id)
        try:
            snapshot = Snapshot.of(self._state_for_others(), self._own_parts(), copied=True)
            if place == 0 and self.optimizer is not None and not self.method.traits.local_steps:
                seat = self._seat
                self._log = StepLog(self.optimizer, lambda: seat.rounds, key, snapshot.nbytes)
            self._server = StateServer(group.store, snapshot, key, self._log)
        except (OSError, IncompatibleError) as error:
            logging.getLogger("gradwire").warning("state cannot be served to newcomers: %s", error)
            self._stop_serving()
            return
        offer = Offer(epoch.number, step.round, len(epoch.members), self._server.host, self._server.port)
        self._party.board.put_unless_away(offer_key(epoch.number, step.round, place), offer)
        if place == 0:
            self._offer = offer
            self._look_for_requests()

    def _look_for_requests(self) -> None:
        """Look for workers that have asked, now."""

    def _stop_serving(self) -> None:
        server, self._server, log, self._log, self._offer = self._server, None, self._log, None, None
        if server is not None:
            server.close()
        elif log is not None:
            log.close()

    # ------------------------------------------------------------------ a newcomer, before it is named

    def _bring(self) -> None:
        """Take state while the members go on, if there are some and it is large."""
        again = self._opened and not self.method.traits.local_steps
        if again or not self._is_large() or self._party.board.get(FIRST, Epoch) is None:
            # Hooks of an open link would see the steps that are taken again.
            return
        for _ in range(TRIES):
            offer = self._offered()
            if offer is None:
                return
            try:
                self._take_offer(offer)
                return
            except (ExchangeError, PayloadError) as error:
                logging.getLogger("gradwire").info("the members that served state were lost, again: %s", error)
                self._drop_brought()
                self._seat.again()

    def _heed_leave(self) -> None:
        """Wait no longer to be named if this worker was told to leave."""
        if self._seat.leaving:
            raise LeftOut

    def _offered(self) -> Offer | None:
        """Ask for state, and return the offer of the first member; None if there is none after a time."""
        board, me = self._party.board, self._seat.me
        end_s = time.monotonic() + self._party.patience_s / 2
        with board.heeding(self._heed_leave):
            while time.monotonic() < end_s and not self._seat.leaving:
                board.ask(Request(me, self._terms, state=True))
                found = board.get(told_key(me.id), Offer)
                if found is not None:
                    return found
                time.sleep(2 * POLL_S)
        return None

    def _take_offer(self, offer: Offer) -> None:
        """Take the state that is offered, and what was logged since."""
        addresses, end_s = {(offer.host, offer.port): None}, time.monotonic() + OFFERS_S
        found: set[int] = set()
        while len(found) < offer.members and time.monotonic() < end_s:
            for place in set(range(offer.members)) - found:
                other = self._party.board.get(offer_key(offer.number, offer.round, place), Offer)
                if other is not None:
                    found.add(place)
                    addresses[other.host, other.port] = None
            time.sleep(POLL_S)
        self._brought, self._reached = self._fetched(list(addresses)), offer.round
        self._take_values(self._brought.state())
        if self.method.traits.local_steps or self.optimizer is None:
            return
        try:
            self._steps = StateConnection(offer.host, offer.port, self._served_key(), LAG_S)
        except OSError:
            return
        self._catch_up()

    def _fetched(self, addresses: Sequence[Address], **more: Any) -> Snapshot:
        fetch = StateFetch(addresses, self._served_key(), **more)
        began_s, found = time.monotonic(), fetch.run()
        counts = self._party.counts
        counts["state_received_bytes"] += fetch.received_bytes
        counts["state_reused_bytes"] += fetch.reused_bytes
        logging.getLogger("gradwire").info(
            "took %d bytes of state by %d from %d members, and had %d, in %.2f s",
            found.nbytes, fetch.received_bytes, fetch.sources, fetch.reused_bytes, time.monotonic() - began_s,
        )  # fmt: skip
        return found

    def _catch_up(self, rounds: int | None = None) -> None:
        """Take the steps that were logged, those up to a round if it is given, else those that there are so far."""
        end_s = time.monotonic() + LAG_S
        while self._steps is not None and (rounds is None or self._reached < rounds):
            try:
                self._steps.ask(ENTRY, self._replayed)
                message = self._steps.answer(self._most_entry_bytes())
                if message:
                    self._reached = replay(self.optimizer, message, self._served_key())
                    self._replayed += 1
                    self._party.counts["steps_replayed"] += 1
                elif rounds is None or time.monotonic() > end_s:
                    return
                else:
                    time.sleep(POLL_S)
            except (OSError, PayloadError) as error:
                logging.getLogger("gradwire").info("the log of steps has ended: %s", error)
                self._steps.close()
                self._steps = None

    def _most_entry_bytes(self) -> int:
        """Return the largest number of bytes of a logged step."""
        parameters = named_parameters(self._asked[0]).values()
        return 2 * sum(x.numel() * x.element_size() for x in parameters) + (1 << 24)

    def _drop_brought(self) -> None:
        steps, self._steps, self._brought, self._replayed, self._reached = self._steps, None, None, 0, -1
        if steps is not None:
            steps.close()

    # ------------------------------------------------------------------ meeting

    def _pass_state(self, group: EpochGroup, epoch: Epoch) -> Any:
        """Give new members the state, all others together if it is large; receive it, if this one is new."""
        if not epoch.new or not self._is_large():
            return super()._pass_state(group, epoch)
        places, new = epoch.ids(), set(epoch.new)
        members = [place for place, id in enumerate(places) if id not in new]
        if self._seat.me.id in new:
            return self._take_from(group, members, epoch)
        snapshot = Snapshot.of(self._state_for_others(), self._own_parts(), copied=False)
        try:
            server = StateServer(group.store, snapshot, self._served_key())
        except OSError as error:
            raise RuntimeError(f"state cannot be served: {error}") from error
        try:
            told = f"{server.host} {server.port}".encode().ljust(ADDRESS_BYTES)
            newcomers, without = [place for place, id in enumerate(places) if id in new], []
            for place in newcomers:
                group.send(place, torch.frombuffer(bytearray(told), dtype=torch.uint8))
            for place in newcomers:
                # It has all that it needs, and the state may change; or 0, and it takes it from the first member.
                group.receive(place, has_all := torch.empty(1, dtype=torch.uint8, device="cpu"))
                without += [] if has_all.item() else [place]
        finally:
            server.close()
        if group.place == members[0]:
            for place in without:
                send_state(group, place, self._state_for_others(), self._key(epoch))
        return None

    def _take_from(self, group: EpochGroup, members: Sequence[int], epoch: Epoch) -> Any:
        addresses = []
        for place in members:
            told = torch.empty(ADDRESS_BYTES, dtype=torch.uint8, device="cpu")
            group.receive(place, told)
            host, _, port = told.numpy().tobytes().decode("ascii", "replace").strip().partition(" ")
            if not (port.isascii() and port.isdecimal()):
                raise PayloadError("what a member sent is not the address of its state")
            addresses.append((host, int(port)))
        have = {}
        if self._brought is not None:
            self._catch_up(epoch.round)
            key, parts = self._served_key(), self._brought.state()
            parts |= {name: part for name, part in self._state_for_others().items() if name != "link"}
            have = Snapshot.of(parts, copied=False).digests(key)
        found: Snapshot | None = None
        try:
            found = self._fetched(addresses, have=have, kept=self._brought if self._own_parts() else None)
        except (ExchangeError, PayloadError) as error:
            # Others may keep it away from the servers, whom the members' own connections do not let in.
            logging.getLogger("gradwire").info("no state from the members' servers, it comes from one: %s", error)
        for place in members:
            group.send(place, torch.tensor([found is not None], dtype=torch.uint8, device="cpu"))
        return receive_state(group, members[0], self._key(epoch)) if found is None else found.state()

    def _warm_up_state(self) -> None:
        """Compile the code of state before anybody waits for it."""
        if self._is_large():
            warm_up_pieces()
