"""Steps on a cluster of nodes with fast links inside and slow links between them: on one level, on two, and by HSDP.

    sudo env "PATH=$PATH" python benchmarks/speed/two_level.py --json benchmarks/results/speed/two_level.json

Two nodes of two hosts each, one rank a host, in network namespaces: a host's link to its node's switch is not limited,
and each node's link to the other is, as the row says. A perceptron with 2.1 M parameters in DDP, or under FSDP2 in two
replicas of two shards ("HSDP"), one replica a node. ``step_s`` is of the rank that took longest, from the third step
on, over the number of steps; ``between_bytes`` is what the two nodes' links to each other carried meanwhile, both
together, by the interfaces' counters, per step, with the headers of packets and acknowledgements. ``sent_within`` is
what ``link.traffic()`` says that rank 0 sent, per step. Methods take turns, three times over.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.tools.lab import Network, Topology, open_network, run_command

UNTIMED, NODE = 2, 2
STEPS = {"10mbit": 3, "100mbit": 8, "1gbit": 16}
"""Timed ones, by the rate between nodes."""
HSDP = "HSDP, "
METHODS = {
    "DDP": "",
    "fp32, two levels": f"Hierarchical(FP32(), node_size={NODE})",
    "TernGrad": "terngrad",
    "TernGrad, two levels": f"Hierarchical(TernGrad(), node_size={NODE})",
    "EDEN 4 bits": "EDEN(bits=4)",
    "EDEN 4 bits, two levels": f"Hierarchical(EDEN(bits=4), node_size={NODE})",
    f"{HSDP}FSDP2's own": "",
    f"{HSDP}TernGrad": "terngrad",
    f"{HSDP}EDEN 4 bits": "EDEN(bits=4)",
}
TICK_S = 0.005


def wrapped(name: str) -> tuple[Any, Any]:
    """Return the module of this rank as a method's row has it, and its link; None where it has none."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw

    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    module: Any = nn.Sequential(*layers)
    if name.startswith(HSDP):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // NODE, NODE), mesh_dim_names=("a", "b"))
        for layer in (layers[0], layers[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        module = DistributedDataParallel(module, bucket_cap_mb=4)
    return module, gw.attach(module, METHODS[name]) if METHODS[name] else None


def meet(folder: Path, mark: str) -> None:
    """Let all ranks wait until who counts bytes has read the counters."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        (folder / mark).touch()
        while not (folder / f"{mark}.read").exists():
            time.sleep(TICK_S)
    dist.barrier()


def rank_main(folder: Path, steps: int, repeats: int) -> None:
    """Train for a few steps by every method on this host; rank 0 writes what they took."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run, name in runs(repeats):
        module, link = wrapped(name)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        inputs = torch.randn(16, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))
        began, before = 0.0, {}
        for step in range(UNTIMED + steps):
            if step == UNTIMED:
                meet(folder, f"{run} began")
                began, before = time.monotonic(), dict(link.traffic().sent_within) if link else {}
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
        taken = torch.tensor([(time.monotonic() - began) / steps])
        within = link.traffic().sent_within if link else {}
        if dist.get_rank() == 0:
            sent = {level: (count - before.get(level, 0)) / steps for level, count in within.items()}
        meet(folder, f"{run} ended")
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            (folder / f"{run}.json").write_text(json.dumps({"step_s": float(taken), "sent_within": sent}))
        if link is not None:
            link.close()
    dist.destroy_process_group()


def runs(repeats: int) -> list[tuple[str, str]]:
    """Return names of all runs in their order, and the method of each."""
    return [(f"{repeat} {i}", name) for repeat in range(repeats) for i, name in enumerate(METHODS)]


def measure(network: Network, rate: str, repeats: int) -> list[dict[str, Any]]:
    """Run all methods on all hosts, and count what crosses between nodes."""
    counts: dict[str, Any] = {}
    over = threading.Event()
    steps = STEPS[rate]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def count() -> None:
            for mark in (f"{run} {what}" for run, _ in runs(repeats) for what in ("began", "ended")):
                while not (folder / mark).exists():
                    if over.wait(TICK_S):
                        return
                counts[mark] = network.group_counters()
                (folder / f"{mark}.read").touch()

        counter = threading.Thread(target=count)
        counter.start()
        try:
            words = ["--folder", path, "--rates", rate, "--repeats", str(repeats)]
            run_command(network, [sys.executable, __file__, *words])
        finally:
            over.set()
            counter.join()
        rows = []
        for run, name in runs(repeats):
            moved = [b.since(a) for a, b in zip(counts[f"{run} began"], counts[f"{run} ended"])]
            row = {"between": rate, "method": name, "spec": METHODS[name], "steps": steps}
            row |= json.loads((folder / f"{run}.json").read_text())
            rows.append(row | {"between_bytes": sum(m.sent_bytes for m in moved) / steps})
    return rows


def main() -> None:
    """Measure all methods on all rates, three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.folder:
        rank_main(given.folder, STEPS[given.rates[0]], given.repeats)
        return
    rows = []
    for rate in given.rates:
        with open_network(Topology.parse(f"hosts=4,groups=2,between={rate}")) as network:
            rows += measure(network, rate, given.repeats)
        for name in METHODS:
            mine = [row for row in rows if (row["between"], row["method"]) == (rate, name)]
            times = [1e3 * row["step_s"] for row in mine]
            print(
                f"{rate:8s} {name:24s} {mean(times):8.1f} ms ({min(times):.1f} to {max(times):.1f}), "
                f"{mean(row['between_bytes'] for row in mine):>12,.0f} bytes between nodes",
                flush=True,
            )
    write(given.json, hosts=4, node_size=NODE, rows=rows)


if __name__ == "__main__":
    main()
