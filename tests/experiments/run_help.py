"""What the tests of runs share: an audience that remembers, tiny data, command lines, process trees."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.exchange.digests import unpack
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.folder import checkpoint_steps
from interpreters import forking, is_server


class Listener:
    """Remembers what a run said."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.rows: list[Mapping[str, Any]] = []
        self.steps: list[tuple[int, str]] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def start(self, plan: RunConfig) -> None:
        self.sentences.append(f"start {plan.method}")

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def step(self, step: int, activity: str) -> None:
        self.steps.append((step, activity))

    def logs(self, logs: Mapping[int, str]) -> None:
        self.sentences.extend(logs.values())


def write_idx(path: Path, magic: int, shape: tuple[int, ...], body: bytes) -> None:
    data = struct.pack(f">{1 + len(shape)}i", magic, *shape) + body
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_small_mnist(folder: Path) -> Path:
    """Write four idx files with 256 training and 64 test images, two packed and two plain."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    for name, count, ending in (("train", 256, ".gz"), ("t10k", 64, "")):
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=draw)
        labels = torch.randint(0, 10, (count,), dtype=torch.uint8, generator=draw)
        write_idx(folder / f"{name}-images-idx3-ubyte{ending}", 2051, (count, 28, 28), images.numpy().tobytes())
        write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", 2049, (count,), labels.numpy().tobytes())
    return folder


def write_small_libsvm(path: Path, rows: int = 90, features: int = 12) -> Path:
    """Write rows of 0/1 features, labels 1 and 2, that no plane separates; one row is a label alone."""
    draw = torch.Generator().manual_seed(2)
    inputs = torch.rand(rows, features, generator=draw) < 0.4
    inputs[:, -1] = inputs[:, 0]  # Without regularisation the solution would not be unique.
    inputs[0, -1] = inputs[0, 0] = True
    inputs[5] = False
    truth = torch.randn(features, generator=draw)
    chance = torch.sigmoid(inputs.to(torch.float32) @ truth)
    labels = 1 + (torch.rand(rows, generator=draw) < chance).to(torch.int64)
    lines = [
        " ".join([str(int(label)), *(f"{int(k) + 1}:1" for k in row.nonzero())]) for label, row in zip(labels, inputs)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def model_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's newest checkpoint."""
    # Workers of a launcher that was killed may have begun another, which is not whole yet.
    path = run / "checkpoint" / f"step-{checkpoint_steps(run)[-1]}" / "shared.pt"
    state: dict[str, torch.Tensor] = unpack(torch.load(path, weights_only=True), str(path))["state"]["model"]
    return state


def same(a: Path, b: Path) -> bool:
    """Return whether two runs ended in the same bits."""
    left, right = model_of(a), model_of(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gradwire(*words: object, fresh: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end in a process of its own; ``fresh``: it and all that it starts import anew."""
    command = [sys.executable, "-m", "gradwire.tools.cli.main", *map(str, words)]
    with forking(fresh):
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, **options)


def start_gradwire(*words: object) -> subprocess.Popen[str]:
    """Start the command line."""
    command = [sys.executable, "-m", "gradwire.tools.cli.main", *map(str, words)]
    with forking():
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(process: int) -> list[int]:
    """Return the process ids of a process's children, without the server that starts them as forks."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found if not is_server(int(child))]


def alive(process: int) -> bool:
    """Return whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until a condition holds; fail with what was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)
