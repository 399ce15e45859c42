"""TopK and Threshold, by number of the property in the papers' summary (docs/properties.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError, IncompatibleError, PayloadError
from gradwire.exchange.codecs import Draw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.sparse.sparse import unit_length

METHODS = [
    gw.TopK(density=0.1),
    gw.TopK(density=1 / 64, block_size=256),
    gw.TopK(density=0.05, blocks="model"),
    gw.TopK(density=0.2, unit="row"),
    gw.TopK(density=0.1, values=gw.BF16()),
    gw.TopK(density=0.1, values=gw.QSGDinf(levels=1, block_size=16)),
    gw.Threshold(threshold=1.5),
    gw.Threshold(threshold=3.0, unit="kernel"),
]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(x: torch.Tensor, method: gw.Method) -> torch.Tensor:
    """What one worker's vector becomes."""
    return gw.simulate(x[None], method).mean


@pytest.mark.parametrize("density", [1e-6, 0.001, 0.1, 0.37, 1.0])
@pytest.mark.parametrize("numel", [1, 2, 999, 70_000])
def test_the_largest_are_kept_and_the_others_left_out(numel: int, density: float) -> None:
    x = gaussian(numel, seed=numel)
    found, k = kept(x, gw.TopK(density=density)), max(1, math.floor(density * numel))
    assert int(found.count_nonzero()) == k
    assert torch.equal(found[found != 0], x[found != 0])
    assert float(x[found == 0].abs().max() if k < numel else 0) <= float(found[found != 0].abs().min())


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, -2.0, 0.5, 2.0, 0.0, 1.0])
    assert kept(x, gw.TopK(density=0.375)).tolist() == [0, -2, 2, -2, 0, 0, 0, 0]
    assert kept(torch.ones(1000), gw.TopK(density=0.01)).nonzero().flatten().tolist() == list(range(10))
    assert int(kept(torch.zeros(1000), gw.TopK(density=0.01)).count_nonzero()) == 0


def test_blocks_choose_by_themselves() -> None:
    x = torch.cat([gaussian(4096, seed=1), 100 * gaussian(4096, seed=2), gaussian(1000, seed=3)])
    found = kept(x, gw.TopK(density=64 / 4096, block_size=4096))
    assert [int(part.count_nonzero()) for part in found.split(4096)] == [64, 64, 15]
    for part, own in zip(found.split(4096), x.split(4096)):
        assert torch.equal(part, kept(own, gw.TopK(density=64 / 4096)))


def test_the_whole_model_chooses_together() -> None:
    gradients = {"a": gaussian(3000, seed=1), "b": 10 * gaussian(5000, seed=2)}
    found = gw.simulate([gradients], gw.TopK(density=0.1, blocks="model")).mean
    together = kept(torch.cat([gradients["a"], gradients["b"]]), gw.TopK(density=0.1))
    assert torch.equal(torch.cat([found["a"], found["b"]]), together)
    assert int(found["a"].count_nonzero()) < 20


@pytest.mark.parametrize(("unit", "length"), [("row", 3 * 5 * 5), ("kernel", 25)])
def test_units_are_kept_as_a_whole_by_their_norm(unit: str, length: int) -> None:
    x = gaussian(16, 3, 5, 5, seed=4)
    x[3] = 0.1
    x[3, 0, 0, 0] = 4.0
    found = gw.simulate([{"w": x}], gw.TopK(density=0.25, unit=unit)).mean["w"]
    units, own = found.reshape(-1, length), x.reshape(-1, length)
    alive = units.abs().amax(1) > 0
    assert int(alive.sum()) == len(units) // 4
    assert torch.equal(units[alive], own[alive])
    norms = own.norm(dim=1)
    assert float(norms[~alive].max()) <= float(norms[alive].min())


def test_units_that_are_spread_over_memory_are_refused() -> None:
    assert unit_length("kernel", Parameter("w", (8, 4, 3, 3), (36, 9, 3, 1))) == 9
    assert unit_length("row", Parameter("w", (8, 4, 3, 3), (36, 1, 12, 4))) == 36
    assert unit_length("kernel", Parameter("w", (8, 4), (4, 1))) == unit_length("row", Parameter("b", (8,), (1,))) == 1
    with pytest.raises(IncompatibleError, match="neighbours in memory"):
        unit_length("kernel", Parameter("w", (8, 4, 3, 3), (36, 1, 12, 4)))
    with pytest.raises(IncompatibleError, match="neighbours in memory"):
        unit_length("row", Parameter("w", (8, 4), (1, 8)))


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("tail", [0.0, 1.5])
def test_contraction(method: gw.Method, tail: float) -> None:
    """1: |x - C(x)|^2 <= (1 - delta) |x|^2 for every vector; none is known for a threshold."""
    x = gaussian(40, 8, 5, 5, seed=5)
    x = x * torch.exp(tail * gaussian(*x.shape, seed=6))
    found = gw.simulate([{"w": x}], method).mean["w"]
    delta = method.delta_of(x.numel())
    if delta is None:
        # Of levels whose variance may exceed the vector's square, either.
        assert isinstance(method, gw.Threshold) or method.values.delta is None
        return
    assert 0 < float((found - x).square().sum()) <= (1 - delta) * float(x.square().sum())


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_the_bound_is_attained_and_is_squared_for_bell_shaped_vectors(density: float) -> None:
    """1, 9: equal magnitudes lose 1 - k/d exactly; of normal values (1 - k/d)^2 is never exceeded."""
    flat, normal = torch.ones(10_000), gaussian(10_000, seed=7)
    method = gw.TopK(density=density)

    def lost(x: torch.Tensor) -> float:
        return float((kept(x, method) - x).double().square().sum() / x.double().square().sum())

    assert lost(flat) == pytest.approx(1 - density)
    assert lost(normal) < (1 - density) ** 2 < 1 - method.delta_of(10_000)


@pytest.mark.parametrize("density", [0.0003, 0.004, 0.3, 1.0])
@pytest.mark.parametrize("block_size", [None, 100])
def test_what_is_declared_whatever_the_size_holds_for_each(density: float, block_size: int | None) -> None:
    method = gw.TopK(density=density, block_size=block_size)
    assert all(method.delta <= method.delta_of(numel) for numel in (1, 2, 50, 101, 333, 499, 3333, 6666, 10**6))
    assert gw.TopK(density=0.4999999).delta_of(4) == 0.25


@pytest.mark.parametrize("values", [gw.FP32(), gw.BF16(), gw.QSGDinf(levels=3, block_size=16)], ids=repr)
def test_nothing_is_lost_under_error_feedback(values: gw.Method) -> None:
    """2: what is sent and what stays behind are the vector, bit for bit: also of values as they were rounded."""
    g = gaussian(3, 2000, seed=8)
    method = gw.ErrorFeedback(compressor=gw.TopK(density=0.05, values=values))
    link, before, ones = gw.SimulatedLink([("w", torch.empty(2000))], method, 3, min_numel=0), torch.zeros(3, 2000), []
    for _ in range(3):
        mean = link.reduce_(g.clone())
        state = link.state_dict()
        after = torch.stack([state[f"rank {rank}"]["residual/w"] for rank in range(3)])
        sent = before + g - after
        ones.append(int((sent != 0).sum()))
        if isinstance(values, gw.FP32):
            # A value is either sent, or stays, whole.
            assert torch.equal(torch.where(after == 0, sent, 0.0), sent)
            assert torch.equal(after[after != 0], (before + g)[after != 0])
        assert torch.allclose(mean, sent.mean(0), rtol=1e-5, atol=1e-6)
        before = after
    assert all(n <= 3 * 100 for n in ones)


def test_the_iterate_with_the_residuals_is_that_of_plain_descent() -> None:
    """3: x_t - rate mean of residuals = x_0 - rate sum of mean gradients."""
    link = gw.SimulatedLink(
        [("w", torch.empty(500))], gw.ErrorFeedback(compressor=gw.TopK(density=0.02)), 4, min_numel=0
    )
    x, virtual, rate = torch.zeros(500), torch.zeros(500), 0.1
    for round in range(20):
        g = gaussian(4, 500, seed=round) + x
        virtual -= rate * g.mean(0)
        x = x - rate * link.reduce_(g.clone())
        state = link.state_dict()
        residual = torch.stack([state[f"rank {rank}"]["residual/w"] for rank in range(4)]).mean(0)
        # 20 rounds of float32 additions of numbers of a few units.
        assert torch.allclose(x - rate * residual, virtual, atol=2e-5)


def test_all_elements_are_the_mean_and_nothing_stays_behind() -> None:
    """4."""
    g = gaussian(3, 700, seed=9)
    found = gw.simulate(g, gw.ErrorFeedback(compressor=gw.TopK(density=1.0)))
    assert torch.allclose(found.mean, g.mean(0), atol=1e-6)
    assert all(float(found.state[f"rank {rank}"]["residual/0"].abs().max()) == 0 for rank in range(3))


def test_unlike_workers_end_near_the_optimum_with_a_memory_and_far_without() -> None:
    """5: four quadratics |x - c_i|^2 / 2 in 50 dimensions, one element a round; with memory the distance falls with
    the rate, without it stays."""
    centres = 3 * gaussian(4, 50, seed=10)

    def distance(method: gw.Method, rate: float) -> float:
        link = gw.SimulatedLink([("w", torch.empty(50))], method, 4, min_numel=0)
        x = torch.zeros(50)
        for _ in range(int(10 / rate)):
            x = x - rate * link.reduce_(x - centres)
        return float((x - centres.mean(0)).norm())

    one = gw.TopK(density=1 / 50)
    fed_back = [distance(gw.ErrorFeedback(compressor=one), rate) for rate in (0.05, 0.01)]
    alone = [distance(one, rate) for rate in (0.05, 0.01)]
    assert fed_back[1] < fed_back[0] / 2
    assert min(alone) > 1.5 * fed_back[0]
    assert alone[1] > alone[0] / 1.5


def test_smaller_steps_make_the_number_of_rounds_independent_of_the_density() -> None:
    """8: rounds until a quadratic with curvatures 1 to 4 is solved to a hundredth, against those of plain descent."""
    curvature = torch.linspace(1, 4, 200)

    def rounds(method: gw.Method, rate: float, most: int = 10_000) -> int:
        link = gw.SimulatedLink([("w", torch.empty(200))], method, 1, min_numel=0)
        x, number = torch.ones(200), 0
        while float(x.norm()) > 0.01 * 200**0.5 and number < most:
            x = x - rate * link.reduce_((curvature * x)[None])
            number += 1
        return number

    sparse = gw.ErrorFeedback(compressor=gw.TopK(density=0.05))
    plain = {rate: rounds(gw.FP32(), rate) for rate in (0.1, 0.02, 0.005)}
    # An element waits for twenty rounds, and a step of 0.1 then brings twenty at once: more than 2 / 4, which diverges.
    assert rounds(sparse, 0.1, most=10 * plain[0.1]) == 10 * plain[0.1]
    ratios = [rounds(sparse, rate) / plain[rate] for rate in (0.02, 0.005)]
    # At a smaller step, what they bring in bursts even helps a little.
    assert 0.05 < abs(ratios[0] - 1) < 0.5
    assert abs(ratios[1] - 1) < abs(ratios[0] - 1) / 2


def test_no_residual_reaches_the_threshold() -> None:
    method = gw.ErrorFeedback(compressor=gw.Threshold(threshold=0.7))
    link = gw.SimulatedLink([("w", torch.empty(400))], method, 2, min_numel=0)
    for round in range(10):
        link.reduce_(gaussian(2, 400, seed=round))
        state = link.state_dict()
        largest = max(float(state[f"rank {rank}"]["residual/w"].abs().max()) for rank in range(2))
        assert 0.35 < largest < 0.7


def test_a_threshold_is_that_of_gradients_before_the_loss_was_scaled() -> None:
    x = gaussian(2000, seed=11)
    codec = gw.Threshold(threshold=1.0).codec(get_kernels("reference"), lay_out([Parameter("w", (2000,), (1,))]), 1, 0)
    out = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    codec.encode(1024 * x, codec.summarise(x), Draw(0, 0, loss_scale=1024.0), out)
    chosen, _ = codec.read(out)
    assert chosen.tolist() == (x.abs() >= 1).nonzero().flatten().tolist()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_positions_take_little_more_than_their_entropy(density: float) -> None:
    """Random positions: d H(k/d) bits, and Golomb-Rice codes or a bitmap at most 5 % more."""
    numel = 200_000
    g = gaussian(2, numel, seed=12)
    traffic = gw.simulate(g, gw.TopK(density=density)).traffic
    k = math.floor(density * numel)
    entropy = -numel * (density * math.log2(density) + (1 - density) * math.log2(1 - density)) / 8
    # Headers, lengths and padding are less than 200 bytes.
    assert entropy < traffic.sent_bytes - 4 * k < 1.05 * entropy + 200


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_changed_section_is_refused_or_read_as_another(method: gw.Method) -> None:
    """Whatever the bytes are, no more is read and written than there is."""
    x = gaussian(4, 8, 5, 5, seed=13)
    parameter = Parameter("w", tuple(x.shape), tuple(x.stride()))
    codec = method.codec(get_kernels("auto"), lay_out([parameter]), 1, 0)
    body = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    codec.encode(x.flatten(), codec.summarise(x.flatten()), Draw(0, 0), body)
    generator, refused = torch.Generator().manual_seed(14), 0
    for _ in range(200):
        spoilt = body.clone()
        at = int(torch.randint(64, (1,), generator=generator))
        spoilt[at] = int(torch.randint(256, (1,), generator=generator))
        try:
            chosen, values = codec.read(spoilt)
        except PayloadError:
            refused += 1
            continue
        assert bool((chosen[1:] > chosen[:-1]).all())
        assert len(values) == sum(codec.table.counts(chosen))
        assert not len(chosen) or 0 <= int(chosen[0]) <= int(chosen[-1]) < codec.units
    assert refused > 20


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gw.TopK(density=0.0), "density"),
        (lambda: gw.TopK(density=1.5), "density"),
        (lambda: gw.TopK(block_size=0), "block_size"),
        (lambda: gw.TopK(unit="column"), "unit is one of element, row, kernel"),
        (lambda: gw.TopK(blocks="bucket"), "blocks"),
        (lambda: gw.TopK(blocks="model", unit="row"), "within a parameter"),
        (lambda: gw.TopK(values=gw.FP16()), "values"),
        (lambda: gw.TopK(values=gw.EDEN()), "values"),
        (lambda: gw.TopK(values=gw.QSGDMaxNorm()), "values"),
        (lambda: gw.TopK(values=gw.QSGD(blocks="model")), "values"),
        (lambda: gw.TopK(values=gw.AsyncServer(inner=gw.QSGD())), "values"),
        (lambda: gw.Threshold(threshold=0.0), "threshold"),
        (lambda: gw.Threshold(threshold=math.inf), "threshold"),
        (lambda: gw.ErrorFeedback(compressor=gw.Threshold(values=gw.QSGDinf())), "no contraction"),
    ],
)
def test_fields_are_checked(make: object, says: str) -> None:
    with pytest.raises(HyperparameterError, match=says):
        make()  # type: ignore[operator]
