"""``gradwire bench step`` and ``gradwire lab`` on the command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from run_help import gradwire
from schema_help import fits, schema
from typer.testing import CliRunner, Result

from gradwire.tools.cli.app import app


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("command", ["lab", "bench step", "bench kernels"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    text = " ".join(result.output.replace("│", " ").split())
    assert f"Example: gradwire {command}" in text or f'Example: sudo env "PATH=$PATH" gradwire {command}' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "lent"], "lenet"),
        (["--variant", "ddp bf16"], "'gradwire SPEC' with any method"),
        (["--variant", "gradwire terngrd"], "did you mean 'terngrad'"),
        (["--bandwidth", "fast"], "such as 100mbit"),
        (["--hosts", "1"], "use at least 2"),
        (["--lab", "hosts=2", "--hosts", "4"], "leave --hosts, --bandwidth, --loopback and what its links do out"),
        (["--lab", "hosts=2", "--loopback"], "leave --hosts, --bandwidth, --loopback and what its links do out"),
        (["--loopback", "--bandwidth", "1gbit"], "leave the bandwidth out"),
        (["--loopback", "--budget", "-1"], "seconds above 0"),
        (["--loopback", "--budget", "nan"], "seconds above 0"),
        (["--loopback", "--budget", "inf"], "finite seconds above 0"),
        (["--loopback", "--cell-budget", "0"], "seconds above 0"),
        (["--loopback", "--compute", "slep"], "one of real, sleep, cuda is needed"),
        (["--loopback", "--figure", "no_such/figure.png"], "there is no folder no_such"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words: list[str], message: str, tmp_path: Path) -> None:
    result = call("bench", "step", *words, "--out", tmp_path / "rows.jsonl")
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gradwire:")]
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "1=5mbit", "--host", "1=6mbit"], "host1 is given twice"),
        (["--bandwidth", "100mbit,groups=2"], "one value is needed"),
        (["--host", "1=5mbit,groups=2"], "one value is needed"),
        (["--bandwidth", "99999gbit"], "8kbit to 600gbit"),
    ],
)
def test_a_lab_that_means_two_things_is_refused(words: list[str], message: str) -> None:
    result = call("lab", *words, "--", "true")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


def test_without_root_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = call("bench", "step", "--model", "lenet", "--out", tmp_path / "rows.jsonl")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("gradwire: an emulated cluster needs root")


def measured(variant: str, gap: float | None) -> dict[str, Any]:
    """Return a row as the benchmark writes it."""
    kinds = {"string": "x", "integer": 2, "number": 0.5}
    fields = schema("bench_step")["items"]["properties"]
    row = {
        k: kinds[v["type"] if isinstance(v["type"], str) else "number"] for k, v in fields.items() if k != "bytes_agree"
    }
    row |= {"model": "lenet", "lab": "hosts=2,bandwidth=1gbit", "variant": variant, "interface_over_library": gap}
    row |= {"compute": "real"}
    return {**row, "bytes_agree": None if gap is None else abs(gap) <= 0.05, "timeline": {}, "turn_medians_s": [1.0]}


@pytest.mark.parametrize(("gap", "code"), [(0.04, 0), (-0.07, 1), (None, 0)])
def test_bytes_that_disagree_fail_the_benchmark_after_its_table(gap: float | None, code: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (measured("compute", None), measured("ddp fp32", gap))))
    words = ["--model", "lenet", "--lab", "bandwidth=1gbit,hosts=2", "--variant", "compute", "--variant", "ddp fp32"]
    result = call("bench", "step", *words, "--out", path)
    assert result.exit_code == code, result.stderr
    assert "ddp fp32" in result.stdout
    if code:
        assert "1 of 2 rows: interfaces and library differ" in result.stderr
        assert "lenet, hosts=2,bandwidth=1gbit, ddp fp32 (-7.0 %)" in " ".join(result.stderr.split())
    as_json = call("bench", "step", *words, "--out", path, "--json")
    assert as_json.exit_code == code
    fits(json.loads(as_json.stdout), schema("bench_step"))


@pytest.mark.ranks
def test_measured_rows_fit_the_schema(tmp_path: Path) -> None:
    words = ["--model", "lenet", "--hosts", 2, "--loopback", "--budget", 0.2, "--out", tmp_path / "rows.jsonl"]
    chosen = ["--variant", "compute", "--variant", "ddp fp16", "--variant", "gradwire terngrad"]
    done = gradwire("bench", "step", *words, *chosen, "--json", fresh=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    fits(rows, schema("bench_step"))
    assert [row["variant"] for row in rows] == ["compute", "ddp fp16", "gradwire terngrad"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3
