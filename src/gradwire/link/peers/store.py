"""The process group's store, by which ranks find one another, and what becomes of them where it is gone."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

__all__ = ["group_store", "store_host", "without_store"]


def group_store() -> Any:
    """Return the store of the default group."""
    return dist.distributed_c10d._get_default_store()


def store_host() -> int | None:
    """Return the rank whose process holds the store of the default group; None where that is not known, or no rank's.

    By ``env://`` and ``tcp://`` rank 0 holds it, unless the launcher does, as torchrun says by a variable. A store that
    a program has passed to ``init_process_group`` may be anywhere.
    """
    method = getattr(dist.distributed_c10d, "_default_pg_init_method", None)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return 0 if str(method).startswith(("env://", "tcp://")) and not by_launcher else None


def without_store() -> str:
    """Say why ranks that this one has not met yet cannot be found any more."""
    host = store_host()
    if host is None:
        return "the process group's store is gone: the process that holds it ended, or is out of reach"
    return f"rank {host} ended, or is out of reach, and with it the process group's store, which it holds"
