"""Exchanges of three simulated ranks in which one message changes on the way, and what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradwire as gw
from gradwire.drivers import Meter, simulate_ranks
from gradwire.kernels import get_kernels
from gradwire.ops import AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv
from gradwire.protocols import Context, Memory
from gradwire.protocols.bucket_plan import Algorithm, BucketPlan, make_plan
from gradwire.segments import Parameter, lay_out
from gradwire.wire import HEADER_BYTES

__all__ = ["CHANGES", "OUTCOMES", "Trials"]

WORKERS = 3
SIZES = (3000, 81, 1500)
ROUND = 2
"""The round in which a message changes, so that there are messages of the one before."""

REFUSED, UNNAMED = "refused, named", "refused, not named"
HARMLESS, DRIFT, WRONG, SPOILT, CRASH = "harmless", "drift", "wrong everywhere", "non-finite", "crash"
OUTCOMES = (REFUSED, UNNAMED, HARMLESS, DRIFT, WRONG, SPOILT, CRASH)

Row = np.ndarray[Any, np.dtype[np.uint8]]
Change = Callable[[Row, Row, np.random.Generator], None]


def flip(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Flip a bit."""
    row[draw.integers(len(row))] ^= 1 << draw.integers(8)


def flip_two(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Flip two bits of two bytes."""
    for at in draw.choice(len(row), 2, replace=False):
        row[at] ^= 1 << draw.integers(8)


def swap_bytes(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Exchange two bytes of the body, if there is one: a rank may own nothing."""
    if len(row) == HEADER_BYTES:
        return
    a, b = 32 + draw.choice(len(row) - 32, 2, replace=False)
    row[[a, b]] = row[[b, a]]


def swap_blocks(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Exchange two blocks of 16 bytes of the body, if there is one."""
    if len(row) < HEADER_BYTES + 16:
        return
    blocks = row[32 : 32 + (len(row) - 32) // 16 * 16].reshape(-1, 16)
    a, b = draw.choice(len(blocks), 2, replace=len(blocks) < 2)
    blocks[[a, b]] = blocks[[b, a]]


def rotate(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Rotate the body by some blocks of 16 bytes."""
    row[32:] = np.roll(row[32:], 16 * draw.integers(1, 9))


def zero_block(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Zero 16 neighbouring bytes."""
    at = draw.integers(len(row) - 15)
    row[at : at + 16] = 0


def cut(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Zero the tail."""
    row[draw.integers(len(row)) :] = 0


def stale_body(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Put the body of the round before behind this round's header."""
    length = min(len(row), len(before))
    row[32:length] = before[32:length]


def stale(row: Row, before: Row, draw: np.random.Generator) -> None:
    """Repeat the message of the round before, whole."""
    length = min(len(row), len(before))
    row[:length] = before[:length]


CHANGES: dict[str, Change | None] = {
    "flip a bit": flip,
    "flip two bits": flip_two,
    "swap bytes": swap_bytes,
    "swap blocks": swap_blocks,
    "rotate the body": rotate,
    "zero a block": zero_block,
    "cut the tail": cut,
    "body of the round before": stale_body,
    "message of the round before": stale,
    # Changes of more than one row are made where rows are at hand.
    "swap ranks": None,
    "repeat a rank": None,
    "announce another length": None,
}


@dataclass
class Tamperer:
    """Changes one message that a rank receives.

    Attributes:
        exchange: Number of the exchange of payloads in the round.
        receiver: The rank.
        sender: Whose message it is.
        other: The third rank, whose message "swap ranks" and "repeat a rank" take, too.
        before: What arrived in the exchanges of the round before.
        changed: Whether any byte was changed.
    """

    kind: str
    exchange: int
    receiver: int
    sender: int
    other: int
    draw: np.random.Generator
    before: list[torch.Tensor]
    seen: int = 0
    changed: bool = False

    def __call__(self, op: Op, reply: torch.Tensor) -> torch.Tensor:
        """Return the reply as it is to arrive."""
        if not is_received(op, self.receiver):
            return reply
        self.seen += 1
        if self.seen - 1 != self.exchange:
            return reply
        if isinstance(op, SendRecv | Broadcast):
            return self._of_one(op, reply)
        rows = reply.clone()
        lengths = [rows.shape[1]] * WORKERS
        if op.arrived is not None:
            lengths = [count or rows.shape[1] for count in op.arrived.tolist()]
        length, other = lengths[self.sender], self.other
        change = CHANGES[self.kind]
        if change is not None:
            has_before = self.exchange < len(self.before) and self.before[self.exchange].shape == rows.shape
            source = self.before[self.exchange] if has_before else rows
            change(rows[self.sender, :length].numpy(), source[self.sender].numpy(), self.draw)
        elif self.kind == "swap ranks":
            rows[[self.sender, other]] = rows[[other, self.sender]]
            if op.arrived is not None and op.arrived[self.sender] and op.arrived[other]:
                op.arrived[[self.sender, other]] = op.arrived[[other, self.sender]]
        elif self.kind == "repeat a rank":
            rows[self.sender] = rows[other]
        elif op.arrived is not None and op.arrived[self.sender]:
            op.arrived[self.sender] += int(self.draw.choice([-16, -1, 1, 16]))
            self.changed = True
        for rank in (self.sender, other):
            self.changed |= not torch.equal(rows[rank, : lengths[rank]], reply[rank, : lengths[rank]])
        return rows

    def _of_one(self, op: SendRecv | Broadcast, reply: torch.Tensor) -> torch.Tensor:
        """Change a message that one rank alone sent; there is none of another rank to take its place."""
        row, change = reply.clone(), CHANGES[self.kind]
        source, arrived = (op.root, op.length) if isinstance(op, Broadcast) else (op.source, op.arrived)
        self.sender = self.other = source if source is not None else self.sender
        length = len(row) if arrived is None else int(arrived)
        if change is not None:
            has_before = self.exchange < len(self.before) and self.before[self.exchange].shape == row.shape
            change(row[:length].numpy(), (self.before[self.exchange] if has_before else row).numpy(), self.draw)
        elif self.kind == "announce another length" and arrived is not None:
            arrived.add_(int(self.draw.choice([-16, -1, 1, 16])))
            self.changed = True
        self.changed |= not torch.equal(row[:length], reply[:length])
        return row


def is_received(op: Op, rank: int) -> bool:
    """Return whether an operation brings a rank a payload."""
    if isinstance(op, Broadcast):
        return op.root != rank
    if isinstance(op, AllToAll) and op.arrived is not None and not bool(op.arrived.any()):
        # Where one rank collects, nothing comes to the others.
        return False
    return not isinstance(op, Reduce) and not (isinstance(op, SendRecv) and op.source is None)


def tampered(inner: Exchange[Any], change: Callable[[Op, torch.Tensor], torch.Tensor]) -> Generator[Op, Any, Any]:
    """Run an exchange whose replies are changed before it sees them."""
    try:
        op = next(inner)
        while True:
            op = inner.send(change(op, (yield op)))
    except StopIteration as stop:
        return stop.value


class Trials:
    """Corrupted exchanges by one method and protocol."""

    def __init__(self, method: gw.Method, collective: str, backend: str = "auto") -> None:
        if isinstance(method, Algorithm) and method.open_coders:
            method = method.with_coder(method.open_coders[0])
        segments = lay_out(Parameter(f"p{i}", (n,), (1,)) for i, n in enumerate(SIZES))
        self.plan: BucketPlan = make_plan(
            method,
            segments,
            kernels=get_kernels(backend),
            world_size=WORKERS,
            collective=collective,
            seed=0,
            chunk_numel=3200,
        )
        self.before: list[list[torch.Tensor]] = []
        self._states: list[dict[str, dict[str, torch.Tensor]]] = []
        memories = [Memory() for _ in range(WORKERS)]
        for round in range(ROUND):
            self.before = self._run(round, memories, self._recorders())[1]
            for memory in memories:
                memory.commit()
        self._states = [memory.state() for memory in memories]
        clean, arrived = self._run(ROUND, self._memories(), self._recorders())
        self._expected = clean
        self.exchanges = [len(of_rank) for of_rank in arrived]
        self.lengths_told = bool(sum(self.exchanges)) and self._tells_lengths

    def one(self, kind: str, seed: int) -> str | None:
        """Change one message, chosen by the seed; return the outcome, None where no byte was changed."""
        draw = np.random.default_rng(seed)
        # A rank's own message does not travel.
        receiver, sender, other = (int(rank) for rank in draw.permutation(WORKERS))
        exchange = int(draw.integers(max(1, self.exchanges[receiver])))
        tamperer = Tamperer(kind, exchange, receiver, sender, other, draw, self.before[receiver])
        keep = [tamperer if rank == receiver else _unchanged for rank in range(WORKERS)]
        try:
            rows, _ = self._run(ROUND, self._memories(), keep)
        except gw.PayloadError as error:
            named = re.search(rf"rank (\d) for bucket 0, chunk \d+, round {ROUND}: ", str(error))
            right = {tamperer.sender, other} if kind == "swap ranks" else {tamperer.sender}
            return REFUSED if named and int(named[1]) in right else UNNAMED
        except Exception:
            return CRASH
        if not tamperer.changed:
            return None
        if all(map(torch.equal, rows, self._expected)):
            return HARMLESS
        if not bool(torch.isfinite(rows).all()):
            return SPOILT
        return WRONG if all(torch.equal(rows[0], row) for row in rows) else DRIFT

    def _run(self, round: int, memories: list[Memory], changes: Any) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        generator = torch.Generator().manual_seed(round)
        rows = torch.randn(WORKERS, sum(SIZES), generator=generator) ** 3
        contexts = [Context(rank, WORKERS, round, memory=memory) for rank, memory in enumerate(memories)]
        whole = [self.plan.whole(context, row) for context, row in zip(contexts, rows)]
        simulate_ranks([tampered(g, change) for g, change in zip(whole, changes)], [Meter()] * WORKERS)
        return rows, [getattr(change, "arrived", []) for change in changes]

    def _memories(self) -> list[Memory]:
        memories = [Memory() for _ in range(WORKERS)]
        for memory, state in zip(memories, self._states):
            memory.load(state)
        return memories

    def _recorders(self) -> list[Recorder]:
        self._tells_lengths = False
        return [Recorder(self, rank) for rank in range(WORKERS)]


class Recorder:
    """Keeps what arrives."""

    def __init__(self, trials: Trials, rank: int) -> None:
        self.arrived: list[torch.Tensor] = []
        self._trials, self._rank = trials, rank

    def __call__(self, op: Op, reply: torch.Tensor) -> torch.Tensor:
        if is_received(op, self._rank):
            self.arrived.append(reply.clone())
            told = op.length if isinstance(op, Broadcast) else getattr(op, "arrived", None)
            self._trials._tells_lengths |= told is not None
        return reply


def _unchanged(op: Op, reply: torch.Tensor) -> torch.Tensor:
    return reply
