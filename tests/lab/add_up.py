"""A DDP script's first lines: the group that torchrun's variables describe, and a sum over it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(value)
print(f"rank {os.environ['RANK']} of {dist.get_world_size()}, {os.environ['GLOO_SOCKET_IFNAME']}: {value.item():g}")
dist.destroy_process_group()
