"""``gradwire plan`` and ``gradwire bench kernels``: rows that fit their schemas, sentences, refusals."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_help import alive, start_gradwire, wait_for
from schema_help import fits, schema
from typer.testing import CliRunner, Result

from gradwire.model.machine import DEFAULT, LinkModel
from gradwire.model.profile import Profile, ReadyBucket, Timeline
from gradwire.tools.bench import predict as calibration_of
from gradwire.tools.bench.predict import cases_of
from gradwire.tools.cli import plan_command
from gradwire.tools.cli.app import app
from gradwire.tools.experiments.errors import RunError


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A machine's costs, so that no test measures one."""
    path = tmp_path / "calibration.json"
    dataclasses.replace(DEFAULT, residual=0.1, source="a test").save(path)
    return path


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A model's profile, so that no test depends on how long this machine computes: 0.4 M elements, 100 ms a step."""
    timeline = Timeline(
        forward_s=0.03,
        buckets=(ReadyBucket(names=("weight",), numel=400_000, ready_s=0.06),),
        backward_s=0.06,
        after_s=0.01,
    )
    path = tmp_path / "profile.json"
    Profile(source="a test", parameters={"weight": ((400, 1000), (1000, 1))}, timeline=timeline).save(path)
    return path


def test_plan_prints_rows_that_fit_the_schema_and_recommends_one_method_a_setting(
    calibration: Path, small_model: Path
) -> None:
    words = ["plan", "--profile", small_model, "--hosts", 2, "--hosts", 4, "--bandwidth", "1mbit"]
    words += ["--bandwidth", "100gbit"]
    result = call(*words, "--calibration", calibration, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    fits(rows, schema("plan"))
    assert len(rows) == 2 * 2 * 5
    for hosts in (2, 4):
        for rate, expected in ((1e6, "coded"), (1e11, "ddp fp32")):
            cell = [r for r in rows if r["hosts"] == hosts and r["bandwidth_bits_per_s"] == rate]
            assert [r["method"] for r in cell if r["recommended"]] == [expected]


def test_a_step_waits_for_its_delays_and_for_lost_packets(calibration: Path, small_model: Path) -> None:
    words = ["plan", "--profile", small_model, "--hosts", 4, "--bandwidth", "100gbit", "--method", "bf16"]
    words += ["--calibration", calibration]

    def asked(*more: str) -> list[dict[str, Any]]:
        rows = json.loads(call(*words, *more, "--json").stdout)
        fits(rows, schema("plan"))
        return rows

    near, far, lossy = asked(), asked("--delay", "20ms"), asked("--delay", "20ms", "--loss", "0.1%")
    assert [(row["delay_s"], row["loss"]) for rows in (near, far, lossy) for row in rows[:1]] == [
        (0.0, 0.0),
        (0.02, 0.0),
        (0.02, 0.001),
    ]
    for row, its, slower in zip(near, far, lossy, strict=True):
        # Gloo's ring of four ranks, in which the bucket is ready when backward ends.
        assert row["delays"] == its["delays"] == 12
        assert its["step_s"] - row["step_s"] == pytest.approx(12 * 0.02, rel=0.05)
        assert slower["step_s"] > its["step_s"] + 0.02
    assert call(*words, "--latency", "20ms", "--json").exit_code == 0
    shown = call(*words, "--delay", "20ms").stdout
    assert "delays: times that a step waits for a message to arrive" in shown
    assert " 12 " in next(line for line in shown.splitlines() if " bf16 " in line)


def test_losses_slow_cubic_down_and_bbr_hardly(
    calibration: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", "--profile", small_model, "--hosts", 4, "--bandwidth", "1gbit", "--method", "bf16"]
    words += ["--calibration", calibration, "--delay", "20ms", "--loss", "1%", "--json"]

    def asked(*more: str) -> tuple[str, float, str]:
        result = call(*words, *more)
        (row,) = [row for row in json.loads(result.stdout) if row["method"] == "ddp fp32"]
        return row["congestion"], row["step_s"], result.stderr

    cubic, bbr = asked("--congestion", "cubic"), asked("--congestion", "bbr")
    assert (cubic[0], bbr[0]) == ("cubic", "bbr")
    assert cubic[1] > 2 * bbr[1]
    assert "congestion" not in cubic[2] + bbr[2]
    for here, known in (("bbr", bbr), (None, cubic)):
        monkeypatch.setattr("gradwire.tools.cli.plan_command.congestion_here", lambda here=here: here)
        name, step_s, said = asked()
        assert (name, step_s) == (known[0], pytest.approx(known[1], rel=0.2))
        assert ("taken for bbr" in said) == (here == "bbr")
    monkeypatch.setattr("gradwire.tools.cli.plan_command.congestion_here", lambda: "reno")
    assert "here is reno, which is predicted as cubic" in asked()[2]


def test_a_congestion_control_that_is_not_predicted_is_refused() -> None:
    result = call("plan", "--profile", "lenet", "--congestion", "cubik")
    assert result.exit_code == 2
    assert "--congestion cubik: predictions know cubic and bbr" in result.stderr


def test_who_computes_longer_than_tcp_waits_learns_that_cubic_begins_slowly_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(asked: str | None, congestion: str, delay_s: float, compute_s: float) -> str:
        return "\n".join(plan_command._about_tcp(asked, congestion, delay_s, compute_s))

    monkeypatch.setattr(plan_command, "congestion_here", lambda: "cubic")
    for kept in (False, True):
        monkeypatch.setattr(plan_command, "_keeps_windows", lambda kept=kept: kept)
        assert "longer than TCP's timeout, 240 ms" in said("cubic", "cubic", 0.02, 0.25)
        assert bool(said(None, "cubic", 0.02, 0.25)) == (not kept)
        assert said(None, "cubic", 0.02, 0.23) == said("bbr", "bbr", 0.02, 9.0) == said(None, "cubic", 0.0, 9.0) == ""


def test_workers_of_one_host_wait_for_no_link_unless_it_was_measured_among_them(
    calibration: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = "AsyncServer(FP32(), staleness=0)"
    words: list[object] = ["plan", "--profile", small_model, "--calibration", calibration, "--json"]
    words += [word for spec in ("terngrad", "dpsgd", server) for word in ("--method", spec)]

    def asked(*more: object) -> dict[str, float]:
        result = call(*words, *more)
        assert result.exit_code == 0, result.output
        return {row["method"]: row["step_s"] for row in json.loads(result.stdout)}

    here = ("--hosts", 1, "--gpus-per-host", 4, "--bandwidth", "100gbit")
    near, far = asked(*here), asked(*here, "--delay", "100000ms", "--loss", "10%")
    assert far["ddp fp32"] == near["ddp fp32"]
    # The times of codecs are measured anew, and are far below a delay.
    assert max(far["terngrad"], far["dpsgd"]) < 100
    # Its server is on a host of its own.
    assert far[server] > 200 > near[server]
    measured = LinkModel(latency_s=100.0, ranks_per_host=4)
    monkeypatch.setattr(plan_command, "_probed", lambda _: (DEFAULT, measured, 4))
    probed = asked("--probe")
    assert min(probed["ddp fp32"], probed["terngrad"], probed["dpsgd"]) > 100


def test_plan_says_why_a_fast_method_is_not_recommended(calibration: Path) -> None:
    words = ["--profile", "lenet", "--hosts", 4, "--bandwidth", "1mbit", "--method", "terngrad", "--method", "signsgd"]
    result = call("plan", *words, "--calibration", calibration)
    assert result.exit_code == 0, result.output
    assert "use terngrad" in result.stdout
    assert "signsgd is not recommended for its time: it gives a direction" in result.stderr


def test_plan_for_hundreds_of_hosts_counts_in_whole_delays_and_refuses_once(calibration: Path) -> None:
    words = ["--profile", "lenet", "--hosts", 256, "--bandwidth", "1mbit", "--bandwidth", "1gbit", "--method", "coded"]
    result = call("plan", *words, "--calibration", calibration)
    assert result.exit_code == 0, result.output
    assert " 1020 " in result.stdout
    assert result.stderr.count("coded on 256 hosts") == 1


def test_plan_marks_what_is_extrapolated(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    dataclasses.replace(DEFAULT, most_workers=4).save(path)
    result = call("plan", "--profile", "lenet", "--hosts", 16, "--bandwidth", "unlimited", "--calibration", path)
    assert result.exit_code == 0, result.output
    assert "~ extrapolated, the interval may not hold: more workers than calibrated (at most 4)" in result.output


def test_plan_says_what_to_do_and_draws_a_curve(calibration: Path, tmp_path: Path) -> None:
    figure = tmp_path / "curve.png"
    words = ["plan", "--profile", "lenet", "--hosts", 2, "--hosts", 64, "--gpus-per-host", 4, "--bandwidth", "10mbit"]
    result = call(*words, "--calibration", calibration, "--figure", figure)
    assert result.exit_code == 0, result.output
    assert "64 x 4 workers, 10 Mbit/s: use " in result.output
    assert "bounded by" in result.output
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--profile", "lenett"], "did you mean 'lenet"),
        (["--profile", "nothing.py"], "does not exist"),
        (["--profile", "mnist"], "needs --data"),
        (["--hosts", "1"], "one worker exchanges nothing"),
        (["--bandwidth", "100"], "a number with bit, kbit, mbit or gbit"),
        (["--latency", "5"], "milliseconds are needed"),
        (["--delay", "5"], "milliseconds are needed"),
        (["--loss", "0.1"], "per cent are needed, such as 0.1%"),
        (["--loss", "100%"], "below 100% is needed"),
        (["--probe", "--delay", "5ms"], "leave --hosts, --gpus-per-host, --bandwidth, --delay and --loss out"),
        (["--probe"], "start it with torchrun"),
        (["--probe", "--hosts", "2"], "leave --hosts, --gpus-per-host, --bandwidth, --delay and --loss out"),
        (["--probe", "--gpus-per-host", "4"], "leave --hosts, --gpus-per-host,"),
        (["--profile", "digits", "--data", "here"], "task digits brings its own data: leave --data here out"),
        *[
            (["--profile", name, "--data", "here"], f"--data is what a task reads, and {name} is none")
            for name in ("lenet", "train.py", "profile.json")
        ],
        (["--method", "terngrat"], "did you mean 'terngrad'"),
        (["--calibration", "no_such.json"], "the calibration no_such.json cannot be read (No such file"),
        (["--calibration-limit", "0"], "seconds above 0"),
        (["--calibration-limit", "nan"], "seconds above 0"),
        (["--calibration", "no_such.jsonl"], "no_such.jsonl does not exist"),
        (["--calibration", "rows.jsonl", "--calibrate"], "not named .json"),
        (["--hosts", "2", "--hosts", "4", "--figure", "no_such/curve.png"], "there is no folder no_such"),
        (["--hosts", "2", "--hosts", "4", "--figure", "curve.xyz"], "name a .png or .svg file"),
        (["--hosts", "2", "--figure", "curve.png"], "a curve needs two numbers of workers"),
        (["--cores", "0"], "--cores 0: at least 1"),
        (["--cores", "-1"], "--cores -1: at least 1"),
        (["digits"], "give --profile digits"),
        (["--bandwidth", "99999gbit"], "8kbit to 600gbit"),
    ],
)
def test_wrong_questions_are_one_line_and_exit_code_2(calibration: Path, words: list[str], sentence: str) -> None:
    result = call("plan", "--calibration", calibration, *words)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_probe_of_hosts_with_unequal_ranks_is_refused_in_one_line(
    calibration: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    hosts, left = [7.0, 7.0, 9.0, 9.0], []

    def all_gather(out: list[torch.Tensor], mine: torch.Tensor) -> None:
        for one, host in zip(out, hosts, strict=True):
            one.fill_(host)

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: left.append(1))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: len(hosts))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    measured = LinkModel(bandwidth_bytes_per_s=1e7, ranks_per_host=2)
    monkeypatch.setattr("gradwire.probe", lambda **_: measured)
    words = ["plan", "--probe", "--profile", small_model, "--calibration", calibration, "--method", "bf16"]
    assert call(*words).exit_code == 0
    hosts += [11.0]
    result = call(*words)
    assert len(left) == 2
    # The others leave the sentence to rank 0.
    assert (result.exit_code, result.stdout) == (0 if rank else 2, "")
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == (0 if rank else 1)
    assert rank or "the hosts run 2, 2, 1 ranks" in lines[0]
    assert rank or "the same --nproc-per-node on each" in lines[0]


def test_of_a_method_that_chooses_the_candidates_are_predicted_and_what_they_cost_is_said(
    calibration: Path, small_model: Path
) -> None:
    words = ["plan", "--profile", small_model, "--hosts", 2, "--bandwidth", "1mbit", "--calibration", calibration]
    words += ["--method", "bf16", "--method", "Auto(candidates=('bf16', 'terngrad'), residuals=True)"]
    told = call(*words, "--json")
    assert told.exit_code == 0, told.output
    rows = json.loads(told.stdout)
    fits(rows, schema("plan"))
    added = ["powersgd", "acp_sgd", "ErrorFeedback(TopK(density=0.01))", "ef_signsgd"]
    assert [row["method"] for row in rows] == ["ddp fp32", "bf16", "terngrad", *added]
    notes = {row["method"]: row["note"] for row in rows}
    assert notes["ddp fp32"] is None
    assert "digits -0.9, mnist -1.1, text -3.7, cifar10 -6.0" in notes["acp_sgd"]
    shown = " ".join(call(*words).stdout.split())
    assert all(f"{spec}: {notes[spec]}" in shown for spec in added)
    assert f"terngrad: {notes['terngrad']}" not in shown


def test_the_options_of_a_task_count_for_a_profile_of_it_that_was_kept(calibration: Path, small_model: Path) -> None:
    """A training of logreg compresses its one small vector."""
    known = Profile.read(small_model)
    bucket = dataclasses.replace(known.timeline.buckets[0], numel=1000)
    timeline = dataclasses.replace(known.timeline, buckets=(bucket,))
    words = ["plan", "--profile", small_model, "--hosts", 2, "--bandwidth", "1gbit", "--method", "terngrad"]
    sent = []
    for source in ("a test", "logreg"):
        parameters = {"weight": ((1000,), (1,))}
        dataclasses.replace(known, source=source, parameters=parameters, timeline=timeline).save(small_model)
        rows = json.loads(call(*words, "--calibration", calibration, "--json").stdout)
        sent.append(rows[-1]["sent_bytes"])
    assert sent[1] < sent[0] / 4


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{}", "line 1: not a row of gradwire bench step: it lacks model, hosts"),
        ("[1, 2]", "line 1: not a row of gradwire bench step, but [1, 2]"),
        (
            '{"model": "lenet", "hosts": 2, "lab": "x", "variant": "compute", "bandwidth_bits_per_s": null,'
            ' "step_time_s": "long", "cores": 2}',
            "step_time_s is 'long'",
        ),
    ],
)
def test_rows_that_are_none_are_named_with_file_and_line(row: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    words = ["bench", "step", "--loopback", "--model", "lenet", "--hosts", 2, "--out", path]
    for result in (call("plan", "--calibration", path), call(*words)):
        assert result.exit_code == 2
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("gradwire:")]
        assert sentence in line
        assert "rows.jsonl, line 1" in line


def test_a_damaged_timeline_is_named() -> None:
    row = {"model": "lenet", "hosts": 2, "lab": "x", "variant": "compute", "bandwidth_bits_per_s": None}
    with pytest.raises(RunError, match="timeline of lenet on 2 hosts cannot be read"):
        cases_of([{**row, "step_time_s": 1.0, "cores": 2, "timeline": {"forward_s": 1.0}}])


def test_measured_rows_survive_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "grid.jsonl"
    rows.write_text("measured for hours\n")
    assert call("plan", "--calibration", rows, "--calibrate").exit_code == 2

    class Measured(Exception):
        """Ends the command where it would take steps."""

    def measure(grid: object, path: Path, *_: object) -> None:
        assert path.parent != tmp_path
        raise Measured

    monkeypatch.setattr(calibration_of, "measure_grid", measure)
    result = call("plan", "--calibration", rows.with_suffix(".json"), "--calibrate")
    assert isinstance(result.exception, Measured)
    assert rows.read_text() == "measured for hours\n"


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent on Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_is_profiled_ends_with_the_command(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, told, folders = tmp_path / "train.py", tmp_path / "pid", tmp_path / "folders"
    script.write_text(f"import os, time\nopen({str(told)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)\n")
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    process = start_gradwire("plan", "--profile", script)
    try:
        wait_for(lambda: process.poll() is not None or (told.exists() and "\n" in told.read_text()), 60, "the script")
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (143, -9)
    worker = int(told.read_text())
    wait_for(lambda: not alive(worker), 20, "the script's end")
    if number == signal.SIGTERM:
        # torchrun has a folder of its own.
        assert [path.name for path in folders.iterdir() if not path.name.startswith("torchelastic_")] == []


def test_bench_kernels_prints_rows_that_fit_the_schema() -> None:
    result = call("bench", "kernels", "--elements", 200_000, "--repetitions", 2, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    fits(rows, schema("bench_kernels"))
    for row in rows:
        assert 0 < row["ratio_p20"] <= row["ratio_to_memcpy"] <= row["ratio_p80"]
    assert {"moments", "encode", "sum of 4", "decode base 9"} <= {row["kernel"] for row in rows}
    assert call("bench", "kernels", "--repetitions", 1).exit_code == 2


def test_bench_kernels_on_a_gpu_is_refused_by_name_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = call("bench", "kernels", "--device", "cuda")
    assert refused.exit_code == 1
    assert f"--device cuda: PyTorch {torch.__version__} finds no CUDA device here" in " ".join(refused.stderr.split())
    assert call("bench", "kernels", "--device", "cuda", "--backend", "cpu").exit_code == 2
    assert call("bench", "kernels", "--device", "tpu").exit_code == 2


@pytest.mark.parametrize("name", ["nope.py", "nope.json"])
def test_a_profile_that_is_not_there_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "_machine", lambda *_: pytest.fail("the machine was calibrated"))
    done = call("plan", "--profile", tmp_path / name, "--hosts", 2)
    assert done.exit_code != 0
    assert "does not exist" in done.output.replace("\n", " ")
