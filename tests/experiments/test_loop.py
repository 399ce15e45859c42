"""The training loop's arithmetic on an engine that does as it is told, and the accounts of workers that fail."""

from __future__ import annotations

import signal
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.tools.experiments import launch, train
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import score_share
from gradwire.tools.experiments.folder import RunFolder
from gradwire.tools.experiments.launch import Crew, Worker
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import build
from gradwire.tools.experiments.train import Trainer

PLAN = RunConfig(task=build("digits", steps=4, eval_every=4, lr=0.5, momentum=0.0), workers=4, log_every=2)
LOSSES = [8.0, 4.0, 1.0, 3.0]
TIMES_S = [0.5, 0.125, 0.25, 1.0]


class Scripted:
    """An engine whose gradient is always one, and whose losses are given; a link that sends 100 bytes a step."""

    rank, world_size, local = 0, 4, False
    now_s = 10.0

    def __init__(self) -> None:
        self.model: nn.Module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.steps: list[int] = []

    def backward(self, step: int) -> float:
        self.steps.append(step)
        Scripted.now_s += TIMES_S[step]
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return LOSSES[step]

    def mean(self, values: Sequence[float]) -> list[float]:
        # The first one is the loss; no rank was asked to stop, and no checkpoint is due.
        return [values[0] + 0.5, *map(float, values[1:])]

    def penalty(self) -> float:
        return 0.0

    def score(self) -> tuple[float, float]:
        return 0.25, 0.75

    def barrier(self) -> None:
        pass

    def traffic(self) -> gw.Traffic:
        taken = len(self.steps)
        return gw.Traffic(sent_bytes=100 * taken, received_bytes=50 * taken, dense_bytes=400 * taken, elements=taken)

    def gauges(self) -> list[dict[str, float]]:
        return []

    def record(self) -> dict[str, Any]:
        return {"taken": len(self.steps)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in the engine alone."""
    Scripted.now_s = 10.0
    monkeypatch.setattr(train, "now_s", lambda: Scripted.now_s)


def trained(folder: Path, plan: RunConfig = PLAN) -> tuple[Trainer, list[dict[str, Any]]]:
    run, rows = RunFolder.create(folder), list[dict[str, Any]]()
    run.write_config({})
    trainer = Trainer(plan, Scripted(), run, lambda row: rows.append(dict(row)))
    trainer.run()
    return trainer, rows


def test_a_row_holds_the_mean_loss_and_the_median_time_since_the_last(tmp_path: Path) -> None:
    trainer, rows = trained(tmp_path / "run")
    train_rows = [row for row in rows if row["event"] == "train"]
    assert [row["step"] for row in train_rows] == [2, 4]
    # The mean over steps here, then over workers, which the engine adds a half for.
    assert [row["loss"] for row in train_rows] == [6.0 + 0.5, 2.0 + 0.5]
    assert [row["step_time_s"] for row in train_rows] == [statistics.median(TIMES_S[i : i + 2]) for i in (0, 2)]
    assert [row["elapsed_s"] for row in train_rows] == [0.625, 1.875]
    assert [(row["sent_bytes"], row["dense_bytes"], row["bits_per_element"]) for row in train_rows] == [
        (200, 800, 8.0),
        (400, 1600, 8.0),
    ]
    first, last = (row for row in rows if row["event"] == "eval")
    assert (first["step"], first["sent_bytes"], first["bits_per_element"], first["step_time_s"]) == (0, 0, None, None)
    assert (last["step"], last["loss"], last["accuracy"], last["elapsed_s"]) == (4, 0.25, 0.75, 1.875)
    assert trainer.folder.read_config()["link"] == {"taken": 4}, "what the link chose is known at the end"


def test_of_more_than_two_steps_the_median_time_is_told(tmp_path: Path) -> None:
    _, rows = trained(tmp_path / "run", RunConfig(task=PLAN.task, workers=4, log_every=3))
    assert next(row["step_time_s"] for row in rows if row["event"] == "train") == 0.25


def test_each_step_has_the_learning_rate_of_its_schedule(tmp_path: Path) -> None:
    task = build("digits", steps=4, eval_every=4, lr=0.5, momentum=0.0, schedule="polynomial")
    trainer, _ = trained(tmp_path / "run", RunConfig(task=task, workers=4))
    # Four steps against a gradient of one, by 0.5 sqrt(1 - step / 4).
    expected = -sum(0.5 * (1 - step / 4) ** 0.5 for step in range(4))
    assert float(trainer.engine.model.weight.detach()) == pytest.approx(expected, rel=1e-6)  # type: ignore[operator]
    assert cast(Scripted, trainer.engine).steps == [0, 1, 2, 3]


def test_a_moving_average_is_evaluated_and_the_weights_come_back(tmp_path: Path) -> None:
    task = build("digits", steps=4, eval_every=4, lr=0.5, momentum=0.0, ema=0.25)
    run = RunFolder.create(tmp_path / "run")
    run.write_config({})
    engine, seen = Scripted(), list[float]()
    engine.score = lambda: (seen.append(float(engine.model.weight.detach())), (0.0, 0.0))[1]  # type: ignore
    trainer = Trainer(RunConfig(task=task, workers=4), engine, run, lambda row: None)
    trainer.run()
    average = 0.0
    for step in range(1, 5):
        decay = min(0.25, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * -0.5 * step
    assert seen == [0.0, pytest.approx(average, rel=1e-6)]
    assert float(engine.model.weight.detach()) == -2.0  # type: ignore[operator]


@pytest.mark.parametrize("older", [False, True])
def test_each_rank_goes_on_with_its_own_losses(tmp_path: Path, older: bool) -> None:
    """The checkpoint of step 2 lies between rows; in an older one there are the losses of rank 0 alone."""
    folder, plan = RunFolder.create(tmp_path / "run"), RunConfig(task=PLAN.task, workers=4, log_every=4)

    def trainer(rank: int) -> tuple[Trainer, list[float]]:
        engine, means = Scripted(), list[float]()
        computed = engine.backward
        engine.rank = rank
        engine.backward = lambda step: computed(step) + rank  # type: ignore[method-assign]
        engine.mean = lambda values: (means.append(values[0]), list(values))[1]  # type: ignore
        return Trainer(plan, engine, folder, lambda row: None), means

    def two_steps(of: Trainer) -> None:
        of._one_step()
        of._one_step()

    halves = [trainer(rank)[0] for rank in (0, 1)]
    folder.begin_checkpoint(2)
    for rank, half in enumerate(halves):
        two_steps(half)
        state = half._rank_state()
        if older:
            del state["losses"]
        folder.save_part(2, f"rank-{rank}", state)
    folder.save_part(2, "shared", halves[0]._shared_state())
    folder.commit_checkpoint(2)
    for rank in (0, 1):
        resumed, means = trainer(rank)
        resumed.load()
        two_steps(resumed)
        resumed._log()
        assert means == [statistics.fmean(LOSSES) + (rank / 2 if older else rank)]


def test_weight_decay_acts_on_weights_alone() -> None:
    """And on each by its strength: without data's gradient, what is left is the decay."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert [p is q for p, q in zip(build("digits").decayed(model), [model[0].weight])] == [True]
    task = build("digits", weight_decay=0.5, batch=66)
    plan = RunConfig(task=task, method="fp32", workers=3, simulate=True)
    plain = RunConfig(task=build("digits", batch=66), method="fp32", workers=3, simulate=True)
    gradients = []
    for one in (plan, plain):
        engine = SimulatedEngine(one)
        engine.backward(0)
        gradients.append({name: p.grad for name, p in engine.model.named_parameters()})
    weights = dict(SimulatedEngine(plan).model.named_parameters())
    for name, parameter in weights.items():
        decay = gradients[0][name] - gradients[1][name]  # type: ignore[operator]
        expected = 0.5 * parameter.detach() if parameter.dim() > 1 else torch.zeros_like(parameter)
        torch.testing.assert_close(decay, expected, rtol=0, atol=2.0**-20)


def test_a_share_is_scored_in_evaluation_mode_without_gradients() -> None:
    model, modes = nn.Linear(2, 3), list[bool]()
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training or torch.is_grad_enabled()))
    inputs = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 0, 1])
    totals = score_share(PLAN, model, [(inputs[:2], target[:2]), (inputs[2:], target[2:])])
    logits = model(inputs).detach()
    right = int((logits.argmax(1) == target).sum())
    assert totals == [pytest.approx(float(nn.functional.cross_entropy(logits, target, reduction="sum"))), right, 5]
    assert modes[:2] == [False, False]
    assert model.training


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def worker(rank: int, code: int, failure: dict[str, Any] | None = None, log: str = "") -> Worker:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(log.encode())
    return Worker(rank, cast(Any, Ended(code)), -1, file, failure=failure)


def told(kind: str, message: str, expected: bool = False) -> dict[str, Any]:
    return {"type": kind, "message": message, "expected": expected}


LOST = told("ExchangeError", "rank 0 could not go on", expected=True)


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (
            [worker(0, 1, LOST), worker(1, -9)],
            "worker 1 was killed by SIGKILL (out of memory?); rank 0 could not go on",
        ),
        ([worker(0, -signal.SIGSEGV)], "worker 0 was killed by SIGSEGV"),
        ([worker(0, 1, LOST), worker(1, 1, told("KeyError", "'x'\nmore"))], "worker 1: KeyError: 'x'"),
        ([worker(0, 1, told("RuntimeError", "Connection closed")), worker(1, 1, LOST)], "rank 0 could not go on"),
        ([worker(0, 1, told("TrainingError", "not finite", expected=True)), worker(1, 1, LOST)], "not finite"),
        ([worker(0, 3, log="first\nlast words\n")], "worker 0 ended with code 3: last words"),
        ([worker(0, 0), worker(1, 3)], "worker 0 ended with code 0: it wrote nothing"),
    ],
)
def test_of_several_accounts_the_one_that_tells_most_is_given(workers: list[Worker], sentence: str) -> None:
    crew = Crew.__new__(Crew)
    crew.workers = workers
    assert str(crew._error()) == sentence


def test_of_several_checkpoints_the_newest_is_read(tmp_path: Path) -> None:
    """As where a run was ended between the new one's name and the old one's removal."""
    run = RunFolder(tmp_path)
    for step in (9, 10):
        run.begin_checkpoint(step)
        run.save_part(step, "shared", {"step": step})
        run.pending(step).replace(tmp_path / "checkpoint" / f"step-{step}")
    assert run.load_part("shared") == {"step": 10}


class Interrupted:
    """A crew on an emulated cluster that is interrupted, and then ends in time; its host has sent 100 bytes."""

    network = object()

    def __init__(self, *words: object, **options: object) -> None:
        self.asked = False

    def __enter__(self) -> Interrupted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def watch(self, *calls: object, limit_s: float | None = None) -> None:
        if limit_s is None:
            raise KeyboardInterrupt
        assert self.asked

    def ask_to_stop(self) -> None:
        self.asked = True

    def interfaces(self) -> list[dict[str, int]]:
        return [{"host": 0, "sent_bytes": 100 if self.asked else 1}]


def test_bytes_of_an_interrupted_part_are_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "Crew", Interrupted)
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({})
    for sent in (100, 200):
        with pytest.raises(KeyboardInterrupt):
            launch.run_workers(PLAN, folder.path, lambda row: None)
        assert folder.read_config()["interfaces"] == [{"host": 0, "sent_bytes": sent}]
