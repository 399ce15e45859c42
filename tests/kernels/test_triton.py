"""Triton's kernels give the bits of the reference, in the interpreter; what they cannot do is refused by name."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import test_digit_sums
import test_levels
import test_natural
import test_parity
import test_selection
import test_shared_random
import test_signs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import normal, one_segment

from gradwire.errors import BackendError
from gradwire.kernels import (
    FAMILIES,
    BlockTable,
    Grid,
    Kernels,
    RotationTable,
    SegmentTable,
    digit_layout,
    get_kernels,
    packed_groups,
)
from gradwire.kernels.backends import reference
from gradwire.kernels.self_test import SELF_TESTS
from gradwire.kernels.triton_core import launch as launching
from gradwire.kernels.triton_core.backend import SERVED, TritonBackend
from triton_interpreter import interpreted

# NumPy warns of products with an infinity, which kernels compute and do not use.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

REFERENCE = get_kernels("reference")
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 0.5, -1.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, -torch.nan]


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return interpreted()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, or NaNs at the same places."""
    if one.is_floating_point():
        return torch.equal(torch.isnan(one), torch.isnan(other)) and torch.equal(one.nan_to_num(), other.nan_to_num())
    return torch.equal(one, other)


PARITIES = [
    test_parity.test_moments_have_the_bits_of_the_reference,
    test_parity.test_encode_has_the_bits_of_the_reference,
    test_parity.test_decode_has_the_bits_of_the_reference_and_leaves_gaps_alone,
    test_parity.test_how_a_parameter_is_cut_into_segments_does_not_matter,
    test_parity.test_empty_everything,
    test_parity.test_bytes_that_no_encoder_writes_stay_in_bounds,
    test_digit_sums.test_sums_are_exact,
    test_digit_sums.test_any_bytes_give_the_bits_of_the_reference,
    test_digit_sums.test_groups_decode_in_parts,
    test_levels.test_every_backend_gives_the_bits_of_the_reference,
    test_levels.test_bytes_that_no_encoder_writes_decode_to_levels,
    test_shared_random.test_every_backend_gives_the_bits_of_the_reference,
    test_natural.test_every_backend_gives_the_bits_of_the_reference,
    test_signs.test_every_backend_gives_the_bits_of_the_reference,
    test_signs.test_sums_are_those_of_the_reference,
    test_signs.test_a_bit_is_x_at_least_zero,
    test_selection.test_ties_go_to_the_lowest_positions_and_signs_do_not_count,
    test_selection.test_the_largest_are_those_of_a_sort,
    test_selection.test_positions_above_a_threshold_ascend_up_to_the_limit,
]
"""What every other backend is held to."""


def name_of(parity: Callable[[str], None]) -> str:
    return f"{parity.__module__}-{parity.__name__}"


@pytest.mark.parametrize("parity", PARITIES, ids=name_of)
def test_what_holds_for_other_backends_holds_for_triton(
    kernels: Kernels, parity: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over generated lengths, offsets, bases and values, as far from aligned addresses as may be."""
    run, launches = launching._launcher, list[None]()

    def count(*launch: Any) -> None:
        launches.append(None)
        run(*launch)

    monkeypatch.setattr(launching, "_launcher", count)
    if hasattr(parity, "hypothesis"):
        # An example takes up to a second in the interpreter, and has up to twelve lengths.
        fewer = settings(parity._hypothesis_internal_use_settings, max_examples=10)  # type: ignore[attr-defined]
        monkeypatch.setattr(parity, "_hypothesis_internal_use_settings", fewer)
    parity("triton")
    # Another backend in its place would give the bits of the reference, too.
    assert launches


@settings(max_examples=10)
@given(
    size=st.sampled_from([256, 512, 1024]),
    numel=st.lists(st.integers(0, 1100), max_size=3),
    seed=st.integers(0, 99),
    shift=st.integers(0, 17),
    round=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([[0.5], [0.3, 1.5], [0.1 * j * j for j in range(1, 9)]]),
    zero=st.booleans(),
    special=st.booleans(),
)
def test_rotations_have_the_bits_of_the_reference(
    kernels: Kernels, size: int, numel: list[int], seed: int, shift: int, round: int, stream: int, levels: list[float],
    zero: bool, special: bool,
) -> None:  # fmt: skip
    offset = [sum(numel[:i]) + 3 * i for i in range(len(numel))]
    table = RotationTable(offset, numel, [size * 77 * i for i in range(len(numel))], [(seed, 5)] * len(numel), size)
    x = normal(table.extent + 3, seed, shift, spread=3.0)
    if special:
        x[::97] = torch.tensor(SPECIAL * len(x))[: len(x[::97])]
    factor = torch.rand(table.blocks, generator=torch.Generator().manual_seed(seed))
    factor[::3] = 0.0
    a, b = torch.zeros(table.coordinates), torch.zeros(table.coordinates + shift)[shift:]
    REFERENCE.rotate(x, table, factor, round, stream, a)
    kernels.rotate(x, table, factor, round, stream, b)
    assert same_bits(a, b)
    assert torch.equal(torch.signbit(a) & ~torch.isnan(a), torch.signbit(b) & ~torch.isnan(b))
    grid = Grid.nearest(levels, zero=zero)
    layout = digit_layout(grid.base)
    length = packed_groups(-(-table.coordinates // 80), layout)
    words = torch.zeros(2, length + shift, dtype=torch.uint8)[:, shift:]
    sums = [
        chosen.encode_rotated(x, table, factor, grid, layout, round, stream, out)
        for chosen, out in zip((REFERENCE, kernels), words)
    ]
    assert torch.equal(*words)
    assert same_bits(*sums)
    scale = factor.clone()
    scale[1::4] = torch.inf
    for accumulate in (False, True):
        results = [normal(table.extent + 3, 1, shift) for _ in range(4)]
        for chosen, z, back, decoded in zip((REFERENCE, kernels), (a, b), results[:2], results[2:]):
            chosen.rotate_back(z.clone(), table, scale, round, stream, back, accumulate)
            chosen.decode_rotated(words[0], table, scale, grid, layout, round, stream, decoded, accumulate)
        assert same_bits(*results[:2])
        assert same_bits(*results[2:])


@pytest.mark.parametrize("size", [2048, 4096])
def test_large_blocks_are_rotated(kernels: Kernels, size: int) -> None:
    """Whose signs come from whole counters."""
    table = RotationTable([0], [2 * size], [3 * size], [(1, 2)], size)
    x, factor = normal(2 * size, size), torch.ones(2)
    found = [torch.zeros(table.coordinates) for _ in range(2)]
    back = [torch.zeros(2 * size) for _ in range(2)]
    for chosen, z, decoded in zip((REFERENCE, kernels), found, back):
        chosen.rotate(x, table, factor, 3, 4, z)
        chosen.rotate_back(z.clone(), table, factor, 3, 4, decoded)
    assert torch.equal(*found)
    assert torch.equal(*back)


@pytest.mark.parametrize("times", [1, 16])
@pytest.mark.parametrize("family", SERVED)
def test_several_programs_share_a_call(
    kernels: Kernels, family: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Tiles as small as on a GPU, so that each call takes several, the last of them in part."""
    monkeypatch.setattr("gradwire.kernels.triton_core.launch._INTERPRETED_TIMES", times)
    size = 1 if family == "rotation" else 11
    for one, other in zip(SELF_TESTS[family](REFERENCE, size), SELF_TESTS[family](kernels, size)):
        assert torch.equal(one, other)


def test_special_values_have_the_bits_of_the_reference(kernels: Kernels) -> None:
    """Infinities, NaNs, subnormal numbers and zeros of both signs, with each special scale."""
    x = torch.tensor(SPECIAL * 30)
    table = one_segment(len(x))
    for scale in (0.0, 1.0, 2.0**-100, 3e38, torch.inf, torch.nan):
        limit, inverse = torch.tensor([scale]), torch.tensor([2.0**24 / scale if scale else 0.0])
        results = []
        for chosen in (REFERENCE, kernels):
            trits = torch.zeros(16 * table.groups, dtype=torch.uint8)
            chosen.ternary_encode(x, table, limit, inverse, 3, 4, 0, table.groups, trits)
            sums = chosen.moments(x[:5], one_segment(5))
            results.append([trits, sums.max_abs, sums.mean, sums.std, sums.norm])
            for grid in (Grid.even(3), Grid.ordered((-1, 0.1, 0.3, 1)), Grid.symmetric((0.1, 0.2, 1), zero=False)):
                layout, blocks = digit_layout(grid.base), BlockTable(table, 1 << 20)
                words = torch.zeros(packed_groups(table.groups, layout), dtype=torch.uint8)
                chosen.quantise(x, blocks, inverse, grid, layout, 3, 4, words)
                back = x.clone()
                chosen.dequantise(words, blocks, limit, grid, layout, back, accumulate=True)
                results[-1] += [words, back]
        assert all(same_bits(one, other) for one, other in zip(*results))


def test_inverses_of_unusual_scales_have_the_bits_of_the_reference(kernels: Kernels) -> None:
    usual = torch.exp2(torch.rand(500, generator=torch.Generator().manual_seed(0)) * 227 - 100)
    unusual = torch.cat([torch.tensor([*SPECIAL, 1e-38, 2.0**-100, 7e-31]), usual])
    found = [torch.empty_like(unusual) for _ in range(2)]
    for chosen, out in zip((REFERENCE, kernels), found):
        chosen._serve("moments").inverse(unusual, out)
    assert torch.equal(*found)


def test_tables_are_copied_to_a_device_once(kernels: Kernels) -> None:
    from gradwire.kernels.triton_core import device_tables

    gc.collect()
    before, cpu = len(device_tables._kept), torch.device("cpu")
    table = one_segment(1000)
    assert device_tables.groups_of(table, cpu) is device_tables.groups_of(table, cpu)
    assert device_tables.groups_of(table, cpu) is not device_tables.groups_of(one_segment(1000), cpu)
    del table
    gc.collect()
    assert len(device_tables._kept) == before


def test_families_without_kernels_are_refused_by_name(kernels: Kernels) -> None:
    assert kernels.name == "triton"
    for family in set(FAMILIES) - set(SERVED):
        with pytest.raises(BackendError, match=f"no kernels of the family '{family}', only of moments, ternary"):
            SELF_TESTS[family](kernels)


def test_tensors_elsewhere_are_refused_by_name(kernels: Kernels) -> None:
    with pytest.raises(BackendError, match="in CPU memory, where TRITON_INTERPRET=1 is set, not on 'meta' tensors"):
        kernels.moments(torch.ones(80, device="meta"), one_segment(80))


def test_what_differs_from_the_reference_is_refused_by_name(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.kernels.signs import triton as signs

    backend = TritonBackend(reference())
    own, table = Kernels(backend), SegmentTable([0], [80], [0], [(1, 2)])
    right = signs.sign_vote

    def wrong(rows: torch.Tensor, out: torch.Tensor) -> None:
        right(rows, out)
        out[3] ^= 1

    monkeypatch.setattr(signs, "sign_vote", wrong)
    message = "does not serve the family 'signs' on Triton's interpreter: its results differ from those of 'reference'"
    for _ in range(2):
        with pytest.raises(BackendError, match=message):
            own.finite(torch.ones(80), table)
    monkeypatch.setattr(signs, "sign_vote", right)
    assert own.finite(torch.ones(80), table).tolist() == [True]


REFUSED = """
import os, sys, torch
from gradwire.errors import BackendError
from gradwire.kernels import get_kernels

def refused():
    try:
        get_kernels("triton")
    except BackendError as error:
        print(error)
"""
MISSING = """
sys.modules["triton"] = None
refused()
del sys.modules["triton"]
torch.cuda.is_available = lambda: False
refused()
"""
CHANGED = """
import triton
os.environ["TRITON_INTERPRET"] = "1"
refused()
"""


def test_what_is_missing_is_named() -> None:
    interpreted()
    told = ""
    # What Triton was imported for is settled once in a process.
    for code in (MISSING, CHANGED):
        command = [sys.executable, "-c", REFUSED + code]
        told += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lacking, without_gpu, changed = told.splitlines()
    assert re.search(r"kernel backend 'triton' needs triton .*: pip install 'gradwire\[triton\]'", lacking)
    assert re.search(r"'triton' needs a CUDA device, and PyTorch \S+ finds none: use", without_gpu)
    assert "TRITON_INTERPRET was changed after triton was imported" in changed


def test_families_are_compiled_ahead_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one: what compiles other backends, tensors in main memory, this one refuses there."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("gradwire.kernels.api.cache_folder", lambda: None)
    compared: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(TritonBackend, "difference", lambda _, *what: compared.append(what))
    backend = TritonBackend(reference())
    assert backend.compiles_for == "triton GPU 3 (sm_90)"
    kernels = Kernels(backend)
    kernels.warm_up(SERVED)
    assert compared == [(family, torch.device("cuda", 3)) for family in SERVED]
    with pytest.raises(BackendError, match="no kernels of the family 'sketch'"):
        kernels.warm_up(["sketch"])


def test_what_is_selected_is_counted_wherever_the_counts_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families are compared with the reference on copies of all tensors on the device."""
    from gradwire.kernels.selection import triton as selection

    monkeypatch.setattr(selection, "launch", lambda *_, **__: None)
    table = SegmentTable([0], [80], [0], [(1, 2)])
    x, one = torch.ones(80, device="meta"), torch.ones(1, dtype=torch.int64)
    found = torch.zeros(1, dtype=torch.int64, device="meta")
    index = torch.zeros(1, dtype=torch.int32, device="meta")
    selection.select_above(x, table, torch.ones(1), one, index, found)
    assert found.shape == (1,)
