"""Sinks: what a logger's own reader finds is what was logged; what is not installed is named."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.integrations import MLflowSink, PrometheusSink, TensorBoardSink, WandbSink

ROWS = [
    (0, {"rounds": 1.0, "sent_bytes": 1.5e9, "encode_s": 0.25, "bits_per_element": 1.625, "gauge/density": 0.01}),
    (50, {"rounds": 51.0, "sent_bytes": 7.5e10, "encode_s": 12.5, "bits_per_element": 1.5, "gauge/density": 0.02}),
]
"""Steps and metrics; all numbers are float32, which TensorBoard keeps."""


def test_tensorboard_has_a_scalar_for_each_metric(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardSink(tmp_path) as sink:
        for step, metrics in ROWS:
            sink.log(metrics, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"gradwire/{name}" for name in ROWS[0][1]}
    for name in ROWS[0][1]:
        found = [(event.step, event.value) for event in events.Scalars(f"gradwire/{name}")]
        assert found == [(step, pytest.approx(metrics[name], rel=1e-7)) for step, metrics in ROWS]


def test_a_writer_of_someone_elses_stays_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with TensorBoardSink(writer) as sink:
        sink.log(ROWS[0][1], 0)
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "loss" in events.Tags()["scalars"]


def test_wandb_keeps_the_metrics_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with WandbSink(project="gradwire", mode="offline", dir=str(tmp_path)) as sink:
        for step, metrics in ROWS:
            sink.log(metrics, step)
        found = dict(sink._run.summary)
    assert wandb.run is None, "the sink's own run is over"
    last = {f"gradwire/{name}": value for name, value in ROWS[-1][1].items()} | {"gradwire/step": 50}
    assert {name: found[name] for name in last} == last
    assert list(tmp_path.rglob("run-*.wandb"))


def test_mlflow_has_the_history_of_each_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path.as_uri()
    with MLflowSink(tracking_uri=store, experiment="first") as sink:
        for step, metrics in ROWS:
            sink.log(metrics, step)
    client = mlflow.MlflowClient(tracking_uri=store)
    for name in ROWS[0][1]:
        history = client.get_metric_history(sink.run_id, f"gradwire/{name}")
        assert [(row.step, row.value) for row in history] == [(step, metrics[name]) for step, metrics in ROWS]
    assert client.get_run(sink.run_id).info.status == "FINISHED"
    # Another sink of the same run, and one of the same experiment.
    again = MLflowSink(sink.run_id, tracking_uri=store)
    again.log({"rounds": 60.0}, 60)
    other = MLflowSink(tracking_uri=store, experiment="first")
    assert other.run_id != sink.run_id
    assert [row.step for row in client.get_metric_history(sink.run_id, "gradwire/rounds")] == [0, 50, 60]
    # A run that somebody else has started goes on.
    theirs = client.create_run(client.get_experiment_by_name("first").experiment_id).info.run_id
    MLflowSink(theirs, tracking_uri=store).close()
    assert client.get_run(theirs).info.status == "RUNNING"


def test_prometheus_scrapes_counters_and_gauges_with_the_rank() -> None:
    pytest.importorskip("prometheus_client")
    with PrometheusSink(0, rank=3) as sink:
        port = sink.port
        assert scraped(port) == {}
        for step, metrics in ROWS:
            sink.log(metrics, step)
        found = scraped(port)
    assert found == {
        "gradwire_rounds_total": 51.0,
        "gradwire_sent_bytes_total": 7.5e10,
        "gradwire_encode_seconds_total": 12.5,
        "gradwire_bits_per_element": 1.5,
        "gradwire_gauge_density": 0.02,
        "gradwire_step": 50.0,
    }
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(port)


def scraped(port: int | None) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.split(" ")
            assert name.endswith('{rank="3"}')
            found[name.partition("{")[0]] = float(value)
    return found


def test_two_ranks_share_a_registry_of_someone_elses() -> None:
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    first, second = (PrometheusSink(rank=rank, registry=registry) for rank in (0, 1))
    first.log(ROWS[0][1], 0)
    second.log(ROWS[1][1], 50)
    text = library.generate_latest(registry).decode()
    assert 'gradwire_rounds_total{rank="0"} 1.0' in text
    assert 'gradwire_rounds_total{rank="1"} 51.0' in text
    # Formats of Prometheus have one group of lines for each name, and parsers refuse a second one.
    assert text.count("# TYPE gradwire_rounds_total counter") == text.count("# TYPE gradwire_step gauge") == 1
    first.close()
    assert 'rank="0"' not in library.generate_latest(registry).decode()


def test_a_prometheus_sink_is_closed_twice_and_leaves_nothing_where_its_port_is_taken() -> None:
    """Another one of the same rank in the registry would give a page that Prometheus refuses."""
    library = pytest.importorskip("prometheus_client")
    registry = library.CollectorRegistry()
    with PrometheusSink(0, registry=registry) as sink:
        with pytest.raises(OSError, match="in use"):
            PrometheusSink(sink.port, rank=1, registry=registry)
        with pytest.raises(gw.HyperparameterError, match="rank: a sink of rank 0 is in this registry already"):
            PrometheusSink(registry=registry)
        PrometheusSink(rank=1, registry=registry).close()
        sink.close()
    PrometheusSink(registry=registry).close()


@pytest.mark.parametrize(
    ("module", "package", "build"),
    [
        ("torch.utils.tensorboard", "tensorboard", lambda: TensorBoardSink("folder")),
        ("wandb", "wandb", lambda: WandbSink(mode="offline")),
        ("mlflow", "mlflow", lambda: MLflowSink()),
        ("prometheus_client", "prometheus_client", lambda: PrometheusSink()),
    ],
)
def test_what_is_not_installed_is_named(module: str, package: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(gw.BackendError, match=f"pip install {package}"):
        build()
