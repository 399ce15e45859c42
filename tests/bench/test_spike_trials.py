"""The trial of one spike under each method, ``benchmarks/trials/spikes.py``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest

import gradwire as gw

pytestmark = pytest.mark.repository

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("method", ["powersgd", "terngrad", "LocalSGD(every=2)", "dpsgd"])
def test_a_row_a_spike_tells_what_it_cost(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "trials"), *sys.path])
    with mock.patch.dict(sys.modules):
        spikes = importlib.import_module("spikes")
    calm, *rows = spikes.rows_of(method, gw.method(method), 8)
    assert (calm["spike"], calm["skipped_rounds"]) == (None, 0)
    assert {(row["spike"], row["place"]) for row in rows} == {
        (str(spike), place) for spike in spikes.SPIKES for place in ("first", "last")
    }
    for row in rows:
        if method == "dpsgd":
            assert "beyond 2^40" in row["refused"]
            continue
        assert row["later_finite"]
        assert row["as_infinity"]
        assert row["skipped_rounds"] == {"powersgd": 1, "LocalSGD(every=2)": 0}.get(method, row["spike"] == "inf")
