"""The workers of a trial of kills: processes that train over Gloo until one of them ends, at a moment that was drawn.

    python benchmarks/trials/mortal.py

Started by ``kills.py``. Imports what a worker needs, once, then reads one line of JSON a kill from standard input,
forks the workers, waits until all have ended, and prints one line: when, and how. A worker is a script as a user would
write it: what it does not catch ends its interpreter, with a traceback.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.trials.moments import ATTACH, BEFORE, BETWEEN, SAVE, WITHIN, Moment
from benchmarks.trials.ways import STEPS, WAYS, WIDTH
from gradwire.kernels import CODERS, FAMILIES, checksum, get_kernels

KILL_AT = 2
GIVE_UP_S = 30.0
"""A survivor that lives on for so long is killed."""

MANNERS = ("SIGKILL", "os._exit", "exception", "SIGTERM")
STORES = ("rank 0", "launcher")


@dataclass(frozen=True)
class Kill:
    """The end of one worker.

    Attributes:
        number: Counted from 0.
        way: Of exchanging, by its name in :data:`~benchmarks.trials.ways.WAYS`.
        moment: One of :data:`~benchmarks.trials.moments.MOMENTS`.
        manner: One of :data:`MANNERS`.
        victim: Its rank.
        ranks: Of the training.
        store: Where the process group's store is: in rank 0, as where a script starts it alone, or in a process that
            is no rank, as under torchrun.
        calls: Collectives that the victim still takes part in, of those in an exchange, a save or an attach; or
            :data:`~benchmarks.trials.moments.BEFORE`.
        begun: Whether it also begins the one after them.
    """

    number: int
    way: str
    moment: str
    manner: str
    victim: int
    ranks: int
    store: str
    calls: int
    begun: bool


class Death(Moment):
    """Ends this process at the moment of a kill.

    Args:
        kill: Whose.
        folder: Takes when it happened.
    """

    def __init__(self, kill: Kill, folder: Path) -> None:
        super().__init__(kill.moment, kill.calls, kill.begun)
        self._manner, self._folder = kill.manner, folder

    def act(self) -> NoReturn:
        """End the process."""
        (self._folder / "killed").write_text(str(time.monotonic()))
        if self._manner == "exception":
            raise ValueError("the trial's own exception")
        if self._manner == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, self._manner))
        raise RuntimeError(f"{self._manner} has not ended this process")


def work(kill: Kill, rank: int, folder: Path, port: int) -> None:
    """Be one of the ranks until something ends the training; leave in the folder what that was."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(kill.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(kill.store == "launcher")}
    dist.init_process_group("gloo")
    death, link = Death(kill, folder) if rank == kill.victim else None, None

    def comes(moment: str) -> None:
        if death is not None:
            death.comes(moment)

    worker = WAYS[kill.way].worker(WIDTH)
    try:
        next(worker)
        comes(ATTACH)
        if kill.calls == BEFORE:
            time.sleep(0.3)
        link = next(worker).link
        for step in range(STEPS):
            if step == KILL_AT:
                comes(BETWEEN)
                comes(WITHIN)
                if kill.moment == SAVE:
                    comes(SAVE)
                    gw.save(link, folder / "saved")
            next(worker)
    except Exception as error:
        told = {"at": time.monotonic(), "error": type(error).__name__, "text": str(error)}
        told["link_error"] = None if link is None or link.error is None else str(link.error)
        (folder / f"{rank}.json").write_text(json.dumps(told))
        raise


def ended(pids: list[int]) -> list[dict[str, Any]]:
    """Wait for processes; return when each ended, and its exit code or the negative number of the signal."""
    found: dict[int, dict[str, Any]] = {}
    watched = {os.pidfd_open(pid): pid for pid in pids}
    give_up_s = time.monotonic() + 2 * GIVE_UP_S
    while watched:
        ready, _, _ = select.select(list(watched), [], [], max(0.0, give_up_s - time.monotonic()))
        now_s = time.monotonic()
        if not ready:
            for pid in watched.values():
                os.kill(pid, signal.SIGKILL)
            give_up_s = now_s + GIVE_UP_S
        for handle in ready:
            pid = watched.pop(handle)
            os.close(handle)
            found[pid] = {"at": now_s, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
            # The first end is the victim's.
            give_up_s = min(give_up_s, now_s + GIVE_UP_S)
    return [found[pid] for pid in pids]


def prepare() -> None:
    """Load what workers need, so that each begins at once."""
    torch.set_num_threads(1)
    get_kernels().warm_up((*FAMILIES, *CODERS))
    checksum.warm_up()
    gc.collect()
    gc.freeze()


def serve() -> tuple[Kill, int, Path, int] | None:
    """Fork workers as standard input says; return in each of them what it is, and None at the end."""
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        kill, folder, port = Kill(**asked["kill"]), Path(asked["folder"]), int(asked["port"])
        pids = []
        for rank in range(kill.ranks):
            pid = os.fork()
            if pid == 0:
                with (folder / f"{rank}.err").open("w") as log:
                    os.dup2(log.fileno(), 2)
                return kill, rank, folder, port
            pids.append(pid)
        print(json.dumps(ended(pids)), flush=True)
    return None


def request(kill: Kill, folder: Path, port: int) -> str:
    """Return the line that asks for a kill."""
    return json.dumps({"kill": asdict(kill), "folder": str(folder), "port": port})


if __name__ == "__main__":
    prepare()
    mine = serve()
    if mine is None:
        # What libraries have to say of their own ends is of no kill.
        os._exit(0)
    work(*mine)
