"""Rehearsed exchanges, calibration, forecasts and advice."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from model_cases import SHAPES, profile

import gradwire as gw
from gradwire.exchange.drivers import Stage, profile_locally
from gradwire.exchange.ops import AllGather
from gradwire.exchange.ops import Exchange as GradwireExchange
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Context
from gradwire.model.calibrate import BOUNDS, Observation, calibrate, log_error
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile, exchange_of, nothing_but_the_sum
from gradwire.model.forecast import NOTHING, Forecast, Rehearsed, Scenario, forecast, recommend
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.profile import Profile, ReadyBucket, Timeline
from gradwire.model.schedule import Load, step_time


@pytest.mark.parametrize("spec", ["fp32", "bf16", "terngrad", "TernGrad(clip=None, share_scaler=False)"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_rehearsal_sends_the_bytes_of_the_dry_run(spec: str, world_size: int) -> None:
    known = profile()
    exchange = exchange_of(spec, known.tensors(), known.timeline.buckets, world_size, repeats=1)
    planner = Planner(gw.method(spec), known.tensors(), world_size, Options())
    assert exchange.sent_bytes == planner.sent_bytes(list(SHAPES))
    assert sum(bucket.work_s for bucket in exchange.buckets) > 0


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("shape", [(600, 100), (100, 601)], ids=["tall", "wide"])
def test_of_rounds_that_alternate_a_profile_has_the_mean(shape: tuple[int, int], world_size: int) -> None:
    link = gw.SimulatedLink([("w", torch.empty(shape))], "acp_sgd", world_size)
    totals = [0]
    for _ in range(2):
        link.reduce_(torch.randn(world_size, math.prod(shape)))
        totals.append(link.traffic().sent_bytes)
    left, right = totals[1], totals[2] - totals[1]
    assert (left > right) == (shape[0] > shape[1])
    tensors = {"w": torch.empty(shape, device="meta")}
    bucket = ReadyBucket(names=("w",), numel=math.prod(shape), ready_s=0.0)
    exchange = exchange_of("acp_sgd", tensors, [bucket], world_size, repeats=1)
    assert exchange.sent_bytes == (left + right) / 2
    planner = Planner(gw.method("acp_sgd"), tensors, world_size, Options())
    assert planner.sent_bytes(["w"]) == math.ceil((left + right) / 2)


FREE = dataclasses.replace(
    DEFAULT, round_s=0.0, call_s=0.0, message_s=0.0, byte_s=0.0, sum_byte_s=0.0, bucket_s=0.0, contention=1.0
)


@pytest.mark.parametrize("spec", ["fp32", "bf16", "terngrad", "coded", "signsgd", "powersgd"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_model_waits_for_the_delays_that_the_clock_counts(spec: str, world_size: int) -> None:
    """Lanes, turns and operations in two simulations, for two buckets of large rows and one of small ones."""
    sizes = {"a": (1 << 10, 1 << 11), "b": (1 << 10, 1 << 11), "c": (64, 64)}
    buckets = tuple(ReadyBucket(names=(name,), numel=math.prod(s), ready_s=0.0) for name, s in sizes.items())
    shapes = {name: torch.empty(shape, device="meta") for name, shape in sizes.items()}
    if spec in ("fp32", "bf16"):
        buckets = buckets[:2]  # Gloo's threads run more of them at a time than there are lanes.
        shapes = {name: shapes[name] for name in ("a", "b")}
    exchange = exchange_of(spec, shapes, buckets, world_size, repeats=1)
    timeline = Timeline(forward_s=0.0, buckets=buckets, backward_s=0.0, after_s=0.0)
    waits = step_time(
        timeline,
        nothing_but_the_sum(exchange),
        machine=FREE,
        link=LinkModel(latency_s=1.0),
        load=Load(ranks=1, cores=8),
    )
    assert waits.step_s == pytest.approx(exchange.delays.count)


class Watched:
    """A plan that notes the threads it runs with, and may fail."""

    chunks, finishes = 2, False

    def __init__(self, fails: bool = False) -> None:
        self.threads: list[int] = []
        self.fails = fails

    def prepare(self, context: Context, flat: torch.Tensor) -> GradwireExchange[None]:
        self.threads.append(torch.get_num_threads())
        yield AllGather(flat[:1], torch.empty(context.world_size, 1))

    def run(self, context: Context, flat: torch.Tensor, prepared: None) -> GradwireExchange[None]:
        self.threads.append(torch.get_num_threads())
        yield AllGather(flat[:1], torch.empty(context.world_size, 1))
        self.threads.append(torch.get_num_threads())
        if self.fails:
            raise ValueError("no")


def test_a_rehearsal_has_one_thread_as_a_worker_has_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        plan = Watched()
        profile_locally(cast(Any, plan), torch.ones(8), 2, repeats=1)
        assert set(plan.threads) == {1}
        assert len(plan.threads) == 2 * (1 + 2 * 2)
        assert torch.get_num_threads() == 3
        with pytest.raises(ValueError, match="no"):
            profile_locally(cast(Any, Watched(fails=True)), torch.ones(8), 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_rehearsal_sends_what_a_simulated_link_counts() -> None:
    known = profile()
    generator = torch.Generator().manual_seed(1)
    workers = [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(3)]
    counted = gw.simulate(workers, "terngrad").traffic.sent_bytes
    exchange = exchange_of("terngrad", known.tensors(), known.timeline.buckets, 3, Options(min_numel=0), repeats=1)
    assert exchange.sent_bytes == counted


@pytest.mark.parametrize("spec", ["coded", "gtopk", "Coded(QSGD(levels=1, block_size=None))"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_rehearsal_of_lengths_that_depend_on_data_has_peers_of_its_own(spec: str, world_size: int) -> None:
    """Sums of N copies of one payload have fewer values, and a rank may receive where it sends nothing."""
    numel = 1 << 14
    link = gw.SimulatedLink([("w", torch.empty(128, 128))], spec, world_size)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        link.reduce_(torch.randn(world_size, numel, generator=generator))
    counted = link.traffic().sent_bytes / 4
    bucket = ReadyBucket(names=("w",), numel=numel, ready_s=0.0)
    tensors = {"w": torch.empty(128, 128, device="meta")}
    assert exchange_of(spec, tensors, [bucket], world_size, repeats=1).sent_bytes == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1), (torch.float32, 2), (torch.float64, 4)])
def test_gradients_travel_in_their_own_dtype_with_ddp_alone(dtype: torch.dtype, factor: int, tmp_path: Path) -> None:
    """A cast to bfloat16 saves nothing of a model in bfloat16, and three quarters of one in float64."""
    known = dataclasses.replace(profile(), dtypes=dict.fromkeys(SHAPES, dtype))
    known.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == known
    slow = LinkModel(bandwidth_bytes_per_s=1e6)
    found, _ = forecast(known, ["bf16"], Scenario(hosts=4, link=slow), DEFAULT, repeats=1)
    assert found[0].sent_bytes == factor * found[1].sent_bytes
    assert (recommend(found)[0] == NOTHING) == (factor == 1)


def test_a_method_that_follows_the_link_is_predicted_for_that_of_the_setting() -> None:
    spec, known, rehearsed = "CAT(fixed_bytes=None)", profile(), Rehearsed()
    sent = []
    for rate, latency_s in ((1.25e6, 0.02), (12.5e6, 0.0)):
        setting = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=rate, latency_s=latency_s))
        found, _ = forecast(known, [spec, "terngrad"], setting, DEFAULT, repeats=1, rehearsed=rehearsed)
        cost = gw.LinkCost(message_s=latency_s + DEFAULT.round_s, bytes_per_s=rate / 3)
        exchange = exchange_of(spec, known.tensors(), known.timeline.buckets, 4, Options(link_cost=cost), repeats=1)
        assert found[1].sent_bytes == exchange.sent_bytes
        sent.append(found[1].sent_bytes)
    assert sent[0] != sent[1]
    assert len(rehearsed) == 4, "the others are rehearsed once for both links"


def test_options_of_the_link_are_those_of_the_prediction() -> None:
    names, setting = ["terngrad", "powersgd"], Scenario(hosts=3)
    usual, _ = forecast(profile(), names, setting, DEFAULT, repeats=1)
    alone, *others = forecast(profile(), names, setting, DEFAULT, Options(exclude=("*",)), repeats=1)[0]
    assert all(f.sent_bytes == pytest.approx(alone.sent_bytes, rel=0.01) for f in others)
    assert all(f.sent_bytes < alone.sent_bytes for f in usual[1:])


def test_profiles_without_dtypes_are_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    record = json.loads(path.read_text())
    del record["dtypes"]
    path.write_text(json.dumps(record))
    assert all(tensor.dtype == torch.float32 for tensor in Profile.read(path).tensors().values())


def test_ddp_alone_is_the_sum_without_work() -> None:
    known = profile()
    exchange = exchange_of("fp32", known.tensors(), known.timeline.buckets, 4, repeats=1)
    bare = nothing_but_the_sum(exchange)
    assert bare.sent_bytes == exchange.sent_bytes
    assert all(bucket.work_s == 0 for bucket in bare.buckets)


def observations(machine: Machine) -> list[Observation]:
    """Steps of a machine whose costs are known, over links, sizes and ranks that tell them apart."""
    found = []
    for compute_s in (0.002, 0.05):
        timeline = profile(compute_s).timeline
        for sent in (1_000, 1_000_000, 30_000_000):
            for n in (2, 4, 8):
                rounds = 2 * (n - 1)
                jobs = {
                    "ring": BucketJobs((), ((Stage(1e-4, "ring", sent, rounds, rounds), Stage(0.0)),), True),
                    "crowd": BucketJobs((), ((Stage(2e-3, "all_to_all", sent // 8, 1, n - 1), Stage(1e-3)),), False),
                }
                for job in jobs.values():
                    for rate in (None, 12.5e6):
                        one = Observation(
                            timeline,
                            ExchangeProfile("x", n, (job,)),
                            LinkModel(bandwidth_bytes_per_s=rate),
                            Load(ranks=n, cores=2),
                            1.0,
                        )
                        found.append(dataclasses.replace(one, step_s=one.predict(machine)))
    return found


def test_calibration_finds_a_machine_that_explains_the_steps() -> None:
    truth = Machine(
        efficiency=0.7,
        round_s=3e-4,
        call_s=8e-4,
        message_s=2e-4,
        byte_s=2e-10,
        sum_byte_s=7e-10,
        bucket_s=3e-4,
        contention=1.3,
    )
    measured = observations(truth)
    fitted = calibrate(measured, "made up")
    errors = [abs(log_error(o, fitted)) for o in measured]
    before = [abs(log_error(o, DEFAULT)) for o in measured]
    assert max(before) > 0.3
    assert sorted(errors)[len(errors) // 2] < 0.01
    assert max(errors) < 0.1
    assert fitted.residual < 0.05
    assert fitted.source == "made up"
    assert (fitted.most_workers, fitted.slowest_bytes_per_s, fitted.fastest_bytes_per_s) == (8, 12.5e6, 12.5e6)


def test_what_the_model_does_not_know_is_not_laid_to_a_number_that_steps_hardly_depend_on() -> None:
    def few_bytes(one: Observation) -> bool:
        stage = one.exchange.buckets[0].chunks[0][0]
        return one.link.bandwidth_bytes_per_s is not None and (stage.kind != "ring" and stage.sent_bytes < 1e4)

    # Small messages to all take a tenth longer over the network, which is not the link's efficiency.
    measured = [o for o in observations(DEFAULT) if o.link.bandwidth_bytes_per_s is None or few_bytes(o)]
    measured = [dataclasses.replace(o, step_s=1.1 * o.step_s) if few_bytes(o) else o for o in measured]
    fitted = calibrate(measured, "made up")
    assert fitted.efficiency == pytest.approx(DEFAULT.efficiency, rel=0.05)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(gw.HyperparameterError, match="cannot fix"):
        calibrate(observations(DEFAULT)[: len(BOUNDS)], "few")


def test_a_machine_and_a_profile_survive_their_files(tmp_path: Path) -> None:
    machine = dataclasses.replace(DEFAULT, call_s=0.123, source="here")
    machine.save(tmp_path / "m.json")
    assert Machine.read(tmp_path / "m.json") == machine
    known = profile()
    known.save(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json") == known
    (tmp_path / "p.json").write_text('{"source": "x"')
    for read in (Machine.read, Profile.read):
        with pytest.raises(gw.HyperparameterError, match=r"p\.json holds no"):
            read(tmp_path / "p.json")


def test_a_calibration_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    DEFAULT.save(path)

    def ended(where: Path, text: str) -> None:
        where.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", ended)
        with pytest.raises(KeyboardInterrupt):
            dataclasses.replace(DEFAULT, round_s=1.0).save(path)
    assert Machine.read(path) == DEFAULT
    assert list(tmp_path.iterdir()) == [path]


def test_an_efficiency_of_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(gw.HyperparameterError, match="efficiency is above 0, not 0"):
        dataclasses.replace(DEFAULT, efficiency=0)
    (tmp_path / "c.json").write_text(json.dumps({**DEFAULT.to_json(), "efficiency": 0.0}))
    with pytest.raises(gw.HyperparameterError, match=r"c\.json holds no calibration .*efficiency is above 0, not 0"):
        Machine.read(tmp_path / "c.json")
    # Other costs may be 0: the work is then free.
    (tmp_path / "c.json").write_text(json.dumps({**DEFAULT.to_json(), "call_s": 0.0}))
    assert Machine.read(tmp_path / "c.json").call_s == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_link_without_bandwidth_is_refused_and_not_taken_for_one_without_a_limit(rate: float) -> None:
    with pytest.raises(gw.HyperparameterError, match="bandwidth_bytes_per_s is above 0 or None for no limit"):
        LinkModel(bandwidth_bytes_per_s=rate)


@pytest.mark.parametrize(
    "wrong", [{"latency_s": -1.0}, {"latency_s": math.nan}, {"ranks_per_host": 0}, {"loss": 1.0}, {"loss": -0.1}]
)
def test_a_link_that_cannot_be_is_refused_by_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(gw.HyperparameterError, match=f"LinkModel: {next(iter(wrong))} is"):
        LinkModel(**wrong)


def test_a_step_that_takes_no_time_is_refused_by_name(tmp_path: Path) -> None:
    empty = profile(0.0)
    with pytest.raises(gw.HyperparameterError, match="a step of 0 s cannot be stretched"):
        empty.timeline.scaled(1.0)
    empty.save(tmp_path / "p.json")
    with pytest.raises(gw.HyperparameterError, match=r"p\.json holds no profile: .*its step takes no time"):
        Profile.read(tmp_path / "p.json")


QUIET = dataclasses.replace(DEFAULT, residual=0.05, contention=1.0)


def test_on_a_slow_link_the_advice_is_to_compress_and_the_link_is_named() -> None:
    slow = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e5))
    found, refused = forecast(profile(), ["bf16", "terngrad"], slow, QUIET, repeats=1)
    by_name = {f.method: f for f in found}
    assert not refused
    assert by_name[NOTHING].bottleneck == "link"
    assert by_name["terngrad"].speedup > by_name["bf16"].speedup > 1.5
    assert all(f.low_s < f.step_s < f.high_s for f in found)
    choice, reason = recommend(found)
    assert choice == "terngrad"
    assert "bounded by" in reason


def test_on_a_fast_link_the_advice_is_to_do_nothing() -> None:
    fast = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e10))
    found, _ = forecast(profile(compute_s=1.0), ["bf16", "terngrad"], fast, QUIET, repeats=1)
    choice, reason = recommend(found)
    assert choice == NOTHING
    assert reason.startswith("do nothing")


def made(method: str, step_s: float) -> Forecast:
    return Forecast(
        method=method,
        world_size=4,
        step_s=step_s,
        low_s=step_s * 0.9,
        high_s=step_s * 1.1,
        floor_s=0.1,
        speedup=1.0 / step_s,
        sent_bytes=1,
        bottleneck="link",
        worker_steps_per_s=4 / step_s,
    )


def test_a_cast_is_advised_before_a_lossy_method_that_hardly_beats_it() -> None:
    assert recommend([made(NOTHING, 1.0), made("bf16", 0.6), made("terngrad", 0.58)])[0] == "bf16"
    assert recommend([made(NOTHING, 1.0), made("bf16", 0.6), made("terngrad", 0.5)])[0] == "terngrad"
    assert recommend([made(NOTHING, 1.0), made("BF16()", 0.52), made("terngrad", 0.5)])[0] == "BF16()"
    assert recommend([made(NOTHING, 1.0), made("FP32()", 0.5)])[0] == NOTHING
    assert recommend([made(NOTHING, 1.0), made("bf16", 0.97), made("terngrad", 0.98)])[0] == NOTHING
    assert recommend([made(NOTHING, 4.0), made("bf16", 1.954)])[1].startswith("use bf16: 1.95 s a step instead of 4 s")
    assert "overlap" in recommend([made(NOTHING, 1.0), made("bf16", 0.9)])[1]


def test_what_its_time_cannot_judge_is_not_advised_for_its_time() -> None:
    slow = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e5))
    found, _ = forecast(profile(), ["terngrad", "signsgd", "grandk", "ErrorFeedback(GRandK())"], slow, QUIET, repeats=1)
    apart = {f.method: f.apart for f in found if f.apart}
    assert list(apart) == ["signsgd", "grandk", "ErrorFeedback(GRandK())"]
    assert "direction" in str(apart["signsgd"])
    assert recommend(found)[0] == "terngrad"


def test_workers_of_one_host_share_link_and_cores() -> None:
    # Slow enough for the time of codecs on a busy machine not to matter.
    link = LinkModel(bandwidth_bytes_per_s=1e5)
    apart, _ = forecast(profile(), ["terngrad"], Scenario(hosts=8, link=link), QUIET, repeats=1)
    together, _ = forecast(profile(), ["terngrad"], Scenario(hosts=2, ranks_per_host=4, link=link), QUIET, repeats=1)
    assert together[1].world_size == apart[1].world_size == 8
    assert together[1].step_s > 1.5 * apart[1].step_s
    shared = Scenario(hosts=2, ranks_per_host=4, cores=2, link=link)
    crowded, _ = forecast(profile(), ["terngrad"], shared, QUIET, repeats=1)
    assert crowded[0].step_s > together[0].step_s


def test_what_lies_far_outside_of_the_calibration_is_said() -> None:
    def beyond(machine: Machine, workers: int, rate: float | None, here: int = 1) -> str | None:
        return machine.beyond(workers, LinkModel(bandwidth_bytes_per_s=rate, ranks_per_host=here))

    known = dataclasses.replace(DEFAULT, most_workers=4, slowest_bytes_per_s=1e6, fastest_bytes_per_s=1e8)
    assert beyond(known, 8, 5e5) is None
    assert beyond(known, 9, 1e6) == "more workers than calibrated (at most 4)"
    assert beyond(known, 2, 4e5) == "a link far from those calibrated (8 to 800 Mbit/s)"
    assert beyond(known, 2, 3e8) == "a link far from those calibrated (8 to 800 Mbit/s)"
    assert beyond(known, 2, None) is None
    loopback = dataclasses.replace(DEFAULT, most_workers=4)
    assert beyond(loopback, 4, 1e6) == "no limited link was calibrated"
    assert beyond(loopback, 4, 1e6, here=4) is None
    assert beyond(DEFAULT, 1000, 1.0) is None
    slow = Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e6))
    found, _ = forecast(profile(), [], slow, loopback, repeats=1)
    assert found[0].extrapolated == "no limited link was calibrated"


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", '{"efficiency": "much"}', "3"])
def test_a_file_that_holds_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(gw.HyperparameterError, match=r"c\.json holds no calibration"):
        Machine.read(tmp_path / "c.json")
