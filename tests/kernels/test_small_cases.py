"""Small cases by hand that every backend must get right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import BACKENDS

from gradwire.kernels import RunTable, SegmentTable, get_kernels, natural_bytes, self_test
from gradwire.kernels import backends as select
from gradwire.kernels.backends import BACKENDS as MADE
from gradwire.kernels.backends import Automatic
from gradwire.kernels.entropy.tables import assign_codes

TABLE = SegmentTable([0], [6], [0], [(0, 0)])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_values_of_several_rows_are_added_up(name: str, accumulate: bool) -> None:
    """Two rows of signs, in runs of three, each with values of its own."""
    kernels, runs = get_kernels(name), RunTable(TABLE, 3)
    x = torch.tensor([[1.0, -1.0, 0.0, 2.0, -2.0, -3.0], [-1.0, -1.0, 1.0, 1.0, 1.0, -1.0]])
    rows = torch.zeros(2, 10, dtype=torch.uint8)
    for row, values in zip(rows, x):
        kernels.sign_encode(values, TABLE, 0, 1, row)
    above, below = torch.tensor([[1.0, 2.0], [10.0, 20.0]]), torch.tensor([[-4.0, -8.0], [-40.0, -80.0]])
    out = torch.full((6,), 0.5)
    kernels.sign_decode(rows, runs, above, below, 0, 1, out, accumulate)
    assert out.tolist() == [
        (0.5 if accumulate else 0.0) + value for value in (1 - 40, -4 - 40, 1 + 10, 2 + 20, -8 + 20, -8 - 80)
    ]


@pytest.mark.parametrize("name", BACKENDS)
def test_powers_of_two_keep_sign_and_magnitude(name: str) -> None:
    kernels = get_kernels(name)
    x = torch.tensor([1.0, -1.0, 0.5, -4.0, 0.0, -(2.0**-126)])
    row = torch.zeros(1, natural_bytes(1), dtype=torch.uint8)
    kernels.natural_encode(x, TABLE, 3, 1, row[0])
    out = torch.full((6,), 7.0)
    kernels.natural_mean(row, TABLE, 0.5, out)
    assert torch.equal(out, 0.5 * x)


def test_of_several_runs_the_shortest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are disturbed in all runs but the second, plain loops in none."""
    now, runs = [0.0], {"cpu": 0, "cpu-plain": 0}
    agreeing = self_test.SELF_TESTS["moments"]

    def test(kernels: object, size: int = 1) -> list[torch.Tensor]:
        name = kernels.name  # type: ignore[attr-defined]
        if size > 1:
            runs[name] += 1
            now[0] += {"cpu": 1.0 if runs[name] == 2 else 9.0, "cpu-plain": 2.0}[name]
            return []
        return agreeing(kernels)  # type: ignore[arg-type]

    monkeypatch.setitem(self_test.SELF_TESTS, "moments", test)
    monkeypatch.setattr(select, "_chosen", {})
    backend = Automatic({name: MADE[name](1) for name in ("cpu", "cpu-plain", "reference")}, lambda: now[0], None)
    backend.measure("moments")
    assert backend.family("moments").simd is True
    assert select._chosen["moments"].times_s == pytest.approx({"cpu": 1.0, "cpu-plain": 2.0})


@pytest.mark.parametrize(
    ("given", "full"), [((2, 1, 2), True), ((1, 2), False), ((1, 1, 1), False), ((3,) * 8, True), ((3,) * 7, False)]
)
def test_lengths_that_leave_codes_unused_or_need_more_than_there_are_make_no_code(
    given: tuple[int, ...], full: bool
) -> None:
    lengths, codes = np.zeros(256, np.int64), np.zeros(256, np.int64)
    lengths[: len(given)] = given
    assert assign_codes(lengths, codes) == full
