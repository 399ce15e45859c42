"""The trial of ``membership.py`` with torchft or hivemind in the place of gradwire.

    python -m venv runs/torchft && runs/torchft/bin/pip install . torchft-nightly==2026.10.26
    python -m venv runs/hivemind && runs/hivemind/bin/pip install . hivemind==1.1.12
    for peer in torchft hivemind; do
        runs/$peer/bin/python benchmarks/trials/membership_peers.py --peer $peer --json peers.json
    done

Neither is needed by gradwire, and each wants an environment of its own. torchft 0.2.0 runs, too, but under its
DistributedDataParallel every replica ends by an AssertionError when one of them does. All append to one file.

Faults, driver and accounting are those of ``churn.py``, and the faults are those of gradwire's method that is most like
the peer's. A replica whose program ends by an exception is started anew, as torchrun would. ``--silence-s`` is the
patience of the peer, too; what else is set is in the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import logging
import multiprocessing
import os
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import earlier
from benchmarks.trials.churn import (
    BATCH,
    WIDTH,
    Program,
    Seat,
    add_arguments,
    append,
    backward,
    cut_off,
    follow,
    network,
    tell,
    tried,
)
from benchmarks.trials.loaded import preload

EVERY = 8
"""Local steps of a round of DiLoCo."""

JOIN_S = 10.0
"""For how long torchft's lighthouse waits for replicas that live and do not ask for a quorum."""


HIVEMIND = {
    8: {"matchmaking_time": 1.0, "averaging_timeout": 5.0, "averager_opts": {"request_timeout": 0.5}},
    32: {"matchmaking_time": 3.0, "averaging_timeout": 10.0},
}
"""Options of hivemind's optimizer, by the steps of a round; the second are what it advises for small local runs."""


def spoil(x: torch.Tensor) -> None:
    """Flip the highest bit of the mantissa of one element."""
    x.view(-1)[x.numel() // 2 :][:1].view(torch.int32).bitwise_xor_(1 << 22)


# torchft


def serve_torchft(namespace: str | None, listen: str, pipe: Connection) -> None:
    """Run a lighthouse."""
    from torchft.coordination import LighthouseServer

    silence_ms = round(1000 * float(os.environ[SILENCE]))
    lighthouse = LighthouseServer(
        bind=listen, min_replicas=1, join_timeout_ms=round(1000 * JOIN_S), heartbeat_timeout_ms=silence_ms
    )
    pipe.send(lighthouse.address())
    threading.Event().wait()


def torchft_replica(seat: Seat, pipe: Connection, orders: Connection) -> None:
    """Train by torchft's DistributedDataParallel or DiLoCo."""
    from torch.distributed import TCPStore
    from torchft.ddp import DistributedDataParallel
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    given, local = seat.given, seat.spec.startswith("DiLoCo")
    module, left, armed = network(given.width), threading.Event(), threading.Event()
    inner = torch.optim.SGD(module.parameters(), lr=0.01)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["module"])
        inner.load_state_dict(state["inner"])

    patience = timedelta(seconds=given.silence_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "inner": inner.state_dict()},
        use_async_quorum=not local,
        timeout=patience,
        replica_id=f"replica_{seat.place}",
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=seat.address,
        rank=0,
        world_size=1,
    )
    usual = manager.allreduce

    def allreduce(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        work = usual(tensor, *args, **more)
        if armed.is_set():
            armed.clear()
            work.wait()
            spoil(tensor)
        return work

    manager.allreduce = allreduce  # type: ignore[method-assign]
    follow(orders, {"cut": cut_off, "corrupt": armed.set, "leave": left.set})

    with contextlib.ExitStack() as stack:
        if local:
            outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            stack.enter_context(DiLoCo(manager, [module], inner, outer, sync_every=EVERY))
            model, optimizer = module, inner
        else:
            model, optimizer = DistributedDataParallel(manager, module), OptimizerWrapper(manager, inner)
        for step in itertools.count():
            before = manager.current_step()
            optimizer.zero_grad()
            loss = backward(model, zlib.crc32(f"{seat.name} {step}".encode()), given)
            optimizer.step()
            if manager.current_step() > before:
                counts = {"step": manager.current_step()}
                tell(pipe, manager.current_step(), module, manager.num_participants(), loss, counts)
                if left.is_set():
                    break
    manager.shutdown(wait=False)
    os._exit(0)


# hivemind


def may_start_processes() -> None:
    """Let this process start others by forking, as hivemind does."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


def serve_hivemind(namespace: str | None, listen: str, pipe: Connection) -> None:
    """Run a peer of the hash table that no fault disturbs."""
    may_start_processes()
    from hivemind import DHT

    dht = DHT(start=True)
    pipe.send([str(address) for address in dht.get_visible_maddrs()])
    threading.Event().wait()


def hivemind_replica(seat: Seat, pipe: Connection, orders: Connection) -> None:
    """Train by hivemind's Optimizer: gradients are averaged when all together have taken so many steps each."""
    may_start_processes()
    from hivemind import DHT, Optimizer

    given, steps = seat.given, seat.steps
    torch.manual_seed(0)  # peers that begin together average their first parameters
    module, left, armed = network(given.width), threading.Event(), threading.Event()
    dht = DHT(initial_peers=seat.address, start=True)
    optimizer = Optimizer(
        dht=dht,
        run_id="trial",
        target_batch_size=BATCH * steps * given.replicas,
        batch_size_per_step=BATCH,
        params=module.parameters(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        **HIVEMIND[steps],
    )
    averager, average = optimizer.grad_averager, optimizer._average_gradients_and_load_into_optimizer
    step, taken, merged, group = averager.step, [0], [0], [0]

    def counted_step(*args: Any, **more: Any) -> Any:
        taken[0] = averager.local_times_accumulated
        return step(*args, **more)

    def counted_average(control: Any) -> None:
        average(control)
        merged[0] = group[0] = 0
        with contextlib.suppress(Exception):
            group[0] = len(control.result(0))
            merged[0] = taken[0]
        if armed.is_set():
            armed.clear()
            with averager.get_tensors() as gradients:
                spoil(gradients[0])

    averager.step, optimizer._average_gradients_and_load_into_optimizer = counted_step, counted_average
    follow(orders, {"cut": lambda: cut_off(group_of(os.getpid())), "corrupt": armed.set, "leave": left.set})
    for number in itertools.count():
        before = optimizer.local_epoch
        optimizer.zero_grad()
        loss = backward(module, zlib.crc32(f"{seat.name} {number}".encode()), given)
        optimizer.step()
        if optimizer.local_epoch > before and merged[0]:
            counts = {"group": group[0], "steps": merged[0]}
            tell(pipe, optimizer.local_epoch, module, -merged[0] / steps, loss, counts)
            merged[0] = 0
            if left.is_set():
                break
    optimizer.shutdown()
    dht.shutdown()
    os._exit(0)


def group_of(pid: int) -> list[int]:
    """Return the other processes of a process's group."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if int(name) != pid and os.getpgid(int(name)) == os.getpgid(pid):
                found.append(int(name))
    return found


SILENCE = "GRADWIRE_TRIAL_SILENCE_S"
QUIETLY = {
    "RUST_LOG": os.environ.get("RUST_LOG", "error"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "HIVEMIND_LOGLEVEL": "ERROR",
}


@dataclass(frozen=True)
class Way:
    """A way to train: the method of gradwire whose faults it has, and the steps of a replica in a round."""

    trace: str
    steps: int


@dataclass(frozen=True)
class Peer:
    """A peer: its program, the modules that replicas need, its ways to train, and what is set for them."""

    program: Program
    modules: tuple[str, ...]
    ways: dict[str, Way]
    settings: Callable[[Way, argparse.Namespace], dict[str, Any]]


STEPWISE, LOCAL = "terngrad", "DiLoCo(every=8, inner=EDEN(bits=4))"

PEERS = {
    "torchft": Peer(
        Program(serve_torchft, torchft_replica),
        ("torchft.manager", "torchft.ddp", "torchft.local_sgd", "torchft.coordination"),
        {"DistributedDataParallel": Way(STEPWISE, 1), f"DiLoCo(sync_every={EVERY})": Way(LOCAL, EVERY)},
        lambda way, given: {
            "process_group_timeout_s": given.silence_s,
            "manager_timeout_s": given.silence_s,
            "heartbeat_timeout_s": given.silence_s,
            "join_timeout_s": JOIN_S,
        },
    ),
    "hivemind": Peer(
        Program(serve_hivemind, hivemind_replica),
        ("hivemind",),
        {f"Optimizer, {steps} steps": Way(LOCAL, steps) for steps in HIVEMIND},
        lambda way, given: HIVEMIND[way.steps],
    ),
}


def installed(peer: str) -> str:
    """Return the name and version of a peer, or of its nightly build."""
    for name in (peer, f"{peer}-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    raise SystemExit(f"{peer} is not installed: see --help")


def main() -> int:
    """Try a peer's ways to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    add_arguments(parser)
    given = parser.parse_args(namespace=argparse.Namespace(width=WIDTH, lab=""))
    peer, system = PEERS[given.peer], installed(given.peer)
    os.environ |= {SILENCE: str(given.silence_s), **QUIETLY}
    preload([], peer.modules)
    rows = earlier(given.json, "rows")
    known = {(row["system"], row["method"], row["seed"]) for row in rows}
    for seed, spec in itertools.product(given.seeds, given.method or peer.ways):
        if (system, spec, seed) in known:
            continue
        way = peer.ways[spec]
        row = tried(peer.program, spec, given, seed, trace=way.trace, steps=way.steps)
        settings = peer.settings(way, given)
        told = {"system": system, "torch": torch.__version__, **row, "settings": settings}
        rows = append(given.json, told)
        print(told, flush=True)
    return int(any(row["hangs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
