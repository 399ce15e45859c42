"""Rounds that go on with a quorum: the rule, the protocol in all orders, and workers of unlike speed."""

from __future__ import annotations

import os
import signal
import time
import zlib
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from benchmarks.lib.membership_cases import QUORUM
from benchmarks.lib.membership_explorer import explored
from benchmarks.lib.membership_states import Wrong
from benchmarks.lib.membership_workers import Case
from crew import Crew, Worker, crew
from gradwire.exchange.protocols import Memory
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.link.membership import protocol, quorum, steps
from gradwire.link.membership.quorum import Presence, Quorum, shares

FULL, SOME, NONE = Presence(4.0, True), Presence(1.0), Presence()


def late(member: Presence) -> Presence:
    return Presence(member.weight, member.full, member.age, True)


# ---------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("least", "staleness", "present", "begins"),
    [
        (2, 4, (FULL, FULL, FULL), True),
        (2, 4, (SOME, SOME, SOME), True),
        (2, 4, (FULL, FULL, NONE), False),
        (2, 4, (late(FULL), FULL, NONE), True),
        (2, 4, (late(NONE), FULL, FULL), True),
        (2, 4, (late(FULL), SOME, NONE), False),
        (2, 4, (FULL, late(FULL), NONE), False),
        (2, 4, (late(FULL), FULL, Presence(age=3)), True),
        (2, 4, (late(FULL), FULL, Presence(age=4)), False),
        (2, 4, (late(FULL), FULL, Presence(1.0, age=4)), True),
        (2, 0, (late(FULL), FULL, NONE), False),
        (9, 4, (late(FULL), FULL), True),
        (9, 4, (late(FULL), NONE), False),
    ],
)
def test_a_round_begins_with_all_or_with_a_quorum_when_time_has_passed_and_nobody_becomes_too_old(
    least: int, staleness: int, present: tuple[Presence, ...], begins: bool
) -> None:
    assert Quorum(least, staleness).begins(present) == begins


def test_shares_make_the_weighted_mean_of_a_mean_and_equal_weights_are_exactly_one() -> None:
    found = shares((Presence(6.0), NONE, Presence(2.0), NONE))
    assert found == (3.0, 0.0, 1.0, 0.0)
    assert shares((Presence(0.1),) * 3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"quorum": True}, {"quorum": 1, "staleness": -1}, {"late_s": 0}])
def test_wrong_values_are_refused_before_anybody_is_asked(wrong: dict[str, Any]) -> None:
    with pytest.raises(gw.HyperparameterError):
        gw.join("127.0.0.1:1", secret="0123456789abcdef", patience_s=0.1, **wrong)


# ---------------------------------------------------------------------- the protocol


@pytest.mark.parametrize("name", QUORUM)
def test_no_order_and_no_fault_divides_the_members_or_makes_them_wait(name: str) -> None:
    found = explored(QUORUM[name])
    assert {"Roll", "Rest", "Exchange", "Vote", "Count"} <= found.steps
    assert any("done" in ends for ends in found.ends)
    assert all("Roll" in at for at in found.faulted.values())


def test_the_explorer_finds_a_member_that_begins_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: protocol.Seat) -> steps.Steps[bool]:
        present = yield steps.Roll(self.rounds, self.rounds - self.since, self._rolls)
        self._rolls += 1
        if present is None:
            return False
        mine = present[self.current.ids().index(self.me.id)]
        self._contributes = mine.weight > 0
        return (yield steps.Exchange(self.rounds, (mine,) * len(present)))

    monkeypatch.setattr(protocol.Seat, "_exchange", own)
    with pytest.raises(Wrong):
        explored(Case("ab", rounds=1, quorum=1))


def test_the_explorer_finds_a_difference_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum.Quorum, "begins", lambda self, present: self.is_met(present) and present[0].late)
    with pytest.raises(Wrong, match="merges"):
        explored(Case("ab", rounds=3, quorum=1, staleness=1, absences=2))


# ---------------------------------------------------------------------- state of a member that sits out


def test_what_a_rank_keeps_alone_neither_acts_nor_changes_while_it_sits_out() -> None:
    segments, memory = lay_out([Parameter("w", (3,), (1,))]), Memory()
    for kind, replicated in (("residual", False), ("factor", True)):
        memory.stage(kind, segments, replicated=replicated).fill_(1.0)
    memory.stage_value("own", torch.tensor(1), own=True)
    memory.commit()
    memory.sits_out = True
    assert memory.read("residual", segments).tolist() == [0, 0, 0]
    assert memory.read("factor", segments, replicated=True).tolist() == [1, 1, 1]
    for kind, replicated in (("residual", False), ("factor", True)):
        memory.stage(kind, segments, replicated=replicated).fill_(2.0)
    memory.stage_value("own", torch.tensor(2), own=True)
    memory.stage_value("common", torch.tensor(2))
    memory.commit()
    memory.sits_out = False
    assert memory.read("residual", segments).tolist() == [1, 1, 1]
    assert memory.read("factor", segments, replicated=True).tolist() == [2, 2, 2]
    assert (memory.value("own"), memory.value("common")) == (torch.tensor(1), torch.tensor(2))


# ---------------------------------------------------------------------- workers


def watch_rounds(pipe: Connection) -> None:
    """Tell what each round merged of this worker, and the global parameters after it."""
    from gradwire.link.membership.quorum_steps import QuorumSteps

    usual = QuorumSteps.take

    def take(self: QuorumSteps, means: Any) -> bool:
        held, names = self._global.held, list(self._global.pieces)
        sent = self._outgoing(names).div(self._share or 1.0)
        before = torch.cat([held[name] for name in names])
        parts = {n: x for of, flat in means for n, x in zip(of, flat.split([held[n].numel() for n in of]))}
        mean = torch.cat([parts[name] for name in names])
        finite = usual(self, means)
        after = torch.cat([held[name] for name in names])
        told = {"share": self._share, "sent": sent, "before": before, "mean": mean, "after": after}
        told |= {"digest": zlib.crc32(after.numpy().data), "waits": self._runtime.memory.norm("residual")}
        pipe.send(("step", self._runtime.round, {key: _plain(value) for key, value in told.items()}))
        return finite

    QuorumSteps.take = take  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    return value.double().tolist() if isinstance(value, torch.Tensor) else value


def train(
    address: str, secret: str, name: str, pipe: Connection, spec: str, least: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Train until told to end, with steps of some length."""
    seed = more.get("seed", ord(name))
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    rule = {key: more[key] for key in ("quorum", "late_s", "staleness") if key in more}
    times = {"silence_s": more.get("silence_s", 30.0), "grace_s": 3.0}
    membership = gw.join(address, secret=secret, name=name, least=least, **times, **rule)
    if "quorum" in more:
        watch_rounds(pipe)
    steps_taken = 0
    with membership:
        link = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, min_numel=0)
        draw = torch.Generator().manual_seed(seed)
        while not membership.left and not pipe.poll() and link.round < more.get("rounds", 1 << 30):
            optimizer.zero_grad()
            module(torch.randn(8, 6, generator=draw)).square().mean().backward()
            time.sleep(more.get("pause_s", 0.0))
            until = link.round + more.get("rounds_a_step", 0)
            while link.round < until and not pipe.poll():
                time.sleep(0.005)
            if "samples" in more:
                link.weigh(more["samples"])
            before = link.round
            optimizer.step()
            steps_taken += 1
            if "quorum" not in more and link.round > before:
                with link.global_parameters():
                    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
                pipe.send(("step", link.round, {"digest": zlib.crc32(flat.numpy().data)}))
            if more.get("die_after") == steps_taken:
                os.kill(os.getpid(), signal.SIGKILL)
            if more.get("sigterm_after") == steps_taken:
                os.kill(os.getpid(), signal.SIGTERM)
        state = link.state_dict()["rank"] if "quorum" in more and not membership.left else {}
        residual = [state[f"residual/{key}"] for key, _ in module.named_parameters() if f"residual/{key}" in state]
        told = {
            "left": membership.left,
            "taken": steps_taken,
            "residual": _plain(torch.cat(residual or [torch.zeros(0)])),
        }
        return {**link.diagnostics()["membership"], **told}


def begin(workers: Crew, names: str, spec: str, common: dict[str, Any], **of: dict[str, Any]) -> list[Worker]:
    return [workers.start(name, train, spec, len(names), {**common, **of.get(name, {})}) for name in names]


def end(*workers: Worker) -> None:
    for worker in workers:
        worker.tell("end")
    for worker in workers:
        worker.end()


def contributed(worker: Worker, times: int) -> None:
    """Wait until a worker has contributed to some rounds."""
    while sum(told["share"] > 0 for told in worker.steps.values()) < times:
        worker.reach(max(worker.steps, default=0) + 1)


def same_bits(*workers: Worker) -> int:
    """Check that workers had the same global parameters after every round that several took; return how many did."""
    shared = 0
    for round in {round for worker in workers for round in worker.steps}:
        found = [worker.steps[round]["digest"] for worker in workers if round in worker.steps]
        assert len(set(found)) == 1, f"after round {round}: {found}"
        shared += len(found) > 1
    return shared


LOCAL_SGD = "LocalSGD(every=4, inner=FP32())"


def test_a_slow_worker_holds_nobody_up_and_its_late_difference_is_merged_with_its_weight() -> None:
    with crew() as workers:
        rule = {"quorum": 2, "late_s": 0.05, "staleness": 50}
        a, b, c = begin(
            workers, "abc", LOCAL_SGD, rule, a={"samples": 3}, b={"samples": 1}, c={"rounds_a_step": 3, "samples": 5}
        )
        contributed(c, 2)
        end(a, b, c)
        rounds = sorted(set(a.steps) & set(b.steps) & set(c.steps))
        assert same_bits(a, b, c) >= len(rounds) > 4
        # While c takes one step, the others take rounds; what it then has is merged.
        assert a.result["late_contributions"] >= 1
        assert max(a.result["ages"]) >= 2
        assert a.result["taken"] > 2 * c.result["taken"]
        for round in rounds:
            told = [worker.steps[round] for worker in (a, b, c)]
            share = torch.tensor([x["share"] for x in told])
            sent, before, after = (
                torch.tensor([x[k] for x in told], dtype=torch.float64) for k in ("sent", "before", "after")
            )
            # x <- x - sum_i w_i d_i / sum_i w_i, and shares are 3 w_i / sum_j w_j.
            torch.testing.assert_close(after[0], before[0] - (share[:, None] * sent).sum(0) / 3, rtol=0, atol=1e-6)
            assert float(share.sum()) == pytest.approx(3.0)
        both = [r for r in rounds if a.steps[r]["share"] and b.steps[r]["share"]]
        # a and b took four steps each: three samples a step weigh three times one.
        assert any(a.steps[r]["share"] == pytest.approx(3 * b.steps[r]["share"]) for r in both)


def test_equal_workers_of_whom_nobody_may_be_late_have_the_bits_of_the_synchronous_rounds() -> None:
    found = []
    for rule in ({}, {"quorum": 2, "late_s": 0.02, "staleness": 0}):
        with crew() as workers:
            # Of two that do the same it does not matter which comes first.
            a, b = begin(workers, "ab", "DiLoCo(every=3, inner=EDEN(bits=4))", {"rounds": 6, "seed": 1, **rule})
            a.end(), b.end()
            assert same_bits(a, b) == 6
            found.append([a.steps[round]["digest"] for round in range(1, 7)])
    assert found[0] == found[1]
    assert len(set(found[0])) == 6


def test_a_residual_stays_while_its_worker_sits_out_and_nothing_is_lost() -> None:
    spec = "LocalSGD(every=4, inner=ErrorFeedback(TopK(density=0.1)))"
    with crew() as workers:
        # However slow the machine is, b sits out some rounds.
        a, b = begin(workers, "ab", spec, {"quorum": 1, "late_s": 0.03, "staleness": 50}, b={"rounds_a_step": 3})
        contributed(b, 3)
        end(a, b)
        rounds = sorted(set(a.steps) & set(b.steps))
        # One of them may take another round when the other has ended.
        taken = [*a.steps.values(), *b.steps.values()]
        assert same_bits(a, b) == len(rounds) >= max(max(a.steps), max(b.steps)) - 1
        idle = [r for r in rounds if r > 1 and b.steps[r]["share"] == 0]
        assert idle
        assert all(b.steps[r]["waits"] == b.steps[r - 1]["waits"] for r in idle)
        assert len({r["waits"] for r in b.steps.values()}) > 1
        # What was weighed in, less what still waits in residuals, is the sum of means, each counted by all who took it.
        entered = sum(torch.tensor(told["sent"]) * told["share"] for told in taken)
        means = sum(torch.tensor(told["mean"]) for told in taken)
        waiting = torch.tensor(a.result["residual"]) + torch.tensor(b.result["residual"])
        assert waiting.norm() > 0
        torch.testing.assert_close(means + waiting, entered, rtol=0, atol=1e-5)


def test_a_worker_lost_while_it_computes_is_left_behind_and_another_comes_in() -> None:
    spec = "DiLoCo(every=4, inner=EDEN(bits=4))"
    rule = {"quorum": 1, "late_s": 0.03, "staleness": 50, "pause_s": 0.01}
    with crew() as workers:
        a, b, c = begin(workers, "abc", spec, rule, b={"pause_s": 0.4, "die_after": 3}, c={"pause_s": 0.1})
        assert b.end() is None
        a.reach(max(a.steps) + 8)
        d = workers.start("d", train, spec, 1, {**rule, "pause_s": 0.2})
        contributed(d, 1)
        end(a, c, d)
        assert same_bits(a, b, c, d) > 8
        assert (a.result["lost"], a.result["joined"], a.result["digests_differed"]) == (1, 1, 0)


def test_a_worker_that_is_stopped_drops_what_it_has_computed_and_takes_over_the_others_parameters() -> None:
    rule = {"quorum": 1, "late_s": 0.03, "staleness": 4, "pause_s": 0.05, "silence_s": 4.0}
    with crew() as workers:
        a, b, c = begin(workers, "abc", LOCAL_SGD, rule, b={"pause_s": 0.2})
        contributed(b, 2)
        b.stop()
        # It may miss four rounds in turn; then the others wait for it until they know that it is gone.
        c.reach(max(b.steps) + 12)
        b.signal(signal.SIGCONT)
        before = len(b.steps)
        while len(b.steps) < before + 8:
            b.reach(max(b.steps) + 1)
        end(a, b, c)
        assert b.result["left_out"] >= 1
        assert same_bits(a, b, c) >= 12


def test_a_slow_worker_that_leaves_hands_in_what_it_has_first() -> None:
    rule = {"quorum": 1, "late_s": 0.03, "staleness": 50, "pause_s": 0.01}
    with crew() as workers:
        a, b = begin(workers, "ab", LOCAL_SGD, rule, b={"rounds_a_step": 2, "sigterm_after": 2})
        b.end()
        end(a)
        assert b.result["left"]
        assert b.steps[max(b.steps)]["share"] > 0
        assert (a.result["left"], a.result["lost"]) == (False, 0)
        assert same_bits(a, b) > 1


def test_what_a_newcomer_receives_does_not_change_while_its_source_goes_on_to_step() -> None:
    with crew() as workers, gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret, quorum=1) as membership:
        module = nn.BatchNorm1d(4)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        membership.carry(module=module)
        spec = "LocalSGD(every=1000, inner=FP32())"
        link: Any = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, min_numel=0)

        def step() -> None:
            module(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()

        step()
        with link._lock:
            sent = link._state_for_others()
        before = repr((sent["optimizer"], sent["carried"]))
        step()
        assert repr((sent["optimizer"], sent["carried"])) == before


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("terngrad", "at every step"),
        ("EASGD(every=4)", "parameters of their own"),
        ("StreamingDiLoCo(every=4, fragments=2, delay=0)", "fragments"),
        ("StreamingDiLoCo(every=4, fragments=1, delay=0)", "parameters of their own"),
        ("LocalSGD(every=4, inner=DIANA())", "what each has sent before"),
    ],
)
def test_methods_that_cannot_go_on_with_a_quorum_are_refused(spec: str, reason: str) -> None:
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    refused = pytest.raises(gw.IncompatibleError, match=reason)
    with (
        crew() as workers,
        gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret, quorum=1) as membership,
        refused,
    ):
        gw.Link([parameter], spec, group=membership, optimizer=optimizer)


def test_a_sampler_in_step_with_all_is_refused_under_a_quorum() -> None:
    refused = pytest.raises(gw.IncompatibleError, match="unlike numbers of steps")
    with (
        crew() as workers,
        gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret, quorum=1) as membership,
        refused,
    ):
        gw.ElasticSampler(100, membership, 4)
