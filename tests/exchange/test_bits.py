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


@pytest.mark.parametrize(("spec", "first"), [("qsgdinf", 8), ("qsgd", 6)])
def test_from_where_on_a_gather_sends_more_than_bf16(spec: str, first: int) -> None:
    larger = [n for n in range(2, 10) if bits(spec, n) > bits("bf16", n)]
    assert larger == list(range(first, 10))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_natural_sends_nine_bits_each_way(world_size: int) -> None:
    """Where every worker sends to every other, nine to each of them: from eight workers on more than float32."""
    assert on_the_scale_of_an_all_reduce("natural", world_size) == pytest.approx(9.0, abs=HEADERS)
    like = {"w": torch.empty(1, NUMEL, device="meta")}
    gathers = Planner(gw.method("natural"), like, world_size, Options(min_numel=0, collective="all_gather"))
    assert 8 * gathers.sent_bytes(["w"]) / NUMEL == pytest.approx(9 * (world_size - 1), abs=HEADERS)
    assert bits("natural", world_size) < bits("fp32", world_size)
    more = 8 * gathers.sent_bytes(["w"]) / NUMEL > bits("fp32", world_size)
    assert more == (world_size >= 8)


@pytest.mark.parametrize(
    "spec", ["QSGD()", "QSGDinf()", "NUQSGD()", *(f"{name}(block_size=512)" for name in ("ALQ", "ALQN", "AMQ", "AMQN"))]
)
def test_where_owners_encode_the_mean_again_bits_do_not_grow_with_the_workers(spec: str) -> None:
    """A payload to each owner and one from it to all: as many bits as two of payloads, (N - 1) / N of each."""
    like, alone = {"w": torch.empty(1, NUMEL, device="meta")}, {}
    for world_size in (2, 4, 8):
        for collective in ("all_gather", "two_shot"):
            options = Options(min_numel=0, collective=collective)
            sent = Planner(gw.method(spec), like, world_size, options).sent_bytes(["w"])
            alone[collective, world_size] = 8 * sent / NUMEL / (world_size - 1)
    gathered, shares = ([alone[c, n] for n in (2, 4, 8)] for c in ("all_gather", "two_shot"))
    assert gathered == pytest.approx([gathered[0]] * 3, abs=HEADERS)
    # A share has whole blocks.
    assert [n * bits / 2 for n, bits in zip((2, 4, 8), shares)] == pytest.approx([gathered[0]] * 3, rel=0.02)


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
