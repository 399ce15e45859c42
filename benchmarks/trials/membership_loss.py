"""Loss of trainings whose workers are lost, leave and come, beside that of undisturbed ones after as many samples.

    python benchmarks/trials/membership_loss.py --json benchmarks/results/trials/membership_loss.json

Eight workers train a byte-level network on the standard library's source with AdamW, under each of some methods. They
are those of ``gw.replay``: the real link and protocol, with the bits of real processes under the same trace. Disturbed
trainings have a change each so many rounds, in turn: a worker is lost and a new one comes some rounds later, one is
left out and comes again as it was, or one leaves by its own word and a new one comes. Seeds draw initial weights, the
order of samples, and where changes fall. Every training ends with the round in which as many samples as given have
counted, and its loss is that on held-out text. Rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import cores_of_others, earlier, write
from benchmarks.trials.speeds import BATCH, CONTEXT, HELD_OUT, network, windows
from gradwire.tools.experiments.tasks.text import Text

METHODS = ("terngrad", "PowerSGD(matrix_rank=2)", "DiLoCo(every=8, inner=EDEN(bits=4))")
WINDOWS = 1 << 20
"""Places of the text that samples begin at."""

AWAY = 0.25
"""Time until somebody comes after a change, as a share of that between two changes."""


def script(workers: int, steps: int, every: int, most: int, seed: int) -> tuple[gw.MembershipTrace, int, int]:
    """Draw changes.

    Args:
        workers: Number of workers.
        steps: Steps of each worker in an undisturbed training.
        every: Steps in a round.
        most: Changes, unless they would be less than two rounds apart; each is followed by an arrival.

    Returns:
        The trace, the rounds after which as many samples as in the undisturbed training have counted, and the number of
        changes.
    """
    draw, members = random.Random(seed), [f"worker {i}" for i in range(workers)]
    founders, apart = list(members), max(2, steps // every // most)
    wanted, at, number = workers * (steps // every), apart, 0
    rounds, counted, changes = 0, 0, list[tuple[int, str, str]]()
    comes: dict[int, str] = {}
    while counted < wanted:
        if rounds == at:
            name, kind = draw.choice(members), ("is lost", "is lost", "leaves")[number % 3]
            changes.append((rounds, kind, name))
            members.remove(name)
            comes[rounds + max(1, round(AWAY * apart))] = name if number % 3 == 1 else f"worker {workers + number}"
            at, number = at + apart, number + 1
        if rounds in comes:
            name = comes.pop(rounds)
            changes.append((rounds, "joins", name))
            members.append(name)
        rounds, counted = rounds + 1, counted + len(members)
    return gw.MembershipTrace.scripted(founders, *changes), rounds, number


def train(membership: Any, spec: str, seed: int, rounds: int, lr: float, text: torch.Tensor) -> list[torch.Tensor]:
    """Train until a round; return the parameters, those of the exchange under local steps."""
    torch.manual_seed(seed)
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    sampler = gw.ElasticSampler(WINDOWS, membership, BATCH, seed=seed)
    link = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, seed=seed)
    local = bool(link.method.traits.local_steps)
    while not membership.left and link.round < rounds:
        inputs, targets = windows(text, torch.tensor(sampler.draw()))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        if not local:
            try:
                link.reduce_()
            except gw.LeftOutError:
                continue
        optimizer.step()
    if local and not membership.left:
        with link.global_parameters():
            return [p.detach().clone() for p in module.parameters()]
    return [p.detach().clone() for p in module.parameters()]


@torch.no_grad()
def loss_of(values: list[torch.Tensor], held_out: torch.Tensor) -> float:
    """Return the loss on held-out windows."""
    module = network()
    for p, value in zip(module.parameters(), values):
        p.copy_(value)
    starts = torch.arange(0, held_out.numel() - CONTEXT, max(1, held_out.numel() // HELD_OUT))
    inputs, targets = windows(held_out, starts)
    return float(nn.functional.cross_entropy(module(inputs), targets))


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400, help="of each worker, undisturbed")
    parser.add_argument("--changes", type=int, nargs="+", default=[40, 4], help="in a disturbed training")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--method", action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    others = cores_of_others()
    torch.set_num_threads(1)
    source: Any = Text().load()
    rows = earlier(given.json, "rows")
    for spec in given.method or METHODS:
        every = getattr(gw.method(spec), "every", 1)
        for seed in given.seeds:
            for most in (0, *given.changes):
                if any((r["method"], r["seed"], r["most_changes"]) == (spec, seed, most) for r in rows):
                    continue
                if most:
                    trace, rounds, changes = script(given.workers, given.steps, every, most, seed)
                else:
                    names = [f"worker {i}" for i in range(given.workers)]
                    trace, rounds, changes = gw.MembershipTrace.scripted(names), given.steps // every, 0
                found = gw.replay(trace, train, spec, seed, rounds, given.lr, source.text)
                last = trace.epochs[-1].members
                losses = [loss_of(found[name] or [], source.held_out) for name in last]
                rows.append(
                    {
                        "method": spec, "seed": seed, "most_changes": most, "changes": changes, "rounds": rounds,
                        "loss": losses[0], "same_on_all": len(set(losses)) == 1,
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
                settings = {"workers": given.workers, "steps": given.steps, "lr": given.lr, "batch": BATCH}
                write(given.json, cores_of_others=others, **settings, rows=rows)


if __name__ == "__main__":
    main()
