"""VARCO: its schedule, its masks, its error, and full communication at a ratio of one."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch
from small_graphs import CLASSES, FEATURES, Run, link_of, parts_of, random_graph

import gradwire as gw
from gradwire.exchange.protocols import Context
from gradwire.graphs import GCN, extended
from gradwire.graphs.halo_method import ChannelSetting, RowChannel
from gradwire.kernels import get_kernels


def network() -> GCN:
    return GCN(FEATURES, CLASSES, width=8, layers=2)


def channel(method: gw.VARCO, rows: int = 20, width: int = 15, name: str = "a", boundary: str = "b") -> RowChannel:
    return method.channel(
        ChannelSetting(
            name=name, boundary=boundary, rows=rows, width=width, seed=0, steps=100, kernels=get_kernels("auto")
        )
    )


def through(one: RowChannel, x: torch.Tensor, round: int = 0) -> torch.Tensor:
    context = Context(0, 2, round)
    return one.decode(context, one.encode(context, x))


@pytest.mark.parametrize(("slope", "end"), [(5, 1.5), (2, 1.0), (7, 4.0), (0.5, 1.0)])
def test_the_schedule_falls_from_start_to_end_and_stays(slope: float, end: float) -> None:
    method, steps = gw.VARCO(start=128, end=end, slope=slope), 300
    ratios = [method.ratio(t, steps) for t in range(steps)]
    assert ratios[0] == 128
    assert all(a >= b for a, b in itertools.pairwise(ratios))
    reached = math.ceil((steps - 2) / slope)
    assert all(r == end for r in ratios[reached:])
    assert all(r > end for r in ratios[: min(reached, steps)])
    # The published formula, which differs by roundings of float64 alone.
    for t, ratio in enumerate(ratios):
        assert ratio == pytest.approx(max(128 - slope * t * (128 - end) / (steps - 2), end), rel=1e-12)


def test_known_values_of_the_published_schedule() -> None:
    method = gw.VARCO(start=128, end=1.5, slope=5, steps=300)
    assert [round(method.ratio(t), 1) for t in (0, 10, 30, 60)] == [128.0, 106.8, 64.3, 1.5]


def test_steps_of_the_method_come_before_those_of_the_training() -> None:
    assert gw.VARCO(steps=12).ratio(1, 1000) == gw.VARCO().ratio(1, 12)
    with pytest.raises(gw.IncompatibleError, match="give their number as steps="):
        gw.VARCO().ratio(0)
    parts = parts_of(random_graph(), 2)
    with pytest.raises(gw.IncompatibleError, match="give their number as steps="):
        gw.SimulatedHaloLink([p.boundary for p in parts], "varco")
    gw.SimulatedHaloLink([p.boundary for p in parts], "VARCO(start=4, end=4)")


def test_at_a_ratio_of_one_it_is_full_communication_bit_for_bit() -> None:
    parts = parts_of(random_graph(), 4)
    exact, varied = (
        Run(network, parts, link_of(parts, spec)).train(5) for spec in ("fp32", "VARCO(start=1, end=1, slope=1)")
    )
    assert all(torch.equal(a, varied.weights()[k]) for k, a in exact.weights().items())
    x = torch.randn(20, 15)
    x[0, 0] = -0.0
    found = through(channel(gw.VARCO(start=1)), x)
    assert torch.equal(found.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("ratio", [2.0, 7.5, 128.0, 1000.0])
def test_a_ratio_keeps_that_share_of_the_entries_and_zeros_elsewhere(ratio: float) -> None:
    x = torch.randn(20, 15)
    found = through(channel(gw.VARCO(start=ratio, end=ratio)), x)
    kept = found != 0
    assert int(kept.sum()) == max(1, int(300 / ratio))
    assert torch.equal(found[kept], x[kept])


def test_the_error_of_a_mask_is_the_share_left_out() -> None:
    """|x - C(x)|^2 / |x|^2 of 75 of 300 entries, all of size one: 3/4 in each draw; of a normal vector on average.

    The sum over entries left out has a variance of k/d (1 - k/d) sum (x_i^2 - m)^2, m their mean.
    """
    ones = torch.ones(20, 15)
    one = channel(gw.VARCO(start=4, end=4))
    assert float((ones - through(one, ones)).square().sum()) == 225
    x = torch.randn(20, 15, generator=torch.Generator().manual_seed(0))
    errors = torch.tensor([float((x - through(one, x, t)).square().sum()) for t in range(400)]).double()
    squares = x.double().square()
    deviation = (0.25 * 0.75 * (squares - squares.mean()).square().sum() * 300 / 299).sqrt() / 20
    assert abs(float(errors.mean()) - 0.75 * float(squares.sum())) < 4 * float(deviation)


def test_masks_differ_from_round_to_round_and_from_boundary_to_boundary() -> None:
    x = torch.ones(20, 15)
    method = gw.VARCO(start=4, end=4)
    one, same, other = channel(method), channel(method, name="c"), channel(method, boundary="d")
    assert torch.equal(through(one, x), through(same, x))
    assert not torch.equal(through(one, x), through(one, x, 1))
    assert not torch.equal(through(one, x), through(other, x))


def test_places_are_those_of_shared_random_elements() -> None:
    """gw.RandK with shared coordinates keeps the same, given the same name, seed and round."""
    x = torch.arange(1.0, 301.0)
    method = gw.VARCO(start=4, end=4)
    kept = through(channel(method, rows=300, width=1, boundary="0"), x[:, None], 7)[:, 0]
    assert torch.equal(kept, gw.simulate(x[None].clone(), gw.RandK(density=0.25), round=7).mean)


def test_gradients_come_back_where_rows_were_seen() -> None:
    """Forward, entries of ones arrive at some places; back, ones arrive at the same places of the owner's gradient."""
    parts = parts_of(random_graph(), 3)
    link = link_of(parts, "VARCO(start=3, end=3)")
    rows = [torch.ones(len(p.own), 4, requires_grad=True) for p in parts]
    known = extended(link, 0, rows)
    seen = [k[len(p.own) :].detach() for k, p in zip(known, parts)]
    torch.stack([k[len(p.own) :].sum() for k, p in zip(known, parts)]).sum().backward()
    assert 0 < float(sum(s.sum() for s in seen)) < sum(s.numel() for s in seen)
    expected = [torch.zeros(len(p.own), 4) for p in parts]
    for user, part in enumerate(parts):
        for owner, rows_of in enumerate(seen[user].split(part.boundary.arriving)):
            expected[owner].index_add_(0, parts[owner].boundary.leaving[user], rows_of)
    for own, more in zip(rows, expected):
        assert torch.equal(own.grad, more)  # type: ignore[arg-type]


def test_traffic_is_the_schedule_s_to_the_byte() -> None:
    parts = parts_of(random_graph(), 4)
    link = link_of(parts, "VARCO(start=16, end=2, slope=3)", steps=12)
    run, before = Run(network, parts, link), [0] * 4
    counts = parts[0].boundary.counts
    for t in range(12):
        run.step()
        ratio = gw.VARCO(start=16, end=2, slope=3).ratio(t, 12)
        for rank, traffic in enumerate(link.traffic()):
            rows = [int(n) for n in (*counts[rank], *counts[:, rank]) if n]
            # Two layers of 8 and 3 values; a header of 32 bytes, values in sixteens of bytes, and 8 bytes a length.
            values = sum(16 * -(-max(1, int(n * w / ratio)) // 4) for n in rows for w in (8, CLASSES))
            expected = values + 2 * 32 * len(rows) + 2 * 2 * 8 * 3
            assert traffic.sent_bytes - before[rank] == expected
            assert link.gauges()[rank]["halo_bytes"] == expected
            before[rank] = traffic.sent_bytes
            assert traffic.dense_bytes == (t + 1) * 4 * (8 + CLASSES) * sum(rows)


def test_values_may_be_quantised() -> None:
    x = torch.randn(20, 16)
    plain = through(channel(gw.VARCO(start=4, end=4), width=16), x)
    coarse = through(channel(gw.VARCO(start=4, end=4, values=gw.QSGDinf(levels=7)), width=16), x)
    assert not bool(((coarse != 0) & (plain == 0)).any())
    # One step of seven of the largest entry of a block.
    assert float((coarse - plain).abs().max()) <= float(plain.abs().max()) / 7 * 1.0001
    assert not torch.equal(coarse, plain)


@pytest.mark.parametrize(
    "fields", [{"start": 0.5}, {"end": 0.9}, {"end": 200.0}, {"slope": 0}, {"steps": 2}, {"start": "a"}, {"values": 3}]
)
def test_fields_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(gw.HyperparameterError, match="VARCO"):
        gw.VARCO(**fields)  # type: ignore[arg-type]


def test_what_was_drawn_for_a_step_ends_with_it() -> None:
    """Places have eight bytes for each entry that is sent: hundreds of draws would take gigabytes."""
    parts = parts_of(random_graph(), 3)
    link = link_of(parts, "VARCO(start=3, end=3)")
    for _ in range(2):
        known = extended(link, 0, [torch.ones(len(p.own), 4, requires_grad=True) for p in parts])
        sum(k.sum() for k in known).backward()  # type: ignore[union-attr]
        drawn = [weakref.ref(places) for worker in link.workers for places in worker.plan.drawn.values()]
        # Both ends and both directions of a boundary, and all workers of a simulation, use one draw.
        assert len({id(ref()) for ref in drawn}) == int((parts[0].boundary.counts > 0).sum())
        link.next_round()
        assert [ref() for ref in drawn if ref() is not None] == []
