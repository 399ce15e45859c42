"""What a grid may ask for, and the file of rows that it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import HyperparameterError
from gradwire.tools.bench import step
from gradwire.tools.bench.models import MODELS, bench_model
from gradwire.tools.bench.network_row import wire_floor_s
from gradwire.tools.bench.row_file import append_row, check_writable
from gradwire.tools.bench.step import StepGrid, measure_grid, read_rows
from gradwire.tools.bench.variants import COMPUTE, VARIANTS, check_variant, dense_wire_bytes
from gradwire.tools.experiments.errors import RunError, UsageError
from gradwire.tools.lab import Topology

TWO = Topology(hosts=2)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"models": ["lent"]}, UsageError, "unknown model 'lent' to benchmark; did you mean 'lenet'"),
        ({"variants": ["ddp bf16"]}, UsageError, "variant 'ddp bf16': known are compute, ddp fp32"),
        ({"variants": ["gradwire"]}, UsageError, "'gradwire SPEC' with any method"),
        ({"variants": ["gradwire terngrd"]}, HyperparameterError, "did you mean 'terngrad'"),
        ({"topologies": [Topology(hosts=1)]}, UsageError, "use at least 2"),
        ({"topologies": [Topology(hosts=2, bandwidth=1e9)], "loopback": True}, UsageError, "leave the bandwidth out"),
        ({"topologies": [Topology.parse("hosts=2,loss=1%")], "loopback": True}, UsageError, "and delay and loss"),
    ],
)
def test_what_cannot_be_measured_is_refused(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        StepGrid(**{"models": ["lenet"], "topologies": [TWO], **fields})


def test_clusters_that_differ_in_bandwidth_alone_share_processes_slowest_last() -> None:
    rates = (1e9, None, 1e8)
    topologies = [Topology(hosts=n, bandwidth=rate) for n in (2, 4) for rate in rates]
    grid = StepGrid(models=["lenet", "mlp"], topologies=topologies)
    found = [(model, [(t.hosts, t.bandwidth) for t in family]) for model, family in grid.families()]
    slowest_last = {n: [(n, None), (n, 1e9), (n, 1e8)] for n in (2, 4)}
    assert found == [(model, slowest_last[n]) for model in ("lenet", "mlp") for n in (2, 4)]


def test_a_dense_exchange_is_a_ring() -> None:
    assert dense_wire_bytes("ddp fp32", 1000, 4) == 6000
    assert dense_wire_bytes("ddp fp16", 1000, 4) == 3000
    assert dense_wire_bytes(COMPUTE, 1000, 4) == 0
    assert dense_wire_bytes("ddp powersgd", 1000, 4) is None


def test_every_variant_and_model_can_be_named() -> None:
    assert [check_variant(name) for name in VARIANTS] == list(VARIANTS)
    assert check_variant("gradwire TernGrad(clip=None)")
    for name in MODELS:
        assert bench_model(name).summary


def row(variant: str, place: str, **fields: Any) -> dict[str, Any]:
    needed = {"hosts": 2, "bandwidth_bits_per_s": None, "step_time_s": 0.01, "cores": 2}
    return {"model": "lenet", "lab": place, "variant": variant, **needed, **fields}


def forbid(*_: object, **__: object) -> None:
    raise AssertionError("nothing was to be measured")


def test_rows_in_the_file_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "open_network", forbid)
    monkeypatch.setattr(step, "open_ranks", forbid)
    path = tmp_path / "rows.jsonl"
    variants = ("compute", "ddp fp32")
    # Rows of other cells may lie between, and the latest of a cell counts.
    rows = [row(v, place, n=n) for n in range(2) for v in variants for place in (TWO.spec(), "elsewhere")]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    grid = StepGrid(models=["lenet"], topologies=[TWO], variants=variants)
    found = measure_grid(grid, path, lambda line: forbid())
    assert found == [row(v, TWO.spec(), n=1) for v in variants]


def test_a_line_that_was_cut_off_is_survived_and_takes_no_other_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    whole = row("compute", "here")
    path.write_text(json.dumps(whole) + "\n" + json.dumps(row("ddp fp32", "here"))[:20])
    assert read_rows(path) == [whole]
    assert "a line that is not JSON is left out" in capsys.readouterr().err
    later = row("ddp fp16", "here")
    append_row(path, later)
    assert read_rows(path) == [whole, later]
    append_row(path, later)
    assert read_rows(path) == [whole, later, later]
    assert read_rows(tmp_path / "none.jsonl") == []
    append_row(tmp_path / "none.jsonl", whole)
    assert read_rows(tmp_path / "none.jsonl") == [whole]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.tools.bench.step.open_cluster", lambda *words: forbid())
    (tmp_path / "file").touch()
    grid = StepGrid(models=["lenet"], topologies=[TWO], variants=[COMPUTE])
    with pytest.raises(RunError, match=r"cannot write .*rows\.jsonl: .*; free space or choose another place"):
        measure_grid(grid, tmp_path / "file" / "rows.jsonl", lambda line: None)
    check_writable(tmp_path / "new" / "rows.jsonl")
    assert list((tmp_path / "new").iterdir()) == [], "what is refused for another reason leaves no file"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_fills_up_is_named() -> None:
    with pytest.raises(RunError, match="cannot write /dev/full: No space left on device"):
        append_row(Path("/dev/full"), row("compute", "here"))


def test_the_slowest_link_sets_the_floor() -> None:
    labs = ("hosts=4", "bandwidth=1gbit", "bandwidth=1gbit,host2=5mbit:1mbit")
    assert [wire_floor_s(Topology.parse(text), 1e6) for text in labs] == pytest.approx([0.0, 0.008, 8.0])
