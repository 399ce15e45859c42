"""The workers of a trial of outages: processes on the hosts of an emulated cluster, whose links fall silent in a phase.

    python benchmarks/trials/silenced.py

Started by ``outages.py``. Imports what a worker needs, once, then reads one line of JSON a trial from standard input,
forks the workers into the namespaces of the hosts, waits until all have ended, and prints one line: when, and how.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.trials.moments import ATTACH, BETWEEN, SAVE, WITHIN, Moment
from benchmarks.trials.mortal import ended, prepare
from benchmarks.trials.ways import MORE_WAYS
from gradwire.tools.processes import enter_namespace

SILENT_AT, STEPS = 2, 6
WIDTH = 192
"""Of a layer, so that some of its rows are sent one at a time and some at once."""

END = "end"
"""The moment from which on collectives are not counted."""

MARK, SILENT = "mark", "silent"
"""Names of files: the first says that a worker is in the phase, the second that links are silent now."""

MOST_S = 30.0
"""The longest that a worker waits for the second."""


@dataclass(frozen=True)
class Trial:
    """A training in which links fall silent.

    Attributes:
        way: Of exchanging, by its name in :data:`~benchmarks.trials.ways.MORE_WAYS`.
        moment: One of :data:`~benchmarks.trials.moments.MOMENTS`; empty: none comes.
        calls: Collectives that come before the outage, from the moment on.
        begun: Whether one more has begun.
        rank: The rank whose collectives are counted.
        patience_s: Timeout of the process group.
    """

    way: str
    moment: str
    calls: int
    begun: bool
    rank: int
    patience_s: float


class Mark(Moment):
    """Says in a folder that the phase has begun, and waits until links are silent.

    Attributes:
        silent_s: When they fell silent, by ``time.monotonic``; infinite before.
    """

    def __init__(self, trial: Trial, folder: Path) -> None:
        super().__init__(trial.moment, trial.calls, trial.begun)
        self._folder, self.silent_s = folder, math.inf

    def act(self) -> None:
        """Mark and wait."""
        (self._folder / MARK).touch()
        give_up_s = time.monotonic() + MOST_S
        while not (self._folder / SILENT).exists():
            if time.monotonic() > give_up_s:
                raise TimeoutError("the links did not fall silent")
            time.sleep(0.002)
        self.silent_s = time.monotonic()


class Count(Moment):
    """Counts the collectives from a moment on, and does nothing."""

    def __init__(self) -> None:
        super().__init__("", 0, False)
        self.calls = dict.fromkeys((ATTACH, SAVE, WITHIN), 0)
        self._now: str | None = None

    def comes(self, moment: str) -> None:
        """Count for this moment from now on."""
        if self._now is None:
            self.watch(0)
        self._now = moment

    def act(self) -> None:
        """Count one collective."""
        if self._now in self.calls:
            self.calls[self._now] += 1
        # The next one is due, too.
        self._left = 0


def work(trial: Trial, rank: int, folder: Path, port: int, namespace: str, address: str) -> None:
    """Be one of the ranks until the training ends; leave in the folder how it went."""
    enter_namespace(namespace)
    ranks = MORE_WAYS[trial.way].ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "GLOO_SOCKET_IFNAME": "eth0"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=trial.patience_s))
    told: dict[str, Any] = {"digests": []}
    moment: Moment | None = None
    if not trial.moment:
        moment = Count()
    elif rank == trial.rank:
        moment = Mark(trial, folder)

    def comes(which: str) -> None:
        if moment is not None:
            moment.comes(which)

    def took(call: Callable[[], Any]) -> Any:
        """Call, and keep for how long of the longest call links had fallen silent."""
        began_s = time.monotonic()
        found = call()
        if isinstance(moment, Mark):
            taken_s = time.monotonic() - max(began_s, moment.silent_s)
            told["paused_s"] = max(told.get("paused_s", 0.0), taken_s)
        return found

    link, worker = None, MORE_WAYS[trial.way].worker(WIDTH)
    try:
        next(worker)
        comes(ATTACH)
        training = took(lambda: next(worker))
        link = training.link
        for step in range(STEPS):
            if step == SILENT_AT:
                if SAVE in MORE_WAYS[trial.way].moments and trial.moment in ("", SAVE):
                    comes(SAVE)
                    took(lambda: gw.save(link, folder / "saved"))
                comes(BETWEEN)
                comes(WITHIN)
            if step == STEPS - 2:
                # An outage behind the last exchange would not be noticed.
                comes(END)
            took(lambda: next(worker))
            told["digests"].append(training.digest())
        told["error"] = None
        if isinstance(moment, Count):
            told["calls"] = moment.calls
    except Exception as error:
        told |= {"at": time.monotonic(), "error": type(error).__name__, "text": str(error)}
        told["link_error"] = None if link is None or link.error is None else str(link.error)
        raise
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(told))


def request(trial: Trial, folder: Path, port: int, namespaces: list[str], address: str) -> str:
    """Return the line that asks for a trial."""
    described = {"folder": str(folder), "port": port, "namespaces": namespaces, "address": address}
    return json.dumps({"trial": asdict(trial), **described})


def serve() -> tuple[Trial, int, Path, int, str, str] | None:
    """Fork workers as standard input says; return in each of them what it is, and None at the end."""
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        trial, folder = Trial(**asked["trial"]), Path(asked["folder"])
        pids = []
        for rank in range(MORE_WAYS[trial.way].ranks):
            pid = os.fork()
            if pid == 0:
                with (folder / f"{rank}.err").open("w") as log:
                    os.dup2(log.fileno(), 2)
                return trial, rank, folder, asked["port"], asked["namespaces"][rank], asked["address"]
            pids.append(pid)
        print(json.dumps(ended(pids)), flush=True)
    return None


if __name__ == "__main__":
    prepare()
    mine = serve()
    if mine is None:
        # What libraries have to say of their own ends is of no trial.
        os._exit(0)
    work(*mine)
