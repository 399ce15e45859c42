"""The training loop: steps, rows of metrics, evaluations and checkpoints, the same for every engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import Engine, now_s
from gradwire.tools.experiments.errors import TrainingError
from gradwire.tools.experiments.folder import GAUGES, RunFolder

COUNTERS = ("sent_bytes", "received_bytes", "dense_bytes", "elements")
TELL_EVERY_S = 0.5
"""Seconds between two calls of ``on_step`` while the activity stays the same."""

Row = Mapping[str, Any]
OnStep = Callable[[int, str], None]
"""Takes the number of steps that are done, and the current activity."""


class Spreads:
    """Mean and deviation of each gauge since the last row, from a count, a sum and a sum of squares.

    Args:
        names: The gauges, the same on all ranks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.sums: dict[str, list[float]] = {}
        self._begin()

    def _begin(self) -> None:
        self.sums = {name: [0.0, 0.0, 0.0] for name in self._names}

    def add(self, workers: Sequence[Mapping[str, float]]) -> None:
        """Add one step's gauges of this process's workers; gauges with other names are ignored."""
        for gauges in workers:
            for name in self._names:
                if name in gauges:
                    value = gauges[name]
                    self.sums[name] = [a + b for a, b in zip(self.sums[name], (1.0, value, value * value))]

    def take(self, mean: Callable[[Sequence[float]], Sequence[float]]) -> dict[str, dict[str, float]]:
        """Return mean and standard deviation of each gauge over steps and workers, and start over (collective).

        A gauge that no worker reported is left out.

        Args:
            mean: Returns the mean of each number over processes; every process calls it with equally many numbers.
        """
        if not self._names:
            return {}
        flat = mean([value for name in self._names for value in self.sums[name]])
        self._begin()
        found = {}
        for i, name in enumerate(self._names):
            count, total, squares = flat[3 * i : 3 * i + 3]
            if count:
                centre = total / count
                found[name] = {"mean": centre, "deviation": math.sqrt(max(0.0, squares / count - centre * centre))}
        return found

    def load(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Load the sums of a checkpoint."""
        self._begin()
        self.sums.update({name: list(sums[name]) for name in self._names if name in sums})


class Average:
    """Exponential moving average of the weights, to evaluate with.

    The decay starts low, ``min(decay, (1 + step) / (10 + step))``, as in TensorFlow, so that the initial weights do not
    linger.
    """

    def __init__(self, decay: float, parameters: list[Tensor]) -> None:
        self.decay, self.parameters = decay, parameters
        self.shadow = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights after ``step`` steps."""
        weight = 1.0 - min(self.decay, (1 + step) / (10 + step))
        for shadow, parameter in zip(self.shadow, self.parameters):
            shadow.lerp_(parameter, weight)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the weights."""
        for shadow, parameter in zip(self.shadow, self.parameters):
            kept = parameter.clone()
            parameter.copy_(shadow)
            shadow.copy_(kept)


class Trainer:
    """Trains one model on one process's engine.

    Args:
        plan: Settings of the run.
        engine: Computes gradients.
        folder: Where rank 0 writes rows, and every rank its part of a checkpoint.
        on_row: Called on rank 0 with every row that was written.
        on_step: Called on rank 0 with the number of steps done and the current activity, at most twice a second while
            the activity stays the same.
        asked_to_stop: Returns a number above 0 if this process was asked to stop; called once for each row of metrics.

    Attributes:
        stopped: Whether the ranks have agreed to stop before the last step, because one was asked to.
    """

    def __init__(
        self,
        plan: RunConfig,
        engine: Engine,
        folder: RunFolder,
        on_row: Callable[[Row], None],
        on_step: OnStep = lambda step, activity: None,
        asked_to_stop: Callable[[], int] = lambda: 0,
    ) -> None:
        self._asked_to_stop, self.stopped = asked_to_stop, False
        self._is_due, self._saved_s = False, now_s()
        self.plan, self.engine, self.folder, self.on_row, self.on_step = plan, engine, folder, on_row, on_step
        self._told: tuple[float, str] = (-math.inf, "")
        self.optimizer = engine.optimizer
        self.named = list(engine.model.named_parameters())
        self.average = Average(plan.task.ema, [p for _, p in self.named]) if plan.task.ema else None
        self.step = 0
        self.elapsed_s = 0.0
        self.base = dict.fromkeys(COUNTERS, 0)
        self._losses: list[float] = []
        self._times_s: list[float] = []
        self._spreads = Spreads((*gw.method(plan.method).traits.gauges, *plan.task.gauges))

    def run(self, stop_after: int | None = None) -> None:
        """Train from the current step to the last, or to ``stop_after``, and write a checkpoint.

        With each row of metrics the ranks agree whether to stop early and whether a checkpoint is due by time: they
        exchange a mean then, and all must do the same.
        """
        last = min(self.plan.task.steps, stop_after or self.plan.task.steps)
        self._record_link()
        if self.step == 0:
            self._evaluate()
        while self.step < last and not self.stopped:
            self._tell("training")
            self._one_step()
            logged = self.step % self.plan.log_every == 0 or self.step == last
            if logged:
                self._log()
            if self.step % self.plan.task.eval_every == 0 or self.step == self.plan.task.steps:
                self._evaluate()
            every = self.plan.checkpoint_every
            if self.step == last or self.stopped or self._is_due or (every and self.step % every == 0):
                self.save()
        self._record_link()

    def _record_link(self) -> None:
        """Write the link's record into the run record: at the start as far as it is known, at the end in full."""
        if self.engine.rank == 0:
            self.folder.write_config({**self.folder.read_config(), "link": self.engine.record()})

    def _one_step(self) -> None:
        began_s = now_s()
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.task.learning_rate(self.step)
        loss = self.engine.backward(self.step) + self.engine.penalty()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.average:
            self.average.update(self.step)
        self._check_finite(loss)
        taken_s = now_s() - began_s
        self.elapsed_s += taken_s
        self._losses.append(loss)
        self._times_s.append(taken_s)
        self._spreads.add(self.engine.gauges())

    def _check_finite(self, loss: float) -> None:
        """Raise if a parameter or the loss is not finite after a step.

        Parameters are checked first: a non-finite gradient reaches every rank, so all ranks stop at the same step.
        """
        for name, parameter in self.named:
            if not math.isfinite(float(parameter.detach().sum())) and not bool(torch.isfinite(parameter).all()):
                raise TrainingError(
                    f"parameter {name} is not finite after step {self.step} (loss {loss:.4g}): "
                    "use a lower learning rate (--lr), or look at the data"
                )
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {self.step}: use a lower learning rate (--lr), or look at the data"
            )

    def _row(
        self,
        event: str,
        loss: float,
        accuracy: float | None,
        step_time_s: float | None,
        gauges: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        counted = self.counters()
        sent, dense = counted["sent_bytes"], counted["dense_bytes"]
        row: dict[str, Any] = {
            "step": self.step,
            "event": event,
            "loss": loss,
            "accuracy": accuracy,
            "step_time_s": step_time_s,
            "elapsed_s": self.elapsed_s,
            "sent_bytes": sent,
            "received_bytes": counted["received_bytes"],
            "dense_bytes": dense,
            "bits_per_element": 32.0 * sent / dense if dense else None,
        }
        if gauges:
            row[GAUGES] = gauges
        if self.engine.rank == 0:
            self.folder.append_row(row)
            self.on_row(row)

    def _log(self) -> None:
        minutes = self.plan.checkpoint_minutes
        is_due = minutes > 0 and now_s() - self._saved_s >= 60 * minutes
        loss, asked, due = self.engine.mean([statistics.fmean(self._losses), self._asked_to_stop(), is_due])
        self.stopped, self._is_due = asked > 0, due > 0
        self._row("train", loss, None, statistics.median(self._times_s), self._spreads.take(self.engine.mean))
        self._losses, self._times_s = [], []

    def _tell(self, activity: str) -> None:
        """Report the step and the activity, unless that was done a moment ago."""
        when_s, before = self._told
        if self.engine.rank == 0 and (activity != before or now_s() - when_s >= TELL_EVERY_S):
            self._told = now_s(), activity
            self.on_step(self.step, activity)

    def _evaluate(self) -> None:
        self._tell("evaluating")
        if self.average:
            self.average.swap()
        loss, accuracy = self.engine.score()
        if self.average:
            self.average.swap()
        if not math.isfinite(loss):
            # After the last step no training loss would show it.
            raise TrainingError(
                f"the loss of the evaluation after step {self.step} is {loss}: use a lower learning rate (--lr), or "
                "look at the data"
            )
        self._row("eval", loss, accuracy, None)

    def counters(self) -> dict[str, int]:
        """Return the bytes and elements of the whole run, including the parts before it was resumed."""
        traffic = self.engine.traffic()
        return {name: self.base[name] + int(getattr(traffic, name)) for name in COUNTERS}

    def save(self) -> None:
        """Write a checkpoint, every rank its part; if that fails, the previous one stays."""
        rank, step = self.engine.rank, self.step
        if rank == 0:
            self.folder.begin_checkpoint(step)
        self.engine.barrier()
        try:
            self.folder.save_part(step, f"rank-{rank}", self._rank_state())
            if rank == 0:
                self.folder.save_part(step, "shared", self._shared_state())
        except Exception:
            self.folder.abandon_checkpoint(step)
            raise
        self.engine.barrier()
        if rank == 0:
            self.folder.commit_checkpoint(step)
        self._is_due, self._saved_s = False, now_s()

    def _rank_state(self) -> dict[str, Any]:
        own = {
            "model": self.engine.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.shadow if self.average else [],
        }
        return {
            "link": self.engine.state_dict(),
            GAUGES: self._spreads.sums,
            # A row of metrics is the mean over ranks of what each has recorded since the last.
            "losses": self._losses,
            # Between exchanges each rank has different parameters.
            **(own if self.engine.local else {}),
        }

    def _shared_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "counters": self.counters(),
            "world_size": self.engine.world_size,
            "model": self.engine.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.shadow if self.average else [],
            "losses": self._losses,
            "times_s": self._times_s,
        }

    @torch.no_grad()
    def load(self) -> None:
        """Continue from the folder's newest checkpoint; raises RunError."""
        shared, mine = self.folder.load_part("shared"), self.folder.load_part(f"rank-{self.engine.rank}")
        own = mine if self.engine.local else shared
        self.engine.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self.engine.load_state_dict(mine["link"])
        self._spreads.load(mine.get(GAUGES, {}))
        if self.average:
            self.average.shadow = list(own["average"])
        self.step, self.elapsed_s = shared["step"], shared["elapsed_s"]
        # In checkpoints of earlier versions only those of rank 0 are kept.
        self._losses, self._times_s = list(mine.get("losses", shared["losses"])), list(shared["times_s"])
        loaded = self.engine.traffic()
        self.base = {name: shared["counters"][name] - int(getattr(loaded, name)) for name in COUNTERS}
        if self.engine.rank == 0:
            self.folder.cut_metrics(self.step)
        self.engine.barrier()
