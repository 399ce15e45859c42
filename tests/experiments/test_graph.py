"""The task ``graph``: its graphs, real workers as simulated ones, exact resumption, what rows and records tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_help import Listener, model_of, same
from torch.nn import functional as F

import gradwire as gw
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import build_model
from gradwire.tools.experiments.engines import simulated_engine
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.order import generator
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.tasks.graph import GraphTask, build_graph

CDFGNN = "CDFGNN(tolerance=0.1, values=QSGDinf(levels=7))"
ADAPTIVE = "CDFGNN(tolerance=0.3, adaptive=True)"
VARCO = "VARCO(start=16, end=1, slope=2)"


def plan(halo: str = "fp32", workers: int = 3, **settings: object) -> RunConfig:
    task = build("graph", halo=halo, steps=6, eval_every=3, layers=2, **settings)
    return RunConfig(task=task, workers=workers, simulate=True, log_every=2, checkpoint_every=3)


def accuracy(steps: int, workers: int, halo: str) -> float:
    task = build("graph", halo=halo, steps=steps)
    engine = simulated_engine(RunConfig(task=task, workers=workers, simulate=True))
    for step in range(steps):
        engine.backward(step)
        engine.optimizer.step()
    return engine.score()[1]


def perceptron(steps: int) -> float:
    graph = build_graph("digits")
    with torch.random.fork_rng():
        torch.manual_seed(generator(0, "perceptron", 0).initial_seed())
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(graph.features[graph.training]), graph.labels[graph.training]).backward()
        optimizer.step()
    right = model(graph.features[graph.held_out]).argmax(1) == graph.labels[graph.held_out]
    return float(right.float().mean())


def test_edges_and_their_exchange_are_worth_something_on_digits() -> None:
    """With 20 known labels: 86 % against 77 % without edges, and about 55 % where workers know no halos."""
    with_halos = accuracy(40, 3, "fp32")
    assert with_halos > perceptron(200) + 0.03
    assert with_halos > accuracy(40, 3, "isolated") + 0.03


@pytest.mark.parametrize(("name", "nodes", "classes", "known"), [("digits", 1797, 10, 20), ("sbm", 2048, 8, 160)])
def test_graphs_are_what_their_page_says(name: str, nodes: int, classes: int, known: int) -> None:
    graph = build_graph(name)
    assert (graph.nodes, graph.classes, int(graph.training.sum())) == (nodes, classes, known)
    assert torch.equal(graph.held_out, ~graph.training)
    assert torch.bincount(graph.labels[graph.training]).tolist() == [known // classes] * classes
    degree = torch.bincount(graph.edges[1]) - 1
    # Each image has its eight nearest, and those that it is among the eight nearest of; a node of the model about 12.
    assert int(degree.min()) >= (8 if name == "digits" else 0)
    assert 8 <= float(degree.float().mean()) <= 16
    back = torch.stack([graph.edges[1], graph.edges[0]])
    assert {tuple(e) for e in back.T.tolist()} == {tuple(e) for e in graph.edges.T.tolist()}


def test_blocks_are_what_edges_and_words_tell_of() -> None:
    graph = build_graph("sbm")
    source, target = graph.edges[:, graph.edges[0] != graph.edges[1]]
    within = float((graph.labels[source] == graph.labels[target]).float().mean())
    # 12 of 2048 * 6 edges: a deviation of 0.5 / sqrt(12288).
    assert abs(within - 0.5) < 5 * 0.5 / 12288**0.5
    assert set(graph.features.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("halo", "model"), [("fp32", "gcn"), (VARCO, "gcn"), (CDFGNN, "gcn"), (ADAPTIVE, "gcn"), (CDFGNN, "sage")]
)
def test_two_halves_make_the_whole(tmp_path: Path, listener: Listener, halo: str, model: str) -> None:
    settings = plan(halo, model=model)
    whole = run.train(settings, listener, folder=tmp_path / "whole")
    half = run.train(settings, listener, folder=tmp_path / "half", stop_after=3)
    assert not same(whole, half)
    run.resume(half, listener)
    assert same(whole, half)


@pytest.mark.ranks
@pytest.mark.parametrize(("halo", "model"), [("fp32", "gat"), (VARCO, "gcn"), (CDFGNN, "gcn"), (ADAPTIVE, "sage")])
def test_real_workers_end_in_the_bits_of_simulated_ones(tmp_path: Path, halo: str, model: str) -> None:
    settings, listener = plan(halo, workers=2, model=model), Listener()
    settings = replace(settings, method="QSGDinf(levels=127)")
    simulated = run.train(settings, listener, folder=tmp_path / "simulated")
    real = run.train(replace(settings, simulate=False), listener, folder=tmp_path / "real")
    assert all(torch.equal(value, model_of(real)[name]) for name, value in model_of(simulated).items())
    ends = [json.loads((f / "metrics.jsonl").read_text().splitlines()[-1]) for f in (simulated, real)]
    for field in ("sent_bytes", "received_bytes", "dense_bytes", "accuracy"):
        assert ends[0][field] == ends[1][field]


@pytest.mark.ranks
@pytest.mark.parametrize("halo", [CDFGNN, ADAPTIVE])
def test_a_real_run_with_caches_resumes_in_the_bits_of_one_that_never_stopped(tmp_path: Path, halo: str) -> None:
    settings, listener = replace(plan(halo, workers=2), method="QSGDinf(levels=127)"), Listener()
    simulated = run.train(settings, listener, folder=tmp_path / "simulated")
    half = run.train(replace(settings, simulate=False), listener, folder=tmp_path / "half", stop_after=3)
    run.resume(half, listener)
    assert all(torch.equal(value, model_of(half)[name]) for name, value in model_of(simulated).items())


def test_rows_and_the_record_tell_the_bytes_of_halos(tmp_path: Path, listener: Listener) -> None:
    folder = run.train(plan(CDFGNN), listener, folder=tmp_path / "a")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["event"] == "train"]
    halo = json.loads((folder / "config.json").read_text())["link"]["halo"]
    assert halo["method"] == repr(gw.halo_method(CDFGNN))
    told = sum(2 * row["gauges"]["halo_bytes"]["mean"] for row in trained)
    assert told == pytest.approx(sum(worker["sent_bytes"] for worker in halo["traffic"]) / 3)
    assert all(0 < row["gauges"]["refreshed"]["mean"] <= 1 for row in trained)
    weights = sum(p.numel() for p in build_model(plan()).parameters())
    dense = round(8 * 6 * weights * 2 / 3)
    assert rows[-1]["dense_bytes"] == dense + halo["traffic"][0]["full_bytes"]
    # A ring's bytes are rounded in every step.
    assert rows[-1]["sent_bytes"] == 6 * round(8 * weights * 2 / 3) + halo["traffic"][0]["sent_bytes"]


def test_the_loss_is_the_mean_over_known_labels_whatever_the_partition() -> None:
    losses = [
        simulated_engine(plan(workers=workers, partition=rule)).backward(0)
        for workers, rule in ((1, "random"), (4, "random"), (3, "greedy"), (3, "contiguous"))
    ]
    for loss in losses[1:]:
        assert loss == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"graph": "cora"}, "unknown graph 'cora'"),
        ({"model": "gnc"}, "did you mean 'gcn"),
        ({"partition": "metis"}, "unknown partition"),
        ({"batch": 8}, "leave --batch out"),
        ({"layers": 0}, "layers = 0"),
        ({"halo": "vargo"}, "halo = vargo"),
        ({"halo": "varco", "steps": 2}, "at least 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        build("graph", **settings)


def test_simulated_workers_with_parts_of_a_graph_do_not_step_by_themselves() -> None:
    with pytest.raises(gw.IncompatibleError, match="so that workers are real"):
        simulated_engine(replace(plan(), method="LocalSGD(every=2)"))


def test_settings_survive_json_and_the_task_has_a_usual_method() -> None:
    one = plan(VARCO, partition="greedy")
    assert RunConfig.from_json(one.to_json()) == one
    assert GraphTask.usual_method == "fp32"
