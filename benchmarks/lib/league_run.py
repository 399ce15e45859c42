"""One training of the league: a plan, and its run, which may be stopped at any step and goes on with the same bits."""

from __future__ import annotations

import json
import math
import os
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

import gradwire as gw
from benchmarks.lib.pairs import Pairs
from benchmarks.lib.stacked_gpt import Shape, StackedGPT, Text
from benchmarks.lib.stacked_optimizers import clip_each_, optimizers_of

__all__ = ["SAMPLES", "WINDOWS", "WORKERS", "Plan", "finished", "train"]

WORKERS, SAMPLES = 4, 3
"""Workers, and samples of each in a step: together nanoGPT's twelve."""
CLIP, FLOOR, WARM_UP = 1.0, 0.1, 0.05
"""nanoGPT's limit of a gradient's norm, its last learning rate as a share of the highest, and the share of steps before
that is reached, 100 of 2000 there."""
WINDOWS = 256
"""Windows of the validation text."""


@dataclass(frozen=True)
class Plan:
    """What determines a run.

    Args:
        spec: A method: "FP32()" exchanges gradients in every step, others have local steps, and "Pairs(every=16,
            outer_lr=0.7, outer_momentum=0.5)" is NoLoCo.
        optimizer: "adamw" or "muon".
        lr: Highest learning rate of the workers' optimizer.
        steps: Optimizer steps, over which the learning rate falls.
        seed: Seed of initial values, samples and the method.
    """

    spec: str
    optimizer: str
    lr: float
    steps: int
    seed: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Plan:
        """Return the plan of a run from its row."""
        return cls(*(row[field.name] for field in fields(cls)))

    @property
    def label(self) -> str:
        """A name for files, different for different plans."""
        parts = (self.steps, self.seed, self.optimizer, f"{self.lr:g}", self.spec)
        return re.sub(r"[^a-zA-Z0-9.]+", "-", "-".join(map(str, parts))).strip("-")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: a rise, then half a cosine."""
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        share = (step - warm) / (self.steps - warm)
        return self.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


class Exchange(Protocol):
    """What happens after a step of the optimizers."""

    def after(self) -> None:
        """Count a step, and exchange if it is due."""

    def finish(self) -> None:
        """Exchange what is left at the end."""

    def swapped(self) -> AbstractContextManager[None]:
        """Return a context in which the first replica is the model to evaluate."""

    def busier_bytes(self) -> int:
        """Return the bytes of the busier direction of worker 0 since the exchange was built."""

    def state(self) -> dict[str, Any]:
        """Return the state, without parameters."""

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


class EveryStep:
    """Gradients, averaged in every step: one replica has the batch of all workers, whose gradient is their mean.

    The bytes of a step are those of one simulated round.
    """

    def __init__(self, model: StackedGPT, spec: str) -> None:
        named = list(model.replica(0).items())
        link = gw.SimulatedLink(named, spec, WORKERS)
        link.reduce_(torch.zeros(WORKERS, link.numel))
        traffic = link.traffic()
        self._bytes_of_step, self._steps = max(traffic.sent_bytes, traffic.received_bytes), 0

    def after(self) -> None:
        self._steps += 1

    def finish(self) -> None:
        return

    def swapped(self) -> AbstractContextManager[None]:
        return nullcontext()

    def busier_bytes(self) -> int:
        return self._steps * self._bytes_of_step

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])


class LocalSteps:
    """A method of the library with local steps."""

    def __init__(self, model: StackedGPT, spec: str, seed: int) -> None:
        workers = [model.replica(k).items() for k in range(model.replicas)]
        self._method = gw.method(spec)
        self._steps = gw.SimulatedLocalSteps(workers, self._method, seed=seed)
        self._taken, self._before = 0, (0, 0)

    def after(self) -> None:
        self._taken += 1
        self._steps.after_step()

    def finish(self) -> None:
        streamed = getattr(self._method, "fragments", 1) > 1
        if streamed or self._taken % self._method.traits.local_steps:
            self._steps.synchronise()

    def swapped(self) -> AbstractContextManager[None]:
        return self._steps.swapped()

    def _bytes(self) -> tuple[int, int]:
        # A loaded state has no traffic: what was counted before is added.
        traffic = self._steps.traffic()
        return self._before[0] + traffic.sent_bytes, self._before[1] + traffic.received_bytes

    def busier_bytes(self) -> int:
        return max(self._bytes())

    def state(self) -> dict[str, Any]:
        return {"link": self._steps.state_dict(), "taken": self._taken, "bytes": list(self._bytes())}

    def load(self, state: dict[str, Any]) -> None:
        self._steps.load_state_dict(state["link"])
        self._taken = int(state["taken"])
        sent, received = state["bytes"]
        already = self._steps.traffic()
        self._before = (sent - already.sent_bytes, received - already.received_bytes)


class InPairs:
    """NoLoCo."""

    def __init__(self, model: StackedGPT, spec: str, seed: int) -> None:
        fields = dict(part.split("=") for part in spec.removeprefix("Pairs(").rstrip(")").replace(" ", "").split(","))
        self._pairs = Pairs(
            [list(model.replica(k).values()) for k in range(model.replicas)],
            every=int(fields["every"]),
            outer_lr=float(fields["outer_lr"]),
            outer_momentum=float(fields["outer_momentum"]),
            seed=seed,
        )

    def after(self) -> None:
        self._pairs.after_step()

    def finish(self) -> None:
        return

    def swapped(self) -> AbstractContextManager[None]:
        return self._pairs.swapped()

    def busier_bytes(self) -> int:
        return self._pairs.sent_bytes

    def state(self) -> dict[str, Any]:
        return dict(self._pairs.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self._pairs.load_state_dict(state)


def exchange_of(plan: Plan, shape: Shape) -> tuple[StackedGPT, Exchange]:
    """Return the model, with as many replicas as the plan needs, and its exchange."""
    if plan.spec.startswith("Pairs("):
        model = StackedGPT(shape, WORKERS, plan.seed)
        return model, InPairs(model, plan.spec, plan.seed)
    if gw.method(plan.spec).traits.local_steps:
        model = StackedGPT(shape, WORKERS, plan.seed)
        return model, LocalSteps(model, plan.spec, plan.seed)
    model = StackedGPT(shape, 1, plan.seed)
    return model, EveryStep(model, plan.spec)


def finished(plan: Plan, work: Path) -> dict[str, Any] | None:
    """Return the row of a run that has ended."""
    path = work / f"{plan.label}.json"
    row: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return row


def keep(plan: Plan, row: dict[str, Any], work: Path) -> None:
    """Write the row of a run that has ended."""
    put(work / f"{plan.label}.json", json.dumps(row).encode())


def train(
    plan: Plan, text: Text, work: Path, *, until: float = math.inf, shape: Shape | None = None
) -> dict[str, Any] | None:
    """Train, or continue a run that was stopped, and write its row when it ends.

    Args:
        plan: What to train.
        text: Data.
        work: Folder of rows and of states of runs that were stopped.
        until: ``time.monotonic()`` after which to stop and keep the state.
        shape: Numbers that fix the model.

    Returns:
        The row, or None if the time was over before the end.
    """
    found = shape or Shape(characters=text.characters)
    model, exchange = exchange_of(plan, found)
    optimizers = optimizers_of(model, plan.optimizer, plan.lr)
    stopped, windows = work / f"{plan.label}.pt", text.windows(WINDOWS, found.context)
    first, losses, cpu_s = 0, [], 0.0
    if stopped.exists():
        kept = torch.load(stopped, weights_only=True)
        first, losses, cpu_s = kept["step"], kept["losses"], kept["cpu_s"]
        with torch.no_grad():
            for name, x in model.stacks.items():
                x.copy_(kept["stacks"][name])
        for optimizer, state in zip(optimizers, kept["optimizers"]):
            optimizer.load_state_dict(state)
        exchange.load(kept["exchange"])
    start, look = time.process_time(), max(1, plan.steps // (10 if plan.steps > 500 else 2))
    for step in range(first, plan.steps):
        if time.monotonic() > until:
            spent = cpu_s + time.process_time() - start
            save(stopped, step, losses, spent, model, optimizers, exchange)
            return None
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate(step)
            optimizer.zero_grad()
        tokens = text.batch(plan.seed, step, WORKERS, SAMPLES, found.context)
        model.losses(tokens.view(model.replicas, -1, found.context + 1)).sum().backward()
        clip_each_(model.stacks.values(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
        exchange.after()
        if step + 1 == plan.steps:
            exchange.finish()
        if (step + 1) % look == 0 or step + 1 == plan.steps:
            with exchange.swapped():
                loss = model.loss_of_first(windows)
                walk = travelled(model, StackedGPT(found, 1, plan.seed)) if step + 1 == plan.steps else {}
            losses.append([step + 1, loss, exchange.busier_bytes()])
    row = (
        asdict(plan)
        | walk
        | {
            "loss": losses[-1][1],
            "numel": model.numel,
            "bytes": losses[-1][2],
            "bits_per_element_and_step": 8 * losses[-1][2] / model.numel / plan.steps,
            "losses": losses,
            "cpu_s": round(cpu_s + time.process_time() - start, 1),
        }
    )
    keep(plan, row, work)
    stopped.unlink(missing_ok=True)
    return row


@torch.no_grad()
def travelled(model: StackedGPT, start: StackedGPT) -> dict[str, float]:
    """Return the distance of the first replica from the initial values, and the share of elements that have moved."""
    changes = torch.cat([(x[0] - start.stacks[name][0]).reshape(-1) for name, x in model.stacks.items()])
    return {"distance": float(changes.norm()), "share_moved": float((changes != 0).double().mean())}


def save(
    path: Path,
    step: int,
    losses: list[list[float]],
    cpu_s: float,
    model: StackedGPT,
    optimizers: list[torch.optim.Optimizer],
    exchange: Exchange,
) -> None:
    """Keep the state of a run that is stopped before ``step``."""
    stacks = {name: x.detach() for name, x in model.stacks.items()}
    states = [optimizer.state_dict() for optimizer in optimizers]
    kept = {"step": step, "losses": losses, "cpu_s": cpu_s, "stacks": stacks, "optimizers": states}
    torch.save(kept | {"exchange": exchange.state()}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
