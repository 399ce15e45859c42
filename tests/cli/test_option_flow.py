"""Every option of a command reaches what it is for: none is dropped, and none arrives as another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import gradwire as gw
from gradwire.exchange.planning import Options
from gradwire.model.forecast import Scenario
from gradwire.model.machine import DEFAULT, LinkModel
from gradwire.tools import lab as lab_package
from gradwire.tools import report
from gradwire.tools.cli import bench_commands, bootstrap, plan_command
from gradwire.tools.cli import torchrun as torchrun_of
from gradwire.tools.cli.app import app
from gradwire.tools.cli.options import ExchangeOptions
from gradwire.tools.experiments import run
from gradwire.tools.experiments.config import LinkSettings, RunConfig
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.lab import Impairments, Outage, Topology

LINK = {
    "exclude": (["--exclude", "0.*", "--exclude", "*.bias"], ("0.*", "*.bias")),
    "min_numel": (["--min-numel", "77"], 77),
    "warmup_steps": (["--warmup-steps", "3"], 3),
    "collective": (["--collective", "all_gather"], "all_gather"),
    "fallback": (["--fallback", "fp32"], "fp32"),
    "fallback_limit": (["--fallback-limit", "2.5"], 2.5),
    "check_every": (["--check-every", "17"], 17),
    "seed": (["--seed", "11"], 11),
}
"""For each option of a link, words and the value that they mean; none is the default."""
LINK_WORDS = [word for words, _ in LINK.values() for word in words]
LINK_OPTIONS = {name: value for name, (_, value) in LINK.items()}

TASK = {
    "steps": (["--steps", "9"], 9),
    "batch": (["--batch", "12"], 12),
    "lr": (["--lr", "0.25"], 0.25),
    "optimizer": (["--optimizer", "sgd"], "sgd"),
    "momentum": (["--momentum", "0.5"], 0.5),
    "schedule": (["--schedule", "cosine"], "cosine"),
    "eval_every": (["--eval-every", "4"], 4),
    "ema": (["--ema", "0.75"], 0.75),
    "l2": (["--l2", "0.125"], 0.125),
    "l1": (["--l1", "0.0625"], 0.0625),
    "split": (["--split", "random"], "random"),
    "data": (["--data", "rows.txt"], "rows.txt"),
}
TASK_WORDS = [word for words, _ in TASK.values() for word in words]
TASK_SETTINGS = {name: value for name, (_, value) in TASK.items()}

RUN_WORDS = ["--workers", "3", "--threads", "2", "--log-every", "7", "--lab", "hosts=3,bandwidth=100mbit"]
RUN_FIELDS = {"workers": 3, "threads": 2, "log_every": 7, "lab": "hosts=3,bandwidth=100mbit"}


class Reached(Exception):
    """Ends a command where it would begin its work."""


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a command called with what, instead of the work."""
    found: dict[str, Any] = {}

    def stop(name: str) -> Any:
        def stopped(*words: Any, **options: Any) -> Any:
            found.update(name=name, words=words, options=options)
            raise Reached

        return stopped

    for home, name in (
        (run, "train"),
        (run, "compare"),
        (run, "resume"),
        (torchrun_of, "replace_process"),
        (torchrun_of, "run_command"),
        (bench_commands, "measure_grid"),
        (bench_commands, "measure_kernels"),
        (plan_command, "profile_name"),
        (plan_command, "forecast"),
        (report, "write_report"),
    ):
        monkeypatch.setattr(home, name, stop(name))
    return found


def check_plan(plan: RunConfig) -> None:
    assert plan.task.settings() | TASK_SETTINGS == plan.task.settings()
    assert plan.task.name == "logreg"
    assert {name: getattr(plan, name) for name in RUN_FIELDS} == RUN_FIELDS
    assert plan.link_options() == LINK_OPTIONS


def test_train_hands_every_option_on(reached: dict[str, Any], tmp_path: Path) -> None:
    own = ["--method", "bf16", "--stop-after", "6", "--overwrite", "--out", tmp_path]
    own += ["--checkpoint-every", "5", "--checkpoint-minutes", "2.5"]
    result = call("train", "logreg", *TASK_WORDS, *RUN_WORDS, *LINK_WORDS, *own)
    assert isinstance(result.exception, Reached), result.output
    assert reached["name"] == "train"
    plan, _ = reached["words"]
    check_plan(plan)
    assert (plan.method, plan.checkpoint_every, plan.simulate) == ("bf16", 5, False)
    assert plan.checkpoint_minutes == 2.5
    assert reached["options"] == {"folder": tmp_path, "overwrite": True, "stop_after": 6}


def test_compare_hands_every_option_on(reached: dict[str, Any], tmp_path: Path) -> None:
    own = ["--method", "bf16", "--method", "qsgd", "--overwrite", "--out", tmp_path]
    result = call("compare", "logreg", *TASK_WORDS, *RUN_WORDS, *LINK_WORDS, *own)
    assert isinstance(result.exception, Reached), result.output
    assert reached["name"] == "compare"
    plan, methods, _ = reached["words"]
    check_plan(plan)
    assert methods == ["bf16", "qsgd"]
    assert reached["options"] == {"folder": tmp_path, "overwrite": True}


def test_under_torchrun_its_workers_are_the_runs(reached: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    # 66 is no multiple of the default of 4, and neither is 64 of 3.
    for words in ((), ("--workers", 3)):
        call("train", "digits", "--batch", 66, *words)
        assert reached.pop("words")[0].workers == 3
    assert "cannot be shared evenly by 3 workers: use --batch 66" in call("train", "digits").stderr
    refused = call("train", "digits", "--batch", 66, "--workers", 2)
    assert refused.exit_code == 2
    assert "--workers 2, and torchrun has started 3: leave --workers out" in " ".join(refused.stderr.split())
    call("train", "digits", "--simulate", "--workers", 2)
    assert reached.pop("words")[0].workers == 2, "they are played in each process"
    monkeypatch.setenv("WORLD_SIZE", "1")
    call("train", "digits")
    assert reached.pop("words")[0].workers == 4, "the training itself says that one is too few"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_model_of_the_text_is_handed_on(reached: dict[str, Any], command: str) -> None:
    call(command, "text", "--model", "transformer", "--simulate")
    assert reached["words"][0].task.model == "transformer"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_only_cifar10_has_is_handed_on(reached: dict[str, Any], command: str) -> None:
    words = ["--model", "convnet", "--crop", "24", "--weight-decay", "0.004", "--optimizer", "adam", "--simulate"]
    call(command, "cifar10", "--data", "folder", *words)
    task = reached["words"][0].task
    assert (task.model, task.crop, task.weight_decay, task.optimizer) == ("convnet", 24, 0.004, "adam")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_all_of_a_graph_s_options_are_handed_on(reached: dict[str, Any], command: str) -> None:
    given = {"graph": "sbm", "model": "gat", "layers": 4, "partition": "greedy", "halo": "bf16"}
    call(command, "graph", "--simulate", *(word for name, value in given.items() for word in (f"--{name}", value)))
    settings = reached["words"][0].task.settings()
    assert {name: settings[name] for name in given} == given


@pytest.mark.parametrize(("task", "method"), [("digits", "terngrad"), ("graph", "fp32")])
def test_a_task_has_a_method_of_its_own_where_none_is_named(reached: dict[str, Any], task: str, method: str) -> None:
    call("train", task, "--simulate")
    assert reached["words"][0].method == method
    call("train", task, "--simulate", "--method", "bf16")
    assert reached["words"][0].method == "bf16"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_workers_may_be_simulated(reached: dict[str, Any], command: str) -> None:
    call(command, "digits", "--simulate")
    plan = reached["words"][0]
    assert plan.simulate
    assert plan.task.name == "digits"
    default = RunConfig(task=plan.task, simulate=True)
    assert plan.link_options() == default.link_options(), "without words, all is as by default"


def test_real_workers_that_are_meant_to_be_equal_are_compared_unless_asked_otherwise(reached: dict[str, Any]) -> None:
    def every(*words: object) -> int:
        call("train", "digits", *words)
        found: int = reached["words"][0].link_options()["check_every"]
        return found

    assert every() == every("--method", "diloco") == 100
    assert every("--method", "dpsgd") == every("--simulate") == every("--check-every", 0) == 0
    assert every("--check-every", 7) == 7
    call("run", "--nproc-per-node=2", __file__)
    assert reached["words"][0].link_options()["check_every"] == 0
    assert "leave --simulate or --check-every out" in call("train", "digits", "--simulate", "--check-every", 7).output


def test_resume_hands_its_options_on(reached: dict[str, Any], tmp_path: Path) -> None:
    call("train", "--resume", tmp_path, "--stop-after", 6)
    assert reached["name"] == "resume"
    assert reached["words"][0] == tmp_path
    assert reached["options"] == {"stop_after": 6}


def test_run_hands_every_option_and_flag_on(reached: dict[str, Any]) -> None:
    flags = ["--nproc-per-node=3", "--nnodes=2", "--node-rank=1", "--master-addr=host", "--master-port=123"]
    flags += ["--max-restarts=4", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-id=job", "--log-dir=logs"]
    result = call("run", *flags, "--method", "QSGD(levels=3)", *LINK_WORDS, __file__, "--epochs", 3)
    assert isinstance(result.exception, Reached), result.output
    settings, words = reached["words"]
    assert settings == LinkSettings(method=repr(gw.QSGD(levels=3)), **LINK_OPTIONS)
    given = words[words.index("gradwire.tools.cli.launcher") + 1 : words.index("--no-python")]
    assert sorted(given) == sorted(flags)
    assert words[-5:] == ["-m", "gradwire.tools.cli.bootstrap", __file__, "--epochs", "3"]


def test_run_on_a_lab_hands_the_settings_to_every_host(
    reached: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Network:
        def address(self, host: int) -> str:
            return f"10.0.0.{host}"

    @contextlib.contextmanager
    def open_network(topology: Topology) -> Iterator[Network]:
        assert topology == Topology(hosts=3, bandwidth=1e8)
        yield Network()

    monkeypatch.setattr(torchrun_of, "open_network", open_network)
    lab = ["--lab", "hosts=3,bandwidth=100mbit", "--nproc-per-node", "2", "--method", "QSGD(levels=3)"]
    result = call("run", *lab, *LINK_WORDS, __file__, "x")
    assert isinstance(result.exception, Reached), result.output
    _, words, variables = reached["words"]
    assert bootstrap.from_text(variables[bootstrap.ENVIRONMENT]) == LinkSettings(
        method=repr(gw.QSGD(levels=3)), **LINK_OPTIONS
    )
    for host in range(3):
        given = words(host)
        assert {"--nnodes=3", f"--node-rank={host}", "--master-addr=10.0.0.0", "--nproc-per-node=2"} <= set(given)
        assert given[-2:] == [__file__, "x"]


def test_every_setting_of_a_link_is_an_option_with_the_same_default() -> None:
    fields = {field.name for field in dataclasses.fields(LinkSettings)} - {"method", "seed"}
    assert {field.name for field in dataclasses.fields(ExchangeOptions)} == fields
    assert LinkSettings(**ExchangeOptions().settings()) == LinkSettings()


def test_settings_travel_to_the_workers_whole() -> None:
    settings = LinkSettings(method="bf16", **LINK_OPTIONS)
    assert bootstrap.from_text(bootstrap.to_text(settings)) == settings
    assert settings.link_options() == LINK_OPTIONS


def test_every_module_of_a_script_is_attached_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Module(nn.Module):
        """Stands for DDP, which needs a group."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Module)
    monkeypatch.setattr(gw, "attach", lambda module, method, **options: given.append((module, method, options)))
    links = bootstrap.attach_everywhere(LinkSettings(method="bf16", **LINK_OPTIONS))
    modules = [Module(3), Module(size=4)]
    assert [module.size for module in modules] == [3, 4]
    assert [(m is n, method) for m, (n, method, _) in zip(modules, given)] == [(True, "bf16")] * 2
    assert [options for *_, options in given] == [LINK_OPTIONS] * 2
    assert len(links) == 2


def test_the_options_change_what_a_link_does(reached: dict[str, Any]) -> None:
    """From a command through the record of the run to the link, for those that a link's record shows."""
    call("train", "digits", "--simulate", "--exclude", "1.*", "--min-numel", 77, "--warmup-steps", 3, "--seed", 11)
    plan = RunConfig.from_json(json.loads(json.dumps(reached["words"][0].to_json())))
    record = SimulatedEngine(plan).link.record()
    assert (record["min_numel"], record["warmup_steps"], record["seed"]) == (77, 3, 11)
    assert record["dense_parameters"] == ["1.bias", "1.weight", "5.bias"]


def test_bench_step_hands_every_option_on(reached: dict[str, Any], tmp_path: Path) -> None:
    words = ["--model", "lenet", "--model", "mlp", "--hosts", 3, "--hosts", 5, "--bandwidth", "1gbit"]
    words += ["--bandwidth", "8mbit", "--variant", "compute", "--variant", "gradwire bf16", "--budget", 1.5]
    result = call("bench", "step", *words, "--out", tmp_path / "rows.jsonl")
    assert isinstance(result.exception, Reached), result.output
    grid, path, *_ = reached["words"]
    assert (list(grid.models), list(grid.variants)) == (["lenet", "mlp"], ["compute", "gradwire bf16"])
    assert (grid.budget_s, grid.loopback, path) == (1.5, False, tmp_path / "rows.jsonl")
    assert [(t.hosts, t.bandwidth) for t in grid.topologies] == [(3, 1e9), (3, 8e6), (5, 1e9), (5, 8e6)]


def test_bench_step_measures_every_delay_with_every_loss(reached: dict[str, Any]) -> None:
    words = ["--hosts", 2, "--bandwidth", "1gbit", "--delay", "5ms", "--delay", "9ms", "--loss", "0%", "--loss", "1%"]
    words += ["--jitter", "1ms", "--reorder", "2%", "--outage", "1s@2s", "--outage", "3s@4s:host1"]
    result = call("bench", "step", *words, "--congestion", "cubic")
    assert isinstance(result.exception, Reached), result.output
    outages = (Outage(lasts_s=1, from_s=2), Outage(lasts_s=3, from_s=4, host=1))
    links = [
        Impairments(delay_s=delay_s, loss=loss, jitter_s=0.001, reorder=0.02)
        for delay_s in (0.005, 0.009)
        for loss in (0.0, 0.01)
    ]
    assert reached["words"][0].topologies == [
        Topology(hosts=2, bandwidth=1e9, impairments=link, outages=outages, congestion="cubic") for link in links
    ]
    call("bench", "step", "--hosts", 2, "--bandwidth", "1gbit", "--loss", "1%", "--burst", 4)
    assert reached["words"][0].topologies[0].impairments == Impairments(loss=0.01, burst=4)


def test_bench_step_takes_one_cluster_or_loopback(reached: dict[str, Any]) -> None:
    call("bench", "step", "--lab", "hosts=3,bandwidth=1gbit,delay=5ms")
    assert reached["words"][0].topologies == [Topology(hosts=3, bandwidth=1e9, impairments=Impairments(delay_s=0.005))]
    call("bench", "step", "--loopback", "--hosts", 6)
    grid = reached["words"][0]
    assert grid.loopback
    assert list(grid.topologies) == [Topology(hosts=6)]


def test_bench_kernels_hands_every_option_on(reached: dict[str, Any]) -> None:
    call("bench", "kernels", "--elements", 123_456, "--repetitions", 4, "--backend", "reference")
    assert reached["words"][:3] == (123_456, 4, "reference")


def test_plan_hands_every_option_on(reached: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    DEFAULT.save(tmp_path / "machine.json")
    words = ["--profile", "mnist", "--data", "here", "--hosts", 3, "--gpus-per-host", 4, "--cores", 6]
    words += ["--bandwidth", "80mbit", "--delay", "5ms", "--loss", "0.5%"]
    words += ["--congestion", "bbr", "--calibration", tmp_path / "machine.json"]
    words += ["--method", "bf16", "--method", "qsgd"]
    assert isinstance(call("plan", *words).exception, Reached)
    assert (reached["name"], reached["words"]) == ("profile_name", ("mnist", "here"))
    found = SimpleNamespace(source="mnist")
    monkeypatch.setattr(plan_command, "profile_name", lambda *words: found)
    assert isinstance(call("plan", *words).exception, Reached)
    profile, methods, setting, machine, options = reached["words"]
    assert (profile, list(methods), machine, options) == (found, ["bf16", "qsgd"], DEFAULT, Options())
    link = LinkModel(bandwidth_bytes_per_s=1e7, latency_s=0.005, loss=0.005, congestion="bbr")
    assert setting == Scenario(hosts=3, ranks_per_host=4, cores=6, link=link)


def test_plan_profiles_a_script_with_its_words(reached: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def profiled(*words: Any) -> Any:
        given.append(words)
        return SimpleNamespace(source="train.py")

    monkeypatch.setattr(plan_command, "profile_script", profiled)
    monkeypatch.setattr(plan_command, "_machine", lambda *words: DEFAULT)
    assert isinstance(call("plan", "--profile", "train.py", "--", "--epochs", "3").exception, Reached)
    assert given == [(Path("train.py"), ["--epochs", "3"])]


def test_lab_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Topology] = []

    def open_network(topology: Topology) -> Any:
        given.append(topology)
        raise Reached

    monkeypatch.setattr(lab_package, "open_network", open_network)
    words = ["--hosts", 4, "--bandwidth", "100mbit", "--asymmetric", "10mbit", "--host", "1=5mbit:6mbit"]
    call("lab", *words, "--groups", 2, "--between", "1gbit", "--delay", "3ms", "--", "true")
    spec = "hosts=4,bandwidth=100mbit,asymmetric=10mbit,host1=5mbit:6mbit,groups=2,between=1gbit,delay=3ms"
    assert given == [Topology.parse(spec)]
    words = ["--delay", "3ms", "--jitter", "1ms", "--loss", "1%", "--burst", 8, "--reorder", "2%", "--seed", 7]
    words += ["--outage", "1s@2s", "--outage", "3s@4s:host1", "--congestion", "cubic", "--host", "1.delay=9ms"]
    words += ["--group", "near=0-2", "--group", "far=3", "--between", "1gbit", "--between", "far.loss=3%"]
    call("lab", *words, "--between", "delay=5ms", "--", "true")
    spec = "hosts=4,delay=3ms,jitter=1ms,loss=1%,burst=8,reorder=2%,seed=7,outage=1s@2s+3s@4s:host1,congestion=cubic"
    spec += ",host1.delay=9ms,group.near=0-2,group.far=3,between=1gbit,between.far.loss=3%,between.delay=5ms"
    assert given[1:] == [Topology.parse(spec)]


def test_report_hands_every_option_on(reached: dict[str, Any], tmp_path: Path) -> None:
    call("report", "a", "b", "--out", tmp_path / "page.html")
    assert reached["words"] == ([Path("a"), Path("b")], tmp_path / "page.html")
