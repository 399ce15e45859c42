"""Messages with a digest under a key: the same replies, and none that somebody else sent, altered or sent again."""

from __future__ import annotations

import contextlib
import itertools
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import PayloadError
from gradwire.exchange.drivers import Lane
from gradwire.exchange.drivers.tables import all_gather_tables, broadcast_table, decode, encode
from gradwire.exchange.drivers.transports import GlooTransport
from gradwire.exchange.drivers.transports.notes import KEYED_BYTES, Notes
from gradwire.exchange.drivers.transports.receives import Receives
from gradwire.exchange.drivers.transports.ring import ring_shares
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv
from ranks import Ranks

WAIT = timedelta(seconds=60)
KEY = bytes(range(32))
SIZES = (1, 3, 7, 1000, 70_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32)


def connected(name: str, key: bytes) -> GlooTransport:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return GlooTransport(store, dist.get_rank(), dist.get_world_size(), WAIT, key)


def drawn(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def some_ops(rank: int, n: int, size: int, round: int = 0) -> list[Op]:
    """Return operations of every kind, with rows of one length and of several."""
    send, lengths = drawn(rank + 10 * round, n, size), torch.tensor([(rank + to) % (size + 1) for to in range(n)])
    lengths[rank] = 0
    same = torch.full((n,), (rank * 5) % (size + 1))
    same[rank] = 0
    right, left = (rank + 1) % n, (rank - 1) % n
    values = drawn(rank + 10 * round, size).float()

    def room(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    def told() -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int64)

    row = send[0].clone
    some_peer = (right if rank else None, left if rank != 1 else None)
    return [
        AllToAll(send.clone(), room(n, size)),
        AllToAll(send.clone(), room(n, size), lengths, told()),
        AllGather(row(), room(n, size)),
        AllGather(row(), room(n, size), same, told()),
        SendRecv(row(), room(size), right, left),
        SendRecv(row(), room(size), *some_peer),
        SendRecv(
            row(), room(size), right, left, torch.tensor([min(size, 1 + rank)]), torch.zeros(1, dtype=torch.int64)
        ),
        Broadcast(values.clone(), 1),
        Broadcast(values.clone(), 1, torch.tensor([max(1, size // 2)])),
        Reduce(values.clone(), "max"),
        Reduce(values.repeat(2), "sum"),
    ]


KINDS = 11


def seen(transport: GlooTransport, op: Op, job: str | None) -> list[torch.Tensor]:
    """Execute an operation, and return what a protocol may read of the reply."""
    reply = transport.execute(op, nullcontext, job).clone()
    if isinstance(op, Broadcast):
        return [reply if op.length is None else reply[: int(op.length)]]
    if isinstance(op, Reduce) or op.arrived is None:
        return [reply]
    rows = reply.view(len(op.arrived), -1)
    return [op.arrived, *(row[:length] for row, length in zip(rows, op.arrived.tolist()))]


def replies(size: int) -> bool:
    """Execute every operation three times on two transports, one of them with a key; return whether they agree."""
    rank, n = dist.get_rank(), dist.get_world_size()
    plain, keyed = connected(f"plain {size}", b""), connected(f"keyed {size}", KEY)
    alike = True
    for _ in range(3):
        for ours, theirs in zip(some_ops(rank, n, size), some_ops(rank, n, size), strict=True):
            found = seen(plain, ours, "job"), seen(keyed, theirs, "job")
            alike = alike and all(map(torch.equal, *found))
        for transport in (plain, keyed):
            # A rank that is done hangs up.
            with contextlib.suppress(RuntimeError):
                transport.end_job()
    return alike


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 9, 70_000])
def test_replies_are_those_without_a_key(three_ranks: Ranks, size: int) -> None:
    assert three_ranks(replies, size) == [True] * 3


def sums(op: str) -> list[bool]:
    """Reduce vectors of several sizes and types with and without a key; return where the bits agree."""
    rank, found = dist.get_rank(), []
    plain, keyed = connected(f"ring {op}", b""), connected(f"ring under a key {op}", KEY)
    for size, dtype in itertools.product((*SIZES, 1_500_000), DTYPES):
        generator = torch.Generator().manual_seed(100 * rank + size % 97)
        values = (torch.randn(size, generator=generator) * 100).to(dtype)
        big = Reduce(values.clone(), op)
        bits = [t.execute(r, nullcontext).clone() for t, r in ((plain, big), (keyed, Reduce(values.clone(), op)))]
        found.append(torch.equal(*(b.view(torch.uint8) for b in bits)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reductions_have_the_bits_of_gloos_own(four_ranks: Ranks, op: str) -> None:
    found = four_ranks(sums, op)
    assert found == [[True] * len(found[0])] * 4


def test_shares_hold_the_whole_vector() -> None:
    for numel, item, n in itertools.product((0, 1, 5, 999, 3_000_000), (1, 2, 4, 8), (2, 3, 8)):
        assert ring_shares(numel, item, n) * n >= numel


class Between:
    """Somebody on the way of what a rank sends."""

    def __init__(self, real: Any, kind: str) -> None:
        self._real, self._kind, self._earlier = real, kind, dict[tuple[int, int], torch.Tensor]()
        self.acts = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        return self._real.send([self._changed(tensors[0], (to, tag))], to, tag)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if options.rootRank == 1:
            tensors = [self._changed(tensors[0], (-1, tensors[0].numel()))]
        return self._real.broadcast(tensors, options)

    def _changed(self, message: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        before, self._earlier[place] = self._earlier.get(place), message.clone()
        is_note = message.dtype == torch.uint8 and message.numel() in (8, KEYED_BYTES, KEYED_BYTES + 8)
        if self.acts and self._kind == "sent again" and before is not None:
            return before
        if self.acts and self._kind == "altered" and not is_note:
            message = message.clone()
            message.view(-1).view(torch.uint8)[-1] ^= 1
        return message


def refused(kind: str) -> list[str]:
    """Execute every operation twice, where somebody stands between rank 1 and the others; return how each ended."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), []
    for number in range(KINDS):
        key = KEY[::-1] if kind == "another key" and rank == 1 else KEY
        transport = connected(f"hostile {kind} {number}", key)
        between = Between(transport._backend, kind)
        if rank == 1:
            transport._backend = between
            transport._receives = Receives(between, n)
        ended = "taken"
        for round in range(2):
            between.acts = round == 1
            try:
                transport.execute(some_ops(rank, n, 100, round)[number], nullcontext)
            except PayloadError as error:
                ended = f"round {round}: {error}"
                break
            except RuntimeError:
                ended = "broken by another"
                break
        found.append(ended)
        # Another rank may wait for a message that does not come.
        transport.close(True)
        del transport, between
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["altered", "sent again", "another key"])
def test_a_message_of_a_stranger_is_refused_by_name_whatever_the_operation(three_ranks: Ranks, kind: str) -> None:
    found = three_ranks(refused, kind)
    first = 0 if kind == "another key" else 1
    about = f"round {first}: message from rank 1: its digest under the secret differs"
    for number, (zero, one, two) in enumerate(zip(*found)):
        # Whoever refuses hangs up. Rank 2 receives of every operation from rank 1, rank 0 of all but the swaps. With a
        # key of its own rank 1 refuses the others' messages, too, and may be the first.
        first_to_refuse = kind == "another key" and "its digest under the secret differs" in one
        assert first_to_refuse or any(about in ended for ended in (zero, two)), (number, zero, one, two)
        assert two != "taken"
        assert zero != "taken" or number in (4, 5, 6)


def spent() -> list[int]:
    """Return the bytes that a lane has counted with a key and without, for one operation of each kind."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []

    def job(op: Op) -> Exchange[None]:
        yield op

    for number in range(KINDS):
        counted = []
        for key in (b"", KEY):
            store = dist.PrefixStore(f"counted {number} {len(key)}", dist.distributed_c10d._get_default_store())
            lane = Lane(store, rank, n, WAIT, "test", connect=partial(GlooTransport, key=key))
            lane.run(job(some_ops(rank, n, 100)[number]), at_once=number == 0).result()
            counted.append(lane.meter.sent_bytes)
            lane.close()
        found.append(counted[1] - counted[0])
    return found


@pytest.mark.ranks
def test_digests_are_counted(three_ranks: Ranks) -> None:
    found = three_ranks(spent)
    # Rows to two others; a swap is one message, and rank 0 sends none in the second; a broadcast's root sends it twice.
    assert found[1] == [KEYED_BYTES * k for k in (2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 4)]
    assert found[0][5] == 0


def test_a_note_belongs_to_one_message_alone() -> None:
    row, other = torch.arange(50, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8).flip(0)

    def accepted(note: torch.Tensor, row: torch.Tensor, sender: int, tag: int, to: int, before: int = 0) -> bool:
        notes = Notes(to, KEY)
        notes._came[sender, tag] = before
        try:
            notes.check(note, row, sender, tag)
        except PayloadError as error:
            return error.sender != sender
        return True

    note = Notes(3, KEY).seal(Notes(3, KEY).begin(None, 1)[0], row, 4, 7)
    assert len(note) == KEYED_BYTES
    assert accepted(note, row, 3, 7, 4)
    for changed in ((other, 3, 7, 4), (row[:-1], 3, 7, 4), (row, 2, 7, 4), (row, 3, 8, 4), (row, 3, 7, 5)):
        assert not accepted(note, *changed)
    assert not accepted(note, row, 3, 7, 4, before=1)
    for bit in range(8 * KEYED_BYTES):
        spoilt = note.clone()
        spoilt[bit // 8] ^= 1 << bit % 8
        assert not accepted(spoilt, row, 3, 7, 4)


def test_a_table_under_a_key_is_read_under_that_key_alone() -> None:
    message = encode({"a": 1}, "handshake", 2, KEY)
    assert decode(message, "handshake", 2, KEY) == {"a": 1}
    for key in (b"", KEY[::-1]):
        with pytest.raises(PayloadError, match="the handshake from rank 2: its checksum differs"):
            decode(message, "handshake", 2, key)
    with pytest.raises(PayloadError, match="somebody sent it who does not know the secret"):
        decode(encode({"a": 1}, "handshake", 2), "handshake", 2, KEY)


def tables_sent_again() -> list[str]:
    """Tell tables under a key, the second time by sending the first one again."""
    from gradwire.exchange.drivers import TorchGroup, tables

    class Keyed(TorchGroup):
        def key(self, purpose: str) -> bytes:
            return KEY[:16] + purpose.encode()

    world = dist.group.WORLD
    assert world is not None
    group, found, real, first = Keyed(world), [], tables.encode, list[bytes]()

    def again(value: object, subject: str, sender: int, key: bytes = b"") -> bytes:
        first.append(real(value, subject, sender, key))
        return first[0]

    if dist.get_rank() == 1:
        tables.encode = again
    gather = partial(all_gather_tables, "x", "test", group, str)
    broadcast = partial(broadcast_table, "x", "test", group, str, 1)
    try:
        for tell in (gather, broadcast, gather, broadcast):
            try:
                found.append(str(tell()))
            except PayloadError as error:
                found.append(str(error)[:20])
    finally:
        tables.encode = real
    return found


@pytest.mark.ranks
def test_a_table_that_is_sent_again_is_refused(three_ranks: Ranks) -> None:
    for found in three_ranks(tables_sent_again):
        assert found[0] == str(["x"] * 3)
        assert found[1:] == ["the test from rank 1"] * 3
