"""A machine of an elastic training dies: torchrun's other agent goes on with the workers that it has.

    python benchmarks/trials/elastic.py --json benchmarks/results/trials/elastic.json

Two agents of two workers each on this machine run ``examples/elastic_digits.py``. Once the checkpoint of step 20 is
there, one agent and its workers are killed. The other's workers end with an error that names the ranks that are gone,
and are started anew as a group of two, which goes on from the latest checkpoint. The loss is that of all data after 60
steps; beside it stands that of the same training in which nobody dies.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import ROOT
from benchmarks.lib.runs import write

EXAMPLE = ROOT / "examples" / "elastic_digits.py"
METHOD, STEPS, EVERY, DIES_AT = "ErrorFeedback(TopK(density=0.05))", 60, 10, 20
WORKERS, WAIT_S = 2, 240.0
# An agent that is gone is noticed after three seconds instead of fifteen; the first round waits for the second agent.
PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=15"


def agent(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    """Start an agent of torchrun and its workers, in a session of its own."""
    words = [
        *("--nnodes=1:2", f"--nproc-per-node={WORKERS}", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=digits"),
        *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={PATIENCE}", str(EXAMPLE), "--folder", str(folder)),
        *("--method", METHOD, "--steps", str(STEPS), "--every", str(EVERY), "--pause", "0.1"),
    ]
    log = (folder / f"{name}.log").open("wb")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def below(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    told = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [one for child in map(int, told) for one in (child, *below(child))]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill an agent and all that it has started, as when its machine loses its power."""
    for pid in (process.pid, *below(process.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def train(dies: bool) -> dict[str, Any]:
    """Train on two agents, and return what the first one's log tells."""
    with tempfile.TemporaryDirectory() as path, socket.socket() as free:
        folder = Path(path)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # The first agent has the store at which they meet.
        agents = [agent(folder, port, "stays")]
        time.sleep(3)
        agents.append(agent(folder, port, "dies"))
        killed_s = resumed_s = None
        try:
            deadline = time.monotonic() + WAIT_S
            while agents[0].poll() is None and time.monotonic() < deadline:
                latest = folder / "latest"
                if dies and killed_s is None and latest.exists() and int(latest.read_text()) >= DIES_AT:
                    end(agents[1])
                    killed_s = time.monotonic()
                if killed_s is not None and resumed_s is None:
                    # The first time it says so is before the death.
                    resumed_s = time.monotonic() if (folder / "stays.log").read_text().count("from step") > 1 else None
                time.sleep(0.05)
        finally:
            for process in agents:
                end(process)
        log = (folder / "stays.log").read_text() + (folder / "dies.log").read_text() * (not dies)
    starts = [(int(step), int(count)) for step, count in re.findall(r"from step (\d+) on (\d+) workers", log)]
    return {
        "dies": dies,
        "starts": starts,
        "loss": float(re.findall(r"loss ([\d.]+) after", log)[-1]),
        "named": sorted(set(re.findall(r"rank \d+ ended without a word", log))),
        "seconds_until_resumed": None if killed_s is None or resumed_s is None else round(resumed_s - killed_s, 1),
    }


def main() -> None:
    """Train with and without a death."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for dies in (False, True):
        rows.append(train(dies))
        print(rows[-1], flush=True)
    write(given.json, method=METHOD, steps=STEPS, workers=WORKERS, rows=rows)


if __name__ == "__main__":
    main()
