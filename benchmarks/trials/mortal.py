"""The workers of a trial of kills: processes that train over Gloo until one of them ends, at a moment that was drawn.

    python benchmarks/trials/mortal.py

Started by ``kills.py``. Imports what a worker needs, once, then reads one line of JSON a kill from standard input,
forks the workers, waits until all have ended, and prints one line: when, and how. A worker is a script as a user would
write it: what it does not catch ends its interpreter, with a traceback.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.graphs import GCN, Graph, partition, subgraphs, symmetrised
from gradwire.kernels import CODERS, FAMILIES, checksum, get_kernels

WIDTH, KILL_AT, STEPS = 48, 2, 60
GIVE_UP_S = 30.0
"""A survivor that lives on for so long is killed."""

BETWEEN, WITHIN, SAVE, ATTACH = MOMENTS = ("between exchanges", "in an exchange", "in gw.save", "in attach")
MANNERS = ("SIGKILL", "os._exit", "exception", "SIGTERM")
STORES = ("rank 0", "launcher")
BEFORE = -1
"""Calls of a victim that ends before it calls anything: the others do so when it is gone."""

COLLECTIVES = (
    "allgather", "_allgather_base", "allreduce", "broadcast", "alltoall_base", "send", "recv", "_reduce_scatter_base",
    "reduce_scatter",
)  # fmt: skip
"""By which Python asks a process group, or a backend, for an exchange; FSDP2's own and gradwire's alike."""


@dataclass(frozen=True)
class Kill:
    """The end of one worker.

    Attributes:
        number: Counted from 0.
        way: Of exchanging, by its name in :data:`WAYS`.
        moment: One of :data:`MOMENTS`.
        manner: One of :data:`MANNERS`.
        victim: Its rank.
        ranks: Of the training.
        store: Where the process group's store is: in rank 0, as where a script starts it alone, or in a process that
            is no rank, as under torchrun.
        calls: Collectives that the victim still takes part in, of those in an exchange, a save or an attach; or
            :data:`BEFORE`.
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


Worker = Iterator[Any]
"""Yields None when its link is to be built next, then the link, then once after each step."""


def network() -> nn.Sequential:
    """Build four small layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a batch of its own."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    loss: torch.Tensor = module(torch.randn(8, WIDTH, generator=draw)).square().mean()
    return loss


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object] = int) -> Worker:
    """Take steps for ever; ``after`` is called behind each backward pass."""
    for step in itertools.count():
        optimizer.zero_grad()
        loss_of(module, dist.get_rank(), step).backward()
        after()
        optimizer.step()
        yield


def ddp(spec: str, **options: Any) -> Callable[[], Worker]:
    """Train by DDP, in several buckets."""

    def worker() -> Worker:
        module = DistributedDataParallel(network(), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        yield
        yield gw.attach(module, spec, optimizer=optimizer, min_numel=1, **options)
        yield from steps(module, optimizer)

    return worker


def loop(spec: str) -> Callable[[], Worker]:
    """Train in a loop without DDP."""

    def worker() -> Worker:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        yield
        link = gw.Link(module.named_parameters(), spec, optimizer=optimizer, min_numel=1)
        yield link
        yield from steps(module, optimizer, link.reduce_)

    return worker


def sharded(shape: tuple[int, ...], attach: Callable[[Any], Any]) -> Callable[[], Worker]:
    """Train a module that FSDP2 shards over a mesh, each layer by itself."""

    def worker() -> Worker:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        module = network()
        for part in (*module, module):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        yield
        yield attach(module)
        yield from steps(module, optimizer)

    return worker


def halos(spec: str) -> Callable[[], Worker]:
    """Train on the parts of a random graph."""

    def worker() -> Worker:
        draw = torch.Generator().manual_seed(0)
        edges, labels = torch.randint(0, 60, (2, 150), generator=draw), torch.randint(0, 3, (60,), generator=draw)
        training, features = torch.ones(60, dtype=torch.bool), torch.randn(60, 5, generator=draw)
        graph = Graph(symmetrised(edges, 60), features, labels, training, ~training)
        part = subgraphs(graph, partition(graph, dist.get_world_size(), "random", seed=1))[dist.get_rank()]
        model = GCN(5, 3, width=8, layers=2)
        yield
        halo = gw.HaloLink(part.boundary, spec, steps=STEPS)
        yield halo
        while True:
            model.zero_grad()
            cross_entropy(model(part.features, part, halo), part.labels).backward()
            halo.next_round()
            yield

    return worker


@dataclass(frozen=True)
class Way:
    """A kind of link, and how many ranks train by it."""

    ranks: int
    worker: Callable[[], Worker]
    moments: tuple[str, ...] = MOMENTS


WAYS = {
    "DDP, all-gather": Way(3, ddp("qsgd", collective="all_gather")),
    "DDP, two-shot": Way(3, ddp("terngrad", collective="two_shot")),
    "DDP, sums of the backend": Way(4, ddp("fp16")),
    "Link": Way(3, loop("diana")),
    "FSDP2": Way(4, sharded((4,), lambda module: gw.attach(module, "qsgd", min_numel=1))),
    "HSDP": Way(4, sharded((2, 2), lambda module: gw.attach(module, "terngrad", min_numel=1))),
    "weights": Way(4, sharded((4,), gw.compress_weights), (BETWEEN, WITHIN, ATTACH)),
    "gossip": Way(4, loop("DPSGD(graph='ring')")),
    "gTopK": Way(4, ddp("GTopK(density=0.05)")),
    "two levels": Way(4, ddp("Hierarchical(QSGDinf(), node_size=2)")),
    "DiLoCo": Way(3, ddp("DiLoCo(every=2)")),
    "streaming DiLoCo": Way(3, ddp("StreamingDiLoCo(every=4, fragments=2, delay=1)")),
    "halos": Way(3, halos("bf16"), (BETWEEN, WITHIN, ATTACH)),
}


class Death:
    """Ends this process at the moment of a kill, if it is the victim.

    Args:
        kill: Whose.
        rank: Of this process.
        folder: Takes when it happened.
    """

    def __init__(self, kill: Kill, rank: int, folder: Path) -> None:
        self._kill, self._due, self._folder = kill, rank == kill.victim, folder
        self._left: int | None = None
        self._lock = threading.Lock()

    def comes(self, moment: str) -> None:
        """End the process, where this is the moment, or let it end in one of the next collectives."""
        if not self._due or moment != self._kill.moment:
            return
        if moment == BETWEEN or self._kill.calls == BEFORE:
            self._end()
        self._left = self._kill.calls
        for kind, name in itertools.product((dist.ProcessGroup, dist.ProcessGroupGloo), COLLECTIVES):
            if hasattr(kind, name):
                setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            # Lanes are threads.
            with self._lock:
                ends = self._left == 0
                self._left = None if ends or self._left is None else self._left - 1
            if ends and not self._kill.begun:
                self._end()
            found = collective(*arguments, **options)
            if ends:
                self._end()
            return found

        return counted

    def _end(self) -> NoReturn:
        (self._folder / "killed").write_text(str(time.monotonic()))
        if self._kill.manner == "exception":
            raise ValueError("the trial's own exception")
        if self._kill.manner == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, self._kill.manner))
        raise RuntimeError(f"{self._kill.manner} has not ended this process")


def work(kill: Kill, rank: int, folder: Path, port: int) -> None:
    """Be one of the ranks until something ends the training; leave in the folder what that was."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(kill.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(kill.store == "launcher")}
    dist.init_process_group("gloo")
    death, link = Death(kill, rank, folder), None
    worker = WAYS[kill.way].worker()
    try:
        next(worker)
        death.comes(ATTACH)
        if kill.calls == BEFORE:
            time.sleep(0.3)
        link = next(worker)
        for step in range(STEPS):
            if step == KILL_AT:
                death.comes(BETWEEN)
                death.comes(WITHIN)
                if kill.moment == SAVE:
                    death.comes(SAVE)
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
