"""The command line in this process: exit codes, one-line errors, JSON that fits its schemas."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pytest
import typer
from run_help import gradwire
from schema_help import fits, schema
from typer.testing import CliRunner, Result

import gradwire as gw
from gradwire.tools.cli.app import app
from gradwire.tools.cli.main import main
from gradwire.tools.cli.methods_command import method_rows, unbiased_text
from gradwire.tools.cli.show import handled, print_json

SIMULATED = ["--simulate", "--steps", "6", "--eval-every", "3"]


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_checker_of_schemas_can_fail() -> None:
    rows = schema("methods")
    with pytest.raises(AssertionError):
        fits([{"name": 3}], rows)
    with pytest.raises(AssertionError):
        fits({}, rows)


@pytest.mark.parametrize("command", ["train", "compare", "run", "coordinate", "methods", "report"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"Example: gradwire {command}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digts"], "did you mean 'digits'"),
        (["train", "digits", "--method", "terngrd"], "did you mean 'terngrad'"),
        (["train", "digits", "--method", "TernGrad(clop=2)"], "did you mean 'clip'"),
        (["train", "digits", "--method", "TernGrad(clip="], "is not a method spec"),
        (["train", "digits", "--method", "__import__('os')"], "unknown method"),
        (["train", "digits", "--method", "DIANA(alpha='auto')"], "alpha is a finite number"),
        (["train", "digits", "--workers", "1"], "use at least 2 workers"),
        (["train", "digits", "--workers", "5"], "--batch 65"),
        (["train", "digits", "--workers", "640", "--batch", "640"], "more than this machine can start"),
        (["train", "digits", "--lab", ""], "an empty lab"),
        (["train", "digits", "--optimizer", "sdg"], "did you mean 'sgd'"),
        (["train", "digits", "--lr", "-1"], "must be a positive number"),
        (["train", "digits", "--exclude", "nothing.*"], "matches no parameter"),
        (["train", "digits", "--collective", "ring"], "unknown collective"),
        (["train", "mnist"], "needs --data"),
        (["compare", "digits", "--method", "fp32", "--method", "FP32()"], "named twice"),
        (["methods", "terngrd"], "did you mean 'terngrad'"),
        (["run", "no_such_script.py", "--nproc-per-node", "2"], "does not exist"),
        (["run", "--nproc-per-node", "abc", __file__], "--nproc-per-node abc: a number of workers"),
        (["run", "--nproc-per-node", "0", __file__], "--nproc-per-node 0: a number of workers"),
        (["run", "--nproc-per-node", "2", "--master-port", "x", __file__], "the number of a port"),
        (["run", __file__], "one process exchanges nothing"),
        (["run", "--nproc-per-node", "2", "--method", "x", __file__], "unknown method"),
        (["run", "--nproc-per-node", "2", "--fallback", "bf16", __file__], "a relative error above 0 is needed"),
        (["train", "digits", "--method", "signum"], "brings its own momentum: use --optimizer sgd --momentum 0"),
        (["train", "digits", "--method", "DIANA(momentum=0.9)"], "brings its own momentum"),
        (["run", "--nproc-per-node", "2", "--collective", "ring", __file__], "unknown collective 'ring'"),
        (["train", "digits", "--fallback", "bf17", "--fallback-limit", "2"], "one of bf16, fp32 is needed"),
        (
            ["train", "digits", "--simulate", "--fallback", "bf16", "--fallback-limit", "2"],
            "leave --simulate or --fallback",
        ),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gradwire:")]
    assert message in line


@pytest.mark.parametrize("step", [0, -5])
def test_a_run_stops_after_its_first_step_at_the_earliest(step: int, tmp_path: Path) -> None:
    for words in (("digits", *SIMULATED, "--out", tmp_path / "r"), ("--resume", tmp_path)):
        result = call("train", *words, "--stop-after", step)
        assert result.exit_code == 2
        assert "--stop-after" in result.stderr
    assert not (tmp_path / "r").exists()


def test_an_interrupted_command_claims_the_end_of_its_own_processes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The other workers of a training that this one has joined go on."""
    with pytest.raises(typer.Exit) as caught, handled(debug=False):
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == "gradwire: interrupted; all that it started is ended\n"


def test_output_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(typer.Exit) as caught, handled(debug=False):
            print("a row")
    assert caught.value.exit_code == 1
    assert "gradwire: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_stream_that_was_closed_takes_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[TextIO] = []

    def write(prog_name: str) -> None:
        with handled(debug=False):
            print("a row")
        shown.append(sys.stdout)

    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr("gradwire.tools.cli.app.app", write)
    main()
    with shown[0] as stream:
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
        assert os.get_inheritable(stream.fileno())


def test_json_has_no_word_for_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"loss": math.nan, "factor": math.inf, "steps": 3}])
    assert json.loads(capsys.readouterr().out) == [{"loss": None, "factor": None, "steps": 3}]


def test_output_shows_what_its_encoding_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr("gradwire.tools.cli.app.app", lambda prog_name: print("run\udcff \u00e9"))
    main()
    assert written.getvalue() == rb"run\udcff \xe9" + b"\n"


@pytest.mark.parametrize(("module", "words"), [("rich", []), ("torch", ["methods"])])
def test_an_interruption_while_libraries_are_imported_is_one_line(
    module: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from gradwire.tools.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("gradwire: interrupted")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--help"], 0, "Usage: gradwire"),
        (["train", "--help"], 0, "--method"),
        (["lab", "--bandwidth", "none", "--", "true"], 2, "bandwidth"),
        (["report", "no-run"], 1, "no-run is not a folder"),
        (["run", "--join", "h:1", "--secret-file", "s", "no.py"], 2, "script no.py does not exist"),
    ],
)
def test_commands_that_exchange_nothing_do_without_torch(words: list[str], code: int, shown: str) -> None:
    started = "import sys; sys.modules['torch'] = None; from gradwire.tools.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", started, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, shown in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


def test_unknown_commands_and_options_are_bad_usage() -> None:
    for words in (["tran"], ["train", "--colour"], ["train", "digits", "--steps", "many"], ["report"]):
        assert call(*words).exit_code == 2


def test_failures_are_one_line_and_exit_code_1(tmp_path: Path) -> None:
    for words, message in (
        (["train", "mnist", "--data", tmp_path / "no"], "does not exist"),
        (["train", "--resume", tmp_path], "holds no config.json"),
        (["report", tmp_path], "is not a run folder"),
        (["report", tmp_path, "-o", "."], "is a folder: name the page"),
        (["report", tmp_path, "-o", tmp_path], "is a folder: name the page"),
        (["train", "digits", *SIMULATED, "--lr", "1e30", "--method", "fp32", "-o", tmp_path / "r"], "is not finite"),
    ):
        result = call(*words)
        assert result.exit_code == 1
        assert message in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
    with pytest.raises(Exception, match="is not a run folder"):
        raise call("report", tmp_path, "--debug").exception or AssertionError("no traceback with --debug")


@pytest.mark.parametrize("words", [("train", "digits", "--method", "fp32"), ("plan", "--probe")])
def test_a_launchers_group_that_cannot_be_made_is_one_line(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    result = call(*words)
    assert result.exit_code == 1
    assert re.search("process group cannot be made: .*MASTER_ADDR.* or unset both", result.stderr.splitlines()[-1])
    assert not list(tmp_path.iterdir())


def test_a_launchers_number_of_ranks_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    result = call("train", "digits", "--method", "fp32")
    assert result.exit_code == 2
    assert "WORLD_SIZE is 'two', no number of ranks: start all ranks by torchrun" in result.stderr


def test_train_report_and_resume_print_rows_that_fit_the_schema(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = call("train", "digits", *SIMULATED, "--out", out, "--stop-after", 3, "--json")
    assert trained.exit_code == 0, trained.stderr
    resumed = call("train", "--resume", out, "--json")
    assert resumed.exit_code == 0, resumed.stderr
    reported = call("report", out, "--out", tmp_path / "page.html", "--json")
    for result, steps in ((trained, 3), (resumed, 6), (reported, 6)):
        rows = json.loads(result.stdout)
        fits(rows, schema("runs"))
        assert rows[0]["steps"] == steps
        assert rows[0]["label"] == "terngrad"
    assert (tmp_path / "page.html").exists()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "gradwire_run": 9}))
    newer = call("train", "--resume", out)
    assert (newer.exit_code, "not a run's record of this version" in newer.stderr) == (1, True)
    (out / "config.json").write_text(json.dumps(config))
    assert call("train", "digits", *SIMULATED, "--out", out).exit_code == 2
    assert call("train", "digits", *SIMULATED, "--out", out, "--overwrite").exit_code == 0


def test_train_and_report_say_what_auto_took(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("train", "digits", *SIMULATED, "--out", out).exit_code == 0
    config = json.loads((out / "config.json").read_text())
    for chosen, text in (
        ("bf16", "terngrad: auto took bf16 (quick): it keeps a residual"),
        (None, "terngrad: auto had not chosen yet"),
    ):
        note = chosen and "it keeps a residual"
        config["link"]["choice"] = {"chosen": chosen, "reason": "quick", "note": note, "step_s": {}, "left_out": {}}
        (out / "config.json").write_text(json.dumps(config))
        assert text in call("report", out, "--out", tmp_path / "page.html").stdout
        rows = json.loads(call("report", out, "--out", tmp_path / "page.html", "--json").stdout)
        fits(rows, schema("runs"))
        assert (rows[0]["chosen_method"], rows[0]["choice_note"]) == (chosen, note)


def test_a_direction_is_said_to_need_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    words = ["--method", "signsgd", "--momentum", "0", "--lr", "0.001", "--out", tmp_path / "run"]
    result = call("train", "digits", *SIMULATED, *words)
    assert result.exit_code == 0
    assert "signsgd gives a direction to step in" in result.stderr


@pytest.mark.ranks
def test_what_workers_warn_of_is_passed_on_once(tmp_path: Path) -> None:
    words = ["--method", "Lattice(distance=0.0001)", "--workers", 2, "--steps", 4, "--out", tmp_path / "run"]
    done = gradwire("train", "digits", *words, fresh=True)
    assert done.returncode == 1
    assert " ".join(done.stderr.split()).count("set a larger distance") == 1


@pytest.mark.ranks
def test_a_return_to_the_fallback_is_said_wherever_numbers_are(tmp_path: Path) -> None:
    words = ["--method", "terngrad", "--workers", 2, "--steps", 12, "--fallback", "bf16", "--fallback-limit", "0.1"]
    out = tmp_path / "run"
    done = gradwire("train", "digits", *words, "--out", out)
    assert done.returncode == 0, done.stderr
    told = "terngrad: returned to BF16() (from round 2 on: what rank "
    assert told in done.stdout
    shown = call("report", out, "--out", tmp_path / "page.html", "--json")
    rows = json.loads(shown.stdout)
    fits(rows, schema("runs"))
    assert rows[0]["fallback_method"] == "BF16()"
    assert told in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "bf16"], "--method"),
        (["-m", "terngrad"], "--method"),
        (["digits"], "digits"),
        (["--steps", "9", "--lab", "hosts=2", "--overwrite"], "--lab, --steps, --overwrite"),
    ],
)
def test_resume_refuses_what_would_change_the_run(words: list[str], named: str, tmp_path: Path) -> None:
    result = call("train", "--resume", tmp_path, "--stop-after", 3, "--json", *words)
    assert result.exit_code == 2
    assert f"leave {named} out" in " ".join(result.stderr.split())


def test_compare_trains_each_method_and_says_whether_it_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.tools.cli.commands.expected", lambda *_: ["Predicted: 5 ms."])
    words = ["compare", "digits", *SIMULATED, "--method", "fp32", "--method", "TernGrad(clip=None)"]
    result = call(*words, "--out", tmp_path / "c")
    assert result.exit_code == 0, result.stderr
    assert "say nothing about a network" in result.stdout
    assert f"report: {tmp_path / 'c' / 'report.html'}" in result.stdout
    assert result.stdout.endswith("\nPredicted: 5 ms.\n")
    assert "<p>Predicted: 5 ms.</p>" in (tmp_path / "c" / "report.html").read_text()
    assert {path.parent.name for path in (tmp_path / "c").glob("*/metrics.jsonl")} == {"fp32", "terngrad-clip-none"}
    as_json = call("report", tmp_path / "c", "--out", tmp_path / "page.html", "--json")
    rows = json.loads(as_json.stdout)
    fits(rows, schema("runs"))
    assert [row["label"] for row in rows] == ["fp32", "TernGrad(clip=None)"]
    assert rows[0]["bits_per_element"] == pytest.approx(32, rel=1e-3)


def test_methods_lists_properties() -> None:
    rows = json.loads(call("methods", "--json").stdout)
    fits(rows, schema("methods"))
    assert {"fp32", "terngrad"} <= {row["name"] for row in rows}
    brief = call("methods").stdout
    lines = {line.split()[0]: line.split() for line in brief.splitlines() if line.startswith("  ")}
    assert lines.keys() == {row["name"] for row in rows}
    assert all(lines[row["name"]][1:3] == [f"{row['bits_per_element']:.3g}", "bits"] for row in rows)
    delays = {row["name"]: row["delays"] for row in rows}
    assert (delays["fp32"], delays["terngrad"], delays["qsgd"]) == (12, 3, 1)
    # Its protocol depends on the ranks of a node.
    assert [name for name, count in delays.items() if count is None] == ["hierarchical"]
    for name, count in delays.items():
        assert lines[name][3:5] == ["-" if count is None else str(count), "delays"]
    headings = [line.strip() for line in brief.splitlines() if line and not line.startswith(" ")]
    assert {"Signs", "Rotations before rounding", "Gossip"} <= set(headings)
    assert len(headings) == len(set(headings))
    assert brief.index("Signs") < brief.index("  signsgd") < brief.index("  signum")
    table = call("methods", "--all").stdout
    assert all(row["name"] in table for row in rows)
    assert "for the clipped gradient" in table
    assert "bits/element (4 workers)" in " ".join(table.split())
    one = call("methods", "terngrad").stdout
    assert "Wen" in one
    assert "delays:            3\n" in one
    assert "delay phases:      1 agreement + 1 rows to each + 1 rows to all\n" in one
    assert "unbiased:          for the clipped gradient" in one
    assert "omega |g|^2" not in one
    for spec, number in (("QSGDinf(levels=31, block_size=64)", "0.0161"), ("QSGDinf(levels=1, block_size=64)", "3.5")):
        one = call("methods", spec).stdout
        assert f"omega:             {number}\n" in one
        assert "omega formula:     (sqrt(1 + (d - 1) / s^2) - 1) / 2\n" in one
        assert "omega |g|^2" in one
        assert "unbiased:          yes\n" in one
    assert "unbiased:          yes\n" in call("methods", "TernGrad(clip=None)").stdout
    (row,) = json.loads(call("methods", "terngrad", "--json").stdout)
    assert (row["collectives"], row["unbiased_note"]) == ("two_shot, all_gather", "for the clipped gradient")


@pytest.mark.parametrize(("name", "exact", "shown"), [("qsgdmaxnorm", 20 / 3, "6.67"), ("grandk", 5 / 48, "0.104")])
def test_numbers_are_rounded_for_reading_and_kept_in_json(name: str, exact: float, shown: str) -> None:
    assert f"bits per element:  {shown}\n" in call("methods", name).stdout
    (row,) = [line for line in call("methods", "--all").stdout.splitlines() if line.startswith(f"{name} ")]
    assert row.split()[1] == shown
    (found,) = json.loads(call("methods", name, "--json").stdout)
    assert found["bits_per_element"] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("spec", "default"), [("EDEN(bits=2)", "16"), ("NUQSGD(norm='max')", "Euclid")])
def test_a_summary_holds_for_other_settings_too(spec: str, default: str) -> None:
    (line,) = [line for line in call("methods", spec).stdout.splitlines() if line.startswith("summary:")]
    assert default not in line


@pytest.mark.parametrize("name", list(gw.methods()))
def test_an_outcome_that_is_a_direction_is_said_to_be_one(name: str) -> None:
    (line,) = [line for line in call("methods", name).stdout.splitlines() if line.startswith("outcome:")]
    assert ("a direction" in line) == gw.method(name).traits.direction
    assert ("parameters" in line) == (gw.method(name).traits.local_steps > 0)


def test_methods_shows_what_auto_tries() -> None:
    text = call("methods", "Auto(turns=2)").stdout
    assert "candidates:        fp32, bf16, terngrad" in text
    assert "turns:             2" in text
    assert "steps:             3" in text
    text = " ".join(call("methods", "Auto(residuals=True)").stdout.split())
    assert "drive, powersgd, acp_sgd" in text
    assert "acp_sgd: it keeps a residual on each rank; final accuracy over float32" in text
    rows = json.loads(call("methods", "auto", "--json").stdout)
    fits(rows, schema("methods"))
    assert rows[0]["bits_per_element"] is None


@pytest.mark.repository
def test_the_table_of_methods_says_of_bias_what_the_command_says() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "methods.md").read_text().splitlines()
    said = {row[1].strip(" `"): row[4].strip() for row in (line.split("|") for line in lines) if len(row) == 9}
    for row in method_rows([]):
        assert said[row["name"]] == unbiased_text(row)


@pytest.mark.ranks
def test_the_package_itself_is_the_command_line() -> None:
    command = [sys.executable, "-m", "gradwire", "methods", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "float32" in done.stdout.lower()) == (0, True), done.stderr


def test_missing_libraries_are_one_line() -> None:
    code = "import sys; sys.modules['typer'] = None; from gradwire.tools.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == 'gradwire: the command line needs typer: pip install "gradwire[cli]"'


def test_importing_gradwire_imports_nothing_of_the_command_line() -> None:
    code = (
        "import sys, gradwire; gradwire.attach; bad = {'typer', 'rich', 'jinja2', 'matplotlib', 'sklearn',"
        " 'gradwire.tools.experiments', 'gradwire.tools.report', 'gradwire.tools.cli'} & set(sys.modules);"
        " sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks
def test_compare_with_real_workers_ends_in_one_table(tmp_path: Path) -> None:
    words = ["--method", "terngrad", "--workers", 2, "--steps", 12, "--eval-every", 6, "--out", tmp_path / "c"]
    done = gradwire("compare", "digits", "--method", "fp32", *words, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    fits(rows, schema("runs"))
    assert [row["workers"] for row in rows] == [2, 2]
    assert rows[0]["sent_bytes"] > 5 * rows[1]["sent_bytes"]
