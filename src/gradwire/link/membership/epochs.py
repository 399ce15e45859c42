"""Which epoch follows another: after it broke, or when members leave or come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gradwire.link.membership.records import Epoch, EpochReport, Member


def next_epoch(epoch: Epoch, reports: Mapping[str, EpochReport]) -> Epoch:
    """Return the epoch after one that broke, with the members that have reported; with none if no one holds the state.

    If the epoch broke before all had met, two members of which one could not reach the other do not both stay:
    otherwise they would fail to meet for ever. Those that hold the state stay rather than those that do not; then those
    with fewer such pairs, so that one that was cut off does not drop all others; then the earlier ones.

    Members that were told to leave are no longer in it, unless nobody else who reported holds the state.
    """
    present = [member for member in epoch.members if member.id in reports]
    alive = [member for member in present if not reports[member.id].leaving]
    if alive and not any(reports[member.id].holds for member in alive):
        # Who was told to leave stays until others have the state; one whose program has ended has it no longer.
        alive = [member for member in present if reports[member.id].holds or not reports[member.id].leaving]
    order = {member.id: place for place, member in enumerate(alive)}
    told = [report for id, report in reports.items() if id in order and not report.met]
    apart = {frozenset((r.id, missed)) for r in told for missed in {*r.missed} & order.keys() - {r.id}}
    while apart:
        pairs = Counter(id for pair in apart for id in pair)
        dropped = max(pairs, key=lambda id: (not reports[id].holds, pairs[id], order[id]))
        apart = {pair for pair in apart if dropped not in pair}
        del order[dropped]
    alive = [member for member in alive if member.id in order]
    told = [reports[member.id] for member in alive]
    holders = [report for report in told if report.holds]
    if not holders and told and epoch.round == 0:
        # Nothing has been learnt yet: the first worker's parameters are as good as any.
        holders = told[:1]
    if not holders:
        alive = []
    ids = {report.id for report in holders}
    return Epoch(
        number=epoch.number + 1,
        members=tuple(alive),
        new=tuple(member.id for member in alive if member.id not in ids),
        round=min((report.held for report in holders), default=0),
        position=max((report.position for report in told), default=0),
        previous=epoch.digest(),
    )


def changed_epoch(
    epoch: Epoch, leavers: Sequence[str], joining: Sequence[Member], round: int, position: int, reserve: int = 0
) -> Epoch:
    """Return the epoch after one in which members leave by their own word, or others are taken in."""
    stay = tuple(member for member in epoch.members if member.id not in leavers)
    new = tuple(member for member in joining if member.id not in epoch.ids())
    position += reserve * len(new)
    return Epoch(
        epoch.number + 1, stay + new, tuple(m.id for m in new), round, position, reserve, previous=epoch.digest()
    )
