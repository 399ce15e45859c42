"""Trainings whose workers come and go, with real processes: killed, stopped, leaving, joining."""

from __future__ import annotations

import os
import signal
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import gradwire as gw
import gradwire.link.link as link_module
from crew import Crew, Worker, crew, cut_off_in_meetings, die_in_exchange, learn, report_late
from gradwire.link.membership import epoch_group, store_steps
from gradwire.link.peers.connections import Connections

pytestmark = pytest.mark.ranks

STEPS = 14
EVERY_STEP = (
    "terngrad",
    "PowerSGD(matrix_rank=2)",
    "acp_sgd",
    "ErrorFeedback(TopK(density=0.1))",
    "diana",
    "fp32",
)


def digest(module: nn.Module) -> int:
    return zlib.crc32(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().data)


def train(
    address: str, secret: str, name: str, pipe: Connection, spec: str, least: int, steps: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Train until a round, and tell the digest of the parameters after each."""
    torch.manual_seed(sum(map(ord, name)))
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.0 if spec == "diana" else 0.9)
    # On a busy machine a process may give no sign of life for seconds, and report late.
    times = {"silence_s": more.get("silence_s", 30.0), "grace_s": more.get("grace_s", 3.0)}
    membership = gw.join(address, secret=secret, name=name, least=least, **times)
    sampler = gw.ElasticSampler(1000, membership, 4)
    drawn: list[list[int]] = []
    grew = 0
    gradients, means = torch.zeros(785, dtype=torch.float64), torch.zeros(785, dtype=torch.float64)
    if "vanished_s" in more:
        store_steps.VANISHED_S = more["vanished_s"]
    if more.get("news_after_s"):
        hear_late_of_ends(more["news_after_s"])
    if "cuts" in more:
        cut_off_in_meetings(more["cuts"])
    if "reports_after_s" in more:
        report_late(membership.board, more["reports_after_s"])
    with membership:
        link = gw.Link(module.named_parameters(), spec, group=membership, optimizer=optimizer, min_numel=0)
        if "die_at" in more:
            die_in_exchange(more["die_at"])
        until_told = more.get("until_told", False)
        local = bool(link.method.traits.local_steps)
        while not membership.left and (link.round < steps or (until_told and not pipe.poll())):
            batch = sampler.draw()
            assert batch is not None
            drawn.append(batch)
            learn(module, optimizer, batch)
            before, members = link.round, membership.world_size
            if not local:
                own = torch.cat([p.grad.reshape(-1) for p in module.parameters()])  # type: ignore[union-attr]
                try:
                    link.reduce_()
                except gw.LeftOutError:
                    continue
                grew += membership.world_size > members
                mean = torch.cat([p.grad.reshape(-1) for p in module.parameters()])  # type: ignore[union-attr]
                if more.get("sums_until", 0) >= link.round:
                    gradients, means = gradients + own.double(), means + mean.double()
            optimizer.step()
            if link.round != before or not local:
                pipe.send(("step", link.round, digest(module)))
            if more.get("sigterm_at") == link.round and not membership.seat.leaving:
                os.kill(os.getpid(), signal.SIGTERM)
            # Until a word comes.
            pipe.poll(more.get("pause_s", 0.0))
        found = link.diagnostics()["membership"]
        traffic = link.traffic().sent_bytes
        state = link.state_dict()["rank"]
        parts = [state.get(f"residual/{key}", torch.zeros(p.numel())) for key, p in module.named_parameters()]
        kept = torch.cat(parts).double().tolist()
        told = {"round": link.round, "drawn": drawn, "sent": traffic, "left_by_word": membership.left, "grew": grew}
        # The others may have ended long before this one comes here.
        told["sizes"] = [len(change.members) for change in membership.changes]
        return {**found, **told, "residual": kept, "gradients": gradients.tolist(), "means": means.tolist()}


def hear_late_of_ends(seconds: float) -> None:
    """Let the thread that reads signs of life be told of ends later than the one that reads messages."""
    lose = Connections._lose

    def late(self: Connections, *given: Any) -> None:
        time.sleep(seconds)
        lose(self, *given)

    Connections._lose = late  # type: ignore[method-assign]
    epoch_group.NEWS_S = 60.0


def begin(workers: Crew, names: str, spec: str, steps: int = STEPS, **of: dict[str, Any]) -> list[Worker]:
    return [workers.start(name, train, spec, len(names), steps, of.get(name, {})) for name in names]


def same_bits(*workers: Worker) -> int:
    """Check that workers had the same parameters after every round that several of them took; return how many did."""
    shared = 0
    for round in {round for worker in workers for round in worker.steps}:
        found = [worker.steps[round] for worker in workers if round in worker.steps]
        assert len(set(found)) == 1, f"after round {round}: {found}"
        shared += len(found) > 1
    return shared


@pytest.mark.parametrize("spec", EVERY_STEP)
def test_a_worker_killed_in_the_middle_of_a_step_is_left_behind(spec: str) -> None:
    with crew() as workers:
        a, b, c = begin(workers, "abc", spec, b={"die_at": 15})
        assert (c.end()["sizes"][:2], a.end()["sizes"][:2], b.end()) == ([3, 2], [3, 2], None)
        assert set(a.steps) == set(c.steps) == set(range(1, STEPS + 1))
        assert b.steps
        assert same_bits(a, b, c) == STEPS
        assert a.result["lost"] == 1
        traits = gw.method(spec).traits
        assert a.result["residuals_lost"] == (traits.waiting in traits.remembers)


@pytest.mark.parametrize("news_after_s", [0.0, 0.3])
def test_nobody_waits_for_the_report_of_a_worker_whose_process_has_ended(news_after_s: float) -> None:
    with crew() as workers:
        # Far longer than a test may take.
        patient = {"grace_s": 600.0, "news_after_s": news_after_s}
        a, b, c = begin(workers, "abc", "terngrad", a=patient, b={**patient, "die_at": 15}, c=patient)
        assert (c.end()["sizes"][:2], a.end()["sizes"][:2], b.end()) == ([3, 2], [3, 2], None)


def begin_and_stop_one(workers: Crew, spec: str, silence_s: float) -> list[Worker]:
    """Begin with a, b and c, which go on until they are told, and stop b in the middle."""
    soon = {"silence_s": silence_s, "until_told": True}
    a, b, c = begin(workers, "abc", spec, 0, a=soon, b=soon, c=soon)
    b.reach(5)
    b.stop()
    return [a, b, c]


def end(*workers: Worker) -> None:
    for worker in workers:
        worker.tell("end")
    assert all(worker.end() for worker in workers)


def test_a_stopped_worker_is_left_behind_and_comes_again() -> None:
    with crew() as workers:
        a, b, c = begin_and_stop_one(workers, "terngrad", 4.0)
        c.reach(max(b.steps) + 12)
        b.signal(signal.SIGCONT)
        b.reach(max(c.steps) + 12)
        end(a, b, c)
        assert b.result["left_out"] >= 1
        assert same_bits(a, b, c) >= 12


def test_a_worker_that_was_stopped_while_many_epochs_began_comes_in_again() -> None:
    spec = "ErrorFeedback(TopK(density=0.1))"
    with crew() as workers:
        a, b, c = begin_and_stop_one(workers, spec, 2.0)
        for name in "def":
            comer = workers.start(name, train, spec, 1, 0, {"silence_s": 2.0, "until_told": True})
            comer.reach(1)
            comer.kill()
            a.reach(max(comer.steps) + 4)
        while (latest := workers.coordinator.epoch) is None or latest.number < 8:
            time.sleep(0.05)
        time.sleep(1.0)  # until the keys of old epochs are gone
        b.signal(signal.SIGCONT)
        b.reach(max(a.steps) + 4)
        end(a, b, c)
        assert b.result["left_out"] >= 1
        assert same_bits(*workers.workers) >= 20


def test_a_worker_that_is_told_to_end_leaves_after_its_round_and_hands_over_what_it_has_not_sent() -> None:
    until = {"sums_until": 6}
    with crew() as workers:
        told = {**until, "sigterm_at": 5, "reports_after_s": 1.5}
        a, b = begin(workers, "ab", "ErrorFeedback(TopK(density=0.1))", 10, a=until, b=told)
        a.end(), b.end()
        assert (b.result["left_by_word"], b.result["round"]) == (True, 6)
        assert (a.result["left"], a.result["lost"], a.result["members"]) == (1, 0, 1)
        assert (a.result["residuals_handed"], a.result["residuals_lost"]) == (1, 0)
        assert same_bits(a, b) == 6
        # What both had of gradients is in the means or in what is left on the one that stays, which is alone since.
        told = ("gradients", "means", "residual")
        gradients, means, residual = (torch.tensor([w.result[key] for w in (a, b)]) for key in told)
        assert torch.equal(means[0], means[1])
        torch.testing.assert_close(gradients.sum(0), 2 * means[0] + residual[0], rtol=0, atol=1e-6)
        assert residual[0].norm() > residual[1].norm() > 0


@pytest.mark.parametrize(("cuts", "left_out"), [(1, 0), (2, 1)])
def test_connections_that_break_while_members_meet_are_made_again_once(cuts: int, left_out: int) -> None:
    with crew() as workers:
        # On a busy machine one may learn of broken connections a second before the other.
        soon = {"until_told": True, "vanished_s": 2.0}
        a, b, c = begin(workers, "abc", "terngrad", 0, a=soon, b={**soon, "cuts": cuts}, c=soon)
        c.reach(3)
        c.kill()
        a.reach(max(c.steps) + 4)
        b.reach(max(c.steps) + 4)
        end(a, b)
        assert a.result["left_out"] + b.result["left_out"] == left_out  # the later one in the epoch
        assert same_bits(a, b) >= 4


def test_a_newcomer_begins_with_the_state_of_the_others() -> None:
    with crew() as workers:
        # However long the newcomer takes to start, the others do not come to their end before.
        a, b = begin(workers, "ab", "PowerSGD(matrix_rank=2)", 60, a={"pause_s": 0.5})
        b.reach(5)
        c = workers.start("c", train, "PowerSGD(matrix_rank=2)", 1, 60, {})
        c.reach(0)
        a.tell("go on without pauses")
        assert [w.end()["sizes"][:2] for w in (a, b)] == [[2, 3], [2, 3]]
        assert c.end()["sizes"][:1] == [3]
        assert min(c.steps) > 5
        assert same_bits(a, b, c) == 60
        assert (a.result["joined"], a.result["lost"], a.result["digests_differed"]) == (1, 0, 0)
        # It came in before the others computed their gradients, so that they need not wait for its.
        assert (a.result["grew"], b.result["grew"]) == (0, 0)
        # No sample came twice in a pass, and none was left out so far.
        drawn = sorted(i for w in (a, b, c) for batch in w.result["drawn"] for i in batch)
        assert len(set(drawn)) == len(drawn) < 1000


def test_local_steps_follow_their_members() -> None:
    spec = "DiLoCo(every=3, inner=EDEN(bits=4))"
    with crew() as workers:
        soon = {"until_told": True}
        a, b, c = begin(workers, "abc", spec, 0, a={**soon, "pause_s": 0.03}, b={**soon, "die_at": 40}, c=soon)
        assert b.end() is None
        d = workers.start("d", train, spec, 1, 0, soon)
        d.reach(1)
        d.reach(max(d.steps) + 4)
        end(a, c, d)
        assert same_bits(a, b, c, d) >= 16
        assert (a.result["lost"], a.result["joined"]) == (1, 1)


def synchronised(address: str, secret: str, name: str, pipe: Connection) -> tuple[list[int], int]:
    """Synchronise after some steps and after none; return the round after each time, and the digest in the end."""
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer, rounds = torch.optim.SGD(module.parameters(), lr=0.05), []
    with gw.join(address, secret=secret, name=name, least=2) as membership:
        link = gw.Link(module.named_parameters(), "DiLoCo(every=3)", group=membership, optimizer=optimizer, min_numel=0)
        for steps in (2, 0, 3, 0):
            for step in range(steps):
                learn(module, optimizer, [ord(name) + step])
                optimizer.step()
            link.synchronise()
            rounds.append(link.round)
        return rounds, digest(module)


def test_members_synchronise_what_has_changed_and_nothing_where_nothing_has() -> None:
    with crew() as workers:
        a, b = (workers.start(name, synchronised) for name in "ab")
        assert a.end() == b.end()
        assert a.result[0] == [1, 1, 2, 2]


def test_without_the_secret_nobody_comes_in() -> None:
    with crew() as workers:
        address = f"127.0.0.1:{workers.port}"
        with pytest.raises(gw.IncompatibleError, match="the secret is not that of the run"):
            gw.join(address, secret="not the secret of it")
        with pytest.raises(gw.HyperparameterError, match="GRADWIRE_SECRET"):
            gw.join(address)


def test_rounds_go_on_without_the_coordinator_which_goes_on_from_its_file(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with crew(state) as workers:
        soon = {"until_told": True}
        a, b = begin(workers, "ab", "terngrad", 0, a={**soon, "pause_s": 0.1}, b=soon)
        a.reach(5)
        with workers.without_coordinator():
            a.reach(max(a.steps) + 30)
        b.signal(signal.SIGKILL)
        a.reach(20)
        c = workers.start("c", train, "terngrad", 1, 0, soon)
        # On a busy machine it comes late.
        c.reach(21)
        c.reach(max(c.steps) + 12)
        with workers.without_coordinator():
            a.tell("end")
            assert a.end()
        c.tell("end")
        assert c.end()
        assert (a.result["lost"], a.result["joined"]) == (1, 1)
        assert same_bits(a, b, c) > 20
        assert state.stat().st_mode & 0o077 == 0


def test_a_restarted_coordinator_refuses_another_secret_and_a_spoilt_file(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    first = gw.Coordinator("127.0.0.1:0", state=state)
    with pytest.raises(gw.IncompatibleError, match="another secret"):
        gw.Coordinator("127.0.0.1:0", secret="0123456789abcdef", state=state)
    state.write_text("[" * 10000)
    with pytest.raises(gw.IncompatibleError, match="not the state of a coordinator"):
        gw.Coordinator("127.0.0.1:0", state=state)
    first.close()


@pytest.mark.parametrize("planted", ["link", "file"])
def test_a_coordinators_secret_is_in_no_file_that_another_user_has_planted(planted: str, tmp_path: Path) -> None:
    state, other = tmp_path / "state.json", tmp_path / "other"
    other.write_text("kept")
    other.chmod(0o666)
    # The name under which the state is written before it takes its place.
    partial = tmp_path / "state.json.partial"
    partial.symlink_to(other) if planted == "link" else partial.hardlink_to(other)
    made = gw.Coordinator("127.0.0.1:0", state=state)
    made.close()
    assert other.read_text() == "kept"
    assert not state.is_symlink()
    assert (made.secret in state.read_text(), state.stat().st_mode & 0o077) == (True, 0)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("dpsgd", "parameters of their own"),
        ("auto", "tries several"),
        ("StreamingDiLoCo(every=4, fragments=2, delay=2)", "in flight"),
        ("Hierarchical(TernGrad(), node_size=2)", "groups of ranks"),
    ],
)
def test_methods_that_cannot_follow_are_refused_before_anybody_waits(spec: str, reason: str) -> None:
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    refused = pytest.raises(gw.IncompatibleError, match=reason)
    with crew() as workers, gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret) as membership, refused:
        gw.Link([parameter], spec, group=membership, optimizer=optimizer)


@pytest.mark.parametrize("wrong", ["parameters", "optimizer"])
def test_what_is_no_parameters_and_no_optimizer_is_refused_as_without_a_membership(wrong: str) -> None:
    module: Any = nn.Linear(2, 2)
    given = {"optimizer": module.parameters()} if wrong == "optimizer" else {}
    parameters = module if wrong == "parameters" else module.parameters()
    refused = pytest.raises(gw.HyperparameterError, match=f"{wrong}: .* needed")
    with crew() as workers, gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret) as membership, refused:
        gw.Link(parameters, "terngrad", group=membership, **given)


class Unheard:
    """An optimizer of whose steps nobody is told."""

    param_groups: ClassVar[list[dict[str, Any]]] = []

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_an_optimizer_whose_steps_nobody_can_hear_is_refused_before_anybody_waits() -> None:
    refused = pytest.raises(gw.IncompatibleError, match="its steps cannot be counted")
    with crew() as workers, gw.join(f"127.0.0.1:{workers.port}", secret=workers.secret) as membership:
        with refused:
            gw.Link([nn.Parameter(torch.zeros(10))], "LocalSGD(every=2)", group=membership, optimizer=Unheard())
        # Nobody was asked to take it in.
        assert membership._link is None


@pytest.mark.parametrize("ends", ["a", "b"])
def test_nobody_waits_for_a_worker_that_ends_as_another_leaves(ends: str) -> None:
    goes_on = "b" if ends == "a" else "a"
    with crew() as workers:
        patient = {"silence_s": 1000.0}
        of = {"a": patient, "b": patient, "c": {**patient, "sigterm_at": 5}}
        started = {n: workers.start(n, train, "terngrad", 3, 6 if n == ends else 9, of[n]) for n in "abc"}
        # The votes of round 6 say that c leaves: the epoch that follows names the one that has taken its last step.
        assert (started[ends].end()["round"], started["c"].end()["round"]) == (6, 6)
        last = started[goes_on]
        assert (last.end()["round"], last.result["left"], last.result["lost"]) == (9, 2, 0)


def train_slowly(address: str, secret: str, name: str, pipe: Connection) -> float:
    """Take two rounds, and compute for long then; return how long it took until the others had met without c."""
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with gw.join(address, secret=secret, name=name, least=3, silence_s=60.0, grace_s=20.0) as membership:
        link = gw.Link([("weight", parameter)], "terngrad", group=membership, optimizer=optimizer, min_numel=0)
        for _ in range(2):
            parameter.grad = torch.ones(64)
            link.reduce_()
            optimizer.step()
        if name == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        while membership.changes[-1].lost != ("c",) and time.monotonic() < began_s + 60:
            time.sleep(0.01)
        found, members = time.monotonic() - began_s, membership.world_size
        # Once it has been taken, the other one may end.
        link.reduce_()
        return found if members == 2 else 60.0


def test_members_meet_again_while_they_compute() -> None:
    with crew() as workers:
        a, b, c = (workers.start(name, train_slowly) for name in "abc")
        assert c.end() is None
        assert max(a.end(), b.end()) < 60


def train_with_wrong_digests(
    address: str, secret: str, name: str, pipe: Connection, wrong: int, steps: int
) -> tuple[int, int]:
    """Train; after round 2, b computes so many wrong digests of its parameters, and c is killed."""
    usual = link_module.value_terms
    left, epoch = [0], 0

    def terms(parameters: Any) -> dict[str, object]:
        left[0] -= 1
        return usual(parameters) if left[0] < 0 else dict.fromkeys(usual(parameters), "wrong")

    link_module.value_terms = terms  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with gw.join(address, secret=secret, name=name, least=3, silence_s=60.0, grace_s=20.0) as membership:
        link = gw.Link([("weight", parameter)], "terngrad", group=membership, optimizer=optimizer, min_numel=0)
        while link.round < steps:
            parameter.grad = torch.ones(64)
            link.reduce_()
            if link.round == 2:
                # From the optimizer's step on, members may meet.
                left[0] = wrong if name == "b" else 0
            elif link.round == steps - 1:
                # After the last round, the other one may end.
                epoch = membership.epoch
            optimizer.step()
            if link.round == 2 and name == "c":
                os.kill(os.getpid(), signal.SIGKILL)
        return link.round, epoch


def test_members_whose_parameters_differ_meet_once_more_and_then_end() -> None:
    """A program may change parameters after its optimizer's step, when others compare theirs already."""
    with crew() as workers:
        a, b, c = (workers.start(name, train_with_wrong_digests, 1, 5) for name in "abc")
        assert (a.end(), b.end(), c.end()) == ((5, 3), (5, 3), None)
    with crew() as workers:
        a, *_ = (workers.start(name, train_with_wrong_digests, 100, 5) for name in "abc")
        with pytest.raises(AssertionError, match="differs from rank 0"):
            a.end()
