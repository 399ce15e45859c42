"""How long the first use of a method takes: where nothing is compiled yet, and where all of it is kept on disk.

    python benchmarks/speed/first_use.py --json benchmarks/results/speed/first_use.json
    python benchmarks/speed/first_use.py --source OTHER_CHECKOUT/src --worlds 4 --json before.json

Processes start together, as a launcher starts them, import the package, wrap a small convolutional network (44,426
parameters) in DDP over Gloo on the loopback, attach, and take a step. *cold* has an empty folder of compiled kernels
and of measured variants; *warm* follows it with the same folder. Seconds of the slowest process; CPU seconds of all.

Times are to be taken on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import earlier, write

METHODS = ("terngrad", "EDEN(bits=4)", "powersgd", "ErrorFeedback(TopK(density=0.01))")
LIMIT_S = 900

Row = dict[str, Any]


def worker(method: str, rank: int, world_size: int, folder: Path) -> None:
    """Time the stages of one process, and leave them in the folder."""
    clock = [time.perf_counter()]

    def stage() -> None:
        clock.append(time.perf_counter())

    import torch
    import torch.distributed as dist
    from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential

    stage()
    import gradwire as gw

    stage()
    torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size)
    convolutions = (Conv2d(1, 6, 5, padding=2), ReLU(), MaxPool2d(2), Conv2d(6, 16, 5), ReLU(), MaxPool2d(2))
    net = Sequential(*convolutions, Flatten(), Linear(400, 84), ReLU(), Linear(84, 10))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    stage()
    gw.attach(ddp, method)
    stage()
    ddp(torch.randn(8, 1, 28, 28)).square().sum().backward()
    stage()
    used = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    names = ("import_torch_s", "import_gradwire_s", "group_s", "attach_s", "step_s")
    found = {name: after - before for name, before, after in zip(names, clock, clock[1:])}
    found["cpu_s"] = used.ru_utime + used.ru_stime + children.ru_utime + children.ru_stime
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def start(method: str, world_size: int, kept: Path, source: Path | None) -> Row:
    """Start the processes of one use; give the slowest one's seconds, stage by stage."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {**os.environ, "NUMBA_CACHE_DIR": str(kept / "numba"), "XDG_CACHE_HOME": str(kept), "HOME": str(kept)}
        if source is not None:
            env["PYTHONPATH"] = str(source)
        command = [sys.executable, __file__, "--worker", method, "--folder", name, "--world-size", str(world_size)]
        began = time.perf_counter()
        workers = [
            subprocess.Popen([*command, "--rank", str(rank)], env=env, stdout=subprocess.DEVNULL)
            for rank in range(world_size)
        ]
        for made in workers:
            if made.wait(LIMIT_S):
                raise RuntimeError(f"a worker of {method} failed: see above")
        total_s = time.perf_counter() - began
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    found = {stage: max(rank[stage] for rank in ranks) for stage in ranks[0] if stage != "cpu_s"}
    return {**found, "cpu_s": sum(rank["cpu_s"] for rank in ranks), "total_s": total_s}


def measure(method: str, world_size: int, repeats: int, source: Path | None) -> list[Row]:
    """Return the rows of one method: cold and warm, medians and ranges of repeated starts."""
    uses: dict[str, list[Row]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as kept:
            for use in uses.values():
                use.append(start(method, world_size, Path(kept), source))
    return [
        {
            "method": method,
            "processes": world_size,
            "use": use,
            **{stage: round(median(row[stage] for row in rows), 2) for stage in rows[0]},
            "attach_range_s": [round(extreme(row["attach_s"] for row in rows), 2) for extreme in (min, max)],
            "repeats": repeats,
        }
        for use, rows in uses.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder that has another gradwire; default: the installed one")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 4], help="processes that start together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.rank, options.world_size, options.folder)
        return
    rows = earlier(options.json, "rows")
    known = {(row["method"], row["processes"]) for row in rows}
    for method in METHODS:
        for world_size in options.worlds:
            if (method, world_size) not in known:
                rows += measure(method, world_size, options.repeats, options.source)
                write(options.json, rows=rows)
                for row in rows[-2:]:
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
