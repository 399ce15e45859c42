"""What an outage in a phase of an exchange costs, and whom errors name where it lasts too long: one row a trial.

    sudo env "PATH=$PATH" python benchmarks/trials/outages.py --json benchmarks/results/trials/trials_outages.json

Three or four hosts of an emulated cluster train by one kind of link (``ways.py``), over TCP. When one of them comes to
a phase, it says so, and waits until links are silent: while links are built, between two exchanges, before or behind
one of the collectives of an exchange, or in ``gw.save``. Three kinds of trials:

- *short*: for ten seconds, one host's link is silent, or two hosts do not hear each other. It is good if the training
  goes on to the bits of one without an outage, on every rank, without an error. So it must in a *long* trial of two
  hosts that exchange nothing with each other, such as two that are no neighbours in a ring.
- *long*: the same, for longer than the timeout of the process group. It is good if every rank ends by an error that
  names two ranks between which there was silence, and no two others, within ``LIMIT_S`` of the timeout.
- *address*: one host has another address from then on. Gloo's connections end with the old one, so that no training
  goes on. It is good if every rank ends as in *long*.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
from benchmarks.trials.moments import ATTACH, BETWEEN, SAVE, WITHIN
from benchmarks.trials.silenced import MARK, SILENT, Trial, request
from benchmarks.trials.ways import MORE_WAYS
from gradwire.tools.lab import Impairments, Network, Outage, Topology, open_network

SHORT_S, PATIENCE_S, LONG_S = 10.0, 60.0, 3600.0
IMPATIENT_S = 6.0
LIMIT_S = 6.0
"""Seconds after the timeout within which every rank must have ended by its error."""

UNNOTICED_S = SHORT_S / 2
"""A short trial that costs less has silenced two hosts that exchange nothing."""

KINDS = ("short", "long", "address")
ADDRESS_WAYS = ("Link", "DDP, two-shot", "gossip")
CLUSTER = Topology(hosts=4, bandwidth=200e6, impairments=Impairments(delay_s=0.005))
PORT, END_S = 29600, 2.0


def phases(calls: dict[str, int], way: str) -> list[tuple[str, int, bool]]:
    """Return moments, collectives before the outage, and whether one has begun: the first, a middle and the last."""
    found = [(BETWEEN, 0, False)]
    for moment in (ATTACH, WITHIN, SAVE):
        count = calls[moment]
        if moment in MORE_WAYS[way].moments and count:
            places = sorted({0, count // 2, count - 1} if moment == WITHIN else {0, count - 1})
            found += [(moment, place, number % 2 == 1) for number, place in enumerate(places)]
    return found


def silent_hosts(kind: str, number: int, ranks: int, marking: int) -> tuple[int, ...]:
    """Return the host whose link falls silent, or the two that do not hear each other: by turns."""
    draw = random.Random(number)
    first = marking if draw.random() < 0.5 else draw.randrange(ranks)
    if kind == "address" or number % 2:
        return (first,)
    return (first, draw.choice([other for other in range(ranks) if other != first]))


def named(text: str) -> set[tuple[int, int]]:
    """Return the pairs of ranks between which an error says there was silence."""
    pairs = {
        (int(a), int(b)) for a, b in re.findall(r"rank (\d+) hangs, or the network between it and rank (\d+)", text)
    }
    pairs |= {(int(a), int(b)) for a, b in re.findall(r"rank (\d+) never came to rank (\d+)", text)}
    for rank, others in re.findall(r"rank (\d+) hears no other rank: no sign of ranks ([\d, ]+) for", text):
        pairs |= {(int(rank), int(other)) for other in others.split(",")}
    return pairs


def suspected(text: str) -> list[set[tuple[int, int]]]:
    """Return sets of pairs of ranks, in each of which, an error says, one pair at least did not meet."""
    pattern = r"one of ranks ([\d, ]+), or several, ended before they came to rank (\d+)"
    return [{(int(rank), int(other)) for other in others.split(",")} for others, rank in re.findall(pattern, text)]


def was_silent(pair: tuple[int, int], hosts: tuple[int, ...]) -> bool:
    """Return whether two ranks could not hear each other."""
    return hosts[0] in pair if len(hosts) == 1 else set(pair) == set(hosts)


class Cluster:
    """An emulated cluster, and the process that forks workers into it.

    Args:
        network: The cluster.
        port: First port of rendezvous; each trial has one of its own.
    """

    def __init__(self, network: Network, port: int) -> None:
        self._network, self._port = network, port
        command = [sys.executable, str(Path(__file__).parent / "silenced.py")]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def train(self, trial: Trial, kind: str = "", hosts: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Let workers train, and links fall silent in the phase; return what became of each rank."""
        self._port += 1
        spaces = [self._network.namespace_path(host) for host in range(self._network.topology.hosts)]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            asked = request(trial, folder, self._port, spaces, self._network.address(0))
            print(asked, file=self._server.stdin, flush=True)
            silent_s = None
            while not self._ready():
                if silent_s is None and (folder / MARK).exists():
                    silent_s = time.monotonic()
                    self._silence(kind, hosts)
                    (folder / SILENT).touch()
                time.sleep(0.002)
            ends = json.loads(self._answer())
            if silent_s is not None:
                self._restore(kind, hosts)
            rows = []
            for rank, end in enumerate(ends):
                path = folder / f"{rank}.json"
                told = json.loads(path.read_text()) if path.exists() else {"error": f"ended with {end['code']}"}
                told["log"] = (folder / f"{rank}.err").read_text()[-2000:]
                if silent_s is not None:
                    told["ended_s"] = round(end["at"] - silent_s, 2)
                    told["raised_s"] = round(told["at"] - silent_s, 2) if "at" in told else None
                rows.append(told)
            return rows

    def close(self) -> None:
        """End the process that forks workers, also in the middle of a trial: the network ends its workers."""
        if self._server.stdin:
            self._server.stdin.close()
        try:
            self._server.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _silence(self, kind: str, hosts: tuple[int, ...]) -> None:
        if kind == "address":
            self._network.change_address(hosts[0])
            return
        lasts_s = SHORT_S if kind == "short" else LONG_S
        peer = hosts[1] if len(hosts) > 1 else None
        self._network.restart_outages([Outage(lasts_s=lasts_s, from_s=0.0, host=hosts[0], peer=peer)])

    def _restore(self, kind: str, hosts: tuple[int, ...]) -> None:
        if kind == "address":
            self._network.change_address(hosts[0])
        else:
            self._network.restart_outages([])

    def _ready(self) -> bool:
        return bool(select.select([self._server.stdout], [], [], 0)[0])

    def _answer(self) -> str:
        line = self._server.stdout.readline() if self._server.stdout else ""
        if not line:
            raise SystemExit(f"the process that forks workers ended with {self._server.wait()}")
        return line


def judged(
    kind: str, hosts: tuple[int, ...], rows: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the verdict on a trial, given what became of its ranks with and without an outage."""
    texts = [row.get("link_error") or row.get("text") or "" for row in rows]
    if kind == "short":
        errors = [f"{row['error']}: {text or row['log']}" for row, text in zip(rows, texts) if row["error"] is not None]
        same = all(row.get("digests") == usual["digests"] for row, usual in zip(rows, plain))
        # Of the rank that came to the phase: the call that was longest from the outage on.
        cost_s = None if errors else max(row.get("paused_s", 0.0) for row in rows)
        unnoticed = cost_s is not None and cost_s < UNNOTICED_S
        return {
            "good": same and not errors,
            "cost_s": cost_s if cost_s is None else round(cost_s, 2),
            "unnoticed": unnoticed and len(hosts) > 1,
            "errors": errors,
        }
    if kind == "long" and len(hosts) > 1 and all(row["error"] is None for row in rows):
        # The two exchange nothing, as in a ring on whose other sides they are.
        same = all(row["digests"] == usual["digests"] for row, usual in zip(rows, plain))
        return {"good": same, "unnoticed": True, "errors": [] if same else ["other bits, without an error"]}
    # An address that changes is silence, too, between the host and all others.
    right = [
        bool(named(text) or suspected(text))
        and all(was_silent(pair, hosts) for pair in named(text))
        and all(any(was_silent(pair, hosts) for pair in pairs) for pairs in suspected(text))
        for text in texts
    ]
    raised = [row.get("raised_s") for row in rows]
    in_time = all(s is not None and s <= IMPATIENT_S + LIMIT_S for s in raised)
    return {
        "good": all(right) and in_time,
        "named": sum(right),
        "raised_s": raised,
        "ended_s": max(row["ended_s"] for row in rows if "ended_s" in row),
        "texts": texts,
        "errors": [] if all(right) and in_time else [text or row["log"] for text, row in zip(texts, rows)],
    }


def rows_of(ways: list[str], port: int, every: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of some ways."""
    with open_network(CLUSTER, "relay") as network:
        cluster = Cluster(network, port)
        try:
            for way in ways:
                ranks = MORE_WAYS[way].ranks
                usual = Trial(way=way, moment="", calls=0, begun=False, rank=0, patience_s=PATIENCE_S)
                plain = cluster.train(usual)
                wrong = [row for row in plain if row["error"] is not None]
                if wrong:
                    yield {"way": way, "kind": "plain", "good": False, "errors": [str(wrong[0])]}
                    continue
                number = list(MORE_WAYS).index(way)
                for kind in KINDS if way in ADDRESS_WAYS else KINDS[:2]:
                    chosen = phases(plain[0]["calls"], way)
                    if kind == "address":
                        chosen = [phase for phase in chosen if phase[0] in (BETWEEN, WITHIN)][:2]
                    for place, (moment, calls, begun) in enumerate(chosen):
                        number += 1
                        if place % every:
                            continue
                        marking = number % ranks
                        hosts = silent_hosts(kind, number, ranks, marking)
                        patience_s = PATIENCE_S if kind == "short" else IMPATIENT_S
                        trial = replace(
                            usual, moment=moment, calls=calls, begun=begun, rank=marking, patience_s=patience_s
                        )
                        rows = cluster.train(trial, kind, hosts)
                        phase = {"moment": moment, "calls": calls, "begun": begun, "marking": marking}
                        came = any("ended_s" in row for row in rows)
                        verdict = judged(kind, hosts, rows, plain) if came else {"good": False, "errors": ["no phase"]}
                        yield {"way": way, "kind": kind, **phase, "silent": list(hosts), **verdict}
        finally:
            cluster.close()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many trials of each kind were good, what short ones cost, and how late errors came."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        costs = sorted(row["cost_s"] for row in mine if row.get("cost_s") is not None and not row["unnoticed"])
        late = [s for row in mine for s in row.get("raised_s", ()) if s is not None]
        found[kind] = {
            "trials": len(mine),
            "good": sum(row["good"] for row in mine),
            "unnoticed": sum(row.get("unnoticed", False) for row in mine),
            "median_cost_s": costs[len(costs) // 2] if costs else None,
            "most_cost_s": costs[-1] if costs else None,
            "latest_error_s": max(late, default=None),
        }
    return found


def together(lanes: int, every: int, ways: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of clusters of their own beside each other: trials mostly wait."""
    command = [sys.executable, __file__, "--every", str(every)]
    parts = [ways[lane::lanes] for lane in range(lanes)]
    started = [
        subprocess.Popen(
            [*command, "--port", str(PORT + 1000 * lane), "--lane", *part], stdout=subprocess.PIPE, text=True
        )
        for lane, part in enumerate(parts)
        if part
    ]
    open_pipes = {process.stdout: process for process in started}
    try:
        while open_pipes:
            for pipe in select.select(list(open_pipes), [], [])[0]:
                line = pipe.readline() if pipe else ""
                if line:
                    yield json.loads(line)
                elif open_pipes.pop(pipe).wait() != 0:
                    raise SystemExit("a cluster of trials ended early: its own lines say why")
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()


def main() -> int:
    """Run all trials and print; exit with 1 where one was not good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lanes", type=int, default=3, help="clusters beside each other")
    parser.add_argument("--every", type=int, default=1, help="of the phases, to try fewer")
    parser.add_argument("--way", action="append", help="of exchanging; all if none is named. The file keeps others")
    parser.add_argument("--lane", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=PORT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lane is not None:
        for row in rows_of(arguments.lane, arguments.port, arguments.every):
            print(json.dumps(row), flush=True)
        return 0
    ways = arguments.way or list(MORE_WAYS)
    kept = json.loads(arguments.json.read_text())["rows"] if arguments.json and arguments.json.exists() else []
    rows = [row for row in kept if row["way"] not in ways]
    for row in together(arguments.lanes, arguments.every, ways):
        rows.append(row)
        phase = f"{row.get('moment')}, {row.get('calls')} calls{' and a begun one' if row.get('begun') else ''}"
        cost = row.get("cost_s") if row["kind"] == "short" else row.get("raised_s")
        end = "good" if row["good"] else f"BAD {row['errors']}"
        print(f"{row['kind']}, {row['way']}, {phase}, silent {row.get('silent')}: {cost} s, {end}", flush=True)
        rows.sort(key=lambda r: (list(MORE_WAYS).index(r["way"]), (*KINDS, "plain").index(r["kind"])))
        given = {"short_s": SHORT_S, "impatient_s": IMPATIENT_S, "limit_s": LIMIT_S}
        write(arguments.json, **given, summary=summary(rows), rows=rows)
    print(json.dumps(summary(rows)))
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
