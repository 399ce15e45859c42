"""Damaged and hostile anchors and patches: each must be refused, with the reader's weights untouched.

    python benchmarks/trials/hostile_patches.py --attempts 100000 --json benchmarks/results/trials/hostile_patches.json

A reader holds the weights of a step. Each attempt takes a good file, damages it in one of the ways below, by numbers
drawn from the seed and the attempt, and hands it to the reader. In most ways all digests are computed anew, as an
attacker would, so that what is tried is the decoder behind them. What is accepted must be weights that were published,
to the last bit, such as an anchor under another step; what is refused must leave every byte as it was.
"""

from __future__ import annotations

import argparse
import collections
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import write
from gradwire.publish.container import ChunkRow, PatchHead, digest_of, read_head

__all__ = ["Case", "attempt", "prepare"]

EXTREMES = (0, 1, 2, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


@dataclass
class Case:
    """A reader, the bytes of its tensors, and good files: the ones that it would accept first."""

    seed: int
    tensors: dict[str, torch.Tensor]
    subscriber: gw.WeightSubscriber
    before: bytes
    published: set[bytes]
    files: list[bytes]


def octets(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the bytes of all tensors."""
    return b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())


def prepare(seed: int) -> Case:
    """Publish four steps, the last one as a patch and as an anchor, and another run; give the first to a reader."""
    generator = torch.Generator().manual_seed(seed)

    def start() -> dict[str, torch.Tensor]:
        drawn = torch.randn(2000, generator=generator)
        return {"w": drawn.bfloat16(), "v": torch.randn(40, 10, generator=generator), "n": torch.arange(9)}

    def publish(tensors: dict[str, torch.Tensor], density: float) -> list[tuple[bytes, bytes]]:
        found = []
        with tempfile.TemporaryDirectory() as folder:
            publisher = gw.WeightPublisher(tensors, folder, anchor_every=3)
            for step in range(4):
                publisher.publish(step)
                names = sorted(Path(folder).glob(f"*-{step:012d}-*"))
                found += [(name.read_bytes(), octets(tensors)) for name in names]
                moved = torch.rand(2000, generator=generator) < density
                tensors["w"].view(torch.int16)[moved] += torch.randint(-3, 200, (2000,), generator=generator)[
                    moved
                ].short()
                tensors["v"][3] += 0.25
        return found

    own, other = publish(start(), 0.05), publish(start(), 0.7)
    held = {name: torch.zeros_like(tensor) for name, tensor in start().items()}
    with tempfile.TemporaryDirectory() as folder:
        subscriber = gw.WeightSubscriber(held, folder)
    subscriber.apply(own[0][0])
    # The good patch first, then a good anchor: most attempts damage one of them.
    first, patch, second, newest, third = (data for data, _ in own)
    files = [patch, newest, first, second, third, *(data for data, _ in other)]
    return Case(seed, held, subscriber, octets(held), {state for _, state in (*own, *other)}, files)


def rebuilt(head: PatchHead, bodies: list[bytes], sign: bool = True) -> bytes:
    """Return a file of a head and chunks, with digests that fit."""
    rows = tuple(
        replace(row, digest=digest_of(body), nbytes=len(body)) if sign else row
        for row, body in zip(head.chunks, bodies)
    )
    _, first = replace(head, chunks=rows).pack()
    return first + b"".join(bodies)


def parts(data: bytes) -> tuple[PatchHead, list[bytes]]:
    """Take a good file apart."""
    head = read_head(np.frombuffer(bytearray(data), np.uint8))
    return head, [data[place] for place in head.places()]


def flip(data: bytes, rng: np.random.Generator, most: int = 4) -> bytes:
    """Change some bytes."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, most + 1))):
        if out:
            out[int(rng.integers(len(out)))] ^= int(rng.integers(1, 256))
    return bytes(out)


def flipped(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Change some bytes, and no digest."""
    return flip(data, rng)


def cut(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Truncate the file, or append to it."""
    if rng.random() < 0.5:
        return data[: int(rng.integers(len(data)))]
    return data + rng.bytes(int(rng.integers(1, 100)))


def random_bytes(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Keep a start of the file, and draw the rest."""
    kept = int(rng.integers(0, 200))
    return data[:kept] + rng.bytes(int(rng.integers(0, 400)))


def body_bytes(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Change bytes of chunks, and sign them anew."""
    head, bodies = parts(data)
    return rebuilt(head, [flip(body, rng) for body in bodies])


def body_numbers(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Put extreme numbers into the heads of chunks, and sign them anew."""
    head, bodies = parts(data)
    out = []
    for body in bodies:
        changed = bytearray(body)
        if len(changed) >= 24:
            place = 4 * int(rng.integers(0, 6))
            struct.pack_into("<I", changed, place, int(rng.choice(EXTREMES)))
        out.append(bytes(changed))
    return rebuilt(head, out)


def body_cut(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Cut or lengthen chunks, and sign them anew."""
    head, bodies = parts(data)
    return rebuilt(head, [cut(body, rng, case) if len(body) else body for body in bodies])


def rows(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Change the table of chunks, and sign the head anew."""
    head, bodies = parts(data)
    if not head.chunks:
        return flip(data, rng)
    number = int(rng.integers(len(head.chunks)))
    row = head.chunks[number]
    value = int(rng.choice(EXTREMES))
    changed: ChunkRow = [
        replace(row, first=value), replace(row, blocks=value), replace(row, kind=value % 256),
        replace(row, nbytes=value), replace(row, digest=rng.bytes(16)),
    ][int(rng.integers(5))]  # fmt: skip
    chunks = (*head.chunks[:number], changed, *head.chunks[number + 1 :])
    if rng.random() < 0.2:
        chunks, bodies = chunks * 2, bodies * 2
    return rebuilt(replace(head, chunks=chunks), bodies, sign=False)


def claims(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Change what the head says of steps, runs, states and sums, and sign it anew."""
    head, bodies = parts(data)
    value, name = int(rng.integers(0, 2**62)), rng.bytes(16)
    sums = list(head.sums)
    sums[int(rng.integers(len(sums)))] = value
    layout = case.subscriber._held.only.layout
    state = layout.state(sums) if layout is not None else name
    changed = [
        replace(head, run=name), replace(head, state=name), replace(head, layout=name),
        replace(head, base_state=name), replace(head, sums=tuple(sums)), replace(head, sums=tuple(sums), state=state),
        replace(head, sums=head.sums[:-1]), replace(head, sums=head.sums * 2), replace(head, changed=value),
        replace(head, kind=1 - head.kind), replace(head, table=head.table + name), replace(head, step=-value),
        replace(head, base_step=value),
    ]  # fmt: skip
    return rebuilt(changed[int(rng.integers(len(changed)))], bodies)


def tables(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Change the layout of an anchor, and sign it anew."""
    head, bodies = parts(data)
    if not head.table:
        return body_bytes(data, rng, case)
    table = flip(head.table, rng, 2)
    return rebuilt(replace(head, table=table, layout=digest_of(table)), bodies)


def grafted(data: bytes, rng: np.random.Generator, case: Case) -> bytes:
    """Give a file the chunks of another, and sign it anew; or hand over another file as it is."""
    other = case.files[int(rng.integers(1, len(case.files)))]
    if rng.random() < 0.2:
        return other
    head, _ = parts(data)
    theirs, bodies = parts(other)
    return rebuilt(replace(head, chunks=theirs.chunks), bodies)


WAYS: tuple[Callable[[bytes, np.random.Generator, Case], bytes], ...] = (
    flipped, cut, random_bytes, body_bytes, body_numbers, body_cut, rows, claims, tables, grafted,
)  # fmt: skip


def attempt(case: Case, number: int) -> tuple[str, str]:
    """Hand over one damaged file; return the outcome and the reason.

    Outcomes: "refused" with the weights untouched, "right" where the file leads to published weights after all, else
    "touched" or "wrong".
    """
    rng = np.random.default_rng((case.seed, number))
    way = WAYS[number % len(WAYS)]
    chance = rng.random()
    good = case.files[0 if chance < 0.4 else 1 if chance < 0.7 else int(rng.integers(len(case.files)))]
    try:
        data = way(good, rng, case)
    except (struct.error, OverflowError):
        # The number does not fit its field: nothing to hand over.
        data = flip(good, rng)
    held = case.subscriber._held.only
    known = held.run, held.step, held.sums
    try:
        case.subscriber.apply(data)
    except gw.GradwireError as error:
        untouched = octets(case.tensors) == case.before and held.sums in (known[2], None)
        held.run, held.step, held.sums = known
        reason = re.sub(r"[0-9a-f]{8}|\d+|'\w'", "N", str(error))
        return ("refused" if untouched else "touched"), f"{type(error).__name__}: {reason[:100]}"
    right = octets(case.tensors) in case.published
    start = 0
    for tensor in case.tensors.values():
        flat = tensor.view(-1).view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
        flat.copy_(torch.frombuffer(bytearray(case.before[start : start + flat.numel()]), dtype=torch.uint8))
        start += flat.numel()
    held.run, held.step, held.sums = known
    return ("right" if right else "wrong"), way.__name__


def main() -> int:
    """Run the attempts, and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    case, began = prepare(arguments.seed), time.perf_counter()
    outcomes: collections.Counter[str] = collections.Counter()
    ways: collections.Counter[tuple[str, str]] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for number in range(arguments.attempts):
        outcome, reason = attempt(case, number)
        outcomes[outcome] += 1
        ways[WAYS[number % len(WAYS)].__name__, outcome] += 1
        reasons[reason] += 1
    seconds = time.perf_counter() - began
    found = {
        "attempts": arguments.attempts,
        "seed": arguments.seed,
        "outcomes": dict(outcomes),
        "ways": [{"way": way, "outcome": outcome, "attempts": n} for (way, outcome), n in sorted(ways.items())],
        "reasons": len(reasons),
        "most_frequent": reasons.most_common(20),
        "seconds": seconds,
    }
    print(f"{arguments.attempts} attempts in {seconds:.0f} s: {dict(outcomes)}; {len(reasons)} reasons")
    if arguments.json:
        write(arguments.json, **found)
    return int(bool(outcomes["touched"] + outcomes["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
