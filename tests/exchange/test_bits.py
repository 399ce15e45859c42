"""Bytes of methods beside each other, as the pages state them: a rank's bits an element, headers aside."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.exchange.planning import Options, Planner

NUMEL = 80 * 512 * 27
"""Whole groups, blocks and shards, so that nothing but headers is padded."""


def bits(spec: str, world_size: int, columns: int = NUMEL) -> float:
    """Return what a rank sends for an element, without running anything."""
    like = {"w": torch.empty(NUMEL // columns, columns, device="meta")}
    sent = Planner(gw.method(spec), like, world_size, Options(min_numel=0)).sent_bytes(["w"])
    return 8 * sent / NUMEL


def on_the_scale_of_an_all_reduce(spec: str, world_size: int, columns: int = NUMEL) -> float:
    """Return bits where float32 has 32."""
    return bits(spec, world_size, columns) * world_size / (2 * (world_size - 1))


HEADERS = 0.01
"""Two messages to each of seven ranks at most, of headers and scalers of 64 bytes: 7000 bits of a million elements."""


@pytest.mark.parametrize("world_size", range(2, 9))
def test_terngrad_sends_less_than_the_levels_of_a_gather(world_size: int) -> None:
    found = {spec: bits(spec, world_size) for spec in ("terngrad", "qsgd", "qsgdinf", "nuqsgd")}
    assert min(found, key=lambda spec: found[spec]) == "terngrad"


@pytest.mark.parametrize(("spec", "first"), [("qsgdinf", 8), ("qsgd", 6), ("natural", 4)])
def test_from_where_on_a_gather_sends_more_than_bf16(spec: str, first: int) -> None:
    larger = [n for n in range(2, 10) if bits(spec, n) > bits("bf16", n)]
    assert larger == list(range(first, 10))


def test_natural_sends_nine_bits_to_each_other_worker() -> None:
    for world_size, shown in ((2, 9.0), (3, 13.5), (4, 18.0)):
        assert on_the_scale_of_an_all_reduce("natural", world_size) == pytest.approx(shown, abs=HEADERS)


def test_sharing_the_scaler_saves_a_quarter_with_four_workers() -> None:
    assert bits("TernGrad(share_scaler=False)", 4) == pytest.approx(4.80, abs=HEADERS)
    assert bits("TernGrad(share_scaler=True)", 4) == pytest.approx(3.60, abs=HEADERS)
    assert on_the_scale_of_an_all_reduce("TernGrad(share_scaler=False)", 4) == pytest.approx(3.2, abs=HEADERS)
    assert on_the_scale_of_an_all_reduce("TernGrad(share_scaler=True)", 4) == pytest.approx(2.4, abs=HEADERS)


@pytest.mark.parametrize("m", [9, 48, 64])
def test_two_means_a_column_cost_128_bits_with_four_workers(m: int) -> None:
    assert on_the_scale_of_an_all_reduce("onebit", 4, m) == pytest.approx(2 + 128 / m, abs=HEADERS)
    if m % 16 == 0:
        assert on_the_scale_of_an_all_reduce(f"OneBit(block_size={m})", 4) == pytest.approx(2 + 128 / m, abs=HEADERS)
        around = f"EFSignSGD(block_size={m})"
        assert on_the_scale_of_an_all_reduce(around, 4) == pytest.approx(2 + 64 / m, abs=HEADERS)
