"""A link over the members of one epoch after the other, whose connections can be broken from any thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gradwire.errors import ExchangeError
from gradwire.exchange.drivers import Lane
from gradwire.link.link import Link
from gradwire.link.link_runtime import LinkRuntime
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.membership.party import Party
from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.records import Epoch

CLOSE_S = 30.0
"""Time that lanes have to end after their connections were broken; a kernel may be running."""


class EpochLink(Link):
    """Has the connections of one epoch at a time."""

    _party: Party
    _seat: Seat
    _epoch_group: EpochGroup | None
    _broken_s: float | None
    """When the connections of the last epoch were broken; None while they are not."""

    def _abort(self) -> None:
        """Break all connections, from any thread."""
        for lane in self._lanes():
            lane.abort()
        group = self._epoch_group
        if group is not None:
            group.abort()

    def _lanes(self) -> Sequence[Lane]:
        """Return the lanes; empty before there are some."""
        runtime: LinkRuntime | None = self.__dict__.get("_runtime")
        return () if runtime is None else runtime.lanes

    def _hang_up(self, how: str) -> None:
        """End all connections of this epoch, and everything that uses them."""
        if self._broken_s is None:
            self._broken_s = time.monotonic()
        group, self._epoch_group = self._epoch_group, None
        if self._lanes():
            self._end_lanes()
        if group is not None:
            group.leave(how)

    def _end_lanes(self) -> None:
        self._runtime.failures.circle.close()
        for lane in self._lanes():
            lane.abort()
        for lane in self._lanes():
            if not lane.close(CLOSE_S):
                raise ExchangeError(f"{lane.name} did not end within {CLOSE_S:.0f} s after its connections were broken")
        self._round = self._step = None

    def _group_of(self, epoch: Epoch) -> EpochGroup:
        party = self._party
        store = party.board.store(f"links/{epoch.number}")
        key = party.board.seal.key_of(f"epoch {epoch.digest()}") if party.keyed else b""
        return EpochGroup(epoch, epoch.ids().index(self._seat.me.id), store, party.silence_s, key)
