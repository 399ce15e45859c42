"""Bits of coded anchors, and the time of coding them on one thread.

    python benchmarks/speed/anchor_speed.py --text FOLDER --json benchmarks/results/speed/anchor_speed.json

Weights are those of a character GPT of 10.7 M parameters (6 layers of width 384), as it begins and after some steps of
AdamW at 3e-4 on Tiny Shakespeare (FOLDER holds its ``input.txt``), and normal values of deviation 0.02, each rounded to
several types. Reported are the bits a weight of a whole anchor's file, of zstd at level 1 on the same bytes if the
package ``zstandard`` is there, and two rates in bytes of weights a second:

- *coder*: coding into chunks, with the sums of words that a publisher takes; and decoding, straight into the weights,
  with the sums that a reader compares;
- *file*: the same with all BLAKE2b digests, and with the passes of memory that a publisher and a reader make.

Times are those of the processor, which do not grow while the process waits for a core, the best of all turns; a memcpy
of the same bytes is timed in the same turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import cores_of_others, write
from benchmarks.lib.stacked_gpt import Shape, StackedGPT, read_text
from gradwire.publish.chunks import CHUNK_ELEMENTS
from gradwire.publish.container import read_head
from gradwire.publish.encoder import StepEncoder
from gradwire.publish.held import HeldWeights
from gradwire.publish.weights import LiveTensors
from gradwire.publish.whole import WholeChunk, encode_whole

TYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def gpt_weights(text: Path, steps: int) -> dict[str, list[torch.Tensor]]:
    """Return the weights of the GPT as it begins, and after so many steps."""
    data = read_text(text / "input.txt")
    shape = Shape(data.characters, 64, 384, 6, 6)
    torch.manual_seed(0)
    model = StackedGPT(shape, 1, 0)
    optimizer = torch.optim.AdamW(model.stacks.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    first = [tensor.detach().clone() for tensor in model.stacks.values()]
    for number in range(steps):
        optimizer.zero_grad()
        model.losses(data.batch(0, number, 1, 8, shape.context)).mean().backward()
        torch.nn.utils.clip_grad_norm_(list(model.stacks.values()), 1.0)
        optimizer.step()
    return {"GPT, untrained": first, f"GPT, {steps} steps": [tensor.detach() for tensor in model.stacks.values()]}


def zstd_bytes(octets: bytes) -> int | None:
    """Return the bytes of zstd at level 1; None if it is not there."""
    try:
        import zstandard
    except ImportError:
        return None
    return len(zstandard.ZstdCompressor(level=1).compress(octets))


def measure(tensors: list[torch.Tensor], turns: int) -> dict[str, Any]:
    """Encode and decode an anchor of tensors."""
    weights = LiveTensors({f"{i:04d}": tensor for i, tensor in enumerate(tensors)})
    read, layout = LiveTensors({f"{i:04d}": torch.zeros_like(t) for i, t in enumerate(tensors)}), weights.layout
    runs = [layout.spans(*run) for run in layout.chunks(CHUNK_ELEMENTS)]
    encoder = StepEncoder(layout, None, bytes(16), 1)
    held = HeldWeights(read, private=True)
    chunks = [encode_whole(spans, weights.read) for spans in runs]
    bodies = [np.concatenate(chunk.pieces) for chunk in chunks]
    file = np.concatenate([np.frombuffer(memoryview(piece), np.uint8) for piece in encoder.anchor(0, weights.read)[1]])
    plain = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
    copied = torch.empty_like(plain)

    def decode() -> None:
        for chunk, spans, body in zip(chunks, runs, bodies):
            WholeChunk(chunk.kind, spans, body).fill(read.target)

    work: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copied.copy_(plain),
        "coder_encode": lambda: [encode_whole(spans, weights.read) for spans in runs],
        "coder_decode": decode,
        "file_encode": lambda: list(encoder.anchor(0, weights.read)[1]),
        "file_decode": lambda: held.apply(read_head(file), file, 1),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(turns):
        for name, call in work.items():
            began = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - began)
    if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(read._tensors, weights._tensors)):
        raise RuntimeError("decoded weights differ")
    zstd = zstd_bytes(plain.numpy().tobytes())
    return {
        "elements": layout.elements,
        "weight_bytes": layout.nbytes,
        "file_bytes": len(file),
        "bits_per_weight": 8 * len(file) / layout.elements,
        "zstd_bits_per_weight": None if zstd is None else 8 * zstd / layout.elements,
        "bytes_per_s": {name: layout.nbytes / seconds for name, seconds in best.items()},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Folder of input.txt")
    parser.add_argument("--steps", type=int, default=100, help="Steps of training")
    parser.add_argument("--elements", type=int, default=1 << 26, help="Normal values")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    others = cores_of_others()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    cases = gpt_weights(arguments.text, arguments.steps)
    cases["normal"] = [torch.randn(arguments.elements, generator=generator) * 0.02]
    rows = []
    for name, tensors in cases.items():
        for kind in TYPES:
            # Types of 8 bits come with a scale for each tensor.
            scaled = [t * (448 / float(t.abs().max())) if "float8" in kind and t.any() else t for t in tensors]
            row = measure([t.to(getattr(torch, kind)).contiguous() for t in scaled], arguments.turns)
            rows.append({"weights": name, "type": kind, **row})
            rates = ", ".join(f"{k} {v / 1e9:.2f} GB/s" for k, v in row["bytes_per_s"].items())
            print(f"{name}, {kind}: {row['bits_per_weight']:.2f} bits (zstd {row['zstd_bits_per_weight']}); {rates}")
    write(arguments.json, cores_of_others=others, rows=rows)


if __name__ == "__main__":
    main()
