"""Choosing a backend, and the tables that all backends share."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kernel_cases import BACKENDS, same_signatures

from gradwire.errors import HyperparameterError
from gradwire.kernels import SegmentTable, get_kernels, packed_bytes


def test_backends_are_cached_and_named() -> None:
    for name in ("reference", "cpu", "cpu-plain", "meta"):
        assert get_kernels(name).name == name
        assert get_kernels(name) is get_kernels(name)


@pytest.mark.parametrize("name", ["auto", *BACKENDS, "meta"])
def test_unknown_families_are_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(HyperparameterError, match="did you mean 'levels'"):
        get_kernels(name).warm_up(["level"])


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(HyperparameterError, match="did you mean 'cpu-plain'"):
        get_kernels("cpu_plain")
    with pytest.raises(HyperparameterError, match="at least one"):
        get_kernels("cpu", threads=0)


def test_importing_the_package_neither_imports_numba_nor_compiles() -> None:
    code = "import sys, gradwire, gradwire.kernels; gradwire.attach; print({'numba', 'llvmlite'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_warm_up_compiles_every_signature_that_calls_use() -> None:
    from gradwire.kernels.ternary import loops

    kernels, table = get_kernels("cpu"), SegmentTable([2, 100], [90, 100], [0, 80], [(1, 2), (3, 4)])
    kernels.warm_up(["moments", "ternary"])
    before = same_signatures(loops)
    x, two = torch.ones(300)[7:], torch.ones(2)
    rows = torch.empty(3, 16 * table.groups + 1, dtype=torch.uint8)[:, 1:]
    kernels.moments(x, table)
    for row in rows:
        kernels.ternary_encode(x, table, two, two, 2**63, 2**32 - 1, 0, table.groups, row)
    for world_size in (1, 2, 3):
        words = torch.empty(packed_bytes(80 * table.groups, world_size), dtype=torch.uint8)
        kernels.ternary_sum(rows[:world_size], words)
        kernels.decode(words, world_size, table, two, 0, table.groups, x, accumulate=True)
    assert same_signatures(loops) == before
    assert all(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 5], [10, 3], [0, 0], [(0, 0)] * 2), "overlap"),
        (([0], [10], [79], [(0, 0)]), "multiple of 80"),
        (([0], [-1], [0], [(0, 0)]), "negative"),
        (([0, 1], [1], [0, 0], [(0, 0)] * 2), "numel has shape"),
        (([0], [1], [0], []), "0 keys"),
        (([0], [80 * 2**28 + 1], [0], [(0, 0)]), "split the parameter"),
    ],
)
def test_impossible_tables_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        SegmentTable(*arguments)


def test_a_table_cannot_be_changed() -> None:
    table = SegmentTable([0], [10], [0], [(0, 0)])
    with pytest.raises(ValueError, match="read-only"):
        table.offset[0] = 1


@pytest.mark.parametrize("name", ["reference", "cpu", "cpu-plain"])
def test_a_vector_shorter_than_the_table_is_refused(name: str) -> None:
    table = SegmentTable([0], [100], [0], [(0, 0)])
    with pytest.raises(HyperparameterError, match="at least 100"):
        get_kernels(name).moments(torch.zeros(99), table)
    with pytest.raises(HyperparameterError, match="float32"):
        get_kernels(name).moments(torch.zeros(200)[::2], table)


def test_meta_accepts_meta_tensors_and_checks_their_sizes() -> None:
    kernels, table = get_kernels("meta"), SegmentTable([0], [100], [0], [(0, 0)])
    x = torch.empty(100, device="meta")
    assert kernels.moments(x, table).std.shape == (1,)
    rows, out = (torch.empty(*size, dtype=torch.uint8, device="meta") for size in ((4, 32), (64,)))
    kernels.ternary_sum(rows, out)
    with pytest.raises(HyperparameterError, match="64 elements"):
        kernels.ternary_sum(rows, out[1:])
