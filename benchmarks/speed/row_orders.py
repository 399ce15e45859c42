"""Orders in which four hosts can send each other rows: what keeps an exchange from the floor of its bytes.

    gradwire lab --hosts 4 --bandwidth 100mbit -- python benchmarks/speed/row_orders.py --bandwidth 100mbit \\
        --json benchmarks/results/speed/row_orders.json

Every rank sends a row to every other, twice, as a two-shot exchange does. The floor is the bytes that a rank sends over
its bandwidth. The orders:

in turn      a row leaves when the one before has left (what lanes do)
in lockstep  a row leaves when the one before has left and this round's has arrived: each receiver has one sender
overlapped   as in lockstep, one round behind
at once      all rows leave together
all-to-all   the backend's collective
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from gradwire.tools.lab import parse_rate

ORDERS = ("in turn", "in lockstep", "overlapped", "at once", "all-to-all")
SIZES = (100_000, 250_000, 500_000)


class Rows:
    """Connections of one rank."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=60)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, self.ranks, self.rank == 0, timeout)
        self.backend: Any = dist.ProcessGroupGloo(dist.PrefixStore("rows", store), self.rank, self.ranks, timeout)
        self._tag = 0

    def exchange(self, send: torch.Tensor, recv: torch.Tensor, order: str) -> None:
        """Send row r to rank r, and receive a row from it."""
        self._tag += 1
        if order == "all-to-all":
            self.backend.alltoall_base(recv.view(-1), send.view(-1), [], []).wait()
            return
        places = range(1, self.ranks)
        sources = {p: (self.rank - p) % self.ranks for p in places}
        asked = {p: self.backend.recv([recv[source]], source, self._tag) for p, source in sources.items()}
        leaving = []
        for p in places:
            to = (self.rank + p) % self.ranks
            leaving.append(self.backend.send([send[to]], to, self._tag))
            if order != "at once":
                leaving.pop().wait()
            arrives = {"in lockstep": p, "overlapped": p - 1}.get(order, 0)
            if arrives:
                asked.pop(arrives).wait()
        for work in (*leaving, *asked.values()):
            work.wait()

    def slowest(self, seconds: float) -> float:
        """Return the largest number of any rank."""
        value, options = torch.tensor([seconds]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.backend.allreduce([value], options).wait()
        return float(value)


def main() -> int:
    """Measure, print and write on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", required=True, help="the lab's, such as 100mbit")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bits_per_s, rows, table = parse_rate(arguments.bandwidth), Rows(), []
    if bits_per_s is None:
        parser.error("without a limit there is no floor")
    for size in SIZES:
        send, recv = (torch.zeros(rows.ranks, size, dtype=torch.uint8) for _ in range(2))
        floor_s = 2 * (rows.ranks - 1) * size * 8 / bits_per_s
        found: dict[str, list[float]] = {order: [] for order in ORDERS}
        for _ in range(arguments.repeats):
            # Side by side, so that a change of the machine's speed meets all orders.
            for order in ORDERS:
                rows.slowest(0.0)
                started = perf_counter()
                for _ in range(2):
                    rows.exchange(send, recv, order)
                found[order].append(rows.slowest(perf_counter() - started))
        for order, times in found.items():
            times = sorted(times[1:])
            row = {"order": order, "row_bytes": size, "of_floor": median(times) / floor_s}
            row |= {"fastest_of_floor": times[0] / floor_s, "slowest_of_floor": times[-1] / floor_s}
            table.append(row)
            if rows.rank == 0:
                print(f"{size:7d} bytes, {order:12s} {row['of_floor']:.2f} of the floor", flush=True)
    if rows.rank == 0:
        write(arguments.json, hosts=rows.ranks, bandwidth=arguments.bandwidth, repeats=arguments.repeats, rows=table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
