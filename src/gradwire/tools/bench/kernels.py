"""The kernel benchmark: kernels against memcpy on one thread, or on a GPU, one row for each; see :class:`Bench`."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from gradwire.kernels import Kernels, SegmentTable, checksum, chosen, get_kernels, inverse_scale, packed_bytes
from gradwire.kernels.backends import SIZE
from gradwire.kernels.self_test import NUMEL as SELF_TEST_NUMEL
from gradwire.kernels.self_test import SELF_TESTS
from gradwire.kernels.triton_core.backend import device_name
from gradwire.tools.bench.codecs import (
    CODER_GOALS,
    ROTATION_GOALS,
    SPARSE_GOALS,
    bench_coder_choices,
    bench_coders,
    bench_low_rank,
    bench_methods,
    bench_rotations,
    bench_sparse,
)
from gradwire.tools.bench.device_kernels import DEVICE_GOALS, check_cuda, measure_bucket, measure_device
from gradwire.tools.bench.timing import Bench
from gradwire.tools.experiments.run_record import hardware, versions

GOALS = {
    "moments": 0.50,
    "encode": 0.60,
    "sum of 4": 0.17,
    "decode base 9": 0.35,
    **CODER_GOALS,
    **ROTATION_GOALS,
    **SPARSE_GOALS,
}
MLP_SIZES = (784 * 2048, 2048, 2048 * 2048, 2048, 2048 * 2048, 2048, 20480, 10)
TINY = (64, 64, 128, 256, 512, 100, 37)


def resnet50_sizes(total: int) -> list[int]:
    """Return sizes like ResNet-50's parameters, last layer first as in DDP, cut to ``total`` elements."""
    sizes, width_in = [64 * 3 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [width_in * width, width, width, width * width * 9, width, width, width * width * 4]
            sizes += [width * 4, width * 4] + ([width_in * width * 4, width * 4, width * 4] if block == 0 else [])
            width_in = width * 4
    sizes = [*sizes, 2048 * 1000, 1000][::-1]
    while sum(sizes) > total and max(sizes) > 1:
        largest = sizes.index(max(sizes))
        if sum(sizes) - sizes[largest] >= total:
            del sizes[largest]
        else:
            sizes[largest] -= sum(sizes) - total
    return sizes


def table_of(sizes: list[int]) -> SegmentTable:
    """Return a table of whole parameters side by side."""
    offset = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    key = np.arange(2 * len(sizes)).reshape(-1, 2) * 2654435761 % 2**32
    return SegmentTable(offset, np.array(sizes), np.zeros(len(sizes)), key)


def gradients(table: SegmentTable) -> torch.Tensor:
    """Return heavy-tailed values with a different spread in every segment."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(table.extent, generator=generator)
    x *= torch.exp(0.5 * torch.randn(table.extent, generator=generator))
    return x * torch.repeat_interleave(
        torch.exp(1.5 * torch.randn(len(table), generator=generator) - 5),
        torch.from_numpy(table.numel.copy()),
    )


def bench_layout(bench: Bench, kernels: Kernels, layout: str, table: SegmentTable) -> None:
    """Time moments, encoder, sum and decoder on one table."""
    x, out, n, groups = gradients(table), torch.zeros(table.extent), table.extent, table.groups
    inner = max(1, 2_000_000 // n)
    moments = kernels.moments(x, table)
    limit = torch.minimum(moments.max_abs, (2.5 * moments.std).float())
    inverse = inverse_scale(limit)
    rows = torch.zeros(4, 16 * groups, dtype=torch.uint8)
    words = torch.zeros(packed_bytes(80 * groups, 4), dtype=torch.uint8)

    def encode(rank: int = 0) -> None:
        kernels.ternary_encode(x, table, limit, inverse, 1, rank, 0, groups, rows[rank])

    for rank in range(4):
        encode(rank)
    bench.run("moments", layout, n, lambda: kernels.moments(x, table), inner)
    bench.run("encode", layout, n, encode, inner)
    bench.run("sum of 4", layout, n, lambda: kernels.ternary_sum(rows, words), inner)
    bench.run("decode base 9", layout, n, lambda: kernels.decode(words, 4, table, limit, 0, groups, out), inner)
    bench.run(
        "decode base 9, added",
        layout,
        n,
        lambda: kernels.decode(words, 4, table, limit, 0, groups, out, True),
        inner,
    )
    for world_size in (2, 8):
        both = torch.zeros(world_size, 16 * groups, dtype=torch.uint8)
        both[:] = rows[:1]
        packed = torch.zeros(packed_bytes(80 * groups, world_size), dtype=torch.uint8)
        base = 2 * world_size + 1
        bench.run(f"sum of {world_size}", layout, n, partial(kernels.ternary_sum, both, packed), inner)
        decode = partial(kernels.decode, packed, world_size, table, limit, 0, groups, out)
        bench.run(f"decode base {base}", layout, n, decode, inner)
    if layout == "resnet50":
        many = torch.zeros(64, 16 * (groups // 8), dtype=torch.uint8)
        many[:] = rows[:1, : many.shape[1]]
        packed = torch.zeros(packed_bytes(5 * many.shape[1], 64), dtype=torch.uint8)
        bench.run("sum of 64", layout, 5 * many.shape[1], lambda: kernels.ternary_sum(many, packed))


def bench_reference(bench: Bench, elements: int) -> None:
    """Time the eager PyTorch encoder."""
    table, kernels = table_of([elements]), get_kernels("reference")
    x, out = gradients(table), torch.zeros(16 * table.groups, dtype=torch.uint8)
    one = torch.ones(1)
    bench.run(
        "encode, eager PyTorch", "one", elements,
        lambda: kernels.ternary_encode(x, table, one, one * 2.0**24, 1, 0, 0, table.groups, out),
    )  # fmt: skip


def bench_step(bench: Bench, kernels: Kernels) -> None:
    """Time the work of one rank of four in a step: moments and encode, sum of a quarter, decode."""
    table = table_of(list(MLP_SIZES))
    x, n, groups = gradients(table), table.extent, table.groups
    quarter = (groups // 4) * 16
    rows, own = torch.zeros(4, quarter, dtype=torch.uint8), torch.zeros(16 * groups, dtype=torch.uint8)
    shard = torch.zeros(packed_bytes(5 * quarter, 4), dtype=torch.uint8)
    words = torch.zeros(packed_bytes(80 * groups, 4), dtype=torch.uint8)
    out = torch.zeros(n)

    def step() -> None:
        moments = kernels.moments(x, table)
        limit = torch.minimum(moments.max_abs, (2.5 * moments.std).float())
        kernels.ternary_encode(x, table, limit, inverse_scale(limit), 1, 0, 0, groups, own)
        kernels.ternary_sum(rows, shard)
        kernels.decode(words, 4, table, limit, 0, groups, out)

    bench.run("codec of a 10 M step", "mlp", n, step)


def bench_checksum(bench: Bench, elements: int) -> None:
    """Time the checksum of a vector's bytes, and the checksums that one rank of four computes in a step."""
    draw = np.random.default_rng(0)

    def rows(number: int, length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return draw.integers(0, 256, (number, length), np.uint8)

    def heads(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        return np.zeros((number, 3), np.uint64)

    whole = rows(1, 4 * elements)
    bench.run("checksum", "flat", elements, lambda: checksum.checksums(heads(1), whole))
    # A quarter's codes to and from each of four ranks, itself included; then a quarter's sums to and from all.
    table = table_of(list(MLP_SIZES))
    up, down = rows(4, 16 * table.groups // 4), rows(4, packed_bytes(80 * table.groups, 4) // 4)

    def step() -> None:
        checksum.checksums(heads(4), up)
        checksum.checksums(heads(4), up)
        checksum.checksums(heads(1), down[:1])
        checksum.checksums(heads(4), down)

    bench.run("checksums of a 10 M step", "mlp", table.extent, step)


def bench_choices(bench: Bench) -> None:
    """Time both variants of each family on the input by which "auto" chooses, and mark the chosen one."""
    for family, choice in chosen().items():
        for variant in ("cpu", "cpu-plain"):
            work = partial(SELF_TESTS[family], get_kernels(variant), SIZE)
            bench.run(f"self test of {family}", variant, SELF_TEST_NUMEL * SIZE, work)
            bench.rows[-1]["chosen"] = variant == choice["backend"]


def measure_kernels(
    elements: int, repetitions: int, backend: str, say: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure all kernels and return a row for each, which is also passed to ``say`` when it is measured.

    Args:
        elements: Length of the large vectors; 20 M do not fit a cache.
        repetitions: Repetitions of each kernel.
        backend: Backend of the kernels.

    Raises:
        HyperparameterError: there is no such backend.
        BackendError: it is not installed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.perf_counter()  # "auto" compiles when it is asked for
        kernels = get_kernels(backend)
        kernels.warm_up()
        kernels.measure()
        warm_up_s = time.perf_counter() - began
        bench = Bench(elements, repetitions, say, GOALS)
        bench.run("floor: memcpy", "flat", elements, lambda: bench.target.copy_(bench.source))
        bench.run("floor: read (sum)", "flat", elements, lambda: bench.source.sum())
        bench.run("floor: write (fill)", "flat", elements, lambda: bench.target.fill_(1.0))
        bench_layout(bench, kernels, "resnet50", table_of(resnet50_sizes(elements)))
        tiny = np.random.default_rng(1).choice(TINY, 2000).tolist()
        bench_layout(bench, kernels, "2000 tiny", table_of(tiny))
        bench_reference(bench, min(elements, 1_000_000))
        bench_step(bench, kernels)
        bench_checksum(bench, elements)
        bench_coders(bench, kernels, elements)
        bench_rotations(bench, kernels, elements)
        bench_sparse(bench, kernels, elements)
        bench_low_rank(bench, kernels, elements)
        bench_methods(bench, kernels, elements)
        if backend == "auto":
            bench_choices(bench)
            bench_coder_choices(bench)
    finally:
        torch.set_num_threads(threads)
    return _with_versions(bench, kernels.name, warm_up_s, "cpu")


def measure_cuda_kernels(
    elements: int, repetitions: int, say: Callable[[dict[str, Any]], None], verified: Callable[[dict[str, Any]], None],
    device: torch.device | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Compare Triton's kernels with the reference on a GPU, and measure those that agree.

    Args:
        elements: Length of the vector.
        repetitions: Repetitions of each kernel.
        say: Called with each row when it is measured.
        verified: Called with ``family`` and ``agrees`` of each family before its rows.
        device: Where to measure; by default the current CUDA device.

    Returns:
        The rows, and the families that differ from the reference, each with the reason.

    Raises:
        BackendError: there is no CUDA device, or Triton is not installed.
    """
    device = check_cuda() if device is None else device
    began, bench = time.perf_counter(), Bench(elements, repetitions, say, goals=DEVICE_GOALS, device=device)
    get_kernels("triton")
    warm_up_s = time.perf_counter() - began
    bench.run("floor: memcpy", "flat", elements, lambda: bench.target.copy_(bench.source))
    sizes = resnet50_sizes(elements)
    table = table_of(sizes * (elements // sum(sizes)))
    wrong = measure_device(bench, table, gradients(table).to(device), "resnet50", verified)
    if not {name.partition(" ")[0] for name in wrong} & {"moments", "ternary"}:
        measure_bucket(bench, table_of(sizes), gradients(table_of(sizes)).to(device))
    return _with_versions(bench, "triton", warm_up_s, device_name(device)), wrong


def _with_versions(bench: Bench, backend: str, warm_up_s: float, device: str) -> list[dict[str, Any]]:
    """Return the rows with backend, hardware, versions and date."""
    found = {"backend": backend, "warm_up_s": warm_up_s, "device": device, "cpu": hardware()["processor"]}
    found |= {"cores": hardware()["cores"], **versions()}
    found["date_utc"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return [{"chosen": None, **row, **found} for row in bench.rows]
