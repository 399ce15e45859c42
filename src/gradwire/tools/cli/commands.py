"""The work of ``gradwire train`` and ``compare``: progress on standard error, results on standard output.

Progress is one live line on a terminal, and a line every ten seconds elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from gradwire.errors import GradwireError
from gradwire.model.forecast import Scenario, forecast
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.tools.bench.predict import default_path
from gradwire.tools.bench.profile import options_of_steps, profile_plan, profiled_by_name
from gradwire.tools.cli.show import print_summary
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.report import write_report
from gradwire.tools.report.verdict import percent, seconds_text

PLAIN_LINE_EVERY_S = 10.0
"""Seconds between two lines if standard error is not a terminal."""

PREDICTED_BITS_PER_S, PREDICTED_DELAY_S = 100_000_000, 1e-4
"""Bandwidth and delay of the network for which ``compare`` predicts steps: a workstation's wide-area connection."""

WINDOW_S = 60.0
"""Seconds over which the rate is measured: the first steps are slower, and evaluations are far apart."""


class Rate:
    """Steps a second over the latest minute, evaluations included.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, step: int) -> None:
        """Record the number of steps done so far."""
        now_s = self._clock()
        self._seen.append((now_s, step))
        # The oldest entry kept is at least a window old, so that the window is full.
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    def steps_per_s(self) -> float | None:
        """Return the rate up to now; None before the first step has ended."""
        if not self._seen or self._seen[-1][1] == self._seen[0][1]:
            return None
        (first_s, first), (_, last) = self._seen[0], self._seen[-1]
        return (last - first) / max(self._clock() - first_s, 1e-9)

    def left_s(self, steps: int) -> float | None:
        """Return the seconds left until ``steps`` are done; None if there is no rate yet."""
        rate = self.steps_per_s()
        return None if rate is None else (steps - self._seen[-1][1]) / rate


class Progressing:
    """Draws a run's progress on standard error.

    A line shows the step, the workers' activity, the rate, the time left and the latest metrics. If standard error is
    not a terminal, a thread writes a line every :data:`PLAIN_LINE_EVERY_S` seconds from the start of the run, even
    while the workers report nothing.

    Args:
        debug: Show the output of a failed run's workers.
        clock: Returns seconds.
        every_s: Seconds between two plain lines; None: only evaluations write one.
    """

    def __init__(
        self,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        every_s: float | None = PLAIN_LINE_EVERY_S,
    ) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.debug = debug
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        self.accuracy: float | None = None
        self.last: Mapping[str, Any] = {}
        self.title, self.steps = "", 0
        self._clock, self._every_s = clock, every_s
        self._activity, self._step, self._line = "", 0, ""
        self._rate = Rate(clock)
        self._began_s = self._printed_s = clock()
        self._stop = threading.Event()
        self._lock = threading.RLock()

    def __enter__(self) -> Progressing:
        """Return this object; :meth:`start` begins a run's line."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing and restore the terminal."""
        self._finish()

    def say(self, sentence: str) -> None:
        """Print a sentence, on one line where no terminal is: it may hold a path or a command."""
        console = self.progress.console if self.progress else self.console
        console.print(sentence, markup=False, emoji=False, soft_wrap=not console.is_terminal)

    def start(self, config: RunConfig) -> None:
        """Begin the line of a run."""
        self._finish()
        kind = "simulated workers" if config.simulate else "workers"
        self.title, self.steps, self.accuracy = config.method, config.task.steps, None
        self._activity, self._step, self._line = f"starting {kind}", 0, ""
        self._rate, self._began_s = Rate(self._clock), self._clock()
        self._printed_s = self._began_s
        place = f" on {config.lab}" if config.lab else ""
        self.say(f"{config.task.name}: {config.method}, {config.workers} {kind}{place}, {config.task.steps} steps")
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=12),
                MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            )
            self.progress = Progress(
                *columns,
                TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
                TextColumn("{task.fields[now]}", markup=False),
                console=self.console,
            )
            self.task = self.progress.add_task(config.method[:14], total=self.steps, now=self._activity)
            self.progress.start()
        elif self._every_s is not None:
            self._stop = threading.Event()
            threading.Thread(target=self._tick_on, args=(self._stop, self._every_s), daemon=True).start()

    def step(self, step: int, activity: str) -> None:
        """Record the number of steps done and the current activity, such as "training"."""
        with self._lock:
            self._step, self._activity = step, activity
            self._rate.saw(step)
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=step, now=self._now())

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics."""
        with self._lock:
            self.last, self._step = row, row["step"]
            if row["event"] == "eval":
                self.accuracy = row["accuracy"]
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=row["step"], now=self._now())
        elif row["event"] == "eval" and (row["step"] == self.steps or self._is_due()):
            self._print_line()

    def tick(self) -> None:
        """Write a plain line if one is due and says anything new: after the last step, the report is written."""
        if self._is_due():
            self._print_line(again=False)

    def logs(self, logs: Mapping[int, str]) -> None:
        """Show the output of a failed run's workers, if debugging."""
        if self.debug:
            for rank, text in logs.items():
                self.say(f"--- worker {rank}\n{text.rstrip()}")

    def _tick_on(self, stop: threading.Event, every_s: float) -> None:
        # An evaluation's line postpones the next one, so checks come more often than lines are due.
        while not stop.wait(every_s / 4):
            self.tick()

    def _is_due(self) -> bool:
        return self._every_s is not None and self._clock() - self._printed_s >= self._every_s

    def _print_line(self, *, again: bool = True) -> None:
        with self._lock:
            self._printed_s = self._clock()
            before, self._line = self._line, f"  step {self._step}/{self.steps}  {self._now()}"
            if again or self._line != before:
                self.say(self._line)

    def _now(self) -> str:
        with self._lock:
            rate, left_s = self._rate.steps_per_s(), self._rate.left_s(self.steps)
            parts = []
            if self._step < self.steps:
                if rate is None or left_s is None:
                    parts.append(f"{self._activity}, {seconds_text(self._clock() - self._began_s)} so far")
                else:
                    parts += [] if self._activity == "training" else [self._activity]
                    parts.append(f"{rate:.3g} steps/s, {seconds_text(left_s)} left")
            return ", ".join(parts + metrics(self.last, self.accuracy))

    def _finish(self) -> None:
        self._stop.set()
        if self.progress:
            self.progress.stop()
            if self.last:
                self.progress.console.print(f"  {', '.join(metrics(self.last, self.accuracy))}", markup=False)
        self.progress, self.last = None, {}


def metrics(row: Mapping[str, Any], accuracy: float | None) -> list[str]:
    """Return the parts of a line that show the latest row; an empty list before the first row."""
    if not row:
        return []
    parts = [f"loss {row['loss']:.3f}"]
    if accuracy is not None:
        parts.append(f"acc. {percent(accuracy)}")
    if row["step_time_s"]:
        parts.append(f"{seconds_text(row['step_time_s'])}/step")
    if row["bits_per_element"]:
        factor = 32.0 / row["bits_per_element"]
        ratio = f"{max(factor, 1 / factor):.1f}"
        times = "" if ratio == "1.0" else f" (x{ratio} {'less' if factor > 1 else 'more'})"
        parts.append(f"{row['bits_per_element']:.2f} bits{times}")
    return parts


def expected(config: RunConfig, methods: Sequence[str]) -> list[str]:
    """Return lines that predict the same training on as many machines; none if the model cannot predict it.

    Workers on one machine exchange through its memory, which is faster than any network, so their measured times say
    little about training over one.
    """
    if config.simulate or config.lab is not None:
        return []
    setting = Scenario(
        hosts=config.workers,
        cores=os.cpu_count(),
        link=LinkModel(bandwidth_bytes_per_s=PREDICTED_BITS_PER_S / 8, latency_s=PREDICTED_DELAY_S),
    )
    calibrated = _calibrated()
    try:
        options = options_of_steps(config)
        forecasts, _ = forecast(profile_plan(config), methods, setting, calibrated or DEFAULT, options)
    except (GradwireError, NotImplementedError):
        # For example, the training of a graph network also exchanges halos.
        return []
    steps = [f"{f.method} {seconds_text(f.step_s)}" for f in forecasts if f.method in methods and f.apart is None]
    if not steps:
        return []
    whose = "this machine's" if calibrated else "a reference machine's"
    delays = [f"{f.delays:g} with {f.method}" for f in forecasts if f.method in methods and f.apart is None]
    lines = [
        f"Predicted, not measured: on {config.workers} machines at 100 Mbit/s a step would take {', '.join(steps)} "
        f"(by the model, with the speed of {whose} collectives).",
        f"Where machines are far apart, one-way delays count. An exchange waits for {', '.join(delays)}.",
    ]
    if profiled_by_name(config):
        lines.append(f"gradwire plan --profile {config.task.name} predicts other links and numbers of machines.")
    return lines


def _calibrated() -> Machine | None:
    """Return this machine's calibration; None if there is none that can be read."""
    try:
        kept = default_path()
        return Machine.read(kept) if kept.exists() else None
    except GradwireError:
        return None


def train(
    config: RunConfig, out: Path | None, *, overwrite: bool, stop_after: int | None, as_json: bool, debug: bool
) -> None:
    """Train, then print the run's row of the table."""
    with Progressing(debug) as progress:
        folder = run.train(config, progress, folder=out, overwrite=overwrite, stop_after=stop_after)
    if run.speaks():
        print_run(folder, as_json=as_json)


def print_run(folder: Path, *, as_json: bool) -> None:
    """Print a run's row of the table."""
    print_summary([folder], folder / "report.html", as_json=as_json)


def resume(folder: Path, *, stop_after: int | None, as_json: bool, debug: bool) -> None:
    """Continue a run, then print its row of the table."""
    with Progressing(debug) as progress:
        run.resume(folder, progress, stop_after=stop_after)
    print_run(folder, as_json=as_json)


def compare(
    config: RunConfig, methods: Sequence[str], out: Path | None, *, overwrite: bool, as_json: bool, debug: bool
) -> None:
    """Train once with each method, then print the table and whether each method paid."""
    with Progressing(debug) as progress:
        top, runs = run.compare(config, methods, progress, folder=out, overwrite=overwrite)
    page = top / "report.html"
    print_summary(runs, page, as_json=as_json)
    lines = [] if as_json else expected(config, methods)
    if lines:
        write_report(runs, page, lines)
        print("".join(f"\n{line}" for line in lines))
