"""What a state must hold before a link takes any of it, and what of it is taken."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeAlias

import torch

from gradwire.errors import IncompatibleError
from gradwire.methods import Method
from gradwire.runtime.selection.autotune import OWN_STATE, STATE
from gradwire.runtime.selection.coder import CODER_STATE

__all__ = ["check_state", "remembered"]

State: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]

OWN_VALUES = ("round", CODER_STATE, *STATE, *OWN_STATE)
"""Values that are the link's, not its method's."""


def check_state(state: State, *, simulated: bool) -> None:
    """Refuse what is no state of a link, or has not the ranks' parts that this kind of link takes.

    Without a rank's own part, memories that all ranks share would be taken beside others that are zero, and what one
    method keeps of the two would never agree again.

    Raises:
        IncompatibleError: naming what is missing and where to find it.
    """
    try:
        int(state["global"]["round"])
        ranks = set(state) - {"global", "replicated"}
    except (KeyError, TypeError, ValueError):
        raise IncompatibleError("this is not the state of a link: it has no global round") from None
    if "replicated" not in state:
        raise IncompatibleError("this state has no part 'replicated': pass all of what state_dict() gave")
    if simulated:
        if ranks != {f"rank {r}" for r in range(max(len(ranks), 1))}:
            raise IncompatibleError(
                "a simulation's state has a part for every worker, 'rank 0', 'rank 1' and so on, and this one has "
                f"{_listed(ranks)}: of the states of a Link's ranks, put what is under 'rank' on rank 1 under 'rank 1'"
            )
    elif ranks != {"rank"}:
        raise IncompatibleError(
            f"a link's state has one part 'rank', this rank's own, and this one has {_listed(ranks)}: of a "
            "simulation's state, pass 'global', 'replicated', and under 'rank' what is under 'rank 1' on rank 1"
        )


def remembered(state: State, method: Method) -> dict[str, dict[str, torch.Tensor]]:
    """Return what of a state a method remembers, without the link's own values; the rest is dropped, which is said."""
    # A method that does not say what it remembers is given all.
    known = method.remembers if method.remembers or method.properties.state == "none" else None
    found: dict[str, dict[str, torch.Tensor]] = {}
    dropped = set()
    for scope, part in state.items():
        found[scope] = {}
        for key, value in part.items():
            kind = key.partition("/")[0]
            if key in OWN_VALUES:
                continue
            if known is None or kind in known:
                found[scope][key] = value
            else:
                dropped.add(kind)
    if dropped:
        logging.getLogger("gradwire").warning(
            "the state is another method's: %s dropped, which mean nothing to %r", _listed(dropped), method
        )
    return found


def _listed(ranks: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(ranks)) or "none"
