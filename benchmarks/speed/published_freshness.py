"""How soon readers hold a trainer's weights over links of 100 Mbit/s: whole files, patches, and patches by a relay.

    sudo env "PATH=$PATH" python benchmarks/speed/published_freshness.py \\
        --json benchmarks/results/speed/published_freshness.json

Four hosts of an emulated cluster. On the first a trainer publishes bfloat16 weights of ten million elements, of which
a share moves by a unit in the last place in each step, twice a second, to a TCPStore of its own. Readers on two others
follow from the first step on, and one on the fourth begins late. In the middle, one reader's link is silent for a
while. A reader is fresh of a step when it holds it or a later one, to the last bit; what counts is the time from the
end of the optimizer's step, when ``publish`` is called, until then, and how many steps a reader is behind, at every
fifth of a second. *Whole* publishes an anchor at each step, which readers fetch; by a *relay* the first reader serves
the two others. The share of changes is that measured at a learning rate of 1e-6 (``published_bits.py``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import cores_of_others, write
from gradwire.tools.lab import Network, Outage, Topology, open_network, start

MODES = ("whole", "patches", "relay")
STEP_S, POLL_S = 0.5, 0.05
SHARE = 0.0183
LATE_AT, OUTAGE_AT_S, OUTAGE_S, SILENT = 40, 10.0, 5.0, 2
"""Step at which the late reader begins; when, how long and on which host the link is silent."""

PORT, KEPT_WHOLE = 29700, 40
READERS = (1, 2, 3)


def tensors_of(elements: int) -> dict[str, torch.Tensor]:
    """Return the weights of the first step."""
    generator = torch.Generator().manual_seed(0)
    width = 1000
    return {f"layer{n}": torch.randn(elements // 10 // width, width, generator=generator).bfloat16() for n in range(10)}


def store_of(address: str, port: int, serves: bool) -> Any:
    """Open the store of a host."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=120))


def say(**row: Any) -> None:
    """Tell the program that started this one, by the clock that all processes of a machine share."""
    print(json.dumps({"at": time.monotonic(), **row}), flush=True)


def train(address: str, mode: str, elements: int, steps: int) -> None:
    """Publish steps."""
    import gradwire as gw

    weights = tensors_of(elements)
    # Whole files stay long enough for readers that share the link.
    settings = {"anchor_every": 1, "keep_anchors": KEPT_WHOLE} if mode == "whole" else {}
    publisher = gw.WeightPublisher(weights, store_of(address, PORT, True), **settings)
    publisher.publish(0)
    say(event="ready")
    sys.stdin.readline()
    generator = torch.Generator().manual_seed(1)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        for tensor in weights.values():
            flat = tensor.view(torch.int16).view(-1)
            chosen = torch.rand(flat.numel(), generator=generator) < SHARE
            flat[chosen] += 1
        time.sleep(max(0.0, begun + step * STEP_S - time.monotonic()))
        say(event="step", step=step)
        told = publisher.publish(step)
        nbytes = told.anchor_bytes if mode == "whole" else told.patch_bytes
        say(event="published", step=step, nbytes=nbytes, changed=told.changed)
    say(event="sums", sums=sums_of(weights))
    sys.stdin.readline()


def sums_of(weights: dict[str, torch.Tensor]) -> list[int]:
    """Return a digest of each tensor's bytes."""
    import zlib

    return [zlib.crc32(tensor.view(torch.uint8).numpy()) for tensor in weights.values()]


def read(source: str, port: int, mode: str, elements: int, steps: int, own: str) -> None:
    """Follow the steps, and serve others from this host's own address if that is asked for."""
    import gradwire as gw

    weights = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(elements).items()}
    relay = store_of(own, PORT + 1, True) if own else None
    subscriber = gw.WeightSubscriber(weights, store_of(source, port, False), relay=relay)
    say(event="ready")
    sys.stdin.readline()
    say(event="begin")
    while subscriber.step != steps:
        before = subscriber.step
        try:
            step = subscriber.update(full=mode == "whole" and _is_newer(subscriber))
        except gw.PayloadError as error:
            say(event="refused", text=str(error))
            continue
        if step != before:
            say(event="held", step=step, nbytes=sum(file.nbytes for file in subscriber.applied))
        else:
            time.sleep(POLL_S)
    say(event="sums", sums=sums_of(weights))
    sys.stdin.readline()


def _is_newer(subscriber: Any) -> bool:
    """Return whether a step is published that is not held: asked for whole, else it would be fetched again."""
    from gradwire.publish.manifest import read_manifest

    manifest = read_manifest(subscriber._place)
    return manifest is not None and manifest.step != subscriber.step


class Role:
    """A process on a host, and the rows that it tells."""

    def __init__(self, network: Network, host: int, *words: object) -> None:
        command = [sys.executable, __file__, "--role", *map(str, words)]
        self.host, self.rows = host, list[dict[str, Any]]()
        self.process: subprocess.Popen[bytes] = start(
            network, host, command, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait(self, event: str) -> dict[str, Any]:
        """Read rows up to one with an event."""
        while True:
            line = self.process.stdout.readline() if self.process.stdout else b""
            if not line:
                raise SystemExit(f"the process on host {self.host} ended with {self.process.wait()}")
            self.rows.append(json.loads(line))
            if self.rows[-1]["event"] == event:
                return self.rows[-1]

    def go(self) -> None:
        """Let it go on."""
        if self.process.stdin:
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return its rows with an event."""
        return [row for row in self.rows if row["event"] == event]


def follow(network: Network, mode: str, elements: int, steps: int) -> list[dict[str, Any]]:
    """Run one training and its readers; return a row for each reader."""
    roles: list[Role] = []
    try:
        roles.append(trainer := Role(network, 0, "trainer", network.address(0), mode, elements, steps))
        trainer.wait("ready")
        readers = {}
        for host in READERS:
            behind = mode == "relay" and host != 1
            source, port = (network.address(1), PORT + 1) if behind else (network.address(0), PORT)
            own = network.address(1) if mode == "relay" and host == 1 else ""
            roles.append(reader := Role(network, host, "reader", source, port, mode, elements, steps, own))
            reader.wait("ready")
            readers[host] = reader
        before = network.counters()
        for reader in (readers[1], readers[2]):
            reader.go()
        for reader in (readers[1], readers[2]):
            reader.wait("held")
        trainer.go()
        began = trainer.wait("step")["at"] - STEP_S
        # The relay counts an outage from this call on.
        network.restart_outages([Outage(lasts_s=OUTAGE_S, from_s=OUTAGE_AT_S, host=SILENT)])
        while trainer.wait("published")["step"] < LATE_AT:
            pass
        readers[3].go()
        expected = trainer.wait("sums")["sums"]
        for reader in readers.values():
            if reader.wait("sums")["sums"] != expected:
                raise SystemExit(f"{mode}: the reader on host {reader.host} holds other bytes")
        sent = [after.sent_bytes - b.sent_bytes for after, b in zip(network.counters(), before)]
        network.restart_outages([])
        return [row_of(mode, trainer, reader, began, sent) for reader in readers.values()]
    finally:
        for role in roles:
            role.process.kill()
            role.process.communicate()


def row_of(mode: str, trainer: Role, reader: Role, began: float, sent: list[int]) -> dict[str, Any]:
    """Return what a reader came to."""
    steps = {row["step"]: row["at"] for row in trainer.of("step")}
    held = [(row["at"], row["step"]) for row in reader.of("held")]
    late = reader.host == 3
    first = reader.of("begin")[0]["at"]
    outage = (began + OUTAGE_AT_S, began + OUTAGE_AT_S + OUTAGE_S)
    fresh = {step: next(at for at, found in held if found >= step) - at_ for step, at_ in steps.items()}
    # What the outage delays has a column of its own.
    disturbed = reader.host == SILENT
    quiet = [s for step, s in fresh.items() if not disturbed or not outage[0] - s <= steps[step] <= outage[1] + 5]
    quiet = [s for step, s in fresh.items() if step > LATE_AT] if late else quiet
    end = max(steps.values())
    begin = held[0][0] if late else began
    behind = [
        max((s for s, at in steps.items() if at <= t), default=0) - max((s for at, s in held if at <= t), default=0)
        for t in (begin + STEP_S * n / 2.5 for n in range(int((end - begin) / (STEP_S / 2.5))))
        if not disturbed or not outage[0] <= t <= outage[1] + 5
    ]
    again = [at - outage[1] for at, _ in held if at > outage[1]]
    published = trainer.of("published")
    return {
        "mode": mode,
        "host": reader.host,
        "fresh_median_s": median(quiet),
        "fresh_most_s": max(quiet),
        "behind_mean_steps": mean(behind) if behind else None,
        "behind_most_steps": max(behind) if behind else None,
        "held_steps": len(held),
        "fetched_bytes": sum(row["nbytes"] for row in reader.of("held")),
        "step_bytes": median(row["nbytes"] for row in published),
        "trainer_sent_bytes": sent[0],
        "refused": len(reader.of("refused")),
        "after_outage_s": again[0] if disturbed and again else None,
        "first_s": held[0][0] - first if late else None,
    }


def main() -> None:
    """Measure, print and write; or play a role."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.role:
        kind, address, *words = arguments.role
        if kind == "trainer":
            train(address, words[0], int(words[1]), int(words[2]))
        else:
            read(address, int(words[0]), words[1], int(words[2]), int(words[3]), words[4])
        return
    rows, others = [], cores_of_others()
    for turn in range(arguments.turns):
        for mode in arguments.mode or MODES:
            with open_network(Topology.parse("hosts=4,bandwidth=100mbit,delay=1ms"), "relay") as network:
                for row in follow(network, mode, arguments.elements, arguments.steps):
                    rows.append({"turn": turn, **row})
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    given = {"share": SHARE, "step_s": STEP_S, "outage_s": OUTAGE_S, "late_at_step": LATE_AT}
    given |= {"elements": arguments.elements, "steps": arguments.steps, "turns": arguments.turns}
    write(arguments.json, cores_of_others=others, **given, rows=rows)


if __name__ == "__main__":
    main()
