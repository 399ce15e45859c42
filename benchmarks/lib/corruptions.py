"""Exchanges of simulated ranks in which one message changes on the way, and what becomes of them."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradwire as gw
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.differences import Known, gathered_differences
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.exchange.wire import HEADER_BYTES
from gradwire.kernels import get_kernels
from gradwire.methods.gossip.vector_coder import VectorCoder

__all__ = ["CHANGES", "OUTCOMES", "Trials", "WeightTrials"]

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
        other: Another rank, whose message "swap ranks" and "repeat a rank" take, too.
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
        lengths = [rows.shape[1]] * len(rows)
        if op.arrived is not None:
            lengths = [count or rows.shape[1] for count in op.arrived.tolist()]
        sender, other = self._places(op, len(rows))
        length = lengths[sender]
        change = CHANGES[self.kind]
        if change is not None:
            has_before = self.exchange < len(self.before) and self.before[self.exchange].shape == rows.shape
            source = self.before[self.exchange] if has_before else rows
            change(rows[sender, :length].numpy(), source[sender].numpy(), self.draw)
        elif self.kind == "swap ranks":
            rows[[sender, other]] = rows[[other, sender]]
            if op.arrived is not None and op.arrived[sender] and op.arrived[other]:
                op.arrived[[sender, other]] = op.arrived[[other, sender]]
        elif self.kind == "repeat a rank":
            rows[sender] = rows[other]
        elif op.arrived is not None and op.arrived[sender]:
            op.arrived[sender] += int(self.draw.choice([-16, -1, 1, 16]))
            self.changed = True
        for row in (sender, other):
            self.changed |= not torch.equal(rows[row, : lengths[row]], reply[row, : lengths[row]])
        return rows

    def _places(self, op: AllToAll | AllGather, rows: int) -> tuple[int, int]:
        """Return the rows that came from the sender and the other rank; in a group of the scope, from members of it."""
        members = list(range(rows)) if op.scope is None else list(op.scope.ranks(self.receiver))
        peers = [rank for rank in members if rank != self.receiver]
        if self.sender not in peers:
            self.sender = peers[self.sender % len(peers)]
        if self.other not in peers or self.other == self.sender:
            self.other = next((rank for rank in peers if rank != self.sender), self.sender)
        return members.index(self.sender), members.index(self.other)

    def _of_one(self, op: SendRecv | Broadcast, reply: torch.Tensor) -> torch.Tensor:
        """Change a message that one rank alone sent; there is none of another rank to take its place."""
        row, change = reply.clone(), CHANGES[self.kind]
        source, arrived = (op.root, op.length) if isinstance(op, Broadcast) else (op.source, op.arrived)
        if source is not None:
            self.sender = self.other = source if op.scope is None else op.scope.ranks(self.receiver)[source]
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
        return op.root != (rank if op.scope is None else op.scope.place(rank)[0])
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


def repeated(op: Op, reply: torch.Tensor, told: torch.Tensor | None) -> torch.Tensor:
    """Do to an operation what it did in the run in which its reply and the lengths of its rows were recorded."""
    room = op.value if isinstance(op, Reduce | Broadcast) else op.recv
    its_own = lengths_of(op)
    if its_own is not None and told is not None:
        its_own.copy_(told)
    return room.copy_(reply.view_as(room)).view_as(reply)


def lengths_of(op: Op) -> torch.Tensor | None:
    """Return what takes the lengths of the rows that come, if these vary."""
    return op.length if isinstance(op, Broadcast) else getattr(op, "arrived", None)


class Trials:
    """Corrupted exchanges by one method and protocol.

    Args:
        method: What is exchanged by.
        collective: Name of the protocol.
        backend: Of the kernels.
        workers: How many ranks exchange, three or more.
    """

    def __init__(self, method: gw.Method, collective: str, backend: str = "auto", workers: int = WORKERS) -> None:
        if method.traits.open_coders:
            method = method.with_coder(method.traits.open_coders[0])
        segments = lay_out(Parameter(f"p{i}", (n,), (1,)) for i, n in enumerate(SIZES))
        setting = PlanSetting(segments, get_kernels(backend), workers, collective, 0, 3200)
        self.plan: BucketPlan = method.plan(setting)
        self._prepare(workers)

    def _prepare(self, workers: int) -> None:
        """Run the rounds before, keep what ranks remember of them, and run the round as it should be."""
        self.workers = workers
        self.before: list[list[torch.Tensor]] = []
        memories = [self._memory() for _ in range(workers)]
        for round in range(ROUND):
            self.before = self._run(round, memories, self._recorders())[1]
            for memory in memories:
                self._commit(memory)
        self._states = memories
        recorders = self._recorders()
        clean, arrived = self._run(ROUND, self._memories(), recorders)
        self._expected, self._replies = clean, [recorder.replies for recorder in recorders]
        self.exchanges = [len(of_rank) for of_rank in arrived]
        self.lengths_told = bool(sum(self.exchanges)) and self._tells_lengths

    def one(self, kind: str, seed: int) -> str | None:
        """Change one message, chosen by the seed; return the outcome, None where no byte was changed."""
        tamperer = self._tamperer(kind, seed)
        try:
            self._receive(tamperer)
            if not tamperer.changed:
                return None
            # What others make of it matters only now.
            tamperer = self._tamperer(kind, seed)
            keep = [tamperer if rank == tamperer.receiver else _unchanged for rank in range(self.workers)]
            rows, _ = self._run(ROUND, self._memories(), keep)
        except gw.PayloadError as error:
            named = re.search(rf"rank (\d) for bucket 0, chunk \d+, round {ROUND}: ", str(error))
            right = {tamperer.sender, tamperer.other} if kind == "swap ranks" else {tamperer.sender}
            return REFUSED if named and int(named[1]) in right else UNNAMED
        except Exception:
            return CRASH
        if all(map(torch.equal, rows, self._expected)):
            return HARMLESS
        if not bool(torch.isfinite(rows).all()):
            return SPOILT
        return WRONG if all(torch.equal(rows[0], row) for row in rows) else DRIFT

    def _tamperer(self, kind: str, seed: int) -> Tamperer:
        draw = np.random.default_rng(seed)
        # A rank's own message does not travel.
        receiver, sender, other, *_ = (int(rank) for rank in draw.permutation(self.workers))
        exchange = int(draw.integers(max(1, self.exchanges[receiver])))
        return Tamperer(kind, exchange, receiver, sender, other, draw, self.before[receiver])

    def _receive(self, tamperer: Tamperer) -> None:
        """Run the exchange of the receiver alone, with the replies of the run as it should be but for one."""
        rank = tamperer.receiver
        exchange = self._exchange(rank, ROUND, self._memories()[rank], self._rows(ROUND)[rank])
        replies = iter(self._replies[rank])
        with contextlib.suppress(StopIteration):
            op = next(exchange)
            while True:
                op = exchange.send(tamperer(op, repeated(op, *next(replies))))

    def _rows(self, round: int) -> torch.Tensor:
        return torch.randn(self.workers, sum(SIZES), generator=torch.Generator().manual_seed(round)) ** 3

    def _run(self, round: int, memories: Sequence[Any], changes: Any) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        rows = self._rows(round)
        exchanges = [self._exchange(rank, round, memory, row) for rank, (memory, row) in enumerate(zip(memories, rows))]
        ended = simulate_ranks([tampered(g, change) for g, change in zip(exchanges, changes)], [Meter()] * self.workers)
        return self._outcome(rows, ended), [getattr(change, "arrived", []) for change in changes]

    def _exchange(self, rank: int, round: int, memory: Any, row: torch.Tensor) -> Exchange[Any]:
        """Return one rank's exchange of a round."""
        return self.plan.whole(Context(rank, self.workers, round, memory=memory), row)

    def _outcome(self, rows: torch.Tensor, ended: Sequence[Any]) -> torch.Tensor:
        """Return what each rank has after a round, a row each."""
        return rows

    def _memory(self) -> Any:
        """Return what a rank remembers before the first round."""
        return Memory()

    def _commit(self, memory: Any) -> None:
        memory.commit()

    def _memories(self) -> list[Any]:
        """Return copies of what ranks remember of the rounds before."""
        copies = [Memory() for _ in self._states]
        for memory, kept in zip(copies, self._states):
            memory.load(kept.state())
        return copies

    def _recorders(self) -> list[Recorder]:
        self._tells_lengths = False
        return [Recorder(self, rank) for rank in range(self.workers)]


class WeightTrials(Trials):
    """Corrupted gathers of what has changed of each rank's vector, as :func:`gradwire.compress_weights` makes them."""

    def __init__(self, method: gw.Method, backend: str = "auto", workers: int = WORKERS) -> None:
        self._coders = [VectorCoder(method, get_kernels(backend), "w", seed) for seed in range(workers)]
        self._prepare(workers)

    def _exchange(self, rank: int, round: int, memory: Any, row: torch.Tensor) -> Exchange[Any]:
        return gathered_differences(Context(rank, self.workers, round), memory, self._coders, row)

    def _outcome(self, rows: torch.Tensor, ended: Sequence[Any]) -> torch.Tensor:
        return torch.stack([known.reshape(-1).clone() for known in ended])

    def _memory(self) -> Any:
        return Known()

    def _commit(self, memory: Any) -> None:
        pass

    def _memories(self) -> list[Any]:
        return copy.deepcopy(self._states)


class Recorder:
    """Keeps what arrives."""

    def __init__(self, trials: Trials, rank: int) -> None:
        self.arrived: list[torch.Tensor] = []
        self.replies: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._trials, self._rank = trials, rank

    def __call__(self, op: Op, reply: torch.Tensor) -> torch.Tensor:
        told = lengths_of(op)
        self.replies.append((reply.clone(), None if told is None else told.clone()))
        if is_received(op, self._rank):
            self.arrived.append(self.replies[-1][0])
            self._trials._tells_lengths |= told is not None
        return reply


def _unchanged(op: Op, reply: torch.Tensor) -> torch.Tensor:
    return reply
