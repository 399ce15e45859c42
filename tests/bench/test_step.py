"""The step benchmark on real ranks, as small as it gets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gradwire.tools.bench.ranks import open_ranks
from gradwire.tools.bench.step import StepGrid, measure_grid, read_rows
from gradwire.tools.experiments.errors import WorkerError
from gradwire.tools.lab import Topology, missing

pytestmark = pytest.mark.ranks

PROBLEM = missing()
VARIANTS = ("compute", "ddp fp32", "gradwire terngrad")


@pytest.mark.lab
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_interfaces_and_library_agree_on_the_bytes(tmp_path: Path) -> None:
    topologies = [Topology(hosts=2, bandwidth=rate) for rate in (None, 1e9)]
    grid = StepGrid(models=["lenet"], topologies=topologies, variants=VARIANTS, budget_s=0.3)
    said: list[str] = []
    rows = measure_grid(grid, tmp_path / "rows.jsonl", said.append)
    assert [(r["lab"], r["variant"]) for r in rows] == [(t.spec(), v) for t in topologies for v in VARIANTS]
    assert len(said) == len(rows) == len(read_rows(tmp_path / "rows.jsonl"))
    for r in rows:
        assert r["step_time_s"] > 0
        assert r["percentile_20_s"] <= r["step_time_s"] <= r["percentile_80_s"]
        if r["variant"] == "compute":
            assert r["sent_bytes_per_step"] == 0
            assert r["timeline"]
        else:
            assert r["bytes_agree"], r["interface_over_library"]
            assert abs(r["interface_over_library"]) <= 0.05
    for _, dense, ternary in (rows[:3], rows[3:]):
        assert dense["sent_bytes_per_step"] == 4 * dense["parameters"]
        assert dense["speedup_over_ddp_fp32"] == 1
        assert ternary["interface_bytes_per_step"] < dense["interface_bytes_per_step"] / 8
        assert ternary["record"]["method"].startswith("TernGrad(")


def test_loopback_has_no_interfaces_and_resumes(tmp_path: Path) -> None:
    path, said = tmp_path / "rows.jsonl", list[str]()
    options = {"models": ["lenet"], "topologies": [Topology(hosts=2)], "budget_s": 0.2, "loopback": True}
    first = measure_grid(StepGrid(**options, variants=VARIANTS[:2]), path, said.append)
    assert [r["variant"] for r in first] == list(VARIANTS[:2])
    assert [r["lab"] for r in first] == ["loopback,hosts=2"] * 2
    assert [r["interface_bytes_per_step"] for r in first] == [r["bytes_agree"] for r in first] == [None, None]
    assert len(said) == 2
    later = measure_grid(StepGrid(**options, variants=VARIANTS), path, said.append)
    assert later[:2] == first
    assert later[2]["variant"] == "gradwire terngrad"
    assert len(said) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named_in_one_sentence(rank: int) -> None:
    with open_ranks("lenet", 2, None) as ranks:
        assert ranks.ask("build", variant="ddp fp32")[0]["numel"] > 0
        os.kill(ranks._processes[rank].pid, signal.SIGKILL)
        ranks._processes[rank].wait()
        with pytest.raises(WorkerError, match=f"^rank {rank} of the benchmark was killed by SIGKILL"):
            ranks.ask("steps", variant="ddp fp32", count=1)
    assert all(process.returncode is not None for process in ranks._processes)


def test_a_rank_that_fails_says_why_in_one_sentence() -> None:
    with (
        open_ranks("lenet", 2, None) as ranks,
        pytest.raises(WorkerError, match=r"ended: KeyError: 'no such variant'$"),
    ):
        ranks.ask("steps", variant="no such variant", count=1)
