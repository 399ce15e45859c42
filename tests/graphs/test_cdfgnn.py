"""CDFGNN: exact at a tolerance of zero, caches alike at both ends, a bounded error, silence where nothing changes."""

from __future__ import annotations

import pytest
import torch
from small_graphs import CLASSES, FEATURES, Run, link_of, parts_of, random_graph

import gradwire as gw
from gradwire.exchange.protocols import Context, Memory
from gradwire.graphs import GCN
from gradwire.graphs.halo_method import ChannelSetting, RowChannel
from gradwire.kernels import get_kernels


def network() -> GCN:
    return GCN(FEATURES, CLASSES, width=16, layers=2)


class Ends:
    """Both ends of one channel, each with a memory."""

    def __init__(self, method: gw.CDFGNN, rows: int = 10, width: int = 16) -> None:
        setting = ChannelSetting(
            name="a", boundary="b", rows=rows, width=width, seed=0, steps=None, kernels=get_kernels("auto")
        )
        self.channels: tuple[RowChannel, RowChannel] = (method.channel(setting), method.channel(setting))
        self.memories, self.round, self.sent_bytes = (Memory(), Memory()), 0, 0

    def send(self, x: torch.Tensor) -> torch.Tensor:
        here, there = (Context(r, 2, self.round, memory=memory) for r, memory in enumerate(self.memories))
        data = self.channels[0].encode(here, x)
        self.sent_bytes = len(data)
        assert len(data) <= self.channels[0].most_bytes(self.round)
        used = self.channels[1].decode(there, data)
        for memory in self.memories:
            memory.commit()
        self.round += 1
        return used

    def caches(self) -> list[torch.Tensor]:
        kinds = ("sent/a", "received/a")
        return [memory.state()["rank"][kind].view(-1, 16) for memory, kind in zip(self.memories, kinds)]


VALUES = ["FP32()", "BF16()", "QSGDinf(levels=7, block_size=16)", "QSGDinf(levels=1)", "TopK(density=0.2)", "EDEN()"]


def test_a_tolerance_of_zero_is_full_communication() -> None:
    parts = parts_of(random_graph(), 4)
    exact, cached = (Run(network, parts, link_of(parts, s)).train(6) for s in ("fp32", "CDFGNN(tolerance=0.0)"))
    assert all(torch.equal(a, cached.weights()[k]) for k, a in exact.weights().items())
    assert exact.losses == cached.losses


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_caches_of_both_ends_hold_the_same_bits_after_every_step(values: str, tolerance: float) -> None:
    parts = parts_of(random_graph(), 4)
    link = link_of(parts, f"CDFGNN(tolerance={tolerance}, values={values})")
    run = Run(network, parts, link)
    for _ in range(4):
        run.step()
        kept = [link.state_dict()[f"rank {r}"] for r in range(4)]
        channels = {key.partition("/")[2] for state in kept for key in state if key != "rank"}
        # Two layers and directions, and as many pairs as have a boundary.
        assert len(channels) == 4 * int((parts[0].boundary.counts > 0).sum())
        for name in channels:
            ends = [
                state[f"{kind}/{name}"] for kind in ("sent", "received") for state in kept if f"{kind}/{name}" in state
            ]
            assert len(ends) == 2
            assert torch.equal(*ends)


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 0.6])
def test_what_is_used_is_within_the_tolerance_and_no_more_is_sent_than_that_takes(tolerance: float) -> None:
    draw = torch.Generator().manual_seed(0)
    ends, x = Ends(gw.CDFGNN(tolerance=tolerance)), torch.randn(10, 16, generator=draw)
    for _ in range(12):
        before = ends.caches()[0] if ends.round else torch.zeros(10, 16)
        used = ends.send(x)
        off = (used - x).double().norm(dim=1)
        # The last bits of a norm.
        assert bool((off <= tolerance * x.double().norm(dim=1) * (1 + 1e-12)).all())
        needed = (x - before).double().norm(dim=1) > tolerance * x.double().norm(dim=1)
        assert ends.sent_bytes == 2 + 4 * 16 * int(needed.sum())
        assert torch.equal(used[~needed], before[~needed])
        assert torch.equal(used[needed], x[needed])
        x = x + 0.1 * torch.randn(10, 16, generator=draw)


@pytest.mark.parametrize("values", VALUES)
def test_the_error_is_that_of_the_tolerance_or_of_the_operator(values: str) -> None:
    draw = torch.Generator().manual_seed(1)
    ends, x = Ends(gw.CDFGNN(tolerance=0.3, values=gw.method(values))), torch.randn(10, 16, generator=draw)
    for _ in range(6):
        before = ends.caches()[0] if ends.round else torch.zeros(10, 16)
        used = ends.send(x)
        kept = (used == before).all(1) & (before != 0).any(1)
        off, size = (used - x).double().norm(dim=1), x.double().norm(dim=1)
        assert bool((off[kept] <= 0.3 * size[kept] * (1 + 1e-12)).all())
        x = x + 0.05 * torch.randn(10, 16, generator=draw)


@pytest.mark.parametrize("values", ["FP32()", "BF16()", "QSGDinf(levels=127, block_size=16)"])
def test_without_a_learning_rate_only_bits_travel_after_the_first_step(values: str) -> None:
    parts = parts_of(random_graph(), 4)
    link = link_of(parts, f"CDFGNN(tolerance=0.2, values={values})")
    run, counts = Run(network, parts, link, lr=0.0), parts[0].boundary.counts
    run.step()
    first = [t.sent_bytes for t in link.traffic()]
    run.step()
    for rank, traffic in enumerate(link.traffic()):
        # Quantised activations of the first layer, used unchanged, change nothing in the second.
        rows = [int(n) for n in (*counts[rank], *counts[:, rank]) if n]
        bits = 2 * sum(32 + -(-n // 8) for n in rows) + 4 * 3 * 8
        assert traffic.sent_bytes - first[rank] == bits
        assert link.gauges()[rank]["refreshed"] == 0
        assert first[rank] > 4 * bits


def test_a_quantised_copy_beyond_the_tolerance_is_sent_again() -> None:
    ends, x = Ends(gw.CDFGNN(tolerance=0.01, values=gw.QSGDinf(levels=1))), torch.randn(10, 16)
    ends.send(x)
    ends.send(x)
    assert ends.sent_bytes > 2


def test_rows_that_are_not_finite_arrive_and_are_not_kept() -> None:
    ends, x = Ends(gw.CDFGNN(tolerance=0.5)), torch.randn(10, 16)
    ends.send(x)
    before = ends.caches()[0].clone()
    bad = x.clone()
    bad[3, 5], bad[4, 0] = torch.inf, torch.nan
    used = ends.send(bad)
    assert torch.isinf(used[3, 5])
    assert torch.isnan(used[4, 0])
    assert all(torch.equal(cache, before) for cache in ends.caches())
    assert torch.equal(ends.send(x), before)


def test_tiny_changes_count_at_a_tolerance_of_zero() -> None:
    """Their squares are zero in float32."""
    ends, x = Ends(gw.CDFGNN(tolerance=0.0)), torch.full((10, 16), 1e-30)
    ends.send(x)
    assert torch.equal(ends.send(2 * x), 2 * x)


def test_a_state_continues_where_it_was_taken() -> None:
    parts, spec = parts_of(random_graph(), 3), "CDFGNN(tolerance=0.1, values=QSGDinf(levels=7, block_size=16))"
    through = Run(network, parts, link_of(parts, spec)).train(8)
    half = Run(network, parts, link_of(parts, spec)).train(4)
    state = half.exchange.state_dict()  # type: ignore[union-attr]
    half.exchange = link_of(parts, spec)
    fresh = Run(network, parts, link_of(parts, spec))
    fresh.model.load_state_dict(half.weights())
    half.exchange.load_state_dict(state)
    half.train(4)
    assert all(torch.equal(a, half.weights()[k]) for k, a in through.weights().items())
    fresh.train(4)
    assert any(not torch.equal(a, fresh.weights()[k]) for k, a in through.weights().items())
    with pytest.raises(gw.IncompatibleError, match="3 simulated workers"):
        half.exchange.load_state_dict({"global": {}})
    with pytest.raises(gw.IncompatibleError, match="no 'round'"):
        half.exchange.load_state_dict({**state, "global": {}})
    with pytest.raises(gw.IncompatibleError, match="another partition"):
        link_of(parts_of(random_graph(), 3, "greedy"), spec).load_state_dict(state)


def test_payloads_that_contradict_themselves_are_refused() -> None:
    ends = Ends(gw.CDFGNN(tolerance=0.1))
    context = Context(1, 2, 0)
    for data in (
        torch.zeros(1, dtype=torch.uint8),
        torch.tensor([0, 0, 7], dtype=torch.uint8),
        torch.tensor([0, 4], dtype=torch.uint8),
        torch.tensor([1, 0], dtype=torch.uint8),
    ):
        with pytest.raises(gw.PayloadError):
            ends.channels[1].decode(context, data)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan"), "a", None])
def test_tolerances_out_of_range_are_refused(tolerance: object) -> None:
    with pytest.raises(gw.HyperparameterError, match="at least 0 and below 1"):
        gw.CDFGNN(tolerance=tolerance)  # type: ignore[arg-type]
