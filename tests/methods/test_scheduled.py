"""A dial that changes with the round: its values, what goes on from stage to stage, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.drivers import LocalProfiler
from gradwire.exchange.ops import Exchange
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.methods.levels.level_fitting import powers
from gradwire.methods.wrappers.scheduled import ScheduledPlan
from resumed import assert_resumes


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linked(method: gw.Method | str, numel: int, workers: int = 2, **options: object) -> gw.SimulatedLink:
    return gw.SimulatedLink([("0", torch.empty(numel))], method, workers, min_numel=0, **options)


def around(inner: gw.Method, **settings: Any) -> gw.Scheduled:
    return gw.Scheduled(compressor=inner, **settings)


def dials(method: gw.Scheduled) -> list[tuple[int, Any]]:
    return [(first, getattr(stage, method.field)) for first, stage in method.stage_methods]


def test_dgcs_warm_up_is_an_exponential_or_a_list() -> None:
    """1: the paper's 25, 6.25, 1.5625, 0.4 and 0.1 per cent, an epoch of 30 rounds each."""
    paper = [0.25, 0.0625, 0.015625, 0.004, 0.001]
    listed = around(gw.TopK(density=0.001), start=paper[:-1], schedule="step", rounds=120)
    assert dials(listed) == list(zip(range(0, 121, 30), paper))
    exponential = dials(around(gw.TopK(density=0.001), rounds=120))
    assert [first for first, _ in exponential] == list(range(0, 121, 30))
    # The paper divides by 4 each time, where the fourth root of 250 is 3.98.
    assert [density for _, density in exponential] == pytest.approx(paper, rel=0.02)
    # To the bit: DGC's own schedule is the same mechanism.
    schedule: dict[str, Any] = {"start": (0.3, 0.1), "schedule": "step", "rounds": 6}
    own, ours = (
        gw.DGC(density=0.02, warmup_densities=(0.3, 0.1), warmup_rounds=3),
        around(gw.DGC(density=0.02), **schedule),
    )
    one, other = linked(own, 500), linked(ours, 500)
    for round in range(8):
        g = gaussian(2, 500, seed=round)
        assert torch.equal(one.reduce_(g.clone()), other.reduce_(g.clone()))


@pytest.mark.parametrize(("total", "slope", "low"), [(300, 5, 1.5), (300, 2, 1.0)])
def test_varcos_compression_ratio_falls_in_a_line(total: int, slope: float, low: float) -> None:
    """2: c_t = max(c_max - a t (c_max - c_min) / (T - 2), c_min), in every round where as many stages fit."""
    rounds, high = (total - 2) / slope, 128.0
    method = around(
        gw.RandK(density=1 / low),
        start=1 / high,
        schedule="reciprocal",
        rounds=rounds,
        stages=min(64, math.ceil(rounds)),
    )
    firsts = [first for first, _ in dials(method)]
    found = [1 / density for _, density in dials(method)]
    wanted = [max(high - slope * t * (high - low) / (total - 2), low) for t in firsts]
    # Values have six digits.
    assert found == pytest.approx(wanted, rel=5e-6)
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(low)
    assert firsts[-1] == math.ceil(rounds)
    if rounds < 64:
        assert firsts == list(range(math.ceil(rounds) + 1))
        assert [round(c, 1) for c in (found[0], found[10], found[30])] == [128.0, 106.8, 64.3]


def test_curves_are_those_of_the_docstring() -> None:
    def values(schedule: str) -> list[float]:
        return [v for _, v in dials(around(gw.TopK(density=0.1), start=0.9, schedule=schedule, rounds=8))]

    assert values("linear") == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    half = 0.4 * math.sqrt(0.5)
    assert values("cosine") == pytest.approx([0.9, 0.5 + half, 0.5, 0.5 - half, 0.1], rel=5e-6)
    assert values("exponential") == pytest.approx([0.9, 0.9 / 9**0.25, 0.3, 0.9 / 9**0.75, 0.1], rel=5e-6)
    assert values("reciprocal") == pytest.approx([1 / c for c in (10 / 9, 30 / 9, 50 / 9, 70 / 9, 10)], rel=5e-6)


def test_whole_numbers_are_rounded_and_equal_stages_are_one() -> None:
    method = around(gw.EDEN(bits=1), field="bits", start=4, schedule="linear", rounds=60, stages=6)
    # 4, 3.5, 3, 2.5, 2, 1.5 and 1, halves rounded up.
    assert dials(method) == [(0, 4), (20, 3), (40, 2), (60, 1)]
    assert all(isinstance(bits, int) for _, bits in dials(method))
    assert dials(around(gw.TopK(density=0.2), start=0.2, rounds=9)) == [(0, 0.2)]
    # A field that takes both kinds of numbers is rounded where the method has a whole one.
    fine = around(gw.EDEN(bits=1.6), field="bits", start=3.2, schedule="linear", rounds=2, stages=1)
    assert [bits for _, bits in dials(fine)] == [3.2, 1.6]


def test_the_round_alone_decides_and_rounds_of_warm_up_count() -> None:
    """3."""
    method = around(gw.TopK(density=0.01), start=(0.5, 0.1), schedule="step", rounds=5)
    wanted = [500, 500, 500, 100, 100, 10, 10]
    g, link = gaussian(1, 1000).expand(2, -1), linked(method, 1000)
    assert [int(link.reduce_(g.clone()).count_nonzero()) for _ in wanted] == wanted
    assert [int(gw.simulate(g, method, round=r).mean.count_nonzero()) for r in range(7)] == wanted
    late = linked(method, 1000, warmup_steps=4)
    assert [int(late.reduce_(g.clone()).count_nonzero()) for _ in wanted] == [1000] * 4 + wanted[4:]


@pytest.mark.parametrize(
    "spec", ["QSGD(levels=16)", "Rotated(QSGDinf(levels=7))", "Coded(QSGDinf(levels=7), coder='huffman')"]
)
def test_a_round_is_that_of_its_stages_method(spec: str) -> None:
    """Bits and bytes; the dry run is of the last stage."""
    method = around(gw.method(spec), field="levels", start=1, schedule="linear", rounds=6, stages=3)
    g, link, seen = gaussian(3, 4000), linked(method, 4000, 3), 0
    for round in range(8):
        stage = [m for first, m in method.stage_methods if first <= round][-1]
        alone = gw.simulate(g, stage, round=round)
        assert torch.equal(link.reduce_(g.clone()), alone.mean)
        sent = link.traffic().sent_bytes
        assert sent - seen == alone.traffic.sent_bytes
        seen = sent
    counted = [
        Planner(m, {"w": torch.empty(4000)}, 3, Options(min_numel=0)).sent_bytes(["w"])
        for m in (method, method.compressor)
    ]
    assert counted[0] == counted[1]


def test_what_is_profiled_is_the_last_stage() -> None:
    method = around(gw.QSGD(levels=16), field="levels", start=1, schedule="linear", rounds=1000)

    def sent(m: gw.Method) -> list[int]:
        plan = Planner(m, {"w": torch.empty(4000)}, 4, Options(min_numel=0)).plan(["w"], 0)
        return [stage.sent_bytes for part in LocalProfiler(plan, gaussian(4000), 4).play() for stage in part]

    assert sent(method) == sent(method.compressor) != sent(method.stage_methods[0][1])


def test_residuals_go_on_from_stage_to_stage() -> None:
    """4: as if the state of one method were loaded into the next."""
    method = around(gw.ErrorFeedback(compressor=gw.TopK(density=0.01), momentum=0.5), start=0.2, rounds=6, stages=2)
    link, rounds = linked(method, 700), [gaussian(2, 700, seed=s) for s in range(9)]
    means = [link.reduce_(g.clone()) for g in rounds]
    state = None
    for round, g in enumerate(rounds):
        stage = linked([m for first, m in method.stage_methods if first <= round][-1], 700)
        if state is not None:
            stage.load_state_dict(state)
        assert torch.equal(stage.reduce_(g.clone()), means[round])
        state = stage.state_dict()
    assert state is not None
    ours = link.state_dict()
    assert all(torch.equal(ours[part][key], value) for part in state for key, value in state[part].items())


@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize(
    "spec", ["ErrorFeedback(TopK(density=0.02))", "GTopK(density=0.02)", "EF21(TopK(density=0.02))"]
)
def test_a_training_is_resumed_in_its_stage(spec: str, cut: int) -> None:
    method = around(gw.method(spec), start=0.3, rounds=4, stages=2)
    rounds = [gaussian(3, 800, seed=s) for s in range(6)]
    assert_resumes(lambda: linked(method, 800, 3), rounds, cut)


def test_fitted_levels_are_fitted_anew_for_another_number_of_bits() -> None:
    link = linked(around(gw.ALQ(bits=2), field="bits", start=4, schedule="linear", rounds=2, stages=1), 3000)
    sizes = []
    for _ in range(4):
        link.reduce_(gaussian(2, 3000))
        sizes.append(len(link.state_dict()["global"]["levels"]))
    assert sizes == [16, 16, 4, 4]


def overlapped(**fields: Any) -> gw.ALQ:
    return gw.ALQ(**{"bits": 2, "blocks": "parameter", "block_size": 512, "overlap": True, **fields})


def levels_of(link: gw.SimulatedLink) -> torch.Tensor:
    return link.state_dict()["global"]["levels"]


def test_levels_that_serve_from_the_next_round_on_are_fitted_in_every_stage() -> None:
    """The review's example, with an update in its first round: the levels are those of the stage's own method."""
    method = around(overlapped(), field="bits", start=4, schedule="linear", rounds=1000)
    link, alone = linked(method, 3000), linked(overlapped(bits=4), 3000)
    for seed in (0, 1):
        means = [found.reduce_(gaussian(2, 3000, seed=seed) ** 5) for found in (link, alone)]
        assert torch.equal(*means)
    assert torch.equal(levels_of(link), levels_of(alone))
    assert levels_of(link).tolist() != powers(0.5, 16), "these are the levels before the first fit"
    assert link.traffic() == alone.traffic()


def test_a_schedule_that_changes_nothing_fits_what_its_method_fits() -> None:
    """One stage, and two whose methods differ only in a field that these rounds do not read."""
    inner = overlapped(updates=(0, 2), every=10_000)
    settings: dict[str, Any] = {"field": "every", "schedule": "step", "rounds": 3}
    constant, two = around(inner, start=(10_000,), **settings), around(inner, start=(20_000,), **settings)
    assert [len(method.stage_methods) for method in (constant, two)] == [1, 2]
    links = [linked(method, 3000, 3) for method in (inner, constant, two)]
    for round in range(5):
        means = [link.reduce_(gaussian(3, 3000, seed=round) ** (3 + round % 3)) for link in links]
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert all(torch.equal(levels_of(link), levels_of(links[0])) for link in links)
    assert len({link.traffic().sent_bytes for link in links}) == 1


def test_the_last_levels_of_a_stage_are_not_the_first_of_the_next() -> None:
    """Both stages fit at the end of a round, the one that the round was in: round 1 has 16 levels, round 2 has 4."""
    method = around(overlapped(updates=(0, 1)), field="bits", start=4, schedule="linear", rounds=2, stages=1)
    link, sizes = linked(method, 3000), []
    fresh = linked(overlapped(updates=(0, 1)), 3000)
    fresh.round = 2
    for round in range(4):
        mean = link.reduce_(gaussian(2, 3000, seed=round) ** 5)
        sizes.append(len(levels_of(link)))
        if round >= 2:
            assert torch.equal(mean, fresh.reduce_(gaussian(2, 3000, seed=round) ** 5))
            assert torch.equal(levels_of(link), levels_of(fresh))
    assert sizes == [16, 16, 4, 4]


class Stage(BucketPlan):
    """Plan that exchanges nothing, and notes the rounds that it ends."""

    chunks, collective, runs = 1, "all_gather", [[(0, 4)]]

    def __init__(self, finishes: bool) -> None:
        self.finishes, self.ended = finishes, list[int]()

    def prepare(self, context: Context, flat: torch.Tensor) -> Exchange[None]:
        yield from ()

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> Exchange[Outcome]:
        yield from ()
        return Outcome(True)

    def finish(self, context: Context) -> Exchange[None]:
        self.ended.append(context.round)
        yield from ()


@pytest.mark.parametrize("finishes", [(True, False), (False, True)])
def test_a_round_is_ended_by_its_own_stage(finishes: tuple[bool, bool]) -> None:
    """Whatever the other stages do."""
    stages = [Stage(one) for one in finishes]
    plan = ScheduledPlan(stages, [0, 3])
    assert plan.finishes
    for round in (0, 2, 3, 9, -1):
        assert list(plan.finish(Context(0, 2, round))) == []
    assert [stage.ended for stage in stages] == [[0, 2], [3, 9, -1]]
    assert not ScheduledPlan([Stage(False)], [0]).finishes


@pytest.mark.parametrize("instance", ["all_reduce", "parameter_server"])
def test_lgcs_autoencoder_is_trained_with_the_learning_rate_of_the_round(instance: str) -> None:
    inner = gw.LGC(density=0.05, instance=instance, full_rounds=1, training_rounds=3)
    settings: dict[str, Any] = {"field": "learning_rate", "schedule": "step", "rounds": 2}
    changing, same = around(inner, start=(0.01,), **settings), around(inner, start=(0.001,), **settings)

    def weights(method: gw.Method) -> list[torch.Tensor]:
        link, found = linked(method, 2000), []
        for round in range(5):
            link.reduce_(gaussian(2, 2000, seed=round))
            found.append(link.state_dict()["global"].get("autoencoder", torch.zeros(0)))
        return found

    plain, constant, changed = (weights(method) for method in (inner, same, changing))
    assert all(torch.equal(a, b) for a, b in zip(plain, constant))
    assert not torch.equal(constant[1], constant[3]), "rounds 1 to 3 train"
    assert not torch.equal(constant[1], changed[1]), "round 1 has the first rate"


def test_with_all_elements_at_the_end_it_is_full_communication() -> None:
    """5: bit for bit, from the round on in which the last value is reached."""
    method = around(gw.RandK(density=1.0), start=1 / 64, schedule="reciprocal", rounds=9.5, stages=10)
    g = gaussian(4, 900)
    full = gw.simulate(g, "fp32").mean
    assert [torch.equal(gw.simulate(g, method, round=r).mean, full) for r in (0, 9, 10, 30)] == [
        False,
        False,
        True,
        True,
    ]


def test_where_the_error_vanishes_the_optimum_is_reached() -> None:
    """6: workers with unlike optima; a fixed ratio ends at a distance, one that falls to 1 does not."""
    centres = gaussian(2, 50)
    private = {"coordinates": "private", "rescale": True}

    def distance(method: gw.Method) -> float:
        link, x = linked(method, 50), torch.zeros(50)
        for _ in range(200):
            x -= 0.1 * link.reduce_(x - centres)
        return float((x - centres.mean(0)).norm() / centres.mean(0).norm())

    falling = around(gw.RandK(density=1.0, **private), start=0.25, schedule="reciprocal", rounds=100, stages=20)
    # A hundred steps of a rate of 0.1 leave 0.9^100 = 3e-5.
    assert distance(falling) < 1e-4
    assert distance(gw.RandK(density=0.25, **private)) > 0.1


def test_declared_is_what_holds_of_the_worst_stage() -> None:
    levels = around(gw.QSGDinf(levels=7), field="levels", start=1, schedule="linear", rounds=10)
    assert levels.traits.unbiased
    assert levels.omega == gw.QSGDinf(levels=1).omega
    assert levels.omega_of(100) == gw.QSGDinf(levels=1).omega_of(100)
    assert levels.delta is None
    assert levels.delta_of(16) == gw.QSGDinf(levels=1).delta_of(16)
    falling, rising = around(gw.TopK(density=0.1), start=0.5), around(gw.TopK(density=0.5), start=0.1)
    assert falling.delta_of(1000) == rising.delta_of(1000) == gw.TopK(density=0.1).delta_of(1000)
    assert falling.usual_delta_of(1000) == rising.usual_delta_of(1000) == gw.TopK(density=0.1).usual_delta_of(1000)
    assert not falling.traits.unbiased
    assert falling.omega is None
    assert set(levels.traits.kernels) == set(gw.QSGDinf().traits.kernels)
    # The residual of a later stage is the one to warn of.
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4000))], lr=0.1, momentum=0.9)
    sparse = around(gw.ErrorFeedback(compressor=gw.TopK(density=0.25)), start=0.0005)
    assert sparse.caution(sgd, {"w": torch.zeros(4000)}) is not None


def test_coders_are_settled_for_all_stages() -> None:
    settings: dict[str, Any] = {"field": "levels", "start": 1, "schedule": "linear", "rounds": 4, "stages": 2}
    inside, outside = (
        around(gw.Coded(compressor=gw.QSGDinf()), **settings),
        gw.Coded(compressor=around(gw.QSGDinf(), **settings)),
    )
    assert inside.traits.open_coders == outside.traits.open_coders != ()
    assert inside.with_coder("rans").traits.open_coders == ()
    assert all(stage.coder == "rans" for _, stage in inside.with_coder("rans").stage_methods)
    assert set(inside.traits.kernels) == {*gw.QSGDinf().traits.kernels, *inside.traits.open_coders}
    g = gaussian(2, 3000)
    for round in (0, 2, 5):
        plain = gw.simulate(g, around(gw.QSGDinf(), **settings), round=round).mean
        assert all(torch.equal(gw.simulate(g, m, round=round).mean, plain) for m in (inside, outside))


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("Scheduled(FP32())", "a method with a dial"),
        ("Scheduled(Scheduled())", "a method with a dial"),
        ("Scheduled(auto)", "a method with a dial"),
        ("Scheduled(QSGD())", "has no field 'density'"),
        ("Scheduled(TopK(), field='unit')", "unit='element' of .* is no number"),
        ("Scheduled(TernGrad(clip=None), field='clip')", "clip=None of .* is no number"),
        ("Scheduled(TopK(), schedule='quadratic')", "schedule is one of"),
        ("Scheduled(TopK(), start=(0.1, 0.2))", "start is a number for schedule='exponential'"),
        ("Scheduled(TopK(), schedule='step')", "start is a tuple of values"),
        ("Scheduled(TopK(), schedule='step', start=())", "start is a tuple of values"),
        ("Scheduled(TopK(), start=-0.1)", "numbers of one sign"),
        ("Scheduled(TopK(), start=2.0)", "TopK: density"),
        ("Scheduled(TopK(), rounds=0)", "rounds is above 0"),
        ("Scheduled(TopK(), rounds=inf)", "rounds is above 0"),
        ("Scheduled(TopK(), stages=0)", "stages is 1 to 64"),
        ("Scheduled(TopK(), stages=65)", "stages is 1 to 64"),
        ("Scheduled(TopK(), rounds=7.5, stages=9)", "at most rounds=7.5"),
        ("Scheduled(TopK(), schedule='step', start=(0.1, 0.2), stages=3)", "as many as start has values, 2"),
        ("Scheduled(PowerSGD(), field='matrix_rank', start=8)", "keeps a factor of another size"),
        ("Scheduled(ACPSGD(), field='matrix_rank', start=8)", "of another size"),
        ("Scheduled(ErrorFeedback(momentum=0.9), field='momentum', start=0.0, schedule='linear')", "has owns_momentum"),
        ("ErrorFeedback(Scheduled())", "operator on one vector"),
    ],
)
def test_what_cannot_work_is_refused(spec: str, part: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=part):
        gw.method(spec)


def test_a_dial_that_decides_what_is_compressed_is_refused_when_attached() -> None:
    """Of a matrix of 64 by 64, factors of rank 8 have four times fewer numbers."""
    method = around(gw.PowerSGD(matrix_rank=8), field="least_saving", start=8.0)
    with pytest.raises(gw.IncompatibleError, match="depends on 'least_saving'"):
        gw.SimulatedLink([("w", torch.empty(64, 64))], method, 2, min_numel=0).reduce_(torch.zeros(2, 4096))


def test_the_outermost_field_of_a_name_is_the_dial() -> None:
    inner = gw.QSGDinf(block_size=64)
    settings: dict[str, Any] = {"field": "block_size", "start": (512, 256), "schedule": "step", "rounds": 2}
    method = around(gw.Rotated(compressor=inner, block_size=1024), **settings)
    assert dials(method) == [(0, 512), (1, 256), (2, 1024)]
    assert all(stage.compressor == inner for _, stage in method.stage_methods)
