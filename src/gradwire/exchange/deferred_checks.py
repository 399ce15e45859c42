"""Conditions on values that may be on a device, whose results are read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Flag: TypeAlias = bool | torch.Tensor
"""The result of a condition: a bool, or a bool tensor ``[]`` on a device, for which a reader waits."""


def all_hold(conditions: torch.Tensor) -> Flag:
    """Return whether all conditions hold; for conditions on a device, as a flag on that device."""
    found = conditions.all()
    return bool(found) if found.device.type == "cpu" else found


def both(first: Flag | None, second: Flag | None) -> Flag | None:
    """Return whether both hold, without reading from a device; None if one is None, that is, was not checked.

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
        if part.numel():
            # The extremes are NaN where a value is; unlike a condition for each value they take no memory.
            finite = both(finite, all_hold(torch.isfinite(torch.stack(torch.aminmax(part)))))
    return finite is not None and finite


def known(flag: Flag | None) -> bool | None:
    """Return the value of a flag; wait for the device that computes it."""
    return None if flag is None else bool(flag)


class Checks:
    """Takes the results of checks of values that other ranks sent.

    This class waits for each result, and raises at once if a check failed.
    :class:`gradwire.exchange.drivers.LateChecks` defers both.
    """

    def require(self, holds: Flag, explain: Callable[[], Exception]) -> None:
        """Raise the exception of ``explain`` unless the condition holds.

        ``explain`` may read the values that were checked, which do not change until the round has ended.
        """
        if not bool(holds):
            raise explain()

    def so_far(self) -> Flag:
        """Return whether all conditions so far hold."""
        return True


AT_ONCE = Checks()
"""Waits for each result. It has no state, so that all links share it."""
