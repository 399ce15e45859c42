"""Which links are open in this process: those that are draw independent random numbers.

A link's number is the lowest that no open link has on any rank of its group, and becomes free when the link is closed.
So links that are attached in the same order have the same numbers in every run, and one that is attached after
another was closed draws as that one did. A link that is dropped without being closed keeps its number until Python has
collected it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from gradwire.seeds import LinkNumber

__all__ = ["Numbered", "lowest_free", "numbers_in_use", "register", "share_a_number"]


class Numbered(Protocol):
    """What has a number while its ``close`` is alive."""

    number: LinkNumber
    close: weakref.finalize[..., Any]


_links: weakref.WeakSet[Numbered] = weakref.WeakSet()


def register(link: Numbered) -> None:
    """Count a link as open until it is closed or collected."""
    _links.add(link)


def numbers_in_use(but: Numbered | None = None) -> set[int]:
    """Return the numbers of this process's open links, but for one of them."""
    return {link.number.value for link in _links if link.close.alive and link is not but}


def lowest_free(in_use: Iterable[int]) -> int:
    """Return the lowest number that is not in use."""
    taken = set(in_use)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def share_a_number(link: Numbered) -> str | None:
    """Say what is wrong where another open link has this one's number, as after loading in another order."""
    if link.number.value not in numbers_in_use(but=link):
        return None
    return (
        f"two open links have the number {link.number.value}, one of them from a checkpoint: where their parameters "
        "bear the same names, they draw the same random numbers; attach links in the order in which they were attached "
        "when the checkpoint was saved, and load the state of each"
    )
