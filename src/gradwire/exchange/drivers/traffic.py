"""Counts of bytes and spans of time, made in drivers, so that no method can misreport them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch.autograd import profiler

from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Op, Reduce, SendRecv
from gradwire.exchange.wire import SUM_BYTES

GATHERED_REDUCE_BYTES = 1 << 16
"""Reductions that do not depend on the order, up to this size, use one gather instead of a ring.

A ring takes 2 (N - 1) dependent messages; on Gloo with four ranks on two cores a 400-byte ring took 4.2 ms, one
all-to-all 0.5 ms.
"""

LENGTH_BYTES = 8
"""Bytes of a message with the length of the row that follows: the length and its complement."""

LARGE_BYTES = 1 << 16
"""Rows from this size on are sent one at a time, in turn with those of other lanes."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sent and received: payloads and headers, without those of TCP and Ethernet.

    Attributes:
        sent_bytes: Bytes that this rank sent, computed from the known algorithm of each collective.
        received_bytes: Bytes that this rank received.
        dense_bytes: Bytes that a float32 ring all-reduce of the same gradients would have sent, or a ring
            reduce-scatter if each rank receives only its shard. Each round counts with the number of ranks that
            exchanged it.
        elements: Gradient elements exchanged, summed over rounds.
        rounds: Number of synchronised backward passes, or of exchanges of local steps.
        buffer_bytes: Bytes that this rank sent in DDP's own broadcasts of module buffers (batch norm's running
            statistics).
        sent_to: The part of ``sent_bytes`` in messages to a single rank, by that rank, such as a neighbour in a graph
            of workers.
        sent_within: The part of ``sent_bytes`` in messages within groups of ranks, by name of the scope: "node" inside
            a node, "between nodes" among the ranks that hold the same shard.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0
    elements: int = 0
    rounds: int = 0
    buffer_bytes: int = 0
    sent_to: Mapping[int, int] = field(default_factory=dict)
    sent_within: Mapping[str, int] = field(default_factory=dict)

    @property
    def compression_factor(self) -> float:
        """Bytes before divided by bytes after; 1.0 if either is zero, as for a rank that is alone."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes and self.dense_bytes else 1.0

    @property
    def bits_per_element(self) -> float:
        """Bits sent per gradient element and direction, on the scale where a float32 all-reduce has 32."""
        return 32.0 / self.compression_factor


def gathers(op: Reduce) -> bool:
    """Return whether drivers execute this reduction by a gather."""
    return op.op != "sum" and op.value.numel() * op.value.element_size() <= GATHERED_REDUCE_BYTES


def large(op: Op) -> bool:
    """Return whether drivers send this operation's rows one at a time."""
    if isinstance(op, Reduce):
        return False
    if isinstance(op, Broadcast):
        return op.value.numel() * op.value.element_size() >= LARGE_BYTES
    row = op.send[0] if isinstance(op, AllToAll) else op.send
    return row.numel() * row.element_size() >= LARGE_BYTES


def broadcast_sends(rank: int, root: int, world_size: int) -> int:
    """Return to how many ranks one rank sends a broadcast's value: its children in Gloo's binomial tree.

    With ranks counted from the root on, v = (rank - root) mod N, rank v sends to v + 2^i for all i with 2^i > v and v +
    2^i < N: the root to ceil(log2 N) ranks, half of the ranks to none. Every rank but the root receives it once.

    Example:
        >>> [broadcast_sends(rank, root=0, world_size=8) for rank in range(8)]
        [3, 2, 1, 1, 0, 0, 0, 0]
    """
    place = (rank - root) % world_size
    return sum(place < 1 << i and place + (1 << i) < world_size for i in range(world_size.bit_length()))


def op_bytes(op: Op, world_size: int, rank: int = 0, keyed_bytes: int = 0) -> tuple[int, int]:
    """Return the bytes that one rank sends and receives for an operation.

    All-to-all and all-gather: (N - 1) rows each way; rows of different lengths count with their lengths, and eight
    bytes for the message with each length. Between two ranks: a row for each peer. Ring all-reduce of M bytes: 2 M (N -
    1) / N each way; by a gather, (N - 1) times M and eight bytes of checksum. Broadcast: sent :func:`broadcast_sends`
    times and received once except by the root, with eight more bytes if a length is sent. It is the only operation in
    which ranks send different numbers of bytes. Each message, of which a ring all-reduce under a key has two for each
    other rank, has ``keyed_bytes`` more.
    """
    if op.scope is not None:
        rank, world_size = op.scope.place(rank)
    others = world_size - 1
    if isinstance(op, Broadcast):
        count = (op.value.numel() if op.length is None else int(op.length)) * op.value.element_size()
        count += LENGTH_BYTES * (op.length is not None) + keyed_bytes
        return count * broadcast_sends(rank, op.root, world_size), count * (rank != op.root)
    if isinstance(op, SendRecv):
        counts = [op.send.numel() if n is None else int(n) + LENGTH_BYTES for n in (op.lengths, op.arrived)]
        sent, received = (count + keyed_bytes for count in counts)
        return sent * (op.to is not None), received * (op.source is not None)
    if not isinstance(op, Reduce) and op.lengths is not None and op.arrived is not None:
        told = (LENGTH_BYTES + keyed_bytes) * others
        return int(op.lengths.sum()) + told, int(op.arrived.sum()) + told
    if isinstance(op, Reduce):
        size = op.value.numel() * op.value.element_size()
        count = (size + SUM_BYTES) * others if gathers(op) else round(2 * size * others / world_size)
        count += keyed_bytes * others * (1 if gathers(op) else 2)
    elif isinstance(op, AllToAll):
        count = (op.send.shape[1] + keyed_bytes) * others
    elif isinstance(op, AllGather):
        count = (op.send.numel() + keyed_bytes) * others
    return count, count


def dense_bytes(elements: int, world_size: int, passes: int = 2) -> int:
    """Return the bytes that one rank sends in a float32 ring all-reduce of that many elements.

    Its first pass is a reduce-scatter, and ``passes=1`` counts that alone.
    """
    return round(passes * 4 * elements * (world_size - 1) / world_size)


class Meter:
    """Running counts of one rank. Each lane has its own, so none needs a lock.

    Args:
        rank: The rank whose bytes are counted.
        keyed_bytes: Bytes of the digest under a key beside each message.

    Of the sent bytes, ``ring_bytes`` counts those to the neighbour in a ring, and ``sent_to`` those of messages to a
    single rank, by that rank; the others were sent to all ranks. ``sent_within`` counts those of operations with a
    scope, by its name.
    """

    def __init__(self, rank: int = 0, keyed_bytes: int = 0) -> None:
        self.rank, self.keyed_bytes = rank, keyed_bytes
        self.sent_bytes = 0
        self.received_bytes = 0
        self.ring_bytes = 0
        self.sent_to: Counter[int] = Counter()
        self.sent_within: Counter[str] = Counter()
        self.encode_s = 0.0
        self.wire_s = 0.0
        self.decode_s = 0.0

    def include(self, other: Meter) -> None:
        """Add the bytes that another meter has counted."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.ring_bytes += other.ring_bytes
        self.sent_to.update(other.sent_to)
        self.sent_within.update(other.sent_within)

    def bytes_of(self, op: Op, world_size: int) -> tuple[int, int]:
        """Return the bytes that this rank sends and receives for an operation."""
        return op_bytes(op, world_size, self.rank, self.keyed_bytes)

    def count(self, op: Op, world_size: int) -> None:
        """Add one operation's bytes."""
        sent, received = self.bytes_of(op, world_size)
        self.sent_bytes += sent
        self.received_bytes += received
        if op.scope is not None:
            self.sent_within[op.scope.name] += sent
        if isinstance(op, Reduce) and not gathers(op):
            self.ring_bytes += sent
        if isinstance(op, SendRecv) and op.to is not None:
            to = op.to if op.scope is None else op.scope.ranks(self.rank)[op.to]
            self.sent_to[to] += sent


def profiled(name: str, detail: str) -> AbstractContextManager[object]:
    """Return a range ``gradwire::name`` of this thread for ``torch.profiler``; a null context if no profiler runs.

    A profiler records the threads of lanes if it was made with ``profile_all_threads=True``.
    """
    # This flag is of the process: the public function of torch.autograd is of the thread, and no profiler starts on
    # that of a lane.
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"gradwire::{name}", detail)
    return nullcontext()


@dataclass(frozen=True)
class Span:
    """A span of one lane's time.

    Attributes:
        track: The lane, or "compute".
        name: "encode", "wait for turn", "send rows", "small message" or "decode"; on "compute" a part of the step.
        began_s: Begin by ``time.perf_counter``, which on Linux is the same clock for all processes of a machine.
        ended_s: End by the same clock.
        detail: The bucket and the operation.
        sent_bytes: Bytes that were sent in it.
    """

    track: str
    name: str
    began_s: float
    ended_s: float
    detail: str = ""
    sent_bytes: int = 0


class Trace:
    """Collects spans from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, track: str, name: str, began_s: float, ended_s: float, detail: str = "", sent_bytes: int = 0) -> None:
        """Add a span."""
        span = Span(track, name, began_s, ended_s, detail, sent_bytes)
        with self._lock:
            self._spans.append(span)

    def spans(self) -> list[Span]:
        """Return the spans added so far, in order of their begin."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.began_s)
