"""``Auto(residuals=True)``: its candidates, what it states of them, and that no part of a gradient is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.link.selection.autotune import Autotuner
from gradwire.methods.accuracy import TABLES, accuracy_text, ends_of, note_of, training_advice
from gradwire.methods.auto import WITH_RESIDUALS
from gradwire.tools.report.summary import choice_text
from oracle import layers, square_loss
from ranks import Ranks
from sharded import loss_of, meshes, sharded

SHORT = gw.Auto(residuals=True, turns=1, steps=1)
EXACT = gw.Auto(candidates=("fp32", "powersgd"), residuals=True, turns=1, steps=1)
"""No candidate rounds a gradient without keeping what is left."""

ENDED = 110
"""Rounds after which a trial of one step a turn has ended: 4 to measure the link, 9 candidates, 10 rounds a turn."""

FEW, FEW_ENDED = gw.Auto(candidates=("fp32", "terngrad"), residuals=True, turns=1, steps=1), 80
"""With six candidates instead of nine."""

EVERY = (*gw.Auto().candidates, *WITH_RESIDUALS)
TOP_K, SIGNS = WITH_RESIDUALS[2:]


def test_the_candidates_with_residuals_are_added_and_a_listed_one_replaces_its_class() -> None:
    assert gw.Auto().added == ()
    assert gw.Auto().traits.tries == gw.Auto().candidates
    assert gw.Auto(residuals=True).traits.tries == EVERY
    assert gw.method("Auto(residuals=True)") == gw.method(repr(gw.Auto(residuals=True)))
    own = gw.Auto(candidates=("bf16", "PowerSGD(matrix_rank=1)"), residuals=True)
    assert own.traits.tries == ("bf16", "PowerSGD(matrix_rank=1)", "acp_sgd", TOP_K, SIGNS)
    with pytest.raises(gw.HyperparameterError, match=r"Auto\(residuals=\.\.\.\): a bool is needed, not 1"):
        gw.Auto(residuals=1)  # type: ignore[arg-type]


@pytest.mark.repository
def test_what_is_stated_is_in_the_committed_tables() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "training"
    for task in ("digits", "mnist", "text", "cifar10"):
        rows = json.loads((folder / f"methods_{task}.json").read_text())["rows"]
        (fp32,) = [row for row in rows if row["method"] == "FP32()"]
        for spec in TABLES:
            same = [r for r in rows if gw.method(r["method"]) == gw.method(spec) and r.get("min_numel") is None]
            told = [row for row in ends_of(spec) if row.task == task]
            assert len(same) == len(told), (spec, task)
            for row, ended in zip(same, told):
                off = 100 * (row["accuracy"]["mean"] - fp32["accuracy"]["mean"])
                assert ended.points == pytest.approx(off, abs=0.0501), (spec, task)
                assert ended.rate == pytest.approx(row["rate"] / fp32["rate"], abs=0.005), (spec, task)
                assert ended.failed == row["failed"]
                assert row["momentum"].startswith(ended.momentum)


def test_a_choice_with_a_residual_says_what_it_costs_and_how_to_train() -> None:
    note = note_of("acp_sgd")
    assert note is not None
    assert note.startswith("it keeps a residual on each rank; final accuracy over float32 in points: digits -0.9")
    assert note.endswith("try 0.3 times the learning rate, which was the best in the tables")
    assert training_advice("powersgd") == "keep the optimizer's momentum and learning rate"
    assert "without momentum, at 10 times the learning rate" in str(note_of(SIGNS))
    assert "where 2 of 3 seeds diverged" in str(accuracy_text(TOP_K))
    assert note_of("GTopK(density=0.3)") == (
        "it keeps a residual on each rank; no table of docs/accuracy.md has its accuracy"
    )
    assert [note_of(spec) for spec in ("fp32", "alq", "diana", "diloco", "power_gossip")] == [None] * 5
    assert "it keeps a residual" in str(note_of("dgc"))
    assert str(choice_text("powersgd", "the fastest", note_of("powersgd"))).startswith(
        "auto took powersgd (the fastest): it keeps a residual"
    )


def optimizer(momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=momentum)


def test_what_was_measured_without_momentum_is_tried_only_where_there_is_known_to_be_none() -> None:
    auto = gw.Auto(residuals=True)
    assert auto.unsuited(optimizer(0.0), {}) == {}
    beside = auto.unsuited(optimizer(0.9), {})
    assert beside.keys() == auto.unsuited(None, {}).keys() == {TOP_K, SIGNS}
    assert beside[SIGNS].endswith("was measured without momentum, and SGD has momentum=0.9")
    assert auto.unsuited(None, {})[SIGNS].endswith("attach with optimizer=")
    # What is left out causes no warning; what a user lists is tried, and does.
    parameters = {"w": torch.zeros(100, 100)}
    assert auto.caution(optimizer(0.9), parameters) is None
    listed = gw.Auto(candidates=("bf16", TOP_K), residuals=True)
    assert "rounds late" in str(listed.caution(optimizer(0.9), parameters))


# ---------------------------------------------------------------------- real ranks


def named_parameters() -> dict[str, torch.nn.Parameter]:
    """Return two matrices and a vector, which low-rank candidates send exactly and others compress."""
    shapes = {"a": (40, 50), "b": (70, 30), "c": (2000,)}
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def auto_link(parameters: Mapping[str, torch.nn.Parameter], method: str | gw.Method = SHORT) -> gw.Link:
    return gw.Link(parameters.items(), method, optimizer=torch.optim.SGD(list(parameters.values()), lr=0.1))


class Ledger:
    """What ranks' gradients sum up to, and what came of them so far.

    Attributes:
        due: Sum over rounds of the mean of all ranks' gradients.
        came: Sum over rounds of the outcomes.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.due = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
        self.came = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
        self.bits: list[int] = []

    def round(self, link: gw.Link, step: int) -> None:
        """Exchange gradients that differ on each rank."""
        rank, world = dist.get_rank(), dist.get_world_size()
        for number, (name, p) in enumerate(self.parameters.items()):
            rows = torch.randn(world, *p.shape, generator=torch.Generator().manual_seed(10 * step + number))
            self.due[name] += rows.double().mean(0)
            p.grad = rows[rank].clone()
        link.reduce_()
        for name, p in self.parameters.items():
            assert p.grad is not None
            self.came[name] += p.grad.double()
        outcomes = [p.grad for p in self.parameters.values() if p.grad is not None]
        self.bits.append(crc32(b"".join(grad.numpy().tobytes() for grad in outcomes)))

    def forgive(self) -> None:
        """Count what a method without residuals rounded away as having come."""
        self.due = {name: value.clone() for name, value in self.came.items()}

    def off(self, link: gw.Link) -> float:
        """Return the largest part of an element that neither came nor waits in a residual."""
        left = {name: self.due[name] - self.came[name] for name in self.due}
        for name, value in residuals(link).items():
            dist.all_reduce(value)
            left[name] -= value.double().view_as(left[name]) / dist.get_world_size()
        return max(float(value.abs().max()) for value in left.values())


def residuals(link: gw.Link) -> dict[str, torch.Tensor]:
    state = link.state_dict()["rank"]
    return {key.partition("/")[2]: value.clone() for key, value in state.items() if key.startswith("residual/")}


def saved(link: gw.Link) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state that the link's next rounds do not change."""
    return {part: {k: v.clone() for k, v in values.items()} for part, values in link.state_dict().items()}


def tuner(link: gw.Link) -> Autotuner:
    selection = link._selection
    assert isinstance(selection, Autotuner)
    return selection


def try_all(steps: int) -> dict[str, Any]:
    parameters = named_parameters()
    link, ledger = auto_link(parameters), Ledger(parameters)
    off, tried = 0.0, []
    for step in range(steps):
        ledger.round(link, step)
        method = link._selection.planner.method
        tried.append(repr(method))
        if not (method.traits.remembers or isinstance(method, gw.FP32)):
            ledger.forgive()
        off = max(off, ledger.off(link))
    found = {"off": off, "tried": tried, "choice": link.record()["choice"], "shown": repr(link), "bits": ledger.bits}
    link.close()
    return found


ROUNDING = 2e-6
"""Half a unit in the last place of values below 64."""


@pytest.mark.ranks
def test_in_every_round_of_the_trial_what_did_not_come_waits_in_a_residual(three_ranks: Ranks) -> None:
    steps = ENDED
    first, *others = three_ranks(try_all, steps)
    # Some ten roundings a round. What was dropped would be missing by about its own size, some units.
    assert first["off"] < 10 * steps * ROUNDING
    assert set(first["tried"]) == {repr(gw.method(spec)) for spec in EVERY}
    assert first["choice"]["chosen"] in EVERY
    assert first["choice"]["left_out"] == {}
    assert all(other == first for other in others)
    assert first["choice"]["accuracy"] == {spec: accuracy_text(spec) for spec in EVERY}
    assert first["choice"]["note"] == note_of(first["choice"]["chosen"])
    assert f"took {first['choice']['chosen']} (" in first["shown"]
    assert first["choice"]["note"] is None or first["choice"]["note"] in first["shown"]


def go_on_alone(spec: str, before: int) -> list[bool]:
    """Take a candidate after some rounds of a trial; return for each round after it whether its own link has its bits.

    The choice begins with the residuals that the trial left, and otherwise without state.
    """
    parameters = named_parameters()
    link, ledger = auto_link(parameters), Ledger(parameters)
    for step in range(before):
        ledger.round(link, step)
    tuner(link).fix(spec, "a test")
    state, last = saved(link), tuner(link)._last
    ledger.bits.clear()
    for step in range(before, before + 5):
        ledger.round(link, step)
    by_auto = ledger.bits[:]
    link.close()
    own = auto_link(parameters, spec)
    if last != spec:
        state = {part: {k: v for k, v in values.items() if "factor" not in k} for part, values in state.items()}
    own.load_state_dict(state)
    ledger.bits.clear()
    for step in range(before, before + 5):
        ledger.round(own, step)
    own.close()
    return [a == b for a, b in zip(by_auto, ledger.bits, strict=True)]


@pytest.mark.ranks
@pytest.mark.parametrize("spec", WITH_RESIDUALS)
def test_the_choice_has_the_bits_of_its_own_link_that_begins_with_the_residuals(three_ranks: Ranks, spec: str) -> None:
    for before in (9, 20):
        assert all(all(same) for same in three_ranks(go_on_alone, spec, before))


def waits(spec: str) -> list[Any]:
    """Return what links tell of the wait: one whose trial took a candidate, and the candidate's own."""
    found = []
    for method in (SHORT, spec):
        parameters = named_parameters()
        link, ledger = auto_link(parameters, method), Ledger(parameters)
        ledger.round(link, 0)
        if method is SHORT:
            tuner(link).fix(spec, "a test")
        ledger.round(link, 1)
        wait = link.diagnostics()["wait"]
        found.append((wait["expected_rounds"], wait["advice"]))
        link.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("spec", ["bf16", *WITH_RESIDUALS])
def test_the_wait_is_told_of_the_candidate_that_was_taken(three_ranks: Ranks, spec: str) -> None:
    for by_auto, own in three_ranks(waits, spec):
        assert by_auto == own
        assert (own[0] is not None) == (spec == TOP_K)


def resume(at: int) -> dict[str, Any]:
    """Continue a trial in another link; then return to the same state in a link that has taken float32."""
    parameters = named_parameters()
    link, ledger = auto_link(parameters, EXACT), Ledger(parameters)
    for step in range(at):
        ledger.round(link, step)
    state, held = saved(link), max([float(v.abs().max()) for v in residuals(link).values()] or [0.0])
    due, came = ({k: v.clone() for k, v in of.items()} for of in (ledger.due, ledger.came))
    link.close()
    resumed = auto_link(parameters, EXACT)
    resumed.load_state_dict(state)
    for step in range(at, at + ENDED):
        ledger.round(resumed, step)
    found = {"held": held, "off": ledger.off(resumed), "choice": resumed.record()["choice"]["chosen"]}
    # And back, in the same link, which has taken a method that keeps nothing.
    tuner(resumed).fix("fp32", "a test")
    ledger.round(resumed, at + ENDED)
    resumed.load_state_dict(state)
    ledger.due, ledger.came = due, came
    ledger.round(resumed, at)
    found["left"] = max([float(v.abs().max()) for v in residuals(resumed).values()] or [0.0])
    found["off after"] = ledger.off(resumed)
    resumed.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("at", [3, 12, ENDED])
def test_a_checkpoint_in_the_trial_or_behind_it_loses_nothing(three_ranks: Ranks, at: int) -> None:
    found = three_ranks(resume, at)
    for rank in found:
        assert rank["off"] < 10 * (at + ENDED) * ROUNDING
        assert rank["off after"] < 10 * (at + ENDED) * ROUNDING
        assert rank["left"] == 0.0 or at == ENDED
        assert rank["choice"] == found[0]["choice"] is not None
    if at == 12:
        assert found[0]["held"] > 0.1


def refused(kind: str) -> str:
    rank = dist.get_rank()
    module = DistributedDataParallel(layers(2))
    momentum = 0.9 if kind == "another momentum" and rank == 1 else 0.0
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    link = None
    try:
        link = gw.attach(module, SHORT, optimizer=sgd)
        scaler.scale(square_loss(module, rank, 0)).backward()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error if link is None else link.error}"
    finally:
        if link is not None:
            link.close()
    return "accepted"


@pytest.mark.ranks
def test_a_scaled_loss_and_optimizers_that_differ_are_refused(three_ranks: Ranks) -> None:
    for told in three_ranks(refused, "scaler"):
        assert "a GradScaler scales losses in this program, and Auto(" in told
    for told in three_ranks(refused, "another momentum"):
        assert told.startswith("RankMismatchError: rank 1 differs from rank 0 in 'candidates left out beside")


def train_sharded() -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return what links have recorded before the first step, of all candidates, and after a trial, of few."""
    found = []
    for mesh in meshes():
        model = sharded(mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        link = gw.attach(model, SHORT, optimizer=sgd, min_numel=1)
        begun = link.record()["choice"]
        link.close()
        link = gw.attach(model, FEW, optimizer=sgd, min_numel=1)
        for step in range(FEW_ENDED):
            loss_of(model, dist.get_rank(), step).backward()
            sgd.step()
            sgd.zero_grad()
        found.append((begun, link.record()["choice"]))
        link.close()
    return found


@pytest.mark.ranks
def test_of_a_sharded_module_those_are_left_out_that_a_reduce_scatter_cannot_carry(four_ranks: Ranks) -> None:
    shards, replicas = four_ranks(train_sharded)[0]
    for choice in shards:
        assert choice["left_out"].keys() == {"powersgd", "acp_sgd"}
        assert "cannot travel by a reduce-scatter" in choice["left_out"]["powersgd"]
    assert shards[1]["chosen"] in {*FEW.traits.tries} - {"powersgd", "acp_sgd"}
    assert [choice["left_out"] for choice in replicas] == [{}, {}]
    assert replicas[1]["chosen"] in FEW.traits.tries
