"""A rotation around an operator: it is undone, and heavy tails become normal."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.wrappers.wrapper import TransformedPlan
from plans import make_plan

NUMEL = 1 << 16


def plan_of(method: gw.Method, sizes: tuple[int, ...]) -> TransformedPlan:
    segments = lay_out(Parameter(str(i), (n,), (1,)) for i, n in enumerate(sizes))
    kernels, collective = get_kernels("reference"), method.traits.collectives[0]
    found = make_plan(
        method, segments, kernels=kernels, world_size=2, collective=collective, seed=0, chunk_numel=1 << 20
    )
    assert isinstance(found, TransformedPlan)
    return found


def lognormal(numel: int = NUMEL, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, numel, generator=torch.Generator().manual_seed(seed)).exp()


def normal(numel: int = NUMEL, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, numel, generator=torch.Generator().manual_seed(seed))


def error(g: torch.Tensor, method: gw.Method, draws: int = 2) -> float:
    """Return the mean over rounds of the squared error, over that of the vector."""
    means = (gw.simulate(g, method, round=r).mean.double() for r in range(draws))
    return sum(float((m - g[0]).square().sum()) for m in means) / draws / float(g.double().square().sum())


@pytest.mark.parametrize("size", [256, 1024])
def test_what_is_rotated_comes_back(size: int) -> None:
    """1: lengths are kept, and the way back undoes it, for whole blocks, ends of parameters and short ones."""
    sizes = (3 * size + 70, 5, size, 300)
    ours = plan_of(gw.Rotated(block_size=size), sizes)
    x = lognormal(sum(sizes))[0]
    slots = torch.empty(4 * size + 256 + 256 + 512)
    back, added, other = torch.empty_like(x), torch.ones_like(x), torch.empty_like(slots)
    # A transform of k steps errs by at most k 2^-24 of the length, and so does the way back; k is ten at most, and
    # either way has a factor that is rounded, and a product.
    bound = 2 * 12 * 2**-24 * float(x.norm())
    ours.gather(7, x, slots)
    assert float(slots.norm()) == pytest.approx(float(x.norm()), rel=0, abs=bound)
    ours.scatter(7, slots.clone(), back, add=False)
    ours.scatter(7, slots.clone(), added, add=True)
    assert float((back - x).norm()) <= bound
    assert float((added - x - 1).norm()) <= bound + 2**-24 * float(added.norm())
    ours.gather(8, x, other)
    assert not torch.equal(other, slots), "every round has a rotation of its own"


# The largest of 512 normal values deviates by a tenth, its square by a fifth: that of 128 blocks by 2 %. Three times as
# much is left for chance.
@pytest.mark.parametrize(
    ("inner", "of_normal", "plain"),
    [
        (gw.QSGDinf(levels=1), 1.58, 3.97),
        (gw.QSGDinf(levels=3), 0.194, 0.917),
        (gw.QSGDinf(levels=7), 0.0356, 0.240),
    ],
    ids=repr,
)
def test_heavy_tails_have_the_error_of_normal_values(inner: gw.Method, of_normal: float, plain: float) -> None:
    """2: figures of 65 536 elements in blocks of 512, normal ones behind a rotation and lognormal ones without."""
    ours = gw.Rotated(compressor=inner, block_size=512)
    assert error(normal(), ours) == pytest.approx(of_normal, rel=0.06)
    assert error(lognormal(), ours) < 1.06 * of_normal
    assert error(lognormal(), inner) > 0.8 * plain > 2 * of_normal


def test_normal_values_have_the_error_that_they_have_without() -> None:
    """3: in both cases levels of the largest of a block of normal values."""
    inner = gw.TernGrad(clip=None)
    # The error is the scale's multiple, and the largest of 65 536 values deviates by 6 %.
    assert error(normal(), gw.Rotated(compressor=inner)) == pytest.approx(error(normal(), inner), rel=0.15)


def test_a_scale_of_all_workers_serves_gradients_with_heavy_tails() -> None:
    """Integers that add up: one outlier no longer decides the unit of all."""
    g = lognormal(seed=1).repeat(4, 1)
    g[1, 5] = 1000.0
    plain, ours = gw.QSGDMaxNorm(), gw.Rotated(compressor=gw.QSGDMaxNorm())
    found = {m: gw.simulate(g, m).mean - g.mean(0) for m in (plain, ours)}
    assert float(found[ours].norm()) < 0.1 * float(found[plain].norm())


@pytest.mark.parametrize("inner", [gw.QSGDMaxNorm(), gw.QSGDinf(), gw.ScaledSign(), gw.Lattice()], ids=repr)
@pytest.mark.parametrize("count", [3, 5, 7])
def test_the_wire_is_the_operators_of_as_many_coordinates(inner: gw.Method, count: int) -> None:
    """5000 elements are a block of 4096 and one of 1024; what is excluded travels beside them as ever."""
    sent = []
    for method, numel in ((gw.Rotated(compressor=inner), 5000), (inner, 5120)):
        parameters = [("w", torch.empty(numel)), ("b", torch.empty(50))]
        link = gw.SimulatedLink(parameters, method, count, min_numel=100)
        g = torch.randn(count, numel + 50, generator=torch.Generator().manual_seed(0))
        mean = link.reduce_(g.clone())
        assert torch.allclose(mean[numel:], g[:, numel:].mean(0), rtol=0, atol=1e-6)
        sent.append(link.traffic().sent_bytes)
    assert sent[0] == sent[1]


def test_sums_are_the_same_by_either_collective() -> None:
    """The rotation is that of all workers: integers are added up as they arrive, by whomever."""
    g = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    links = [
        gw.SimulatedLink([("w", torch.empty(3000))], gw.Rotated(), 5, collective=c) for c in ("two_shot", "all_gather")
    ]
    assert torch.equal(*(link.reduce_(g.clone()) for link in links))


def test_two_elements_that_dominate_a_block_have_no_bias() -> None:
    """Where levels that are nearest keep (a^2 + b^2) / a and nothing, in every round."""
    g, draws = torch.zeros(1, 256), 4000
    g[0, 3], g[0, 90] = 2.0, 1.0
    ours = gw.SimulatedLink(
        [("w", torch.empty(256))], gw.Rotated(compressor=gw.QSGDinf(levels=1, block_size=256)), 1, min_numel=0
    )
    mean = sum(ours.reduce_(g.clone()).double() for _ in range(draws)) / draws
    # Coordinates are +-3/16 and +-1/16, the scale 3/16: half of them have the variance (1/16) (2/16), the others none.
    deviation = (0.5 * 2 / 256 / draws) ** 0.5
    assert float((mean - g[0]).abs().max()) < 4.8 * deviation


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_infinity_in_one_block_is_that_of_the_parameter(bad: float) -> None:
    g = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    g[1, 700] = bad
    method = gw.Rotated(compressor=gw.QSGDinf(block_size=64), block_size=256)
    found = gw.simulate([{"a": row[:300], "b": row[300:]} for row in g], method).mean
    assert bool((found["b"] == torch.inf).all())
    assert bool(torch.isfinite(found["a"]).all())


def test_methods_around_it_and_operators_of_the_whole_model() -> None:
    g = [{"a": row[:900], "b": row[900:]} for row in torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))]
    inner = gw.Rotated(compressor=gw.QSGDinf(block_size=256))
    fed_back = gw.simulate(g, gw.ErrorFeedback(compressor=inner))
    residual = torch.stack([fed_back.state[f"rank {r}"]["residual/a"] for r in range(3)]).mean(0)
    mean = torch.stack([row["a"] for row in g]).mean(0)
    # Nothing is lost, to the rounding of a rotation back and of sums.
    assert torch.allclose(fed_back.mean["a"] + residual, mean, rtol=0, atol=1e-5)
    plain, coded = gw.simulate(g, inner).mean, gw.simulate(g, gw.Coded(compressor=inner, coder="huffman")).mean
    assert all(torch.equal(plain[name], coded[name]) for name in "ab")
    joined = gw.simulate(g, gw.Rotated(compressor=gw.QSGDMaxNorm(blocks="model"))).mean["a"]
    assert float((joined - mean).norm()) < 0.3 * float(mean.norm())


def test_what_it_takes_over_is_of_coordinates() -> None:
    inner = gw.QSGD(levels=4, block_size=512)
    ours = gw.Rotated(compressor=inner)
    assert (ours.omega, ours.omega_of(100)) == (inner.omega, inner.omega_of(256))
    assert (ours.traits.unbiased, gw.Rotated(compressor=gw.TernGrad()).traits.unbiased) == (True, False)
    assert gw.Rotated(compressor=gw.TernGrad()).traits.unbiased_note == "for the clipped rotated gradient"
    assert ours.traits.worst_step is None
    sparse = gw.SIDCo(density=0.5)
    n = 1 << 20
    assert gw.Rotated(compressor=sparse).usual_delta_of(n) == sparse.usual_delta_of(n) != sparse.delta_of(n)
    assert gw.Rotated(compressor=gw.ScaledSign()).properties.stream == "shared, and the compressor's"
    assert gw.Rotated().traits.collectives == gw.QSGDMaxNorm().traits.collectives


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compressor": gw.EDEN()}, "without a rotation"),
        ({"compressor": gw.FP16()}, "without a rotation"),
        ({"compressor": gw.Signum()}, "without a rotation"),
        ({"compressor": gw.Coded()}, "without a rotation"),
        ({"block_size": 300}, "power of two from 256 to 32768"),
        ({"block_size": True}, "power of two"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=message):
        gw.Rotated(**fields)  # type: ignore[arg-type]
