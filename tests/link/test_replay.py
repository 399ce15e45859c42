"""Traces of members: a real training with a kill, a join and a leave has the bits of its replay in one process."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwire as gw
from crew import crew, die_in_exchange, learn
from gradwire.link.membership import conductor, steps
from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.records import Epoch, Member
from gradwire.link.membership.trace import MOST_LISTED, History, TracedEpoch

SPECS = (
    "terngrad",
    "PowerSGD(matrix_rank=2)",
    "ErrorFeedback(TopK(density=0.1))",
    "diana",
    "DiLoCo(every=3, inner=EDEN(bits=4))",
)

Tell = Callable[[int, int], object]


def digest(module: nn.Module) -> int:
    return zlib.crc32(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().data)


def train(membership: gw.Membership, spec: str, goes_on: Callable[[gw.Link], bool], tell: Tell) -> dict[str, Any]:
    """Train as long as a function says, and tell the digest of the parameters after each round."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(map(ord, membership.name)))
    # Members draw from the generator of their process, too, which a replay has to keep apart.
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(0.1), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.0 if spec == "diana" else 0.9)
    sampler = gw.ElasticSampler(1000, membership, 4)
    drawn: list[list[int]] = []
    link = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, min_numel=0)
    local = bool(link.method.traits.local_steps)
    while not membership.left and goes_on(link):
        batch = sampler.draw()
        assert batch is not None
        drawn.append(batch)
        learn(module, optimizer, batch)
        before = link.round
        if not local:
            try:
                link.reduce_()
            except gw.LeftOutError:
                continue
        optimizer.step()
        if link.round != before:
            tell(link.round, digest(module))
    rank = link.state_dict()["rank"]
    kept = {key: zlib.crc32(vector.numpy().data) for key, vector in sorted(rank.items())}
    return {"round": link.round, "drawn": drawn, "kept": kept, "left": membership.left, "epoch": membership.epoch}


def member(
    address: str, secret: str, name: str, pipe: Connection, spec: str, least: int, die_at: int, folder: str
) -> Any:
    """Train as a real process, until it is told to leave or to end, and save the trace."""

    def goes_on(link: gw.Link) -> bool:
        while pipe.poll():
            word = pipe.recv()
            if word == "end":
                return False
            membership.leave()
        time.sleep(0.02)
        return True

    with gw.join(address, secret=secret, name=name, least=least, silence_s=30.0, grace_s=3.0) as membership:
        # The first operations connect; a few rounds follow.
        if die_at:
            die_in_exchange(die_at)
        found = train(membership, spec, goes_on, lambda round, bits: pipe.send(("step", round, bits)))
        membership.trace().save(Path(folder, f"{name}.json"))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("spec", SPECS)
def test_a_replay_has_the_bits_of_the_training_with_a_kill_a_join_and_a_leave(spec: str, tmp_path: Path) -> None:
    with crew() as workers:
        a, b, c = (workers.start(name, member, spec, 3, 15 if name == "b" else 0, str(tmp_path)) for name in "abc")
        assert b.end() is None
        d = workers.start("d", member, spec, 1, 0, str(tmp_path))
        d.reach(max(a.steps) + 2)
        c.tell("leave")
        assert c.end()["left"]
        d.reach(max(a.steps) + 3)
        for worker in (a, d):
            worker.tell("end")
        assert a.end()
        assert d.end()
        real = {worker.name: worker for worker in (a, b, c, d)}
    # Each of those that stayed has the whole trace, also the one that came later; who ended first lacks the rest.
    traces = [gw.MembershipTrace.load(tmp_path / f"{name}.json") for name in "ad"]
    trace = max(traces, key=lambda one: len(one.epochs))
    assert all(one.epochs == trace.epochs[: len(one.epochs)] for one in traces)
    assert {*trace.epochs[0].members} == {*"abc"}
    assert [trace.lost(index) for index, _ in enumerate(trace.epochs)].count(("b",)) == 1
    assert any("d" in row.new for row in trace.epochs)
    assert any("c" in row.left for row in trace.epochs)
    rounds = {name: worker.result["round"] if worker.result else 1 << 40 for name, worker in real.items()}
    steps: dict[str, dict[int, int]] = {name: {} for name in real}

    def again(membership: gw.Membership) -> dict[str, Any]:
        name = membership.name
        return train(membership, spec, lambda link: link.round < rounds[name], steps[name].__setitem__)

    found = gw.replay(trace, again)
    assert found.pop("b") is None
    assert steps["b"].keys() >= b.steps.keys()
    for name, worker in real.items():
        assert {round: steps[name][round] for round in worker.steps} == worker.steps
    for name, result in found.items():
        for key in ("round", "kept", "left"):
            assert result[key] == real[name].result[key], (name, key)
        # A real one may have taken local steps after its last round.
        assert result["drawn"] == real[name].result["drawn"][: len(result["drawn"])]
    assert sum(len(worker.steps) for worker in (a, c, d)) > 12


def gradients(membership: gw.Membership, spec: str, rounds: int, seen: list[Any]) -> int:
    """Reduce a gradient that depends on worker and round, and note what is there after each round."""
    x = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([x], lr=0.1)
    link = gw.Link([("x", x)], spec, group=membership, optimizer=optimizer, min_numel=0)
    left_out = 0
    while not membership.left and link.round < rounds:
        x.grad = torch.randn(64, generator=torch.Generator().manual_seed(100 * ord(membership.name) + link.round))
        try:
            link.reduce_()
        except gw.LeftOutError:
            left_out += 1
            continue
        seen.append((link.round, membership.name, membership.members, x.grad.clone()))
        optimizer.step()
    return left_out


def test_a_scripted_trace_decides_who_takes_part_in_which_round() -> None:
    changes = (2, "is lost", "b"), (4, "joins", "b"), (4, "joins", "d"), (6, "leaves", "a"), (6, "joins", "e")
    trace = gw.MembershipTrace.scripted("abc", *changes)
    assert [(row.round, row.members, row.left) for row in trace.epochs] == [
        (0, ("a", "b", "c"), ()),
        (2, ("a", "c"), ()),
        (4, ("a", "c", "b", "d"), ()),
        (6, ("c", "b", "d", "e"), ("a",)),
    ]
    found: list[list[Any]] = []
    for _ in range(2):
        found.append([])
        told = gw.replay(trace, gradients, "fp32", 8, found[-1])
        assert told == {"c": 0, "b": 1, "d": 0, "e": 0, "a": 0}
    assert [row[:3] for row in found[0]] == [row[:3] for row in found[1]]
    for (round, name, members, mean), (*_, other) in zip(*found):
        assert torch.equal(mean, other)
        assert members == next(row.members for row in reversed(trace.epochs) if row.round < round), name
        wanted = torch.stack(
            [torch.randn(64, generator=torch.Generator().manual_seed(100 * ord(n) + round - 1)) for n in members]
        )
        torch.testing.assert_close(mean, wanted.mean(0), rtol=0, atol=1e-6)
    assert {(round, name) for round, name, *_ in found[0]} == {
        (round, name) for row in trace.epochs for name in row.members for round in range(row.round + 1, 9)
        if name in next(r.members for r in reversed(trace.epochs) if r.round < round)
    }  # fmt: skip


def test_the_residual_of_a_worker_that_leaves_is_sent_by_its_heir_and_that_of_a_lost_one_by_nobody() -> None:
    def residuals(membership: gw.Membership, kept: dict[str, torch.Tensor]) -> None:
        x = nn.Parameter(torch.zeros(64))
        link = gw.Link([("x", x)], "ErrorFeedback(TopK(density=0.1))", group=membership, min_numel=0)
        while not membership.left and link.round < 4:
            x.grad = torch.full((64,), float(ord(membership.name) - 96)) * torch.arange(64)
            if link.round < 3:
                link.reduce_()
                kept[f"{membership.name}{link.round}"] = link.state_dict()["rank"]["residual/x"].clone()
            else:
                return

    ways: dict[str, dict[str, torch.Tensor]] = {}
    for word in ("leaves", "is lost"):
        ways[word] = {}
        trace = gw.MembershipTrace.scripted("abc", (2, word, "c"))
        gw.replay(trace, residuals, ways[word])
    left, lost = ways["leaves"], ways["is lost"]
    torch.testing.assert_close(left["a2"], lost["a2"] + lost["c2"])
    assert torch.equal(left["b2"], lost["b2"])
    assert lost["c2"].norm() > 0


def test_workers_draw_from_generators_of_their_own() -> None:
    def draws(membership: gw.Membership) -> list[float]:
        torch.manual_seed(ord(membership.name))
        link = gw.Link([nn.Parameter(torch.zeros(4))], "terngrad", group=membership)
        found = []
        for _ in range(3):
            found += [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
            link.reduce_()
        return found

    before = torch.get_rng_state()
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    alone = gw.replay(gw.MembershipTrace.scripted("b"), draws)
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    together = gw.replay(gw.MembershipTrace.scripted("abc"), draws)
    assert together["b"] == alone["b"]
    assert together["a"] != together["b"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_member_s_history_has_the_epochs_and_who_left() -> None:
    """As a seat goes through its protocol, answered by hand: b leaves after the first round, c comes in with it."""
    a, b, c = (Member(letter * 16, letter) for letter in "abc")
    seat = Seat(a)
    following = Epoch(2, (a, c), (c.id,), 1, 8, 4, Epoch(1, (a, b), (b.id,)).digest())

    def reply(step: steps.Step) -> Any:
        match step:
            case steps.Founders():
                return (a, b)
            case steps.Propose():
                return step.epoch if step.epoch.number == 1 else following
            case steps.Exchange():
                return True
            case steps.Vote():
                return (steps.Word(joins=True), steps.Word(leaving=True))
            case steps.Requests():
                return (c,)
        return None

    for part in (seat.enter, seat.round, seat.change):
        running, answer = part(), None
        with contextlib.suppress(StopIteration):
            while True:
                step = running.send(answer)
                answer = reply(step)
                if isinstance(step, steps.Meet):
                    seat.history.met()
    told = History()
    told.load(seat.history.state())
    for history in (seat.history, told):
        trace = gw.MembershipTrace.of(history)
        assert [(row.round, row.members, row.new, row.left) for row in trace.epochs] == [
            (0, ("a", "b"), ("b",), ()),
            (1, ("a", "c"), ("c",), ("b",)),
        ]
        assert (trace.epochs[1].position, trace.epochs[1].reserved) == (8, 4)
    with pytest.raises(gw.PayloadError, match="has not the expected form"):
        told.load([[{"number": 1}, [], True]])


def test_a_history_is_bounded_and_workers_of_one_name_are_told_apart() -> None:
    history = History()
    members = tuple(Member(f"{number:016x}", "same") for number in range(4))
    for number in range(1, MOST_LISTED // 4 + 10):
        history.add(Epoch(number, members))
        history.met()
    found = gw.MembershipTrace.of(history)
    assert len(found.epochs) == MOST_LISTED // 4
    assert found.epochs[-1].members == ("same", "same (2)", "same (3)", "same (4)")
    with pytest.raises(gw.IncompatibleError, match="begins with epoch 10"):
        gw.replay(found, gradients)


def test_programs_that_end_too_soon_or_raise_end_the_replay() -> None:
    def raises(membership: gw.Membership) -> None:
        x = nn.Parameter(torch.zeros(4))
        link = gw.Link([x], "terngrad", group=membership)
        for round in range(3):
            if membership.name == "b" and round == 1:
                raise KeyError("the program's own")
            link.reduce_()

    def ends(membership: gw.Membership) -> None:
        link = gw.Link([nn.Parameter(torch.zeros(4))], "terngrad", group=membership)
        for _ in range(2 if membership.name == "b" else 5):
            link.reduce_()

    with pytest.raises(KeyError, match="the program's own"):
        gw.replay(gw.MembershipTrace.scripted("abc"), raises)
    with pytest.raises(gw.IncompatibleError, match="'b' ended at round 2"):
        gw.replay(gw.MembershipTrace.scripted("abc"), ends)
    late = gw.MembershipTrace(gw.MembershipTrace.scripted("abc", (3, "is lost", "b")).epochs[1:])
    with pytest.raises(gw.IncompatibleError, match="begins with epoch 2 at round 3"):
        gw.replay(late, ends)


def test_a_replay_runs_in_any_thread_but_not_beside_another_one() -> None:
    trace, began, go_on, found = gw.MembershipTrace.scripted("ab"), threading.Event(), threading.Event(), {}

    def train(membership: gw.Membership, *waiting: threading.Event) -> torch.Tensor:
        torch.manual_seed(3)
        x = nn.Parameter(torch.zeros(2000))
        link = gw.Link([x], "terngrad", group=membership)
        for event in waiting:
            began.set()
            event.wait(30.0)
        for _ in range(3):
            x.grad = torch.randn(2000)
            link.reduce_()
        assert x.grad is not None
        return x.grad

    alone = gw.replay(trace, train)
    other = threading.Thread(target=lambda: found.update(gw.replay(trace, train, go_on)))
    other.start()
    assert began.wait(30.0)
    # Both would draw from the same generators.
    with pytest.raises(gw.IncompatibleError, match="another replay runs"):
        gw.replay(trace, train)
    go_on.set()
    other.join(30.0)
    again = gw.replay(trace, train)
    assert all(torch.equal(alone[name], values[name]) for values in (found, again) for name in "ab")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize("comes_back", [True, False])
def test_an_interruption_ends_a_replay_also_while_a_program_runs(
    comes_back: bool, wakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of a worker may be waiting for something that never comes, or reach its link a little later.

    A signal that another thread receives does not wake the main thread, nor does one just before its wait begins.
    """
    monkeypatch.setattr(conductor, "INTERRUPTED_S", 30.0 if comes_back else 0.1)
    main, ended, never = threading.get_ident(), threading.Event(), threading.Event()

    def train(membership: gw.Membership) -> None:
        link = gw.Link([nn.Parameter(torch.zeros(4))], "terngrad", group=membership)
        link.reduce_()
        if membership.name == "b":
            try:
                signal.pthread_kill(main if wakes else threading.get_ident(), signal.SIGINT)
                # Longer than it takes until an interruption is seen.
                never.wait(3 * conductor.LOOKS_EVERY_S if comes_back else None)
                link.reduce_()
            finally:
                ended.set()
        link.reduce_()

    with pytest.raises(KeyboardInterrupt):
        gw.replay(gw.MembershipTrace.scripted("abc"), train)
    assert ended.is_set() is comes_back
    never.set()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (((3, "joins", "b"),), "'b' joins, and is there already"),
        (((3, "leaves", "x"),), "'x' leaves, and is not there"),
        (((3, "is lost", "a"), (2, "is lost", "b")), "in the order of rounds"),
        (((3, "explodes", "a"),), "'joins', 'leaves' or 'is lost'"),
        (((1, "is lost", "a"), (2, "is lost", "b"), (3, "is lost", "c")), "1 to 1024 members"),
    ],
)
def test_a_script_that_cannot_be_is_refused(changes: Any, reason: str) -> None:
    with pytest.raises(gw.GradwireError, match=reason):
        gw.MembershipTrace.scripted("abc", *changes)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("gradwire membership trace 1", "something else", "its format"),
        ('"round": 5', '"round": -5', "whole numbers"),
        ('"round": 5', '"round": true', "whole numbers"),
        ('"epoch": 2', '"epoch": 7', "it follows epoch 1"),
        ('"met": true', '"met": 1', "true or false"),
        ('"position": null', '"place": null', "unexpected keyword"),
        ('"members"', '"memberz"', "memberz"),
        ("[", "{", "holds no trace"),
    ],
)
def test_a_file_that_holds_no_trace_is_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = gw.MembershipTrace.scripted("abc", (5, "is lost", "b"))
    trace.save(path)
    assert gw.MembershipTrace.load(path) == trace
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(gw.IncompatibleError, match=reason):
        gw.MembershipTrace.load(path)


@pytest.mark.parametrize("spec", ["fp32", "DiLoCo(every=3, inner=EDEN(bits=4))"])
def test_samplers_and_parameters_of_a_script_are_those_of_members(spec: str) -> None:
    """No sample comes twice in a pass, and members hold the same bits after every round."""
    changes = (2, "is lost", "b"), (4, "joins", "b"), (5, "joins", "d"), (6, "leaves", "a"), (7, "is lost", "c")
    trace = gw.MembershipTrace.scripted("abc", *changes)
    steps: dict[str, dict[int, int]] = {name: {} for name in "abcd"}

    def again(membership: gw.Membership) -> dict[str, Any]:
        return train(membership, spec, lambda link: link.round < 9, steps[membership.name].__setitem__)

    found = gw.replay(trace, again)
    assert [name for name, result in found.items() if result is None] == ["c"]
    for round in range(1, 10):
        row = next(row for row in reversed(trace.epochs) if row.round < round)
        told = {name for name in "abcd" if round in steps[name]}
        # One that comes again under local steps has the others' parameters of the round before its first.
        assert told - set(row.members) <= ({"b"} if round == 4 else set())
        assert told >= set(row.members)
        assert len({steps[name][round] for name in told}) == 1
    drawn = [tuple(batch) for name in "ad" for batch in found[name]["drawn"]]  # type: ignore[index]
    assert len({i for batch in drawn for i in batch}) == 4 * len(drawn)


@pytest.mark.parametrize("spec", ["terngrad", "DiLoCo(every=3, inner=EDEN(bits=4))"])
def test_a_worker_that_comes_again_before_the_others_have_met_is_a_new_one(spec: str) -> None:
    first = gw.MembershipTrace.scripted("ab").epochs[0]
    trace = gw.MembershipTrace(
        (
            first,
            TracedEpoch(epoch=2, round=2, members=("a",), met=False),
            TracedEpoch(epoch=3, round=2, members=("a", "b"), new=("b",)),
        )
    )
    counts: dict[str, int] = {}
    steps: dict[str, dict[int, int]] = {name: {} for name in "ab"}

    def again(membership: gw.Membership) -> int:
        found = train(membership, spec, lambda link: link.round < 5, steps[membership.name].__setitem__)
        counts[membership.name] = membership.counts["left_out"]
        return int(found["round"])

    assert gw.replay(trace, again) == {"a": 5, "b": 5}
    assert counts == {"a": 0, "b": 1}
    assert all(steps["a"][round] == steps["b"][round] for round in steps["b"])
    assert {3, 4, 5} <= steps["b"].keys()
