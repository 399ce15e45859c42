"""Workers of speeds 1 : 1 : 2 : 4, synchronous and with a quorum: local steps a second, and the loss over samples.

    python benchmarks/trials/speeds.py --json benchmarks/results/trials/speeds.json

Four workers on this machine train a byte-level network on the standard library's source by DiLoCo, over a membership.
A step of a worker ends a fixed time after the step before has ended, by sleeping, so that workers do not wait for one
another's cores and the ratio of their speeds is exact. What a step computes takes a small part of that time. First the
workers train side by side without an exchange: the sum of their rates is what there is to keep. Then they train as many
samples in all

- synchronously: a round waits for all,
- with a quorum of one: when the fastest worker has taken all its local steps, the others contribute, after their
  current step, what they have,
- the same with so little time for that that those in the middle of a step are late, and contribute to a later round.

The loss is that of the global parameters on the held-out tail of the text. The fastest worker keeps them after each of
its contributions, and evaluates them after the training. Rows that are in the file already are not measured again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import earlier, write
from gradwire.tools.experiments.tasks.text import Text

CONTEXT, BATCH = 16, 32
HELD_OUT = 16_000
"""Held-out windows that are evaluated."""

WARM_STEPS = 10


def network() -> nn.Sequential:
    """Build a network that guesses the byte after 16 bytes."""
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 256)
    )


def windows(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contexts and the bytes that follow them."""
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(torch.int64)
    return rows[:, :-1], rows[:, -1]


class Stepper:
    """A worker's network, its data and its pace."""

    def __init__(self, number: int, seed: int, period_s: float, lr: float) -> None:
        source: Any = Text().load()
        self.text, self.held_out = source.text, source.held_out
        torch.manual_seed(seed)
        self.module = network()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self._draw = torch.Generator().manual_seed(1000 * seed + number)
        self._period_s, self._ends_s = period_s, 0.0
        self.times: list[float] = []

    def step(self) -> None:
        """Take a step, at its pace."""
        self._ends_s = time.monotonic() + self._period_s
        starts = torch.randint(self.text.numel() - CONTEXT, (BATCH,), generator=self._draw)
        inputs, targets = windows(self.text, starts)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(inputs), targets).backward()
        time.sleep(max(0.0, self._ends_s - time.monotonic()))
        self.times.append(time.monotonic())
        self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on held-out windows."""
        starts = torch.arange(0, self.held_out.numel() - CONTEXT, max(1, self.held_out.numel() // HELD_OUT))
        inputs, targets = windows(self.held_out, starts)
        return float(nn.functional.cross_entropy(self.module(inputs), targets))


def alone(number: int, seed: int, period_s: float, lr: float, seconds: float, pipe: Connection) -> None:
    """Train without an exchange, and tell when steps ended."""
    torch.set_num_threads(1)
    stepper = Stepper(number, seed, period_s, lr)
    for _ in range(WARM_STEPS):
        stepper.step()
    pipe.send("ready")
    pipe.recv()
    stepper.times.clear()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        stepper.step()
    pipe.send(stepper.times)


def member(
    number: int, seed: int, period_s: float, lr: float, spec: str, samples: int, rule: dict[str, Any],
    of: dict[str, Any], pipe: Connection,
) -> None:  # fmt: skip
    """Train over a membership until told to end, or until as many samples were merged."""
    torch.set_num_threads(1)
    stepper = Stepper(number, seed, period_s, lr)
    kept: list[tuple[int, list[torch.Tensor]]] = []
    with gw.join(
        of["address"], secret=of["secret"], name=f"worker {number}", least=of["workers"], **rule
    ) as membership:
        link = gw.Link(
            stepper.module.named_parameters(), spec, group=membership, optimizer=stepper.optimizer, seed=seed
        )
        counts = of["workers"] * link.method.traits.local_steps * BATCH
        round, is_last = 0, False
        while not is_last and not pipe.poll():
            if rule:
                link.weigh(BATCH)
            stepper.step()
            if not of["keeps"] or link.round == round:
                continue
            round, told = link.round, link.diagnostics()["membership"]
            merged = int(sum(told["weights"].values())) if rule else counts * round
            with link.global_parameters():
                kept.append((merged, [p.detach().clone() for p in stepper.module.parameters()]))
            is_last = merged >= samples
        ended_s, told = time.monotonic(), link.diagnostics()["membership"]
        sent_bytes = link.traffic().sent_bytes
    curve = []
    for merged, values in kept:
        with torch.no_grad():
            for p, value in zip(stepper.module.parameters(), values):
                p.copy_(value)
        curve.append((merged, stepper.loss()))
    pipe.send({"times": stepper.times, "ended_s": ended_s, "told": told, "sent_bytes": sent_bytes, "curve": curve})


def started(target: Any, *given: Any) -> tuple[Any, Connection]:
    """Start a process; return it, and the pipe to it."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*given, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def rates_alone(seed: int, given: argparse.Namespace) -> list[float]:
    """Return each worker's steps a second without an exchange, all of them at once."""
    workers = [started(alone, i, seed, period, given.lr, given.alone_s) for i, period in enumerate(given.periods)]
    for _, pipe in workers:
        pipe.recv()
    for _, pipe in workers:
        pipe.send("go")
    times = [pipe.recv() for _, pipe in workers]
    for process, _ in workers:
        process.join()
    return [(len(found) - 1) / (found[-1] - found[0]) for found in times]


def trained(
    mode: str, rule: dict[str, Any], seed: int, alone_rates: list[float], given: argparse.Namespace
) -> dict[str, Any]:
    """Train in one mode; return its row."""
    coordinator = gw.Coordinator("127.0.0.1:0")
    serving = threading.Thread(target=coordinator.serve, daemon=True)
    serving.start()
    spec = f"DiLoCo(every={given.every}, inner={given.inner})"
    fastest = given.periods.index(min(given.periods))
    of = {"address": f"127.0.0.1:{coordinator.port}", "secret": coordinator.secret, "workers": len(given.periods)}
    workers = [
        started(member, i, seed, period, given.lr, spec, given.samples, rule, {**of, "keeps": i == fastest})
        for i, period in enumerate(given.periods)
    ]
    try:
        first = workers[fastest][1].recv()
        for i, (_, pipe) in enumerate(workers):
            if i != fastest:
                pipe.send("end")
        found = [first if i == fastest else pipe.recv() for i, (_, pipe) in enumerate(workers)]
    finally:
        for process, _ in workers:
            process.join(10.0)
            process.kill()
        coordinator.close()
        serving.join()
    began_s = max(one["times"][0] for one in found)
    seconds = first["ended_s"] - began_s
    rates = [sum(began_s < at <= first["ended_s"] for at in one["times"]) / seconds for one in found]
    told, curve = first["told"], first["curve"]
    return {
        "mode": mode,
        "method": spec,
        "seed": seed,
        "periods_s": given.periods,
        **{name: rule.get(name) for name in ("quorum", "late_s", "staleness")},
        "seconds": round(seconds, 1),
        "steps_per_s": [round(rate, 2) for rate in rates],
        "alone_steps_per_s": [round(rate, 2) for rate in alone_rates],
        "share_of_summed_rate": round(sum(rates) / sum(alone_rates), 4),
        "rounds": len(curve),
        "samples": curve[-1][0],
        "loss": round(curve[-1][1], 4),
        "loss_at_quarters": [
            round(min(curve, key=lambda point: abs(point[0] - share * given.samples / 4))[1], 4) for share in (1, 2, 3)
        ],
        "sent_bytes": first["sent_bytes"],
        **{name: told.get(name, 0) for name in ("contributions", "late_contributions", "rounds_missed")},
        "ages": told.get("ages", {}),
    }


def main() -> int:
    """Train in all modes under all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--periods", type=float, nargs="+", default=[0.2, 0.2, 0.1, 0.05], help="s from step to step")
    parser.add_argument("--samples", type=int, default=3200 * BATCH, help="in all, under each mode")
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--inner", default="EDEN(bits=4)")
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--alone-s", type=float, default=20.0, help="seconds of training without an exchange")
    parser.add_argument("--late-s", type=float, nargs=2, default=[0.5, 0.05], help="of the two modes with a quorum")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["gradwire", "gradwire.kernels", "numba"])
    gw.warm_up(gw.method(given.inner))
    rule = {"quorum": 1, "staleness": given.staleness}
    modes = {
        "synchronous": {},
        "quorum": {**rule, "late_s": given.late_s[0]},
        "quorum, little time": {**rule, "late_s": given.late_s[1]},
    }
    rows = earlier(given.json, "rows")
    known = {(row["mode"], row["seed"]) for row in rows}
    for seed in range(given.seeds):
        left = {mode: chosen for mode, chosen in modes.items() if (mode, seed) not in known}
        rates = rates_alone(seed, given) if left else []
        for mode, chosen in left.items():
            rows.append(trained(mode, chosen, seed, rates, given))
            print(rows[-1], flush=True)
            write(given.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
