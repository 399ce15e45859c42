"""Bytes that the operating system counts on the interface against what ``link.traffic()`` says.

    python benchmarks/speed/bench_bytes.py --json benchmarks/results/speed/bytes.json

Ranks talk over the loopback interface of a network namespace of their own (``unshare``), so that nothing else is
counted. What remains between the two figures is TCP's and IP's headers and acknowledgements.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.interface import interface_bytes, isolate

METHODS = ("fp32", "bf16", "terngrad", "TernGrad(share_scaler=False)")


def rank_main(rank: int, world_size: int, port: int, numel: int, rounds: int, pipe: Any) -> None:
    """Exchange ``numel`` elements by each method."""
    import torch
    import torch.distributed as dist

    import gradwire as gw

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    for method in METHODS:
        parameters = [("w", torch.nn.Parameter(torch.zeros(numel)))]
        link = gw.Link(parameters, method)
        generator = torch.Generator().manual_seed(rank)
        parameters[0][1].grad = torch.randn(numel, generator=generator)
        link.reduce_()
        dist.barrier()
        before, start = link.traffic().sent_bytes, interface_bytes()
        dist.barrier()
        for _ in range(rounds):
            link.reduce_()
        dist.barrier()
        end, after = interface_bytes(), link.traffic().sent_bytes
        dist.barrier()
        pipe.send((method, after - before, end - start))
        link.close()
    dist.barrier()
    os._exit(0)


def measure(world_size: int, numel: int, rounds: int) -> list[dict[str, Any]]:
    """Compare the sum over ranks with the interface's count."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # PyTorch is imported once, by the process that the ranks are forks of.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "gradwire"])
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        arguments = (rank, world_size, store.port, numel, rounds, theirs)
        processes.append(context.Process(target=rank_main, args=arguments))
        processes[-1].start()
        pipes.append(ours)
    rows = []
    for method in METHODS:
        found = [pipe.recv() for pipe in pipes]
        claimed, counted = sum(sent for _, sent, _ in found), found[0][2]
        rows.append(
            {
                "method": method,
                "workers": world_size,
                "elements": numel,
                "rounds": rounds,
                "traffic_bytes": claimed,
                "interface_bytes": counted,
                "difference_percent": 100 * (counted - claimed) / claimed,
            }
        )
    for process in processes:
        process.join()
    return rows


def main() -> int:
    """Measure and print; exit with 1 where a difference exceeds five percent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    isolate()
    rows = [row for n in arguments.workers for row in measure(n, arguments.elements, arguments.rounds)]
    for row in rows:
        print(
            f"{row['method']:30s} {row['workers']} workers: traffic() {row['traffic_bytes']:>12,} bytes, "
            f"interface {row['interface_bytes']:>12,} bytes, {row['difference_percent']:+.2f} %"
        )
    if arguments.json:
        import torch

        import gradwire

        versions = {"gradwire": gradwire.__version__, "torch": torch.__version__, "python": platform.python_version()}
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found = {"date_utc": date, "system": platform.release(), "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(abs(row["difference_percent"]) > 5 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
