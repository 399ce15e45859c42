"""A DDP script whose rank 1 kills itself in the third step, or that trains until it is ended."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
store = dist.distributed_c10d._get_default_store()
step = 0
while True:
    model(torch.ones(2, 64)).sum().backward()
    step += 1
    if step == 3 and dist.get_rank() == 0:
        store.set("trained", "")
        print("training", flush=True)
    if step == 3 and dist.get_rank() == 1 and sys.argv[1] == "kill":
        # Else rank 0 may still be in its third step.
        store.wait(["trained"])
        os.kill(os.getpid(), signal.SIGKILL)
