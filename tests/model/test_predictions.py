"""From rows of the step benchmark to predictions: units, roles and intervals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import HyperparameterError
from gradwire.exchange.drivers import Stage
from gradwire.model.calibrate import BOUNDS, Observation, calibrate, log_error
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile
from gradwire.model.forecast import Scenario, forecast
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.profile import Profile, ReadyBucket, Timeline
from gradwire.model.schedule import Load
from gradwire.tools.bench import predict
from gradwire.tools.experiments.errors import RunError

RATES = (None, 1e9, 1e8, 1e7)
VARIANTS = ("compute", "ddp fp32", "gradwire terngrad", "ddp powersgd", "gradwire auto")


def timeline(forward_s: float) -> Timeline:
    bucket = ReadyBucket(names=("weight",), numel=100, ready_s=0.01)
    return Timeline(forward_s=forward_s, buckets=(bucket,), backward_s=0.02, after_s=0.01)


def exchange(hosts: int, spec: str = "x", sent: int = 100_000) -> ExchangeProfile:
    stages = (Stage(1e-3, "all_to_all", sent, 1, hosts - 1), Stage(2e-3))
    return ExchangeProfile(spec, hosts, (BucketJobs((), (stages,), False),))


def row(model: str, hosts: int, rate: float | None, variant: str, step_s: float) -> dict[str, Any]:
    place = f"hosts={hosts}" + (f",bandwidth={rate / 1e6:g}mbit" if rate else "")
    found = {"model": model, "hosts": hosts, "lab": place, "variant": variant, "bandwidth_bits_per_s": rate, "cores": 8}
    # Each cell's timeline tells which it is, by its forward.
    told = {"timeline": timeline(1 / (rate or 1e12)).to_json()} if variant == "compute" else {}
    return {**found, "step_time_s": step_s, **told}


def grid(models: Sequence[str] = ("lenet", "mlp")) -> list[dict[str, Any]]:
    cells = [(model, hosts, rate) for model in models for hosts in (2, 4) for rate in RATES]
    # No two steps take the same time, so that each can be told from all others.
    return [
        row(*cell, variant, 0.05 * (1 + i) + 1e-4 * k)
        for k, cell in enumerate(cells)
        for i, variant in enumerate(VARIANTS)
    ]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Exchanges without a rehearsal; what was asked for."""
    asked: list[tuple[Any, ...]] = []

    def made(model: str, hosts: int, spec: str, variant: str, at: Timeline) -> ExchangeProfile:
        asked.append((model, hosts, spec, variant))
        return exchange(hosts, spec)

    monkeypatch.setattr(predict, "_exchange", made)
    return asked


def test_bits_a_second_become_bytes_a_second(no_kernels: object) -> None:
    for case in predict.cases_of(grid()):
        rate = case.row["bandwidth_bits_per_s"]
        assert case.observation.link.bandwidth_bytes_per_s == (None if rate is None else rate / 8)
        assert case.observation.load == Load(ranks=case.row["hosts"], cores=8)
        assert case.observation.step_s == case.row["step_time_s"]
        assert case.observation.exchange.world_size == case.row["hosts"]


def test_a_lab_has_its_latency_and_loopback_none(no_kernels: object) -> None:
    rows = [row("lenet", 2, 1e9, variant, 0.1) for variant in VARIANTS[:2]]
    for one in rows:
        one["lab"] = "hosts=2,bandwidth=1gbit,delay=5ms"
    (case,) = predict.cases_of(rows)
    assert case.observation.link == LinkModel(bandwidth_bytes_per_s=1.25e8, latency_s=0.005)
    for one in rows:
        one |= {"lab": "loopback,hosts=2", "bandwidth_bits_per_s": None}
    (case,) = predict.cases_of(rows)
    assert case.observation.link == LinkModel()


def test_a_row_tells_its_congestion_control_and_where_frames_are_lost_its_mean(no_kernels: object) -> None:
    rows = [row("lenet", 2, 1e9, variant, 0.1) for variant in VARIANTS[:2]]
    for lab, expected_s in (("delay=5ms", 0.1), ("delay=5ms,loss=1%", 0.15)):
        for one in rows:
            one |= {"lab": f"hosts=2,bandwidth=1gbit,{lab}", "tcp_congestion_control": "bbr", "mean_step_time_s": 0.15}
        (case,) = predict.cases_of(rows)
        assert case.observation.link.congestion == "bbr"
        assert case.observation.step_s == expected_s
    # Rows from before there was a mean.
    old = [{key: value for key, value in one.items() if key != "mean_step_time_s"} for one in rows]
    assert [case.observation.step_s for case in predict.cases_of(old)] == [0.1]


def test_rows_of_links_that_differ_or_fail_are_left_out_and_named_once(
    no_kernels: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    others = [
        "hosts=4,bandwidth=1gbit,groups=2,between=10mbit",
        "hosts=4,bandwidth=1gbit,asymmetric=10mbit",
        "hosts=4,bandwidth=1gbit,host2=10mbit",
        "hosts=4,bandwidth=1gbit,host2.delay=50ms",
        "hosts=4,bandwidth=1gbit,outage=10s@60s",
    ]
    alike = [row("lenet", 4, rate, variant, 0.1) for rate in RATES for variant in VARIANTS]
    rows = [*alike, *({**row("lenet", 4, 1e9, variant, 9.9), "lab": lab} for lab in others for variant in VARIANTS)]
    said: list[str] = []
    assert predict.cases_of(rows, said.append) == predict.cases_of(alike)
    (told,) = [line for line in said if line.startswith("left out, since links")]
    assert all(lab in told for lab in others)
    # Also where a user hands rows to gradwire plan.
    path, said = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(HyperparameterError, match="8 measured steps"):
        predict.machine_of_rows(path, said.append)
    assert said[0] == told


def test_rows_of_methods_without_an_exchange_of_their_own_in_every_step_are_left_out_and_named(
    no_kernels: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    others = ["gradwire auto", "gradwire Auto(residuals=True)", "gradwire dpsgd", "gradwire diloco", "fsdp fp32"]
    rows = [row("lenet", 2, 1e9, variant, 0.1) for variant in ("compute", "gradwire terngrad", *others)]
    said: list[str] = []
    assert [case.row["variant"] for case in predict.cases_of(rows, said.append)] == ["gradwire terngrad"]
    (told,) = [line for line in said if line.startswith("left out")]
    assert all(variant in told for variant in others)
    # Also where a user hands rows to gradwire plan.
    path, said = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(HyperparameterError, match="1 measured step"):
        predict.machine_of_rows(path, said.append)
    assert said == [told]


def test_rows_of_nodes_whose_size_is_not_stated_are_left_out_and_named(no_kernels: object) -> None:
    variants = ("compute", "gradwire hierarchical", "gradwire Hierarchical(TernGrad(), node_size=2)")
    rows = [row("lenet", 4, 1e9, variant, 0.1) for variant in variants]
    said: list[str] = []
    assert [case.row["variant"] for case in predict.cases_of(rows, said.append)] == [variants[2]]
    (told,) = [line for line in said if line.startswith("left out")]
    assert told.endswith("(node_size): the rows of gradwire hierarchical")


def test_what_the_model_cannot_know_is_left_out_and_ddp_is_the_method_that_equals_it(
    no_kernels: list[tuple[Any, ...]],
) -> None:
    assert {case.row["variant"] for case in predict.cases_of(grid())} == {"ddp fp32", "gradwire terngrad"}
    # PyTorch's hook has the name of a method here, which is predicted like any other.
    of_a_method = [*grid(), *(row("mlp", 2, rate, "gradwire powersgd", 1.0) for rate in RATES)]
    assert [case.row["variant"] for case in predict.cases_of(of_a_method)].count("gradwire powersgd") == len(RATES)
    no_kernels[:] = [one for one in no_kernels if "powersgd" not in one]
    assert set(no_kernels) == {
        (model, hosts, spec, variant)
        for model in ("lenet", "mlp")
        for hosts in (2, 4)
        for spec, variant in (("fp32", "ddp fp32"), ("terngrad", "gradwire terngrad"))
    }


def test_the_timeline_is_that_of_the_fastest_link(no_kernels: object) -> None:
    """Whatever the order of the rows: a user profiles once."""

    def told(rows: list[dict[str, Any]]) -> set[float]:
        found = [case.observation.timeline for case in predict.cases_of(rows)]
        return {round(one.forward_s / one.backward_s, 15) for one in found}

    rows = grid()
    for given in (rows, rows[::-1]):
        assert told(given) == {5e-11}
    limited = [one for one in rows if one["bandwidth_bits_per_s"] is not None]
    assert told(limited) == {5e-8}


def test_the_timeline_is_as_long_as_a_step_without_an_exchange_in_the_cell(no_kernels: object) -> None:
    """At another hour a shared machine computes at another speed."""
    rows = [row("lenet", 2, rate, variant, 0.1) for rate in RATES for variant in VARIANTS[:2]]
    seconds = dict(zip(RATES, (0.9, 0.03, 0.05, 0.04)))
    for one in rows:
        one["compute_s"] = seconds[one["bandwidth_bits_per_s"]]
    found = {case.row["bandwidth_bits_per_s"]: case.observation.timeline.compute_s for case in predict.cases_of(rows)}
    assert found == pytest.approx(seconds)
    # The oldest rows do not say.
    for one in rows:
        del one["compute_s"]
    assert len({case.observation.timeline.compute_s for case in predict.cases_of(rows)}) == 1


def test_without_a_step_that_computes_alone_there_is_no_prediction(no_kernels: object) -> None:
    with pytest.raises(RunError, match="no step without an exchange was measured for lenet on 2 hosts"):
        predict.cases_of([one for one in grid() if one["variant"] != "compute"])


def test_ddp_alone_has_no_codec() -> None:
    """By a real rehearsal of a small model."""
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "5.weight", "5.bias", "7.weight", "7.bias")
    at = dataclasses.replace(timeline(0.1), buckets=(ReadyBucket(names=names, numel=431_080, ready_s=0.01),))
    bare, ours = (predict._exchange("lenet", 2, "fp32", variant, at) for variant in ("ddp fp32", "gradwire fp32"))
    assert [sum(bucket.work_s for bucket in e.buckets) > 0 for e in (bare, ours)] == [False, True]
    assert bare.sent_bytes == ours.sent_bytes == 4 * 431_080


def test_no_cell_that_calibrates_is_judged(no_kernels: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Observation] = []

    def noted(observations: Sequence[Observation], source: str) -> Machine:
        seen.extend(observations)
        return dataclasses.replace(DEFAULT, source=source)

    monkeypatch.setattr(predict, "calibrate", noted)
    rows = grid()
    machine, found = predict.judge(rows)
    cases = predict.cases_of(rows)
    used = [case.observation in seen for case in cases]
    assert [one["role"] for one in found] == ["calibration" if was else "judged" for was in used]
    cells = {
        role: {c.cell for c, one in zip(cases, found) if one["role"] == role} for role in ("calibration", "judged")
    }
    assert not cells["calibration"] & cells["judged"]
    # Every third of sixteen cells: both models, both numbers of hosts, and links of several speeds.
    assert len(cells["calibration"]) == 6
    assert len(cells["judged"]) == 10
    assert machine.source == f"{len(seen)} measured steps of 6 cells"
    assert len(seen) == 12


def test_an_error_is_relative_to_what_was_measured(no_kernels: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "calibrate", lambda observations, source: DEFAULT)
    _, found = predict.judge(grid())
    for one, case in zip(found, predict.cases_of(grid())):
        assert one["measured_s"] == case.row["step_time_s"]
        assert one["predicted_s"] == case.observation.predict(DEFAULT)
        assert one["measured_s"] * (1 + one["relative_error"]) == pytest.approx(one["predicted_s"])
        assert (one["model"], one["hosts"], one["variant"]) == tuple(case.row[k] for k in ("model", "hosts", "variant"))


def observed(noise: Sequence[float]) -> list[Observation]:
    """Steps of the default machine, each off by its share of ``noise``."""
    found = []
    for i, off in enumerate(noise):
        hosts, rate = 2 + i % 3, (None, 1e7, 1e6)[i % 3]
        link = LinkModel(bandwidth_bytes_per_s=rate)
        one = Observation(timeline(0.01), exchange(hosts, sent=10_000 * (1 + i)), link, Load(ranks=1, cores=2), 1.0)
        found.append(dataclasses.replace(one, step_s=one.predict(DEFAULT) * math.exp(off)))
    return found


def test_the_residual_is_the_deviation_of_what_was_measured_from_the_fit() -> None:
    """For as many steps as the numbers leave free."""
    measured = observed([0.2 if i % 2 else -0.2 for i in range(6 * len(BOUNDS))])
    fitted = calibrate(measured, "noisy")
    errors = [log_error(one, fitted) for one in measured]
    assert fitted.residual == pytest.approx(math.sqrt(sum(e * e for e in errors) / (len(errors) - len(BOUNDS))))
    # Noise that no number of the model can explain, as it changes from step to step of one cluster.
    assert 0.1 < fitted.residual < 0.25
    assert (fitted.most_workers, fitted.slowest_bytes_per_s, fitted.fastest_bytes_per_s) == (4, 1e6, 1e7)


def test_loopback_leaves_the_links_efficiency_as_it_is() -> None:
    measured = observed([0.1 * (i % 3) for i in range(len(BOUNDS) + 3)])
    start = dataclasses.replace(DEFAULT, efficiency=0.77)
    fitted = calibrate(measured, "x", start, fit_links=False)
    assert fitted.efficiency == 0.77
    assert fitted.call_s != start.call_s
    with pytest.raises(HyperparameterError, match=r"8 measured steps cannot fix 8 numbers"):
        calibrate(measured[: len(BOUNDS)], "few")


def forecasts(machine: Machine, setting: Scenario | None = None) -> Any:
    names = ("weight",)
    at = dataclasses.replace(timeline(0.1), buckets=(ReadyBucket(names=names, numel=40_000, ready_s=0.01),))
    known = Profile(source="test", parameters={"weight": ((200, 200), (200, 1))}, timeline=at)
    chosen = setting or Scenario(hosts=4, link=LinkModel(bandwidth_bytes_per_s=1e6))
    found, _ = forecast(known, ["fp32", "bf16"], chosen, machine, repeats=1)
    return {one.method: one for one in found}


def test_an_interval_holds_four_fifths_of_a_normal_residual() -> None:
    for residual in (0.05, 0.3):
        for one in forecasts(dataclasses.replace(DEFAULT, residual=residual)).values():
            # Phi(1.2816) = 0.9: a tenth lies beyond each end.
            assert math.log(one.high_s / one.step_s) == pytest.approx(1.2816 * residual)
            assert math.log(one.step_s / one.low_s) == pytest.approx(1.2816 * residual)


def test_speed_ups_bytes_and_throughput_of_a_forecast() -> None:
    found = forecasts(DEFAULT)
    alone = found["ddp fp32"]
    assert alone.speedup == 1.0
    for one in found.values():
        assert one.speedup == pytest.approx(alone.step_s / one.step_s)
        assert one.worker_steps_per_s == pytest.approx(4 / one.step_s)
    # A ring among four: three quarters of the vector, twice.
    assert alone.sent_bytes == found["fp32"].sent_bytes == 240_000
    assert found["bf16"].sent_bytes == 120_000
    # At 1 MB/s the bytes alone take 0.24 s, against 0.13 s of computing.
    assert alone.floor_s == pytest.approx(0.24)
    assert found["bf16"].floor_s == pytest.approx(0.13)


def test_ranks_that_share_a_core_take_as_much_longer() -> None:
    """Two ranks on each core: computing takes twice its time."""
    setting = Scenario(hosts=2, ranks_per_host=4, cores=2, link=LinkModel())
    assert forecasts(DEFAULT, setting)["ddp fp32"].floor_s == pytest.approx(2 * 0.13)
    alone = Scenario(hosts=2, ranks_per_host=4, link=LinkModel())
    assert forecasts(DEFAULT, alone)["ddp fp32"].floor_s == pytest.approx(0.13)
    assert alone.world_size == setting.world_size == 8
