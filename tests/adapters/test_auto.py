"""``method="auto"``: the trial with made-up clocks, and on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.adapters.pilot import Chooser
from gradwire.planning import Options, Planner
from oracle import layers, square_loss
from ranks import Ranks


class Planned:
    """A planner as far as a chooser asks."""

    def __init__(self, size: int) -> None:
        self.size, self.parameters = size, {"p": None}

    def sent_bytes(self, names: Sequence[str]) -> int:
        return self.size


class World:
    """A clock that a round of each method moves by a known time, and the answers of two equal ranks."""

    def __init__(self, step_s: dict[str, float], bandwidth: float, sizes: dict[str, int]) -> None:
        self.now_s, self.step_s, self.speed = 0.0, step_s, bandwidth
        method = gw.Auto(candidates=tuple(step_s), turns=2, steps=2)
        planners: dict[str, Any] = {spec: Planned(sizes[spec]) for spec in step_s}
        self.specs = {id(planner): spec for spec, planner in planners.items()}
        self.chooser = Chooser(method, planners, clock=lambda: self.now_s)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), list(values)]

    def bandwidth(self) -> float:
        return self.speed

    def train(self, rounds: int) -> list[str]:
        used = []
        for round in range(rounds):
            self.chooser.begin(round, self)
            spec = self.specs[id(self.chooser.planner)]
            used.append(spec)
            self.now_s += self.step_s[spec]
        return used


SIZES = {"fp32": 4_000_000, "bf16": 2_000_000, "terngrad": 300_000}


def test_the_fastest_is_kept_and_every_candidate_had_its_turns() -> None:
    world = World({"fp32": 1.0, "bf16": 0.8, "terngrad": 0.9}, 1e9, SIZES)
    used = world.train(40)
    assert used[:4] == ["terngrad"] * 4
    assert {spec: used[4:19].count(spec) for spec in SIZES} == {"fp32": 5, "bf16": 5, "terngrad": 5}
    assert set(used[19:]) == {"bf16"}
    found = world.chooser.record()
    assert found["chosen"] == "bf16"
    assert found["step_s"] == pytest.approx({"fp32": 1.0, "bf16": 0.8, "terngrad": 0.9})
    assert "2 turns of 2 steps" in found["reason"]


def test_at_equal_speed_the_candidate_listed_first_is_taken() -> None:
    world = World({"fp32": 1.0, "bf16": 0.999, "terngrad": 0.995}, 1e9, SIZES)
    assert world.train(40)[-1] == "fp32"


def test_what_the_link_makes_hopeless_is_not_tried_and_the_reason_is_kept() -> None:
    world = World({"fp32": 50.0, "bf16": 25.0, "terngrad": 4.0}, 1e5, SIZES)
    used = world.train(12)
    assert set(used) == {"terngrad"}
    left_out = world.chooser.record()["left_out"]
    assert set(left_out) == {"fp32", "bf16"}
    assert "4.00 MB at 0.1 MB/s take 40 s" in left_out["fp32"]


def test_a_choice_is_never_changed_unless_asked_for() -> None:
    world = World({"fp32": 1.0, "bf16": 0.8, "terngrad": 0.9}, 1e9, SIZES)
    world.train(25)
    world.step_s = {"fp32": 0.1, "bf16": 0.8, "terngrad": 0.9}
    assert set(world.train(50)) == {"bf16"}
    world.chooser.again()
    assert world.train(40)[-1] == "fp32"


def test_a_checkpoints_choice_is_taken_without_a_trial() -> None:
    world = World({"fp32": 1.0, "bf16": 0.8, "terngrad": 0.9}, 1e9, SIZES)
    world.chooser.load(2)
    assert set(world.train(5)) == {"terngrad"}
    assert world.chooser.chosen_index == 2
    world.chooser.again()
    assert world.chooser.chosen_index == -1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"candidates": ("fp32",)}, "at least two"),
        ({"candidates": ("fp32", "FP32()")}, "named twice"),
        ({"candidates": ("fp32", "auto")}, "cannot be tried"),
        ({"candidates": "fp32"}, "a tuple of specs"),
        ({"candidates": ("fp32", "terngrat")}, "did you mean 'terngrad'"),
        ({"turns": 0}, "at least 1"),
    ],
)
def test_wrong_lists_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=sentence):
        gw.Auto(**arguments)


def test_a_spec_reads_back() -> None:
    chosen = gw.Auto(candidates=("fp32", "TernGrad(clip=None)"), turns=1)
    assert gw.method(repr(chosen)) == chosen
    assert gw.method("auto") == gw.Auto()


def test_a_planner_of_what_chooses_is_refused() -> None:
    with pytest.raises(gw.HyperparameterError, match="auto: it chooses among methods"):
        Planner(gw.Auto(), {"p": torch.ones(2000)}, 2, Options())


def test_a_simulation_has_no_link_to_measure() -> None:
    with pytest.raises(gw.IncompatibleError, match="name a method to simulate"):
        gw.simulate(torch.ones(2, 5), "auto")


def train_by_choice(steps: int) -> dict[str, Any]:
    import torch.distributed as dist

    ddp = DistributedDataParallel(layers(6), bucket_cap_mb=0.0163)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    link = gw.attach(ddp, gw.Auto(turns=2, steps=2), check=False)
    undecided = link.record()["choice"]["chosen"]
    for step in range(steps):
        square_loss(ddp, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    choice = link.record()["choice"]
    state = link.state_dict()
    link.close()

    other = DistributedDataParallel(layers(6), bucket_cap_mb=0.0163)
    again = gw.attach(other, gw.Auto(turns=2, steps=2))
    again.load_state_dict(state)
    reloaded = again.record()["choice"]["chosen"]
    again.close()
    digest = [float(p.double().sum()) for p in ddp.parameters()]
    return {"undecided": undecided, "choice": choice, "reloaded": reloaded, "digest": digest}


@pytest.mark.ranks
def test_real_ranks_choose_alike_stay_identical_and_record_why(three_ranks: Ranks) -> None:
    found = three_ranks(train_by_choice, 30)
    first = found[0]
    assert first["undecided"] is None
    assert first["choice"]["chosen"] in gw.Auto().candidates
    assert first["choice"]["reason"]
    assert set(first["choice"]["step_s"]) | set(first["choice"]["left_out"]) == set(gw.Auto().candidates)
    assert first["choice"]["link_bytes_per_s"] > 0
    assert all(rank == first for rank in found[1:])
    assert first["reloaded"] == first["choice"]["chosen"]


def measure_link() -> tuple[float | None, float]:
    found = gw.probe()
    return found.bandwidth_bytes_per_s, found.latency_s


@pytest.mark.ranks
def test_a_probe_gives_all_ranks_the_slowest_ranks_link(three_ranks: Ranks) -> None:
    found = three_ranks(measure_link)
    assert len(set(found)) == 1
    bandwidth, latency_s = found[0]
    assert bandwidth is not None
    assert bandwidth > 1e6
    assert 0 < latency_s < 1
