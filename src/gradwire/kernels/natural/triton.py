# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Triton kernels of powers of two: one bit for each sign, one byte for each exponent."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from gradwire.kernels.natural.operations import natural_sign_bytes
from gradwire.kernels.signs.triton import pack_signs
from gradwire.kernels.table import SIGN_BYTES, SegmentTable
from gradwire.kernels.triton_core.device_tables import groups_of
from gradwire.kernels.triton_core.integers import elements_of, uniform, words_of
from gradwire.kernels.triton_core.launch import cdiv, launch, stride_of, tile, word_arguments

_TILE = 32


@triton.jit(do_not_specialize=["groups", "low", "high", "stream"])
def _encode(x, at, room, number, segment, key, groups, low, high, stream, out, TILE: tl.constexpr):
    group, known, place, last, lane = elements_of(at, room, 0, groups, TILE)
    _, w0, w1, w2, w3 = words_of(number, segment, key, group, known, lane, low, high, stream)
    for plane in tl.static_range(5):
        within = 16 * plane + lane
        value = tl.load(x + place + within, mask=within < last, other=0.0)
        # Unsigned, since the sum of a large number's bits and a uniform integer may reach 2^31.
        bits = value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        exponent = tl.minimum((bits + (uniform(w0, w1, w2, w3, plane) >> 1)) >> 23, 254)
        exponent = tl.where(bits >= 0x7F800000, 255, exponent)
        tl.store(out + group.to(tl.int64) * 80 + within, exponent.to(tl.uint8), mask=known & (lane < 16))


def natural_encode(x: torch.Tensor, table: SegmentTable, round: int, stream: int, out: torch.Tensor) -> None:
    pack_signs(x, table, 0, table.groups, out[: SIGN_BYTES * table.groups], minus=True)
    launch(
        _encode, cdiv(table.groups, tile(_TILE)), x, *groups_of(table, x.device), table.groups,
        *word_arguments(round, stream), out[natural_sign_bytes(table.groups) :], TILE=tile(_TILE),
    )  # fmt: skip


@triton.jit(do_not_specialize=["number", "groups", "weight"])
def _mean(rows, number, stride, behind, at, room, groups, weight, x, ADD: tl.constexpr, TILE: tl.constexpr):
    group, _, place, last, lane = elements_of(at, room, 0, groups, TILE)
    step = stride.to(tl.int64)
    for plane in tl.static_range(5):
        within = 16 * plane + lane
        inside = within < last
        total = tl.zeros([TILE, 16], tl.float32)
        for row in range(number):
            payload = rows + row * step
            octet = tl.load(payload + group.to(tl.int64) * 10 + within // 8, mask=inside, other=0).to(tl.int32)
            exponent = tl.load(payload + behind + group.to(tl.int64) * 80 + within, mask=inside, other=0).to(tl.int32)
            bits = (exponent << 23) | (((octet >> (within % 8)) & 1) << 31)
            value = tl.where(exponent == 255, float("inf"), bits.to(tl.float32, bitcast=True) * weight)
            # The first value is not added to zero, which would lose the sign of a negative zero.
            total = tl.where(row == 0, value, total + value)
        if ADD:
            total = tl.load(x + place + within, mask=inside, other=0.0) + total
        tl.store(x + place + within, total, mask=inside)


def natural_mean(rows: torch.Tensor, table: SegmentTable, weight: float, x: torch.Tensor, accumulate: bool) -> None:
    groups = groups_of(table, x.device)
    launch(
        _mean, cdiv(table.groups, tile(_TILE)), rows, rows.shape[0], stride_of(rows), natural_sign_bytes(table.groups),
        groups.at, groups.room, table.groups, float(np.float32(weight)), x, ADD=accumulate, TILE=tile(_TILE),
    )  # fmt: skip
