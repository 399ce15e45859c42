"""What is counted, told and forgotten of a round that broke because of others."""

from __future__ import annotations

from gradwire.errors import GradwireError, PayloadError
from gradwire.link.failures import WarnOnce
from gradwire.link.membership.party import Party


def count_broken(own: GradwireError, party: Party, warnings: WarnOnce) -> None:
    """Count a round that broke; log once for each member that a message of it was refused.

    Args:
        own: The error of this worker's link.
    """
    party.counts["broken_rounds"] += 1
    if not isinstance(own.__cause__, PayloadError):
        return
    party.counts["payloads_refused"] += 1
    members, sender = party.seat.current.members, own.__cause__.sender
    name = members[sender].name if sender is not None and sender < len(members) else "a member"
    warnings.here(
        f"payload from {name}",
        f"refused a message from {name}, and the round is taken again: {own}; if this comes again, look at the network "
        "between the two, and at who else reaches it",
    )


def forget_frames(error: BaseException | None) -> None:
    """Forget where an error has passed: PyTorch's future holds it, and those frames hold the future and the epoch.

    The collector does not see that circle, which would keep the connections of every epoch that broke.
    """
    if error is not None:
        error.__traceback__ = None
        forget_frames(error.__cause__)
        forget_frames(error.__context__)
