"""A process group of this process alone, for tests of what needs one."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Be rank 0 of 1 in the ``with`` block.

    The group is never freed. If a DDP module were the last to hold it, torch would join the threads of Gloo under
    Python's lock, for which one of them may wait (pytorch#56297): then nothing ends the test, not even a signal.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.distributed_c10d._get_default_group()))
    try:
        yield
    finally:
        dist.destroy_process_group()
