"""Trainings whose workers are killed, stopped, cut off, told to leave and fed spoilt bytes, and come again.

    python benchmarks/trials/membership.py --minutes 30 --json benchmarks/results/trials/trials_membership.json
    sudo env "PATH=$PATH" python benchmarks/trials/membership.py --lab bandwidth=100mbit,delay=20ms --method terngrad

``churn.py`` has the faults, the driver and what is counted; here is what is tried: replicas of a membership, under each
of some methods. With ``--lab``, each replica is a host of an emulated network. A run that was ended goes on by the
same command: rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
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
    move,
    network,
    tell,
    tried,
)
from benchmarks.trials.loaded import preload
from gradwire.exchange.drivers.transports.gloo import GlooTransport
from gradwire.link.membership import serving_link
from gradwire.tools.lab import Topology, open_network

METHODS = ("terngrad", "PowerSGD(matrix_rank=2)", "DiLoCo(every=8, inner=EDEN(bits=4))")
SMALL = {"width": WIDTH, "momentum": 0.0, "large_bytes": serving_link.LARGE_BYTES}
"""The network of this trial; that of others may have more state."""


def spoil_next(armed: threading.Event) -> None:
    """Flip one bit of the next rows that this process receives after ``armed`` is set."""
    usual = GlooTransport.execute

    def execute(self: GlooTransport, *args: Any, **more: Any) -> torch.Tensor:
        reply = usual(self, *args, **more)
        if armed.is_set() and reply.dtype == torch.uint8 and reply.numel() > 256:
            armed.clear()
            reply = reply.clone()
            reply.view(-1)[reply.numel() // 2] ^= 1
        return reply

    GlooTransport.execute = execute  # type: ignore[method-assign]


def keep(namespace: str | None, listen: str, pipe: Connection) -> None:
    """Coordinate, on a host of an emulated network."""
    move(namespace)
    coordinator = gw.Coordinator(listen, finds_names=False)
    host = listen.rpartition(":")[0]
    pipe.send((f"{host}:{coordinator.port}", coordinator.secret))
    coordinator.serve()


def replica(seat: Seat, pipe: Connection, orders: Connection) -> None:
    """Train until told to leave, and tell every round that counted."""
    given, (address, secret) = seat.given, seat.address
    if given.log:
        logging.basicConfig(format=f"%(asctime)s.%(msecs)03d {seat.name}: %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("gradwire").setLevel(logging.DEBUG)
    module, armed = network(given.width), threading.Event()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=given.momentum)
    serving_link.LARGE_BYTES = given.large_bytes
    membership = gw.join(address, secret=secret, name=seat.name, least=seat.least, silence_s=given.silence_s)
    spoil_next(armed)
    follow(orders, {"cut": cut_off, "corrupt": armed.set, "leave": membership.leave})
    with membership:
        sampler = gw.ElasticSampler(1 << 20, membership, BATCH)
        link = gw.Link(module.named_parameters(), seat.spec, group=membership, optimizer=optimizer, min_numel=0)
        local = bool(link.method.traits.local_steps)
        while not membership.left:
            batch, before = sampler.draw() or [0], link.round
            optimizer.zero_grad()
            loss = backward(module, batch[0], given)
            try:
                if not local:
                    link.reduce_()
            except gw.LeftOutError:
                continue
            optimizer.step()
            if link.round > before:
                counts = {**link.diagnostics()["membership"], "met_s": membership.changes[-1].seconds}
                with link.global_parameters() if local else contextlib.nullcontext():
                    tell(pipe, link.round, module, membership.world_size, loss, counts)


MEMBERS = Program(keep, replica)


def main() -> int:
    """Try all methods; exit with 1 where digests differ, or a round hung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--lab", help="an emulated network, such as bandwidth=100mbit,delay=20ms")
    parser.add_argument("--log", action="store_true", help="replicas write to stderr how they meet")
    given = parser.parse_args(namespace=argparse.Namespace(**SMALL))
    methods = given.method or METHODS
    preload(methods)
    rows = earlier(given.json, "rows")
    known = {(row["method"], row["seed"], row["lab"], row["silence_s"]) for row in rows}
    with contextlib.ExitStack() as stack:
        emulated = None
        if given.lab:
            topology = Topology.parse(f"hosts={given.replicas + 1},{given.lab}")
            emulated = stack.enter_context(open_network(topology))
        for seed, spec in itertools.product(given.seeds, methods):
            if (spec, seed, given.lab or "", given.silence_s) in known:
                continue
            steps = getattr(gw.method(spec), "every", 1)
            rows = append(given.json, tried(MEMBERS, spec, given, seed, steps=steps, network=emulated))
            print(rows[-1], flush=True)
    return int(any(row["rounds_with_differing_digests"] or row["hangs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
