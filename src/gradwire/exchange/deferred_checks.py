"""Conditions on values that may lie on a device, where the thread that asks cannot know yet whether they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Flag: TypeAlias = bool | torch.Tensor
"""Whether something holds: known already, or a bool tensor ``[]`` on a device, which whoever reads it waits for."""


def all_hold(conditions: torch.Tensor) -> Flag:
    """Return whether all of some conditions hold; of conditions on a device, as a flag that lies there too."""
    found = conditions.all()
    return bool(found) if found.device.type == "cpu" else found


def both(first: Flag | None, second: Flag | None) -> Flag | None:
    """Return whether both hold, without reading what lies on a device; None where one is None: nobody looked.

    Example:
        >>> both(True, False), both(True, None)
        (False, None)
    """
    if first is None or second is None:
        return None
    if first is False or second is False:
        return False
    if isinstance(first, torch.Tensor):
        return first & second if isinstance(second, torch.Tensor) else first
    return second


def all_finite(*parts: torch.Tensor) -> Flag:
    """Return whether all values are finite; see :func:`all_hold`."""
    finite: Flag | None = True
    for part in parts:
        finite = both(finite, all_hold(torch.isfinite(part)))
    return finite is not None and finite


def known(flag: Flag | None) -> bool | None:
    """Return the value of a flag; waits for the device that works it out."""
    return None if flag is None else bool(flag)


class Checks:
    """Takes the results of checks of values that other ranks sent.

    This class waits for each result, and raises at once where it is bad.
    :class:`gradwire.exchange.drivers.LateChecks` does not.
    """

    def require(self, holds: Flag, explain: Callable[[], Exception]) -> None:
        """Raise what ``explain`` returns unless the condition holds.

        ``explain`` may look at the values that were checked: they stay as they are until the round has ended.
        """
        if not bool(holds):
            raise explain()

    def so_far(self) -> Flag:
        """Return whether all that was required holds."""
        return True


AT_ONCE = Checks()
"""Waits for each result; it keeps nothing, so that one serves all."""
