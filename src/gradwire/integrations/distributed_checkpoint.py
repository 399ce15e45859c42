"""``torch.distributed.checkpoint``: a link's state beside sharded models and optimizers."""

from __future__ import annotations

import io
from typing import Any

import torch

from gradwire.adapters import Link
from gradwire.runtime.checkpoint import take

__all__ = ["StatefulLink"]

COMMON, WORLD_SIZE = "common", "world_size"


class StatefulLink:
    """A link as an entry of what ``torch.distributed.checkpoint`` saves and loads::

        state = {"model": ..., "optimizer": ..., "link": gw.integrations.StatefulLink(link)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)

    Each rank has a key of its own, so that none is taken for a copy of another. On fewer ranks the policy is that
    of :func:`gradwire.load`; on more ranks the new ones have no part, and the load needs
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``.

    Args:
        link: The link.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks share, and this rank's part, both packed."""
        state = self.link.state_dict()
        return {
            f"rank {self.link.rank}": _packed(state.pop("rank")),
            COMMON: _packed(state),
            WORLD_SIZE: self.link.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded (collective).

        Raises:
            IncompatibleError: it is no state of such a link, on this rank or on another.
        """
        world_size = int(state[WORLD_SIZE])
        found = _unpacked(state[COMMON])
        # A rank that is new finds what it offered itself as the place to load into.
        found["rank"] = _unpacked(state[f"rank {self.link.rank}"]) if self.link.rank < world_size else {}
        take(self.link, found, None, 0, world_size, "a distributed checkpoint")


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
