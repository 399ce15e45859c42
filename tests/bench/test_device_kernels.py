"""The benchmark on a device, in Triton's interpreter: families are verified, then measured; what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire.kernels.triton_core.backend import SERVED, TritonBackend
from gradwire.tools.bench.kernels import measure_cuda_kernels
from triton_interpreter import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def test_families_are_verified_before_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted()
    right = TritonBackend.difference

    def difference(self: TritonBackend, family: str, device: torch.device) -> str | None:
        return "its results differ" if family == "levels" else right(self, family, device)

    monkeypatch.setattr(TritonBackend, "difference", difference)
    monkeypatch.setattr("gradwire.tools.bench.kernels.resnet50_sizes", lambda elements: [3000, 500, 17])
    said: list[dict[str, Any]] = []
    rows, wrong = measure_cuda_kernels(20_000, 2, said.append, said.append, torch.device("cpu"))
    assert wrong == ["levels (its results differ)"]
    assert [(line["family"], line["agrees"]) for line in said if "family" in line] == [
        (family, family != "levels") for family in SERVED
    ]
    kernels = [row["kernel"] for row in rows]
    assert {"moments", "encode", "sum of 4", "signs, vote of 4", "encode rotated, 4 bits", "select 0.01"} < set(kernels)
    assert {"encode with statistics", "25 MB bucket, both ways"} < set(kernels)
    assert "quantise, 4 bits" not in kernels
    assert said.index({"family": "ternary", "agrees": True}) < [line.get("kernel") for line in said].index("encode")
    assert all(row["device"] == "Triton's interpreter" and row["median_s"] > 0 for row in rows)
