"""State for newcomers: its code, its servers, the steps that are taken again, and members that go on meanwhile."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
import weakref
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import gradwire as gw
from crew import Crew, Worker, crew, wait_for
from gradwire.kernels.pieces import decode, encode
from gradwire.link.membership import state_server
from gradwire.link.membership.replay import StepLog, replay
from gradwire.link.membership.serving_link import LARGE_BYTES
from gradwire.link.membership.snapshot import Snapshot
from gradwire.link.membership.state_fetch import StateFetch
from gradwire.link.membership.state_server import StateServer

KEY = bytes(range(32))


def octets(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


DRAWN = torch.randn(30001, generator=torch.Generator().manual_seed(3))
TENSORS = {
    "float32": DRAWN,
    "float64": DRAWN.double(),
    "bfloat16": DRAWN.bfloat16(),
    "ternary": DRAWN.sign() * 0.37 * (DRAWN.abs() > 1),
    "zeros": torch.zeros(30001),
    "specials": torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45] * 99),
    "int64": torch.arange(30001) * 17 - 999,
    "bool": DRAWN > 0,
    "uint8": (DRAWN * 100).to(torch.int32).to(torch.uint8),
    "one": torch.tensor([2.5]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_code_gives_every_bit_back(name: str) -> None:
    tensor = TENSORS[name]
    data, form = octets(tensor), (tensor.element_size(), tensor.is_floating_point())
    coded = encode(data, *form)
    assert np.array_equal(decode(coded, len(data), *form), data)
    assert len(coded) <= len(data) + 1


def test_the_code_is_shorter_where_there_is_something_to_gain() -> None:
    ratio = {
        name: len(encode(octets(x), x.element_size(), x.is_floating_point())) / x.nbytes for name, x in TENSORS.items()
    }
    # Exponents of normal numbers take about 2.5 bits of 8; three values, one with two signs, 1.9 of 32.
    assert ratio["float32"] < 0.9
    assert ratio["bfloat16"] < 0.8
    assert ratio["ternary"] < 0.08
    assert ratio["zeros"] < 0.01


def test_spoilt_pieces_are_refused_or_differ_and_nothing_else_is_raised() -> None:
    draw = random.Random(5)
    for name in ("float32", "ternary"):
        data = octets(TENSORS[name])
        coded = encode(data, 4, True)
        for _ in range(200):
            spoilt = bytearray(coded[: draw.randrange(len(coded) + 1)] if draw.random() < 0.3 else coded)
            if spoilt:
                spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
            with contextlib.suppress(gw.PayloadError):
                assert len(decode(bytes(spoilt), len(data), 4, True)) == len(data)


def state(seed: int = 0, size: int = 700_000) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "parameters": {"a": torch.randn(size, generator=draw), "b": torch.randn(3, 5, generator=draw)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(size, generator=draw)}}, "lr": 0.1},
        "none": None,
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def test_a_message_of_state_comes_back_and_a_changed_byte_is_refused() -> None:
    message = Snapshot.of(state(size=1000), copied=True).packed(KEY)
    assert equal(Snapshot.unpacked(message, KEY).state(), state(size=1000))
    draw = random.Random(1)
    for _ in range(100):
        spoilt = bytearray(message)
        spoilt[draw.randrange(len(message))] ^= 1 << draw.randrange(8)
        with pytest.raises(gw.PayloadError):
            Snapshot.unpacked(bytes(spoilt), KEY)
    with pytest.raises(gw.PayloadError, match="does not verify under the secret"):
        Snapshot.unpacked(message, KEY[::-1])


def serve(*states: dict[str, Any], own: tuple[str, ...] = (), key: bytes = KEY) -> list[StateServer]:
    return [StateServer(HashStore(), Snapshot.of(s, own, copied=False), key) for s in states]


def addresses(servers: list[StateServer]) -> list[tuple[str, int]]:
    return [(server.host, server.port) for server in servers]


def test_state_comes_from_several_members_and_what_is_there_does_not_come() -> None:
    servers = serve(state(), state(), state())
    fetch = StateFetch(addresses(servers), KEY)
    assert equal(fetch.run().state(), state())
    assert fetch.received_bytes < 0.95 * fetch.snapshot.nbytes
    again = StateFetch(addresses(servers), KEY, fetch.snapshot.digests(KEY))
    assert equal(again.run().state(), state())
    assert (again.received_bytes, again.reused_bytes) == (0, fetch.snapshot.nbytes)
    for server in servers:
        server.close()


def test_a_server_that_nobody_asks_ends_and_holds_neither_state_nor_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "IDLE_S", 0.0)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = StepLog(optimizer, lambda: 0, KEY, 1 << 20)
    model(torch.ones(100)).sum().backward()
    optimizer.step()
    assert log.entry(0)
    snapshot = Snapshot.of(state(), (), copied=True)
    held = weakref.ref(snapshot)
    server = StateServer(HashStore(), snapshot, KEY, log)
    del snapshot
    # It looks once a second.
    end_s = time.monotonic() + 30.0
    while server.alive or held() is not None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert log.entry(0) is None
    optimizer.step()
    assert log.entry(1) is None


def test_a_member_with_other_state_is_not_believed_and_own_parts_are_the_first_ones() -> None:
    servers = serve(state(), state(seed=1), state(seed=2), own=("optimizer",))
    fetch = StateFetch(addresses(servers), KEY)
    assert equal(fetch.run().state(), state())
    # A version of its own that the newcomer took before will do.
    kept = Snapshot.of(state(seed=3), ("optimizer",), copied=True)
    found = StateFetch(addresses(servers), KEY, kept=kept).run().state()
    assert equal(found["parameters"], state()["parameters"])
    assert equal(found["optimizer"]["state"], state(seed=3)["optimizer"]["state"])
    for server in servers:
        server.close()


def lost_after(monkeypatch: pytest.MonkeyPatch, server: StateServer, pieces: int) -> None:
    """End a server after it has answered so often."""
    usual: Callable[[int, int], bytes | None] = server._answer
    left = [pieces + 1]

    def answer(kind: int, number: int) -> bytes | None:
        left[0] -= 1
        return usual(kind, number) if left[0] >= 0 else None

    monkeypatch.setattr(server, "_answer", answer)


@pytest.mark.parametrize("which", [0, 1])
def test_the_others_give_what_a_lost_member_has_not_sent(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    servers = serve(state(), state())
    lost_after(monkeypatch, servers[which], 2)
    assert equal(StateFetch(addresses(servers), KEY).run().state(), state())
    for server in servers:
        server.close()


def test_without_the_member_that_has_its_own_the_newcomer_learns_that_state_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = serve(state(), state(), own=("optimizer",))
    lost_after(monkeypatch, servers[0], 1)
    with pytest.raises(gw.ExchangeError, match="are gone"):
        StateFetch(addresses(servers), KEY).run()
    for server in servers:
        server.close()
    with pytest.raises(gw.ExchangeError, match="cannot be reached"):
        StateFetch([("127.0.0.1", 9)], KEY).run()


def test_strangers_that_hold_connections_keep_no_newcomer_out() -> None:
    servers = serve(state())
    held = [socket.create_connection(addresses(servers)[0]) for _ in range(3 * state_server.MOST_UNPROVEN)]
    found = None
    # One that has to make room by chance comes again, as newcomers do.
    for _ in range(50):
        with contextlib.suppress(gw.ExchangeError):
            found = StateFetch(addresses(servers), KEY).run().state()
            break
    assert equal(found, state())
    for made in held:
        made.close()


def test_a_stranger_that_sends_a_byte_now_and_then_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "HANDSHAKE_S", 0.2)
    (server,) = serve(state())
    most, sent = len(state_server.MAGIC) + state_server.NONCE_BYTES - 1, 0
    with socket.create_connection((server.host, server.port)) as made, contextlib.suppress(OSError):
        # Each byte comes in time. The last one, after which the server would answer, is never sent.
        while sent < most:
            made.sendall(b"g")
            sent += 1
            time.sleep(0.05)
    assert sent < most, "the server still listens"


def test_neither_side_believes_one_that_does_not_know_the_secret() -> None:
    servers = serve(state(size=100), key=KEY[::-1])
    with pytest.raises((gw.ExchangeError, gw.PayloadError)):
        StateFetch(addresses(servers), KEY).run()
    servers[0].close()


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_steps_that_are_taken_again_give_the_same_bits(kind: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))
        usual = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
        return module, usual(module.parameters(), lr=0.1, **({"momentum": 0.9} if kind == "sgd" else {}))

    (module, optimizer), (copy, its_optimizer) = made(), made()
    log = StepLog(optimizer, lambda: round, KEY, 1 << 20)
    for round in range(1, 6):
        optimizer.zero_grad()
        module(torch.randn(4, 9)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.param_groups[0]["lr"] = 0.1 / round
        optimizer.step()
    for number in range(5):
        message = log.entry(number)
        assert message
        assert replay(its_optimizer, message, KEY) == number + 1
    assert log.entry(5) == b""
    assert equal(dict(copy.state_dict()), dict(module.state_dict()))
    assert equal(its_optimizer.state_dict()["state"], optimizer.state_dict()["state"])
    log.close()
    assert log.entry(5) is None


def test_a_log_that_is_longer_than_the_state_ends() -> None:
    module = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    log = StepLog(optimizer, lambda: 0, KEY, 200_000)
    for _ in range(20):
        module(torch.randn(4, 200)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
    assert not log.goes_on
    log.close()


WIDTH = 600


def train(address: str, secret: str, name: str, pipe: Connection, spec: str, least: int, more: dict[str, Any]) -> Any:
    """Train a network whose state is large until told to end, and tell the digest of the parameters of each round."""
    torch.manual_seed(sum(map(ord, name)))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    assert sum(4 * p.numel() for p in module.parameters()) > LARGE_BYTES
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    if "slow_s" in more:
        usual, begun = decode, [False]

        def slow(*args: Any) -> Any:
            if more.get("tells") and not begun[0]:
                begun[0] = True
                pipe.send(("step", -1, None))
            time.sleep(more["slow_s"])
            return usual(*args)

        from gradwire.link.membership import snapshot

        snapshot.decode_piece = slow
    if more.get("is_kept_away"):
        # As by strangers that hold all connections of the members' servers.
        def refused(*args: Any) -> Any:
            raise gw.ExchangeError("the member that has the state cannot be reached")

        StateFetch.run = refused  # type: ignore[method-assign]
    membership = gw.join(address, secret=secret, name=name, least=least, silence_s=30.0, grace_s=3.0)
    with membership:
        link = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer)
        local = bool(link.method.traits.local_steps)
        pipe.send(("step", link.round, None))
        while not membership.left and not pipe.poll():
            before = link.round
            optimizer.zero_grad()
            module(torch.randn(4, WIDTH)).square().mean().backward()
            try:
                if not local:
                    link.reduce_()
            except gw.LeftOutError:
                continue
            optimizer.step()
            time.sleep(more.get("pause_s", 0.02))
            if link.round != before:
                with link.global_parameters() if local else torch.no_grad():
                    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
                pipe.send(("step", link.round, zlib.crc32(flat.numpy().data)))
        return link.diagnostics()["membership"]


def ended(*workers: Worker) -> list[Any]:
    for worker in workers:
        worker.tell("end")
    found = [worker.end() for worker in workers]
    for round in {round for worker in workers for round in worker.steps}:
        seen = {worker.steps[round] for worker in workers if worker.steps.get(round) is not None}
        assert len(seen) <= 1, f"after round {round}"
    return found


def taken_in(spec: str, more: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Take a newcomer into a training of two; return the round at which it began, and what it counted."""
    with crew() as workers:
        # After some thirty steps their log is longer than the state, and ends: a slow newcomer is done by then.
        a, b = (workers.start(name, train, spec, 2, {"pause_s": 0.1}) for name in "ab")
        a.reach(3)
        c = workers.start("c", train, spec, 1, more)
        c.reach(0)
        begun = min(c.steps)
        c.reach(begun + 4)
        a.reach(begun + 4)
        of_a, _, of_c = ended(a, b, c)
        assert (of_a["joined"], of_a["lost"], of_a["digests_differed"]) == (1, 0, 0)
        return begun, of_c


@pytest.mark.ranks
@pytest.mark.parametrize("spec", ["terngrad", "DiLoCo(every=4, inner=EDEN(bits=4))"])
def test_members_go_on_while_a_newcomer_takes_their_state(spec: str) -> None:
    # Its pieces take a second to decode: the others do not wait for it.
    begun, counted = taken_in(spec, {"slow_s": 0.1})
    assert counted["state_received_bytes"] > 0
    assert begun > 3
    if spec == "terngrad":
        assert counted["steps_replayed"] > 0
        # When it met the others it had parameters and momentum to the last bit.
        assert counted["state_reused_bytes"] > 0


@pytest.mark.ranks
@pytest.mark.parametrize("spec", ["terngrad", "DiLoCo(every=4, inner=EDEN(bits=4))"])
def test_a_newcomer_that_is_kept_away_from_the_servers_takes_state_from_one_member(spec: str) -> None:
    # Members that could not pass state on would meet without end.
    _, counted = taken_in(spec, {"is_kept_away": True})
    assert counted["state_received_bytes"] == 0


def two_and_a_slow_newcomer(workers: Crew, slow_s: float) -> tuple[Worker, Worker, Worker]:
    """Return two members, and a worker that takes their state slowly and has begun to."""
    a, b = (workers.start(name, train, "terngrad", 2, {}) for name in "ab")
    a.reach(3)
    c = workers.start("c", train, "terngrad", 1, {"slow_s": slow_s, "tells": True})
    wait_for(lambda: c.read(0.1))
    assert c.steps.pop(-1) is None
    return a, b, c


@pytest.mark.ranks
def test_a_newcomer_that_ends_while_it_takes_state_disturbs_nobody() -> None:
    with crew() as workers:
        a, b, c = two_and_a_slow_newcomer(workers, 1.0)
        c.signal(signal.SIGKILL)
        a.reach(max(a.steps) + 10)
        d = workers.start("d", train, "terngrad", 1, {})
        d.reach(0)
        a.reach(min(d.steps) + 3)
        of_a, *_ = ended(a, b, d)
        assert (of_a["lost"], of_a["joined"]) == (0, 1)


@pytest.mark.ranks
def test_a_newcomer_begins_again_when_a_member_that_serves_it_ends() -> None:
    with crew() as workers:
        a, b, c = two_and_a_slow_newcomer(workers, 0.3)
        a.signal(signal.SIGKILL)
        c.reach(0)
        b.reach(min(c.steps) + 3)
        of_b, _ = ended(b, c)
        assert (of_b["lost"], of_b["joined"]) == (1, 1)
