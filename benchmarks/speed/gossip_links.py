"""Steps by gossip and by an all-reduce where one host's link is slow, on an emulated cluster.

    sudo env "PATH=$PATH" gradwire lab --hosts 4 --bandwidth 100mbit --host 2=10mbit -- \\
        python benchmarks/speed/gossip_links.py --links "100 Mbit/s, host 2: 10 Mbit/s" \\
        --json benchmarks/results/speed/gossip_links.json

A perceptron with 0.27 M parameters in DDP, four workers; seconds of a step are those from the third to the last, of the
rank that took longest, over their number. In the graph from a file host 2 has one neighbour, the others two or three.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write

STEPS, UNTIMED = 12, 2
LEAF = "0 1\n1 3\n0 3\n1 2\n"


def timed(method: str) -> dict[str, Any]:
    """Train for a few steps, and return what one takes."""
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    link = gw.attach(module, method, optimizer=optimizer)
    inputs = torch.randn(8, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    began = 0.0
    for step in range(STEPS):
        if step == UNTIMED:
            dist.barrier()
            began = time.monotonic()
            before = link.traffic().sent_bytes
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
    taken = torch.tensor([(time.monotonic() - began) / (STEPS - UNTIMED)])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    sent = torch.tensor([float(link.traffic().sent_bytes - before) / (STEPS - UNTIMED) * (dist.get_rank() == 2)])
    dist.all_reduce(sent)
    link.close()
    return {"method": method, "step_s": float(taken), "sent_by_host_2": float(sent)}


def main() -> None:
    """Time all methods, three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", required=True, help="What the links are, for the record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = options.json and options.json.resolve()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        # Each rank reads its own copy: ranks compare what is in it, and the name.
        os.chdir(folder)
        Path("leaf.txt").write_text(LEAF)
        specs = {
            "fp32, all-reduce": "fp32",
            "DPSGD, ring": "dpsgd",
            "DPSGD, host 2 with one neighbour": "DPSGD(graph='leaf.txt')",
            "ChocoSGD, 4 bits, ring": "choco_sgd",
            "PowerGossip, rank 1, ring": "power_gossip",
        }
        rows = []
        for repeat in range(3):
            for name, spec in specs.items():
                rows.append({**timed(spec), "method": name, "repeat": repeat})
                if dist.get_rank() == 0:
                    print(rows[-1], flush=True)
        os.chdir("/")
    if dist.get_rank() == 0:
        write(target, links=options.links, workers=dist.get_world_size(), steps=STEPS - UNTIMED, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
