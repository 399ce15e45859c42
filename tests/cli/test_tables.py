"""Tables on terminals and elsewhere: no number is cut, and cells say what they were given."""

from __future__ import annotations

import re
import sys
from io import BytesIO, TextIOWrapper
from typing import Any

import pytest

from gradwire.tools.cli.methods_command import print_methods
from gradwire.tools.cli.show import print_runs, print_steps, print_table, table_of

NUMBERS = ["97.22 %", "0.1234", "431 ms", "2.5 min", "12.4 MB", "12.30", "2.60"]
SPEC = "DiLoCo(ErrorFeedback(TopK(density=0.05)), every=16)"


def run_row(label: str) -> dict[str, Any]:
    numbers = {
        "final_accuracy": 0.9722,
        "final_loss": 0.1234,
        "step_time_s": 0.431,
        "elapsed_s": 150.0,
        "sent_bytes": 12_400_000,
        "compression_factor": 12.3,
        "bits_per_element": 2.6,
    }
    link = ("chosen_method", "choice_reason", "choice_note", "fallback_method", "fallback_reason")
    return {"label": label, **numbers, **dict.fromkeys(link)}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_the_label_is_broken_and_numbers_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs([run_row(SPEC)], None)
    head, first, *others = plain(capsys.readouterr().out).splitlines()
    assert all(number in first for number in NUMBERS)
    assert "".join(line[: head.index("accuracy") - 1].strip() for line in (first, *others)) == SPEC.replace(" ", "")
    assert max(map(len, (head, first, *others))) <= 80


@pytest.mark.usefixtures("terminal")
def test_numbers_that_are_wider_than_a_terminal_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of("rank", *(f"number {i}" for i in range(15)))
    table.add_row("0", *(f"{i}.125 ms" for i in range(15)))
    print_table(table)
    out = plain(capsys.readouterr().out)
    assert all(f" {i}.125 ms" in out for i in range(15))


def test_elsewhere_a_row_is_a_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs([run_row("x" * 300)], None)
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("x" * 300)
    assert all(number in line for number in NUMBERS)


@pytest.mark.usefixtures("terminal")
def test_tables_are_printed_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii", write_through=True))
    print_runs([run_row("x" * 300)], None)
    assert plain(written.getvalue().decode()).count("x") == 300


@pytest.mark.parametrize("label", ["exclude [a-z]*.bias", "data [/x]", "host1=1mbit:fire:"])
def test_what_looks_like_markup_is_shown_as_it_is(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_runs([run_row(label)], None)
    assert label in capsys.readouterr().out


def test_families_have_headings(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {"bits_per_element": 1.0, "delays": 1, "summary": "of signs"}
    print_methods([{"name": name, "spec": name, **shown} for name in ("signsgd", "signum")])
    assert capsys.readouterr().out.splitlines()[0].strip() == "Signs"


@pytest.mark.parametrize(
    ("lab", "shown"),
    [("loopback,hosts=4", "loopback"), ("hosts=4,bandwidth=100mbit,delay=5ms", "100mbit,delay=5ms")],
)
def test_the_link_of_a_step_is_its_own(lab: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"step_time_s": 0.1, "percentile_20_s": 0.1, "percentile_80_s": 0.1, "ratio_to_floor": 1.0}
    row = {"model": "mlp", "hosts": 4, "lab": lab, "variant": "ddp fp32", **times}
    print_steps([{**row, "sent_bytes_per_step": None, "speedup_over_ddp_fp32": None}])
    assert capsys.readouterr().out.splitlines()[1].split()[2] == shown
