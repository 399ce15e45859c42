"""A DDP script whose third backward meets an error of its own."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
for step in range(3):
    model(torch.ones(2, 64)).sum().backward()
    if step == 2:
        raise ValueError(f"my own mistake, called with {sys.argv[1:]} from {__name__}")
