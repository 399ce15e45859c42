"""The trial of one spike under each method, ``benchmarks/trials/spikes.py``."""

from __future__ import annotations

import pytest

import gradwire as gw
from benchmarks.trials import spikes

pytestmark = pytest.mark.repository


@pytest.mark.parametrize("method", ["powersgd", "terngrad", "LocalSGD(every=2)", "dpsgd"])
def test_a_row_a_spike_tells_what_it_cost(method: str) -> None:
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
