"""Kernels on a GPU: compare each family with the reference, then time it against a copy in the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradwire.errors import BackendError
from gradwire.kernels import (
    SIGN_BYTES,
    BlockTable,
    Grid,
    Kernels,
    RotationTable,
    RunTable,
    SegmentTable,
    digit_layout,
    get_kernels,
    natural_bytes,
    packed_bytes,
    packed_groups,
    summed,
)
from gradwire.kernels.backends import reference
from gradwire.kernels.triton_core.backend import SERVED, TritonBackend
from gradwire.tools.bench.timing import Bench

RANKS = 4

DEVICE_GOALS = {"encode with statistics": 8.2 / 8 / 0.6, "sum of 4": 1.0 / 8 / 0.6}
"""Goals: 0.6 of a copy's bytes a second. A copy moves eight bytes an element. The first kernel reads an element twice
and writes a fifth of a byte, the second reads four such fifths and writes one."""

BUCKET_BYTES = 25 << 20
"""Default size of DDP's buckets."""


def check_cuda(option: str = "--device cuda") -> torch.device:
    """Return the current CUDA device.

    Args:
        option: The option that asks for one, for the message.

    Raises:
        BackendError: there is none.
    """
    if not torch.cuda.is_available():
        raise BackendError(
            f"{option}: PyTorch {torch.__version__} finds no CUDA device here: run this on a machine with one, "
            "and with a PyTorch that is built for CUDA"
        )
    return torch.device("cuda", torch.cuda.current_device())


def measure_device(
    bench: Bench, table: SegmentTable, x: torch.Tensor, layout: str, verified: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Compare each family that has Triton kernels with the reference on a device, and time those that agree.

    Args:
        bench: Measures the times, on its device.
        table: Segments of ``x``.
        x: A vector on the device.
        layout: Name of the table in the rows.
        verified: Called for each family with a dict of its name, ``family``, and whether it ``agrees``.

    Returns:
        The families that differ, each with the reason.
    """
    backend, kernels, wrong = TritonBackend(reference()), get_kernels("triton"), []
    for family in SERVED:
        reason = backend.difference(family, bench.device)
        verified({"family": family, "agrees": reason is None})
        if reason is not None:
            wrong.append(f"{family} ({reason})")
            continue
        for name, work in _FAMILIES[family](kernels, table, x):
            bench.run(name, layout, table.extent, work)
    return wrong


def measure_bucket(bench: Bench, table: SegmentTable, x: torch.Tensor) -> None:
    """Time TernGrad on a bucket of DDP's size with two ranks: encode with statistics, and decode.

    Args:
        bench: Measures the times.
        table: Parameters, the first of which make a bucket.
        x: Their gradients, on the device.
    """
    count = max(1, int((4 * table.numel.cumsum() <= BUCKET_BYTES).sum()))
    bucket = SegmentTable(table.offset[:count], table.numel[:count], table.start[:count], table.key[:count])
    kernels, room, out = get_kernels("triton"), _bytes(x, 16 * bucket.groups), torch.zeros_like(x[: bucket.extent])
    words = _bytes(x, packed_bytes(80 * bucket.groups, 2))
    encode = _encode_with_statistics(kernels, bucket, x[: bucket.extent], room)

    def both_ways() -> None:
        scale = encode()
        kernels.decode(words, 2, bucket, scale, 0, bucket.groups, out)

    bench.run("25 MB bucket, both ways", "resnet50", bucket.extent, both_ways)


def _encode_with_statistics(
    kernels: Kernels, table: SegmentTable, x: torch.Tensor, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    def encode() -> torch.Tensor:
        scale = kernels.moments(x, table).max_abs
        kernels.ternary_encode(x, table, scale, kernels.inverse_scale(scale), 1, 0, 0, table.groups, out)
        return scale

    return encode


Work = tuple[str, Callable[[], object]]


def _bytes(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=x.device)


def _moments(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    return [("moments", lambda: kernels.moments(x, table))]


def _ternary(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    limit = torch.ones(len(table), device=x.device)
    inverse, rows, out = kernels.inverse_scale(limit), _bytes(x, RANKS, 16 * table.groups), torch.zeros_like(x)
    words = _bytes(x, packed_bytes(80 * table.groups, RANKS))
    return [
        ("encode", lambda: kernels.ternary_encode(x, table, limit, inverse, 1, 0, 0, table.groups, rows[0])),
        ("encode with statistics", _encode_with_statistics(kernels, table, x, rows[0])),
        ("sum of 4", lambda: kernels.ternary_sum(rows, words)),
        ("decode base 9", lambda: kernels.decode(words, RANKS, table, limit, 0, table.groups, out)),
    ]


def _levels(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    blocks, grid = BlockTable(table, 512), Grid.even(7)
    layout, scale = digit_layout(grid.base), torch.ones(blocks.blocks, device=x.device)
    inverse, out = kernels.inverse_scale(scale), torch.zeros_like(x)
    rows = _bytes(x, RANKS, packed_groups(table.groups, layout))
    total = _bytes(x, packed_groups(table.groups, summed(layout, RANKS)))
    return [
        ("quantise, 4 bits", lambda: kernels.quantise(x, blocks, inverse, grid, layout, 1, 0, rows[0])),
        ("dequantise, 4 bits", lambda: kernels.dequantise(rows[0], blocks, scale, grid, layout, out)),
        ("sum of 4, 4 bits", lambda: kernels.sum_digits(rows, table.groups, layout, total)),
    ]


def _natural(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    rows, out = _bytes(x, RANKS, natural_bytes(table.groups)), torch.zeros_like(x)
    return [
        ("powers of two, encode", lambda: kernels.natural_encode(x, table, 1, 0, rows[0])),
        ("powers of two, mean of 4", lambda: kernels.natural_mean(rows, table, 1 / RANKS, out)),
    ]


def _signs(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    runs, rows, out = RunTable(table, 512), _bytes(x, RANKS, SIGN_BYTES * table.groups), torch.zeros_like(x)
    values = torch.ones((RANKS, runs.runs), device=x.device)
    return [
        ("signs, sums", lambda: kernels.sign_sums(x, table)),
        ("signs, encode", lambda: kernels.sign_encode(x, table, 0, table.groups, rows[0])),
        ("signs, vote of 4", lambda: kernels.sign_vote(rows, rows[0])),
        ("signs, decode 4", lambda: kernels.sign_decode(rows, runs, values, -values, 0, table.groups, out)),
    ]


def _rotation(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    blocks = RotationTable(table.offset, table.numel, table.start * 0, table.key, 4096)
    factor, z = torch.full((blocks.blocks,), 2.0**-6, device=x.device), torch.zeros(blocks.coordinates, device=x.device)
    grid, out = Grid.nearest([j + 0.5 for j in range(8)]), torch.zeros_like(x)
    layout = digit_layout(grid.base)
    words = _bytes(x, packed_groups(-(-blocks.coordinates // 80), layout))
    return [
        ("rotate", lambda: kernels.rotate(x, blocks, factor, 1, 0, z)),
        ("encode rotated, 4 bits", lambda: kernels.encode_rotated(x, blocks, factor, grid, layout, 1, 0, words)),
        ("decode rotated, 4 bits", lambda: kernels.decode_rotated(words, blocks, factor, grid, layout, 1, 0, out)),
    ]


def _selection(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    works: list[Work] = []
    for density in (0.001, 0.01, 0.1):
        counts = torch.from_numpy((table.numel * density).astype("int64"))
        index = torch.zeros(int(counts.sum()), dtype=torch.int32, device=x.device)
        works.append((f"select {density:g}", partial(kernels.select_largest, x, table, counts, index)))
    return works


def _shifts(kernels: Kernels, table: SegmentTable, x: torch.Tensor) -> list[Work]:
    shift, out = torch.zeros(len(x), dtype=torch.float64, device=x.device), x.double()
    return [
        ("difference to a shift", lambda: kernels.subtract_shift(x, shift, 1.0)),
        ("step of a shift", lambda: kernels.step_shift(shift, x, 0.5, out)),
    ]


_FAMILIES: dict[str, Callable[[Kernels, SegmentTable, torch.Tensor], list[Work]]] = {
    "moments": _moments,
    "ternary": _ternary,
    "levels": _levels,
    "natural": _natural,
    "signs": _signs,
    "rotation": _rotation,
    "selection": _selection,
    "shifts": _shifts,
}
