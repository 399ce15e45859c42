"""Bits of patches of a model in training, beside their entropy and other codes of the same changes.

    python benchmarks/training/published_bits.py --text FOLDER --json benchmarks/results/training/published_bits.json

A character GPT of 10.7 M parameters (6 layers of width 384) is trained on Tiny Shakespeare (FOLDER holds its
``input.txt``) by AdamW with float32 masters. After a common start, training goes on at several learning rates, and the
weights, rounded to bfloat16, are published after each step. Reported are means over the last steps:

- the share of elements that change, and the share of these that move by one unit in the last place;
- the entropy bound: that of changes which fall anywhere in the model with this share, and of the distances, for each
  distance by itself; and the same with the shares and distances of each tensor;
- bits a changed element of the patch's file, everything in it counted;
- the same of other codes: pairs of an int32 position and a bfloat16 value, as they are and through a compressor; the
  exclusive or of both states through a compressor; positions in the order of the model as differences in the smallest
  integer type that holds them, values as they are, and both through a compressor, as PULSE (arXiv:2602.03839)
  describes its coding. Compressors are zstd at levels 1 and 3, if the package ``zstandard`` is there, and zlib at 1.

Every patch is applied by a subscriber, whose weights must equal the publisher's to the last bit.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from benchmarks.lib.stacked_gpt import Shape, StackedGPT, read_text

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Return the compressors at hand, by name."""
    found: dict[str, Callable[[bytes], bytes]] = {"zlib 1": lambda data: zlib.compress(data, 1)}
    try:
        import zstandard
    except ImportError:
        return found
    found["zstd 1"] = zstandard.ZstdCompressor(level=1).compress
    found["zstd 3"] = zstandard.ZstdCompressor(level=3).compress
    return found


def entropy(counts: np.ndarray[Any, Any]) -> float:
    """Return the empirical entropy, in bits for all."""
    counts = counts[counts > 0].astype(float)
    return float((counts * np.log2(counts.sum() / counts)).sum())


def distances(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return signed distances in units in the last place."""

    def ordered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(x < 0, x.astype(np.int32) ^ 0x7FFF, x.astype(np.int32))

    return ordered(after) - ordered(before)


def bound(before: list[np.ndarray[Any, Any]], after: list[np.ndarray[Any, Any]]) -> float:
    """Return the bits of positions with this share, and of distances by their frequencies."""
    moved = np.concatenate([distances(a, b)[a != b] for a, b in zip(before, after)])
    numel = sum(len(a) for a in before)
    positions = entropy(np.array([len(moved), numel - len(moved)]))
    return positions + entropy(np.unique(moved, return_counts=True)[1])


def smallest(values: np.ndarray[Any, Any]) -> bytes:
    """Return integers in the smallest type that holds them."""
    kind = next(k for k in (np.uint8, np.uint16, np.uint32) if values.max(initial=0) <= np.iinfo(k).max)
    return values.astype(kind).tobytes()


def other_codes(before: list[np.ndarray[Any, Any]], after: list[np.ndarray[Any, Any]]) -> dict[str, int]:
    """Return the bytes of other codes of the same changes."""
    old, new = np.concatenate(before), np.concatenate(after)
    index = np.flatnonzero(old != new)
    values = new[index]
    pairs = index.astype(np.int32).tobytes() + values.tobytes()
    parts = [np.flatnonzero(a != b) for a, b in zip(before, after)]
    gaps = b"".join(smallest(np.diff(part, prepend=0)) for part in parts)
    found = {"int32 + bfloat16": len(pairs)}
    for name, compress in compressors().items():
        found[f"int32 + bfloat16, {name}"] = len(compress(pairs))
        found[f"exclusive or, {name}"] = len(compress((old ^ new).tobytes()))
        found[f"differences of positions + bfloat16 (PULSE), {name}"] = len(compress(gaps + values.tobytes()))
    return found


def train(text: Path, start: int, steps: int, keep: int, samples: int) -> list[dict[str, Any]]:
    """Train from one start at each rate; return a row for each."""
    data = read_text(text)
    shape = Shape(data.characters, 64, 384, 6, 6)
    torch.manual_seed(0)
    model = StackedGPT(shape, 1, 0)
    optimizer = torch.optim.AdamW(model.stacks.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model.losses(data.batch(0, number, 1, samples, shape.context)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.stacks.values()), 1.0)
        optimizer.step()
        return float(loss.detach())

    began, loss = time.perf_counter(), math.nan
    for number in range(start):
        loss = step(number)
    print(
        f"{model.numel} parameters, loss {loss:.3f} after {start} steps, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    held = {name: tensor.detach().clone() for name, tensor in model.stacks.items()}
    state = {
        k: {n: (v.clone() if isinstance(v, torch.Tensor) else v) for n, v in s.items()}
        for k, s in optimizer.state.items()
    }
    rows = []
    for rate in RATES:
        with torch.no_grad():
            for name, tensor in model.stacks.items():
                tensor.copy_(held[name])
        for parameter, values in state.items():
            optimizer.state[parameter] = {
                n: (v.clone() if isinstance(v, torch.Tensor) else v) for n, v in values.items()
            }
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows.append(measure(rate, model, step, start, steps, keep))
        print(
            {k: (round(v, 4) if isinstance(v, float) else v) for k, v in rows[-1].items() if k != "codes"}, flush=True
        )
    return rows


def measure(
    rate: float, model: StackedGPT, step: Callable[[int], float], start: int, steps: int, keep: int
) -> dict[str, Any]:
    """Publish each step at a learning rate; return means over the last ones."""
    names = sorted(model.stacks)
    served = {name: torch.zeros_like(model.stacks[name], dtype=torch.bfloat16) for name in names}
    totals: dict[str, float] = {}
    codes: dict[str, float] = {}

    def octets() -> list[np.ndarray[Any, Any]]:
        return [served[name].reshape(-1).view(torch.int16).numpy().copy() for name in names]

    with tempfile.TemporaryDirectory() as folder:
        publisher = gw.WeightPublisher(model.stacks, folder, dtype=torch.bfloat16, anchor_every=10**6)
        subscriber = gw.WeightSubscriber(served, folder)
        for number in range(steps):
            publication = publisher.publish(number)
            before = octets()
            subscriber.update()
            after = octets()
            for name in names:
                if not torch.equal(served[name], model.stacks[name].detach().bfloat16()):
                    raise RuntimeError(f"{name} differs after step {number}")
            loss = step(start + number)
            if number < steps - keep:
                continue
            moved = np.concatenate([distances(a, b)[a != b] for a, b in zip(before, after)])
            if len(moved) != publication.changed:
                raise RuntimeError("the publisher counts other changes")
            for name, value in {
                "changed": len(moved),
                "by_one": float((np.abs(moved) == 1).sum()),
                "bound_bits": bound(before, after),
                "bound_by_tensor_bits": sum(bound([a], [b]) for a, b in zip(before, after) if (a != b).any()),
                "patch_bits": 8.0 * publication.patch_bytes,
            }.items():
                totals[name] = totals.get(name, 0.0) + value
            for name, size in other_codes(before, after).items():
                codes[name] = codes.get(name, 0.0) + 8 * size
    changed = totals["changed"]
    return {
        "rate": rate,
        "steps": keep,
        "loss": loss,
        "elements": model.numel,
        "share_changed": changed / keep / model.numel,
        "share_by_one": totals["by_one"] / changed,
        "bound_bits_per_change": totals["bound_bits"] / changed,
        "bound_by_tensor_bits_per_change": totals["bound_by_tensor_bits"] / changed,
        "patch_bits_per_change": totals["patch_bits"] / changed,
        "patch_over_bound": totals["patch_bits"] / totals["bound_bits"],
        "patch_bits_per_element": totals["patch_bits"] / keep / model.numel,
        "codes": {name: bits / changed for name, bits in codes.items()},
    }


def main() -> None:
    """Train, publish, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--start", type=int, default=150, help="Steps before the rates part")
    parser.add_argument("--steps", type=int, default=12, help="Steps at each rate")
    parser.add_argument("--keep", type=int, default=6, help="Steps that are measured, the last ones")
    parser.add_argument("--samples", type=int, default=16, help="Samples of 64 characters a step")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    text = arguments.text / "input.txt" if arguments.text.is_dir() else arguments.text
    rows = train(text, arguments.start, arguments.steps, arguments.keep, arguments.samples)
    write(
        arguments.json,
        start_steps=arguments.start,
        samples=arguments.samples,
        compressors=list(compressors()),
        rows=rows,
    )


if __name__ == "__main__":
    main()
