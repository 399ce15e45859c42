"""Signs: the same bits from every backend, votes as counted one by one, sums that no order changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, COMPILED, OTHERS, normal, one_segment, same_signatures, tables, unaligned_bytes

from gradwire.errors import HyperparameterError
from gradwire.kernels import SIGN_BYTES, WHOLE, RunTable, SegmentTable, get_kernels

REFERENCE = get_kernels("reference")
LIGHT = settings(max_examples=25)


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(
    table=tables(),
    length=st.sampled_from([1, 3, 16, 37, 80, 512, 4608, WHOLE]),
    rows=st.integers(1, 4),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_every_backend_gives_the_bits_of_the_reference(
    name: str, table: SegmentTable, length: int, rows: int, seed: int, shift: int, cuts: tuple[float, float]
) -> None:
    kernels = get_kernels(name)
    begin, end = sorted(int(cut * table.groups) for cut in cuts)
    x = normal(table.extent + 3, seed, shift)
    x[::11], x[5::13] = 0.0, -0.0
    size = SIGN_BYTES * (end - begin)
    expected = torch.zeros(rows, size, dtype=torch.uint8)
    got = unaligned_bytes(rows * (size + 5), shift).view(rows, size + 5)[:, :size]
    for i in range(rows):
        REFERENCE.sign_encode(x.roll(i), table, begin, end, expected[i])
        kernels.sign_encode(x.roll(i), table, begin, end, got[i])
    assert torch.equal(expected, got)
    a, b = torch.empty(size, dtype=torch.uint8), unaligned_bytes(size, shift)
    REFERENCE.sign_vote(expected, a)
    kernels.sign_vote(got, b)
    assert torch.equal(a, b)
    runs = RunTable(table, length)
    above, below = (normal(rows * runs.runs, i).reshape(rows, -1) for i in (1, 2))
    for accumulate in (False, True):
        a, b = (normal(table.extent + 3, 1, shift) for _ in range(2))
        REFERENCE.sign_decode(expected, runs, above, below, begin, end, a, accumulate)
        kernels.sign_decode(got, runs, above, below, begin, end, b, accumulate)
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OTHERS)
@LIGHT
@given(table=tables(), seed=st.integers(0, 99), shift=st.integers(0, 17), spoil=st.sampled_from([0, 1, 50]))
def test_sums_are_those_of_the_reference(name: str, table: SegmentTable, seed: int, shift: int, spoil: int) -> None:
    x = normal(table.extent, seed, shift, spread=4.0)
    x[::11], x[5::13] = 0.0, -0.0
    where = torch.randperm(max(table.extent, 1), generator=torch.Generator().manual_seed(seed))[:spoil]
    x[where[where < table.extent]] = torch.nan if seed % 2 else -torch.inf
    one, other = REFERENCE.sign_sums(x, table), get_kernels(name).sign_sums(x, table)
    for field in ("above", "below", "count"):
        assert torch.equal(getattr(one, field), getattr(other, field))
    finite = REFERENCE.finite(x, table)
    assert torch.equal(finite, get_kernels(name).finite(x, table))
    assert torch.equal(finite, torch.isfinite(one.above))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_bit_is_x_at_least_zero(name: str) -> None:
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, -torch.nan, 3.0])
    out = torch.full((SIGN_BYTES,), 255, dtype=torch.uint8)
    get_kernels(name).sign_encode(x, one_segment(9), 0, 1, out)
    assert out.tolist() == [0b00101011, 1] + [0] * 8


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("voters", [1, 2, 3, 4, 5, 7, 8, 11, 16, 31, 64, 100, 257])
def test_votes_are_counted(name: str, voters: int) -> None:
    """Random ballots, near a tie, and both unanimous ones; a tie is a yes."""
    generator = torch.Generator().manual_seed(voters)
    yes = torch.rand(voters, 8 * 700, generator=generator) < 0.5
    yes[:, :8], yes[:, 8:16] = True, False
    yes[: voters // 2, 16:24], yes[voters // 2 :, 16:24] = True, False
    powers = 2 ** torch.arange(8)
    rows = (yes.reshape(voters, -1, 8) * powers).sum(2).to(torch.uint8)
    out = unaligned_bytes(700, 3)
    get_kernels(name).sign_vote(rows, out)
    bits = (out[:, None] & powers != 0).reshape(-1)
    assert torch.equal(bits, 2 * yes.sum(0) >= voters)
    assert bool(bits[16]) == (voters % 2 == 0)


@pytest.mark.parametrize("voters", [32767, 16384])
def test_the_largest_electorate(voters: int) -> None:
    rows = torch.zeros(voters, 2, dtype=torch.uint8)
    rows[: (voters + 1) // 2, 0] = 1
    rows[: (voters - 1) // 2, 1] = 1
    for name in COMPILED:
        out = torch.empty(2, dtype=torch.uint8)
        get_kernels(name).sign_vote(rows, out)
        assert out.tolist() == [1, 0]
    with pytest.raises(HyperparameterError, match="32768 rows"):
        REFERENCE.sign_vote(torch.zeros(32768, 1, dtype=torch.uint8), out[:1])


@pytest.mark.parametrize("name", BACKENDS)
def test_sums_are_free_of_order_within_a_block_and_exact_for_short_numbers(name: str) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    kernels, table = get_kernels(name), one_segment(4096)
    one, other = kernels.sign_sums(x, table), kernels.sign_sums(x[order], table)
    assert (one.above, one.below, one.count) == (other.above, other.below, other.count)
    # Truncation loses less than a unit of 2^(e-23) an element, e that of the largest.
    assert float(one.above) == pytest.approx(float(x.double().clamp(min=0).sum()), abs=4096 * 2.0**-21)
    assert float(one.below) == pytest.approx(float(-x.double().clamp(max=0).sum()), abs=4096 * 2.0**-21)
    assert int(one.count) == int((x >= 0).sum())
    x = torch.tensor([0.1, -0.1, 0.1]).repeat(3000)
    found = kernels.sign_sums(x, one_segment(9000))
    assert float(found.above) == 6000 * float(x[0])
    assert float(found.below) == 3000 * float(x[0])


@pytest.mark.parametrize("name", BACKENDS)
def test_special_values_are_written_as_they_are(name: str) -> None:
    runs = RunTable(one_segment(200), 100)
    rows = torch.zeros(2, SIGN_BYTES * 3, dtype=torch.uint8)
    above, below = torch.ones(2, 2), torch.tensor([[torch.inf, -2.0], [1.0, 1.0]])
    x = torch.zeros(201)
    get_kernels(name).sign_decode(rows, runs, above, below, 0, 3, x)
    assert x.tolist() == [torch.inf] * 100 + [-1.0] * 100 + [0.0]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    kernels, table = get_kernels(name), one_segment(100)
    runs, rows = RunTable(table, 50), torch.zeros(2, 20, dtype=torch.uint8)
    x, two = torch.zeros(100), torch.zeros(2, 2)
    with pytest.raises(HyperparameterError, match="at least 100"):
        kernels.sign_encode(x[:99], table, 0, 2, rows[0])
    with pytest.raises(HyperparameterError, match="out is"):
        kernels.sign_encode(x, table, 0, 2, rows[0, :19])
    with pytest.raises(HyperparameterError, match=r"groups 0\.\.3"):
        kernels.sign_encode(x, table, 0, 3, rows[0])
    with pytest.raises(HyperparameterError, match="rows is"):
        kernels.sign_decode(rows[:, :10], runs, two, two, 0, 2, x)
    with pytest.raises(HyperparameterError, match="below is"):
        kernels.sign_decode(rows, runs, two, two[:1], 0, 2, x)
    with pytest.raises(HyperparameterError, match="rows is"):
        kernels.sign_vote(rows.float(), rows[0])
    with pytest.raises(HyperparameterError, match="at least 1"):
        RunTable(table, 0)


def test_runs_are_anchored_to_the_parameter() -> None:
    table = SegmentTable([0, 300, 400], [250, 100, 9], [0, 240, 0], [(1, 2), (1, 2), (3, 4)])
    runs = RunTable(table, [100, 100, 4])
    assert runs.first.tolist() == [0, 3, 5, 8]
    assert runs.number.tolist() == [0, 1, 2, 2, 3, 0, 1, 2]
    elements = runs.elements()
    # The second segment is elements 240 .. 340 of its parameter: the ends of runs 2 and 3.
    assert elements.offset.tolist() == [0, 100, 200, 300, 360, 400, 404, 408]
    assert elements.numel.tolist() == [100, 100, 50, 60, 40, 4, 4, 1]


@pytest.mark.parametrize("name", COMPILED)
def test_warm_up_compiles_every_signature_that_calls_use(name: str) -> None:
    from gradwire.kernels.signs import loops

    kernels, table = get_kernels(name), SegmentTable([2, 100], [90, 100], [0, 80], [(1, 2), (3, 4)])
    kernels.warm_up(["signs"])
    before = same_signatures(loops)
    x, runs = torch.ones(300)[7:], RunTable(table, [7, 1000])
    rows = torch.empty(3, SIGN_BYTES * table.groups + 1, dtype=torch.uint8)[:, 1:]
    kernels.finite(x, runs.elements())
    kernels.sign_sums(x, runs.elements())
    for row in rows:
        kernels.sign_encode(x, table, 0, table.groups, row)
    kernels.sign_vote(rows, rows[0].clone())
    for number in (1, 3):
        values = torch.ones(number, runs.runs)
        kernels.sign_decode(rows[:number], runs, values, -values, 0, table.groups, x, accumulate=True)
    assert same_signatures(loops) == before
    assert all(before)
