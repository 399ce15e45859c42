"""Runs that must end in the same bits: real and simulated, three bucket sizes, all backends, and float32 against DDP.

    python benchmarks/identity.py --json benchmarks/results/identity.json

Trains a small network on four real ranks over Gloo (three for the order test) and prints a digest of the parameters of
every run; exits with 1 where digests differ that must not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

STEPS = 100
WIDTH = 128

# Name -> (world size, method or None for plain DDP, options of DDP, options of the link).
Run = tuple[int, str | None, dict[str, Any], dict[str, Any]]
RUNS: dict[str, Run] = {
    "plain DDP": (4, None, {}, {}),
    "fp32": (4, "fp32", {}, {}),
    "plain DDP, 0.1 MB buckets": (4, None, {"bucket_cap_mb": 0.1}, {}),
    "fp32, 0.1 MB buckets": (4, "fp32", {"bucket_cap_mb": 0.1}, {}),
    "terngrad": (4, "terngrad", {}, {}),
    "terngrad, 0.1 MB buckets": (4, "terngrad", {"bucket_cap_mb": 0.1}, {}),
    "terngrad, 0.2 MB buckets": (4, "terngrad", {"bucket_cap_mb": 0.2}, {}),
    "terngrad, four lanes, chunks of 5000": (4, "terngrad", {"bucket_cap_mb": 0.2}, {"lanes": 4, "chunk_numel": 5000}),
    "terngrad, cpu-plain kernels": (4, "terngrad", {}, {"backend": "cpu-plain"}),
    "terngrad, reference kernels": (4, "terngrad", {}, {"backend": "reference"}),
    "terngrad, all_gather": (4, "terngrad", {}, {"collective": "all_gather"}),
    "order: 20 buckets, 3 ranks, 200 steps, two-shot": (
        3,
        "terngrad",
        {"bucket_cap_mb": 0.06},
        {"collective": "two_shot", "lanes": 3},
    ),
}
SAME = [
    ["plain DDP", "fp32"],
    ["plain DDP, 0.1 MB buckets", "fp32, 0.1 MB buckets"],
    [name for name in RUNS if name.startswith("terngrad")] + ["terngrad, simulated"],
    ["order: 20 buckets, 3 ranks, 200 steps, two-shot", "order, simulated"],
]


def network(order: bool) -> Any:
    """Build the network, the same everywhere."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(20 if order else 6):
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
        _, method, ddp_options, options = RUNS[name]
        module = network(name.startswith("order"))
        ddp = DistributedDataParallel(module, **ddp_options)
        link = gw.attach(ddp, method, **options) if method else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(200 if name.startswith("order") else STEPS):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
        pipe.send((name, digest(module)))
        if link is not None:
            link.close()
    dist.barrier()
    os._exit(0)


def simulated(world_size: int, order: bool) -> str:
    """Run TernGrad with all workers in this process."""
    import torch

    import gradwire as gw
    from gradwire.segments import flatten

    torch.set_num_threads(1)
    module = network(order)
    parameters = list(module.parameters())
    link = gw.SimulatedLink(module.named_parameters(), "terngrad", world_size)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for step in range(200 if order else STEPS):
        rows = []
        for rank in range(world_size):
            rows.append(flatten(torch.autograd.grad(loss(module, rank, step), parameters)))
        link.scatter_(link.reduce_(torch.stack(rows)))
        optimizer.step()
    return digest(module)


def run_real(world_size: int) -> dict[str, list[str]]:
    """Return the digests of all ranks, by run."""
    import torch.distributed as dist

    names = [name for name, run in RUNS.items() if run[0] == world_size]
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
    found = run_real(4) | run_real(3)
    found["terngrad, simulated"] = [simulated(4, order=False)]
    found["order, simulated"] = [simulated(3, order=True)]
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
