"""Runs that must end in the same bits: real and simulated, three bucket sizes, all backends, and float32 against DDP.

    python benchmarks/claims/identity.py --json benchmarks/results/claims/identity.json

Trains a small network on three to seven real ranks over Gloo and prints a digest of the parameters of every run; exits
with 1 where digests differ that must not, also between the ranks of a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

WIDTH = 128
RATE = 0.05


@dataclass(frozen=True)
class Run:
    """A training on real ranks.

    Attributes:
        ranks: How many.
        method: None: plain DDP.
        layers: Of the network; a bucket of 0.06 MB holds one.
        steps: Of SGD.
        ddp, link: Options of DDP and of the link.
    """

    ranks: int
    method: str | None
    layers: int = 6
    steps: int = 100
    ddp: Mapping[str, Any] = field(default_factory=dict)
    link: Mapping[str, Any] = field(default_factory=dict)


TENTH, FIFTH, LAYER = {"bucket_cap_mb": 0.1}, {"bucket_cap_mb": 0.2}, {"bucket_cap_mb": 0.06}
LOW_RANK = "PowerSGD(matrix_rank=2)"
ORDER = "order: terngrad, 20 buckets, 3 ranks, 200 steps, two-shot"
RUNS: dict[str, Run] = {
    "plain DDP": Run(4, None),
    "fp32": Run(4, "fp32"),
    "plain DDP, 0.1 MB buckets": Run(4, None, ddp=TENTH),
    "fp32, 0.1 MB buckets": Run(4, "fp32", ddp=TENTH),
    "terngrad": Run(4, "terngrad"),
    "terngrad, 0.1 MB buckets": Run(4, "terngrad", ddp=TENTH),
    "terngrad, 0.2 MB buckets": Run(4, "terngrad", ddp=FIFTH),
    "terngrad, four lanes, chunks of 5000": Run(4, "terngrad", ddp=FIFTH, link={"lanes": 4, "chunk_numel": 5000}),
    "terngrad, cpu-plain kernels": Run(4, "terngrad", link={"backend": "cpu-plain"}),
    "terngrad, reference kernels": Run(4, "terngrad", link={"backend": "reference"}),
    "terngrad, all_gather": Run(4, "terngrad", link={"collective": "all_gather"}),
    ORDER: Run(3, "terngrad", 20, 200, LAYER, {"collective": "two_shot", "lanes": 3}),
    "powersgd, 12 buckets, 200 steps": Run(4, LOW_RANK, 12, 200, LAYER),
    "powersgd, one bucket, 200 steps": Run(4, LOW_RANK, 12, 200),
    "powersgd, 12 buckets, 200 steps, cpu-plain kernels": Run(4, LOW_RANK, 12, 200, LAYER, {"backend": "cpu-plain"}),
    **{
        f"{name}, {ranks} ranks": Run(ranks, spec, 12, 50, LAYER)
        for name, spec in (("powersgd", LOW_RANK), ("acp_sgd", "ACPSGD()"), ("gtopk", "GTopK(density=0.01)"))
        for ranks in (3, 5, 7)
    },
}
SAME = [
    ["plain DDP", "fp32"],
    ["plain DDP, 0.1 MB buckets", "fp32, 0.1 MB buckets"],
    [name for name in RUNS if name.startswith("terngrad")] + ["terngrad, simulated"],
    [ORDER, f"{ORDER}, simulated"],
    [name for name in RUNS if name.startswith("powersgd") and "200" in name]
    + ["powersgd, 12 buckets, 200 steps, simulated"],
    *([name, f"{name}, simulated"] for name in RUNS if name.endswith("ranks")),
]


def network(depth: int) -> Any:
    """Build the network, the same everywhere."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def loss(module: Any, rank: int, step: int) -> Any:
    """Return a rank's loss of a step."""
    import torch

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (module(x) - x.roll(1, 1)).square().mean()


def digest(module: Any) -> str:
    """Hash the bits of all parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()[:16]


def real(rank: int, world_size: int, port: int, names: list[str], pipe: Any) -> None:
    """Run every named run on this rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    for name in names:
        run = RUNS[name]
        module = network(run.layers)
        ddp = DistributedDataParallel(module, **run.ddp)
        link = gw.attach(ddp, run.method, **run.link) if run.method else None
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
        for step in range(run.steps):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
        pipe.send((name, digest(module)))
        if link is not None:
            link.close()
    dist.barrier()
    os._exit(0)


def simulated(run: Run) -> str:
    """Train with all workers in this process."""
    import torch

    import gradwire as gw
    from gradwire.exchange.segments import flatten

    torch.set_num_threads(1)
    module = network(run.layers)
    parameters = list(module.parameters())
    link = gw.SimulatedLink(module.named_parameters(), run.method, run.ranks)
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    for step in range(run.steps):
        rows = []
        for rank in range(run.ranks):
            rows.append(flatten(torch.autograd.grad(loss(module, rank, step), parameters)))
        link.scatter_(link.reduce_(torch.stack(rows)))
        optimizer.step()
    return digest(module)


def run_real(world_size: int) -> dict[str, list[str]]:
    """Return the digests of all ranks, by run."""
    import torch.distributed as dist

    names = [name for name, run in RUNS.items() if run.ranks == world_size]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=real, args=(rank, world_size, store.port, names, theirs)))
        processes[-1].start()
        pipes.append(ours)
    found = {name: [pipe.recv()[1] for pipe in pipes] for name in names}
    for process in processes:
        process.join()
    return found


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[str]] = {}
    for ranks in sorted({run.ranks for run in RUNS.values()}):
        found |= run_real(ranks)
    for name in [name for group in SAME for name in group if name not in RUNS]:
        found[name] = [simulated(RUNS[name.removesuffix(", simulated")])]
    for name, digests in found.items():
        print(f"{name:50s} {' '.join(sorted(set(digests)))}")
    groups = [{"runs": names, "same_bits": len({d for n in names for d in found[n]}) == 1} for names in SAME]
    for group in groups:
        print(f"{'same bits' if group['same_bits'] else 'DIFFERENT BITS'}: {'; '.join(group['runs'])}")
    if arguments.json:
        import torch

        import gradwire

        versions = {"gradwire": gradwire.__version__, "torch": torch.__version__, "python": platform.python_version()}
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        rows = [{"run": name, "digest": sorted(set(d)), "ranks": len(d)} for name, d in found.items()]
        record = {"date_utc": date, "cores": os.cpu_count(), "versions": versions, "groups": groups, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(group["same_bits"] for group in groups))


if __name__ == "__main__":
    sys.exit(main())
