"""The kernel benchmark's rows for methods."""

from __future__ import annotations

from typing import Any

from gradwire.kernels import get_kernels
from gradwire.methods.registry import METHODS
from gradwire.tools.bench.codecs import bench_methods
from gradwire.tools.bench.timing import Bench


def test_every_method_has_a_row_and_its_time_is_a_share_of_memcpy() -> None:
    said: list[dict[str, Any]] = []
    bench = Bench(elements=40_000, repetitions=2, say=said.append)
    bench_methods(bench, get_kernels("auto"), 40_000)
    assert [row["kernel"] for row in said] == [f"step of {kind.name}" for kind in METHODS if not kind().traits.sharded]
    assert bench.rows == said
    for row in said:
        assert 30_000 < row["elements"] <= 40_000
        assert 0 < row["ratio_p20"] <= row["ratio_to_memcpy"] <= row["ratio_p80"]
        assert row["median_s"] > 0
