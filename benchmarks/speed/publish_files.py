"""Checkpoints published and followed by the commands, from file to file: seconds, bytes and memory.

    python benchmarks/speed/publish_files.py --folder SCRATCH --json benchmarks/results/speed/publish_files.json

A synthetic checkpoint has the tensors of a model of 7.5 G parameters (an embedding of 131072 by 4096, and layers with
grouped attention and an inner width of 14336; 32 of them) but for the number of its layers, in bfloat16 with normal
values of deviation 0.02, in safetensors files of up to 4 GB. ``gradwire publish --watch`` and ``gradwire subscribe
--watch`` run from a folder of checkpoints to a folder, and from there to a safetensors file. After the first
checkpoint, the anchor, each next one has a share of its elements moved by one unit in the last place; it is written
over the one before, out of the commands' sight. At the end the subscriber's file must equal the last checkpoint in
every byte of every tensor.

Reported are, for the anchor and as the best of the patches: what the commands report, seconds from the checkpoint's
appearance until the file has been replaced, which include polling every 0.2 s, and a plain copy of the reader's file
with fsync, which is what a reader's new file costs. Memory is the largest resident set of each command, without and
with the pages of files that it has mapped. Everything goes through one disk, which needs room
for four checkpoints, or five with the base in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import cores_of_others, write
from gradwire.publish.layout import BY_NAME, Entry, Layout
from gradwire.publish.manifest import read_manifest
from gradwire.publish.safetensor_files import TensorPlace, files_of, header_of, read_places
from gradwire.publish.stores import FolderPlace

PIECE, SHARD_BYTES = 1 << 25, 4 * 10**9
WAIT_S = 1800


def layout_of(layers: int) -> Layout:
    """Return the tensors of the model with so many layers."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (131072, 4096)}
    for number in range(layers):
        for name, shape in {
            "q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "gate": (14336, 4096),
            "up": (14336, 4096), "down": (4096, 14336), "norm": (4096,),
        }.items():  # fmt: skip
            shapes[f"layers.{number}.{name}.weight"] = shape
    return Layout(Entry(name, BY_NAME["BF16"], shape) for name, shape in shapes.items())


def shards_of(layout: Layout) -> list[Layout]:
    """Return the layouts of a checkpoint's files, each of at most ``SHARD_BYTES``."""
    groups, held = list[list[Entry]](), 0
    for entry in layout.entries:
        if not groups or held + entry.nbytes > SHARD_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(entry)
        held += entry.nbytes
    return [Layout(group) for group in groups]


def first_checkpoint(folder: Path, layout: Layout, seed: int) -> None:
    """Write a checkpoint of normal values of deviation 0.02."""
    generator, shards = torch.Generator().manual_seed(seed), shards_of(layout)
    for number, shard in enumerate(shards, 1):
        header, _ = header_of(shard, {"format": "pt"})
        with (folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors").open("wb") as stream:
            stream.write(header)
            for begin in range(0, shard.nbytes, PIECE):
                values = torch.randn(min(PIECE, shard.nbytes - begin) // 2, generator=generator).mul_(0.02)
                stream.write(values.bfloat16().view(torch.uint8).numpy().data)


def next_checkpoint(folder: Path, density: float, rng: np.random.Generator) -> int:
    """Move elements of a checkpoint by one unit, in its files; return how many.

    The places within a piece are drawn once, and turned by a draw for each piece.
    """
    changed, numel = 0, PIECE // 2
    drawn = np.cumsum(rng.geometric(density, int(1.1 * density * numel) + 1000)) - 1
    drawn = drawn[drawn < numel]
    for file in sorted(folder.glob("*.safetensors")):
        at = min(place.offset for place in read_places(file).values())
        with file.open("r+b") as stream:
            while True:
                stream.seek(at)
                part = bytearray(stream.read(PIECE))
                if not part:
                    break
                elements = np.frombuffer(part, np.int16)
                places = (drawn + rng.integers(numel)) % numel
                places = places[places < len(elements)]
                elements[places] += rng.integers(0, 2, len(places)).astype(np.int16) * 2 - 1
                changed += len(places)
                stream.seek(at)
                stream.write(part)
                at += len(part)
            stream.flush()
            os.fsync(stream.fileno())
    return changed


class Command:
    """A command that watches, and its memory."""

    def __init__(self, *words: str) -> None:
        # A shell's background jobs ignore interrupts, and hand that down.
        program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        program += "from gradwire.tools.cli.main import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *words, "--watch", "--every", "0.2", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.own_bytes = self.resident_bytes = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        while self._process.poll() is None:
            try:
                rows = dict(line.split(":", 1) for line in status.read_text().splitlines())
                own, whole = (1024 * int(rows[name].split()[0]) for name in ("RssAnon", "VmRSS"))
            except (OSError, KeyError):
                return
            self.own_bytes, self.resident_bytes = max(self.own_bytes, own), max(self.resident_bytes, whole)
            time.sleep(0.02)

    def end(self) -> list[dict[str, Any]]:
        """Interrupt it, and return what it has done."""
        self._process.send_signal(signal.SIGINT)
        out, _ = self._process.communicate(timeout=WAIT_S)
        found: list[dict[str, Any]] = json.loads(out)
        return found

    def kill(self) -> None:
        """End it, however it stands."""
        self._process.kill()


def wait_for(step: int, file: Path) -> float:
    """Wait until the file has a step; return when that was seen."""
    began = time.perf_counter()
    while time.perf_counter() - began < WAIT_S:
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                metadata = json.loads(stream.read(length))["__metadata__"]
            if int(metadata["step"]) == step:
                return time.perf_counter()
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.02)
    raise RuntimeError(f"{file} has not reached step {step} after {WAIT_S} s")


def all_places(path: Path) -> dict[Entry, TensorPlace]:
    """Return the tensors of a file, or of all files of a folder, and where they lie."""
    return {entry: place for file in files_of(path) for entry, place in read_places(file).items()}


def same(first: Path, second: Path) -> bool:
    """Compare all tensors of two files or folders."""
    places, others = all_places(first), all_places(second)
    if places.keys() != others.keys():
        return False
    for entry, place in places.items():
        with place.file.open("rb") as one, others[entry].file.open("rb") as two:
            one.seek(place.offset)
            two.seek(others[entry].offset)
            for begin in range(0, entry.nbytes, PIECE):
                size = min(PIECE, entry.nbytes - begin)
                if one.read(size) != two.read(size):
                    return False
    return True


def copy(source: Path, target: Path) -> float:
    """Copy a file to the disk; return the seconds."""
    began = time.perf_counter()
    with source.open("rb") as one, target.open("wb") as two:
        shutil.copyfileobj(one, two, PIECE)
        two.flush()
        os.fsync(two.fileno())
    seconds = time.perf_counter() - began
    target.unlink()
    return seconds


def measure(
    layers: int, density: float, steps: int, folder: Path, base: str, first: Path | None, drop_anchor: bool
) -> dict[str, Any]:
    """Publish and follow some checkpoints."""
    layout, rng = layout_of(layers), np.random.default_rng(0)
    checkpoints, place, target = folder / "checkpoints", folder / "published", folder / "weights"
    checkpoints.mkdir()
    held = target / "model.safetensors"
    commands = [
        Command("publish", "--from", str(checkpoints), "--to", str(place), "--base", base),
        Command("subscribe", "--from", str(place), "--to", str(target)),
    ]
    try:
        fresh, changes = list[float](), 0
        for step in range(steps + 1):
            hidden = folder / f"checkpoint-{step}"
            if step:
                (checkpoints / f"checkpoint-{step - 1}").rename(hidden)
                changes = next_checkpoint(hidden, density, rng)
            elif first is not None:
                first.rename(hidden)
            else:
                hidden.mkdir()
                first_checkpoint(hidden, layout, 0)
            began = time.perf_counter()
            hidden.rename(checkpoints / hidden.name)
            fresh.append(wait_for(step, held) - began)
            if drop_anchor and not step:
                for file in place.glob("anchor-*"):
                    file.unlink()
            print(f"step {step}: fresh after {fresh[-1]:.1f} s", flush=True)
        copy_s = copy(held, folder / "copy")
        published, applied = (command.end() for command in commands)
    finally:
        for command in commands:
            command.kill()
    manifest = read_manifest(FolderPlace(place))
    if manifest is None or not same(checkpoints / f"checkpoint-{steps}", held):
        raise RuntimeError("the subscriber's file differs from the last checkpoint")
    patches = [row for row in published if row["patch_bytes"]]
    if len(patches) != steps or patches[-1]["changed"] != changes or len(applied) != steps + 1:
        raise RuntimeError(f"there are {len(patches)} patches and {len(applied)} applied files of {steps} steps")
    return {
        "layers": layers,
        "elements": layout.elements,
        "weight_bytes": layout.nbytes,
        "share_changed": changes / layout.elements,
        "steps": steps,
        "base": "file" if os.sep in base else base,
        "files": len(shards_of(layout)),
        "anchor_dropped": drop_anchor,
        "copy_s": copy_s,
        "anchor": {
            "file_bytes": published[0]["anchor_bytes"],
            "bits_per_weight": 8 * published[0]["anchor_bytes"] / layout.elements, "encode_s": published[0]["encode_s"],
            "write_s": published[0]["write_s"], "apply_s": applied[0]["apply_s"], "fresh_s": fresh[0],
        },
        "patch": {
            "file_bytes": patches[-1]["patch_bytes"],
            "bits_per_change": 8 * patches[-1]["patch_bytes"] / changes,
            "encode_s": min(row["encode_s"] for row in patches),
            "write_s": min(row["write_s"] for row in patches),
            "apply_s": min(row["apply_s"] for row in applied[1:]),
            "fresh_s": min(fresh[1:]),
        },
        "spread": {
            "patch_fresh_s": [min(fresh[1:]), max(fresh[1:])],
            "patch_encode_s": [min(row["encode_s"] for row in patches), max(row["encode_s"] for row in patches)],
            "patch_apply_s": [min(row["apply_s"] for row in applied[1:]), max(row["apply_s"] for row in applied[1:])],
        },
        "publisher_own_bytes": commands[0].own_bytes,
        "publisher_resident_bytes": commands[0].resident_bytes,
        "subscriber_own_bytes": commands[1].own_bytes,
        "subscriber_resident_bytes": commands[1].resident_bytes,
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, action="append", help="Layers of the model; 32 are all (default: 2, 30)")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Folder with room for four checkpoints (default: a temporary one)")
    parser.add_argument("--base", default="memory", help="The publisher's base: memory, sums or a file")
    parser.add_argument("--first", type=Path, help="A first checkpoint of that size, which is moved and changed")
    parser.add_argument(
        "--drop-anchor", action="store_true", help="Remove the anchor once it has been read, where the disk is small"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    others = cores_of_others()
    rows = []
    for layers in arguments.layers or (2, 30):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows.append(
                measure(
                    layers,
                    arguments.density,
                    arguments.steps,
                    Path(folder),
                    arguments.base,
                    arguments.first,
                    arguments.drop_anchor,
                )
            )
        print(json.dumps(rows[-1], indent=1), flush=True)
        write(arguments.json, cores_of_others=others, rows=rows)


if __name__ == "__main__":
    main()
