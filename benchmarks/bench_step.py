"""A training step of the 10 M-parameter MLP with real ranks over loopback, methods side by side in one run.

    python benchmarks/bench_step.py --workers 4 --json benchmarks/results/step.json

Every repetition runs all variants one after the other, so that a noisy machine disturbs all of them alike. "compute"
is the same step with a hook that exchanges nothing; "fp32 DDP" has no hook at all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median, quantiles
from typing import Any

VARIANTS = ["compute", "fp32 DDP", "fp16 hook", "gradwire fp32", "gradwire bf16", "gradwire terngrad"]
SIZES = (784, 2048, 2048, 2048, 10)
BATCH = 16


def build(variant: str, arguments: argparse.Namespace) -> Any:
    """Make one variant: the module, its optimizer and its link."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw

    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(SIZES):
        parts += [nn.Linear(a, b), nn.ReLU()]
    ddp = DistributedDataParallel(nn.Sequential(*parts[:-1]))
    link = None
    if variant == "compute":
        ddp.register_comm_hook(None, nothing)
    elif variant == "fp16 hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif variant.startswith("gradwire"):
        options: dict[str, Any] = {"lanes": arguments.lanes}
        if arguments.chunk:
            options["chunk_numel"] = arguments.chunk
        link = gw.attach(ddp, variant.split()[1], **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), link


def nothing(state: object, bucket):  # type: ignore[no-untyped-def]
    """Exchange nothing: what computing alone costs under DDP."""
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def rank_main(rank: int, port: int, arguments: argparse.Namespace, pipe: Any) -> None:
    """One rank: all variants, interleaved."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=arguments.workers, timeout=timedelta(seconds=120)
    )
    names = arguments.variants or VARIANTS
    variants = {name: build(name, arguments) for name in names}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH, SIZES[0], generator=generator)
    y = torch.randint(0, SIZES[-1], (BATCH,), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(arguments.repetitions + 1):
        for name, (ddp, optimizer, _) in variants.items():
            for _ in range(arguments.steps):
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
                if repetition:
                    times[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - busy)
    extra = {}
    for name, (_, _, link) in variants.items():
        if link is not None:
            t, d = link.traffic(), link.diagnostics()
            extra[name] = {
                "sent_bytes_per_step": t.sent_bytes // t.rounds,
                "compression_factor": t.compression_factor,
                **{k + "_per_step": d[k] / t.rounds for k in ("encode_s", "wire_s", "decode_s")},
            }
            link.close()
    pipe.send((times, extra, cpu))
    dist.barrier()
    os._exit(0)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks and gather rows: a step lasts as long as its slowest rank."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(arguments.workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(rank, store.port, arguments, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    rows = []
    steps = {name: [max(ts) for ts in zip(*(times[name] for times, _, _ in found))] for name in found[0][0]}
    compute = median(steps["compute"]) if "compute" in steps else None
    for name, times in steps.items():
        low, *_, high = quantiles(times, n=5)
        rows.append(
            {
                "variant": name,
                "workers": arguments.workers,
                "median_s": median(times),
                "percentile_20_s": low,
                "percentile_80_s": high,
                "ratio_to_compute": median(times) / compute if compute else None,
                "median_cpu_s_of_all_ranks": sum(median(cpu[name]) for _, _, cpu in found),
                "samples": len(times),
                **found[0][1].get(name, {}),
            }
        )
    return rows


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put what ran beside what was measured."""
    import numba
    import torch

    import gradwire

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().split("\n") if "model name" in x), ""
    )
    return {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "link": "loopback, unlimited",
        "model": f"MLP {'-'.join(map(str, SIZES))}, batch {BATCH} a rank, one thread a rank",
        "versions": {
            "gradwire": gradwire.__version__,
            "torch": torch.__version__,
            "numba": numba.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of a variant in a row")
    parser.add_argument("--lanes", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=0, help="elements of a chunk")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments)
    for row in rows:
        ratio = f"{row['ratio_to_compute']:5.2f} x compute" if row["ratio_to_compute"] else ""
        parts = "".join(
            f"  {k[:-11]} {row[k] * 1e3:.1f}"
            for k in ("encode_s_per_step", "wire_s_per_step", "decode_s_per_step")
            if k in row
        )
        print(
            f"{row['variant']:18s} {row['median_s'] * 1e3:7.1f} ms "
            f"[{row['percentile_20_s'] * 1e3:.1f} - {row['percentile_80_s'] * 1e3:.1f}] {ratio}"
            f"  cpu {row['median_cpu_s_of_all_ranks'] * 1e3:.0f}{parts}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(record(rows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
