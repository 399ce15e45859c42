"""Who is named, and how soon, where one worker of a training ends: one row a kill.

    python benchmarks/trials/kills.py --json benchmarks/results/trials/trials_kills.json

Three or four processes train over Gloo on this machine, as scripts of a user would (``mortal.py``). One of them ends
by SIGKILL, SIGTERM, ``os._exit`` or an exception that nobody catches: between two exchanges, in the middle of one, in
``gw.save``, or while links are built. The victim is rank 0 in every third kill. The process group's store is in rank 0,
or in a process that is no rank, as under torchrun. All that is drawn depends on the seed and the kill's number alone.

A survivor does well if it ends within 5 s of the victim, by an exception whose text, and that of ``link.error`` where
there is a link, names the victim by its global rank and blames no other.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import earlier, write
from benchmarks.trials.moments import ATTACH, BEFORE
from benchmarks.trials.mortal import MANNERS, STORES, Kill, request
from benchmarks.trials.ways import WAYS

LIMIT_S = 5.0
VICTIM_0_EVERY = 3


def drawn(seed: int, number: int) -> Kill:
    """Return a kill: kinds of links and moments by turns, everything else at random."""
    draw = random.Random(f"{seed} {number}")
    turn, place = divmod(number, len(WAYS))
    name, way = list(WAYS.items())[place]
    moment = way.moments[(turn + place) % len(way.moments)]
    victim = 0 if number % VICTIM_0_EVERY == 0 else draw.randrange(1, way.ranks)
    # Links are built in two gathers before there are connections; steps and a save have more.
    calls = draw.randrange(BEFORE, 2) if moment == ATTACH else draw.randrange(4)
    manner, store = draw.choice(MANNERS), draw.choice(STORES)
    return Kill(number, name, moment, manner, victim, way.ranks, store, calls, draw.random() < 0.5)


def names(text: str, rank: int, victim: int) -> bool:
    """Return whether a rank's error names the victim, and blames nobody else."""
    # Who missed the victim is no cause.
    text = re.sub(r"never came to rank \d+|between it and rank \d+", "never came", text)
    named = {int(found) for found in re.findall(r"rank (\d+)", text)}
    blames_itself = re.search(rf"rank {rank} (ended|failed|hangs|closed|never)", text)
    return victim in named and named <= {victim, rank} and not blames_itself


def survivor(rank: int, victim: int, folder: Path, end: dict[str, Any], killed_s: float) -> dict[str, Any]:
    """Return what became of a survivor."""
    path = folder / f"{rank}.json"
    row = {"rank": rank, "exit_code": end["code"], "ended_s": round(end["at"] - killed_s, 2)}
    if not path.exists():
        last = (folder / f"{rank}.err").read_text().strip().splitlines()[-1:]
        return row | {"named": False, "error": None, "text": last[0] if last else ""}
    told = json.loads(path.read_text())
    texts = [told["text"]] if told["link_error"] is None else [told["text"], told["link_error"]]
    row |= {"error": told["error"], "raised_s": round(told["at"] - killed_s, 2), "text": told["text"]}
    row["link_error"] = "same" if told["link_error"] == told["text"] else told["link_error"]
    return row | {"named": all(names(text, rank, victim) for text in texts)}


class Server:
    """The process that forks workers."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).parent / "mortal.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"the process that forks workers ended with {self._process.wait()}")
        return line

    def ends(self, kill: Kill, folder: Path, port: int) -> list[dict[str, Any]]:
        """Let workers train, and one of them end; return when each ended, and how."""
        print(request(kill, folder, port), file=self._process.stdin, flush=True)
        found: list[dict[str, Any]] = json.loads(self._answer())
        return found

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def tried(kill: Kill, server: Server) -> dict[str, Any]:
    """Let a worker end; return the row of the kill."""
    store = None
    if kill.store == "launcher":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ends = server.ends(kill, folder, store.port if store else free_port())
        if not (folder / "killed").exists():
            logs = "\n".join((folder / f"{rank}.err").read_text() for rank in range(kill.ranks))
            raise SystemExit(f"kill {kill} did not happen:\n{logs}")
        killed_s = float((folder / "killed").read_text())
        others = [
            survivor(rank, kill.victim, folder, end, killed_s) for rank, end in enumerate(ends) if rank != kill.victim
        ]
    good = [row["named"] and row["ended_s"] <= LIMIT_S for row in others]
    slowest = max(row["ended_s"] for row in others)
    named = sum(row["named"] for row in others)
    return {**asdict(kill), "named": named, "slowest_s": slowest, "good": all(good), "survivors": others}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rows_of(kills: list[Kill]) -> Iterator[dict[str, Any]]:
    """Yield the rows of kills."""
    server = Server()
    try:
        for kill in kills:
            yield tried(kill, server)
    finally:
        server.close()


def main() -> int:
    """Kill and print; exit with 1 where a survivor did not do well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=52)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="these numbers alone")
    parser.add_argument("--resume", action="store_true", help="keep rows of the file, where the seed is the same")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = earlier(arguments.json, "rows") if arguments.resume else []
    rows = [row for row in rows if row["seed"] == arguments.seed]
    missing = [number for number in range(arguments.kills) if number not in {row["number"] for row in rows}]
    began_s = time.monotonic()
    for row in rows_of([drawn(arguments.seed, number) for number in arguments.only or missing]):
        rows.append({"seed": arguments.seed, **row})
        what = (
            f"{row['way']:25s} {row['moment']:18s} {row['manner']:9s} rank {row['victim']}, store in {row['store']:9s}"
        )
        named = f"named by {row['named']} of {len(row['survivors'])}"
        print(f"{row['number']:3d} {what} {named}, {row['slowest_s']:5.1f} s", flush=True)
        for told in row["survivors"]:
            if not told["named"] or told["ended_s"] > LIMIT_S:
                print(f"      rank {told['rank']}: {told}", flush=True)
        rows.sort(key=lambda row: row["number"])
        if arguments.json:
            write(arguments.json, seed=arguments.seed, limit_s=LIMIT_S, rows=rows)
    good = sum(row["good"] for row in rows)
    print(f"{good} of {len(rows)} as they should, in {time.monotonic() - began_s:.0f} s")
    return int(good < len(rows))


if __name__ == "__main__":
    sys.exit(main())
