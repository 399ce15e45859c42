"""State of a link for ``torch.distributed.checkpoint``, beside sharded models and optimizers."""

from __future__ import annotations

import io
from typing import Any

import torch

from gradwire.errors import IncompatibleError
from gradwire.link.adapters import Link
from gradwire.link.checkpoint import take

COMMON, WORLD_SIZE = "common", "world_size"
FIRST = "first"
"""Key, in the part of rank 0, of the values that this rank alone holds."""


class StatefulLink:
    """A link as an entry in the state that ``torch.distributed.checkpoint`` saves and loads::

        state = {"model": ..., "optimizer": ..., "link": gw.integrations.StatefulLink(link)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)

    Each rank has its own key, so that no part is taken for a copy of another. If several groups of ranks exchange
    shards of one module, as in HSDP, the keys of each group also name its shard, :attr:`gradwire.Link.part`. On fewer
    ranks the policy is that of :func:`gradwire.load`; on more ranks the new ones have no part, and the load needs
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``.

    Args:
        link: The link.

    Raises:
        IncompatibleError: its method has local steps, so that parameters differ between ranks, and a distributed
            checkpoint has only one copy of a parameter that is not sharded.
    """

    def __init__(self, link: Link) -> None:
        if link.method.traits.local_steps:
            raise IncompatibleError(
                f"{link.method!r} lets each rank have parameters of its own, and a distributed checkpoint keeps those "
                'of one rank: use gw.save(link, folder, own={"model": model.state_dict(), "optimizer": ...})'
            )
        self.link = link
        self._offered: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the common state of all ranks and this rank's part, both packed."""
        state, traits = self.link.state_dict(), self.link.method.traits
        own: dict[str, Any] = dict(state.pop("rank"))
        # Of an entry that all ranks offer, the copy of any rank is written.
        first = {name: value for name, value in state["global"].items() if name in traits.of_first}
        if first and self.link.rank == 0 and traits.sent_by_first not in state["global"]:
            own[FIRST] = first
        self._offered = {
            self._key(f"rank {self.link.rank}"): _packed(own),
            self._key(COMMON): _packed(state),
            self._key(WORLD_SIZE): self.link.world_size,
        }
        return dict(self._offered)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that was read (collective).

        Raises:
            IncompatibleError: the state is incomplete, or not that of such a link, on this rank or on another.
        """
        common, own = self._key(COMMON), self._key(f"rank {self.link.rank}")
        world_size = int(state[self._key(WORLD_SIZE)])
        found = _unpacked(state[common])
        # With allow_partial_load=True, an entry that was not loaded is still the one that was offered.
        missing = [key for key in (common, own) if state[key] is self._offered.get(key)]
        if self.link.rank >= world_size and missing == [own]:
            # This rank is new.
            missing, found["rank"] = [], {}
        else:
            found["rank"] = _unpacked(state[own])
            found["global"] |= found["rank"].pop(FIRST, {})
        problem = f"the distributed checkpoint has no {missing[0]!r} of this link" if missing else None
        take(self.link, found, problem, 0, world_size, "a distributed checkpoint")

    def _key(self, name: str) -> str:
        """Return a key of this link alone: in the link of another shard, a rank may have the same number."""
        return f"{self.link.part}/{name}" if self.link.part else name


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    # A rank copies state to its own device; the one in the file may be another's, or not exist here.
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
