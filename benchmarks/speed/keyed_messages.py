"""What digests under a key cost: bytes a second of BLAKE2b, and rounds with them beside rounds without.

    sudo env "PATH=$PATH" gradwire lab --hosts 4 --bandwidth 1gbit -- \\
        python benchmarks/speed/keyed_messages.py --network "4 hosts, 1 Gbit/s" \\
        --json benchmarks/results/speed/keyed_messages.json

Each method has two links over the same ranks, one of them with a key, as members of ``gradwire.join`` have. Their
rounds alternate, and so do the two in each pair. A round is ``reduce_()`` on gradients of 10.2 million parameters, from
a barrier until the last rank has its mean. BLAKE2b is timed beside the checksum that every payload has and a copy in
memory, over the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import earlier, write
from gradwire.exchange.digests import digest_of
from gradwire.exchange.drivers import TorchGroup
from gradwire.kernels.checksum import checksums

METHODS = ("fp32", "bf16", "terngrad", "PowerSGD(matrix_rank=2)")
SIDE, MATRICES = 1600, 4
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
REPEATS = 9


class Keyed(TorchGroup):
    """The ranks of the default group, with a key."""

    def key(self, purpose: str) -> bytes:
        return digest_of(purpose.encode(), bytes(32))


def best_s(work: Callable[[], object], bytes_each: int) -> float:
    """Return the shortest time of one call."""
    calls = max(1, (1 << 22) // bytes_each)
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def rates(size: int) -> dict[str, Any]:
    """Return gigabytes a second of the digest, the checksum and a copy, for messages of a size."""
    octets = np.arange(size, dtype=np.uint64).view(np.uint8)[:size].copy()
    into, heads = np.empty_like(octets), np.zeros((1, 3), np.uint64)
    seconds = {
        "blake2b": best_s(lambda: hashlib.blake2b(octets.data, key=bytes(32), digest_size=32).digest(), size),
        "checksum": best_s(lambda: checksums(heads, octets[None]), size),
        "copy": best_s(lambda: np.copyto(into, octets), size),
    }
    return {"bytes": size, **{f"{name}_gb_per_s": round(size / s / 1e9, 3) for name, s in seconds.items()}}


def link_over(group: TorchGroup, method: str) -> tuple[gw.Link, list[torch.nn.Parameter]]:
    """Return a link, and its parameters with gradients of this rank."""
    parameters = [torch.nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(MATRICES)]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    return gw.Link(
        [(str(i), p) for i, p in enumerate(parameters)], method, group=group, optimizer=optimizer
    ), parameters


def round_s(link: gw.Link, parameters: list[torch.nn.Parameter]) -> float:
    """Return the seconds of one round, of the rank that took longest."""
    for i, parameter in enumerate(parameters):
        draw = torch.Generator().manual_seed(10 * dist.get_rank() + i)
        parameter.grad = torch.randn(SIDE, SIDE, generator=draw)
    dist.barrier()
    began = time.perf_counter()
    link.reduce_()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def compared(method: str, rounds: int) -> dict[str, Any]:
    """Time rounds of both links in turn; return a row."""
    world = dist.group.WORLD
    if world is None:
        raise SystemExit("start it under torchrun, or gradwire lab")
    pair = [link_over(kind(world), method) for kind in (TorchGroup, Keyed)]
    for link, parameters in pair * 3:
        round_s(link, parameters)
    sent = [link.traffic().sent_bytes for link, _ in pair]
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(round_s(*pair[which]))
    sent = [(link.traffic().sent_bytes - before) / rounds for (link, _), before in zip(pair, sent)]
    for link, _ in pair:
        link.close()
    plain, keyed = map(statistics.median, times)
    return {
        "method": method,
        "ranks": dist.get_world_size(),
        "rounds": rounds,
        "sent_bytes": round(sent[0]),
        "digest_bytes": round(sent[1] - sent[0]),
        "round_s": round(plain, 5),
        "keyed_round_s": round(keyed, 5),
        "median_ratio": round(keyed / plain, 4),
        "best_ratio": round(min(times[1]) / min(times[0]), 4),
    }


def main() -> None:
    """Time everything; rows of other networks in the file stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", required=True, help="What connects the ranks, for the record")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--method", action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = [rates(size) for size in SIZES] if dist.get_rank() == 0 else []
    dist.barrier()
    rows = [row for row in earlier(given.json, "rows") if row["network"] != given.network]
    for method in given.method or METHODS:
        gw.warm_up(method)
        dist.barrier()
        rows.append({"network": given.network, **compared(method, given.rounds)})
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        write(given.json, rates=measured, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
