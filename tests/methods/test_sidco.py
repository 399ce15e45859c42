"""SIDCo, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import gammaincc

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.exchange.codecs import Draw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels, most_index_bytes, smallest_format
from gradwire.methods.sparse import sidco
from gradwire.methods.sparse.sidco import FIRST_TAIL, MODELS, inverse_gamma_tail

NUMEL = 2_000_000
NAMES = ("laplace", "normal", "gamma", "student", "pareto")


def drawn(name: str, numel: int = NUMEL, seed: int = 0) -> npt.NDArray[np.float32]:
    """Values with both signs where the distribution has them."""
    r = np.random.default_rng(seed)
    values = {
        "laplace": lambda: r.laplace(size=numel),
        "normal": lambda: r.standard_normal(numel),
        "gamma": lambda: r.gamma(0.3, size=numel),
        "student": lambda: r.standard_t(3, size=numel),
        "pareto": lambda: (r.random(numel) ** -0.4 - 1) / 0.4,
    }[name]()
    return values.astype(np.float32)


def tail_threshold(x: npt.NDArray[np.float32], density: float, model: str, stages: int) -> float | None:
    return sidco.tail_threshold(get_kernels(), torch.from_numpy(x), density, model, stages)


@pytest.fixture(scope="module")
def magnitudes() -> dict[str, npt.NDArray[np.float32]]:
    return {name: np.abs(drawn(name)) for name in NAMES}


def share(x: npt.NDArray[np.float32], density: float, model: str, stages: int) -> float:
    """How many times the aim are above the threshold."""
    eta = tail_threshold(x, density, model, stages)
    assert eta is not None
    return float((x > eta).mean()) / density


def kept(x: npt.NDArray[np.float32] | torch.Tensor, method: gw.Method, **options: object) -> torch.Tensor:
    """What one worker's vector becomes."""
    return gw.simulate(torch.as_tensor(x)[None], method, **options).mean


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_of_laplace_values_the_share_is_kept_that_is_aimed_at(
    magnitudes: dict[str, npt.NDArray[np.float32]], model: str, stages: int, density: float
) -> None:
    """1: k is binomial, and thresholds estimated from the same or fewer values add a few times as much; the closed form
    of the shape of a gamma distribution is 1 % off, which is 7 % of the tail at 0.001."""
    tolerance = 4 / math.sqrt(density * NUMEL) + (0.07 if model == "gamma" and stages == 1 else 0)
    assert share(magnitudes["laplace"], density, model, stages) == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stages", [1, 3])
def test_thresholds_follow_the_scale(model: str, stages: int) -> None:
    """2: to within roundings of float64; powers of two are exact in float32."""
    x = np.abs(drawn("student", 200_000))
    eta = tail_threshold(x, 0.01, model, stages)
    for factor in (2.0**-40, 2.0**60):
        assert tail_threshold(x * np.float32(factor), 0.01, model, stages) == pytest.approx(eta * factor, rel=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_adapted_stages_keep_the_aim_within_the_papers_tolerance(
    magnitudes: dict[str, npt.NDArray[np.float32]], name: str, model: str, density: float
) -> None:
    """7: where three stages of "exponential" keep 0.71 of normal values, and one 4.7 of Student's, at 0.001.

    In one case of 45 no neighbouring number of stages is within the tolerance, and the best of them is a little below.
    """
    x = magnitudes[name]
    eta = sidco.adapted_threshold(get_kernels(), torch.from_numpy(x), density, model)
    assert eta is not None
    least = 0.78 if (name, model, density) == ("pareto", "gamma", 0.01) else 0.8
    assert least <= float((x > eta).mean()) / density <= 1.2


def test_stages_that_are_within_the_tolerance_are_not_changed() -> None:
    """7: three stages then give the threshold; where they do not, one that is nearer to the aim."""
    for name in NAMES:
        x = np.abs(drawn(name, 300_000))
        fixed = share(x, 0.001, "exponential", 3)
        eta = sidco.adapted_threshold(get_kernels(), torch.from_numpy(x), 0.001, "exponential")
        adapted = float((x > eta).mean()) / 0.001
        if abs(fixed - 1) <= 0.2:
            assert eta == tail_threshold(x, 0.001, "exponential", 3)
        else:
            assert abs(math.log(adapted)) < abs(math.log(fixed))


def test_adapted_stages_need_a_fit() -> None:
    """7: the k largest are kept of equal magnitudes, and of fewer elements than are fitted."""
    assert int(kept(torch.ones(200_000), gw.SIDCo(density=0.01, stages=None)).count_nonzero()) == 2000
    assert int(kept(torch.from_numpy(drawn("normal", 5000)), gw.SIDCo(density=0.01, stages=None)).count_nonzero()) == 50
    found = int(kept(torch.from_numpy(drawn("normal", 500_000)), gw.SIDCo(density=0.001, stages=None)).count_nonzero())
    assert 400 <= found <= 600


@pytest.mark.parametrize("density", [0.001, 0.1, 0.3])
def test_one_stage_is_the_closed_form(density: float) -> None:
    """3: also of any number of stages where the share is that of the first or more."""
    x = np.abs(drawn("gamma", 100_000))
    y = x.astype(np.float64)
    mean, ratio = y.mean(), y.mean() ** 2 / y.var(ddof=1)
    shape, scale = (1 - ratio) / 2, mean * (ratio + 1) / 2
    s = math.log(mean) - np.log(y).mean()
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    stages = (1, 2, 5) if density >= FIRST_TAIL else (1,)
    for number in stages:
        assert tail_threshold(x, density, "exponential", number) == pytest.approx(-mean * math.log(density), rel=1e-9)
        pareto = scale / shape * (density**-shape - 1)
        assert tail_threshold(x, density, "pareto", number) == pytest.approx(pareto, rel=1e-9)
        z = tail_threshold(x, density, "gamma", number) / (mean / alpha)  # type: ignore[operator]
        assert float(gammaincc(alpha, z)) == pytest.approx(density, rel=1e-9)


@pytest.mark.parametrize("shape", [0.01, 0.3, 1.0, 7.5, 300.0])
@pytest.mark.parametrize("tail", [0.9, 0.25, 1e-3, 1e-9])
def test_the_incomplete_gamma_function_is_inverted_exactly(shape: float, tail: float) -> None:
    assert float(gammaincc(shape, inverse_gamma_tail(shape, tail))) == pytest.approx(tail, rel=1e-9)


# Shares kept at 0.001 with 1, 2, 3 and 5 stages.
SHARES = {
    "laplace": {"exponential": (1.0, 1.0, 1.0, 1.0), "pareto": (1.0, 1.0, 1.0, 1.0), "gamma": (0.95, 1.0, 1.0, 1.0)},
    "normal": {
        "exponential": (0, 0.09, 0.71, 1.28),
        "pareto": (6.82, 1.21, 0.91, 0.93),
        "gamma": (0, 1.43, 1.02, 1.07),
    },
    "gamma": {
        "exponential": (19.98, 1.82, 1.07, 0.81),
        "pareto": (0.3, 0.85, 1.1, 1.01),
        "gamma": (0.95, 0.86, 1.12, 1.02),
    },
    "student": {
        "exponential": (4.7, 3.55, 1.18, 0.41),
        "pareto": (1.31, 0.91, 0.93, 1.04),
        "gamma": (5.0, 0.82, 0.84, 0.94),
    },
    "pareto": {
        "exponential": (13.38, 4.1, 1.07, 0.32),
        "pareto": (1.12, 1.09, 1.0, 0.88),
        "gamma": (8.11, 0.88, 0.8, 0.69),
    },
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_how_far_each_model_is_off(magnitudes: dict[str, npt.NDArray[np.float32]], name: str, model: str) -> None:
    """4: k = 2000, of which a deviation is 2 %; fits of heavy tails vary by several times that."""
    for stages, expected in zip((1, 2, 3, 5), SHARES[name][model]):
        found = share(magnitudes[name], 0.001, model, stages)
        assert found == pytest.approx(expected, rel=0.15, abs=0.02), stages
        if model != "exponential" and stages > 1:
            assert 0.55 < found < 1.5


def test_more_stages_keep_more_of_light_tails_and_less_of_heavy_ones(
    magnitudes: dict[str, npt.NDArray[np.float32]],
) -> None:
    """5: so that no rule that adds a stage when too much is kept can find the number of stages."""
    for name, sign in (("normal", 1), ("student", -1), ("pareto", -1)):
        shares = [share(magnitudes[name], 0.001, "exponential", stages) for stages in (2, 3, 5)]
        assert sorted(shares, reverse=sign < 0) == shares, name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_are_the_largest_and_no_more_than_a_third_above_the_aim(name: str, model: str) -> None:
    """6: a contraction with as many as were kept."""
    x = torch.from_numpy(drawn(name, 300_000, seed=1))
    found = kept(x, gw.SIDCo(density=0.01, model=model, stages=2))
    k = int(found.count_nonzero())
    assert 1500 < k <= 3900
    assert torch.equal(found, kept(x, gw.TopK(density=(k + 0.5) / 300_000)))
    assert float((x - found).double().square().sum()) <= (1 - k / 300_000) * float(x.double().square().sum())


@pytest.mark.parametrize("values", [gw.FP32(), gw.BF16()], ids=repr)
def test_nothing_is_lost_under_error_feedback(values: gw.Method) -> None:
    """6."""
    method = gw.ErrorFeedback(compressor=gw.SIDCo(density=0.01, model="pareto", values=values))
    link = gw.SimulatedLink([("w", torch.empty(400, 300))], method, 2)
    before = torch.zeros(2, 120_000)
    for round in range(3):
        g = torch.from_numpy(drawn("student", 240_000, seed=round)).view(2, -1)
        mean = link.reduce_(g.clone())
        after = torch.stack([link.state_dict()[f"rank {r}"]["residual/w"] for r in (0, 1)])
        # Sums of two float32 of a few hundreds at most.
        assert torch.allclose(mean + after.mean(0), (before + g).mean(0), rtol=1e-5, atol=1e-5)
        assert 0 < int(mean.count_nonzero()) <= 2 * 1560
        before = after


def test_a_cap_and_the_k_largest_take_over_where_the_fit_fails() -> None:
    one = {"density": 0.001, "stages": 1}
    heavy, light = drawn("pareto", 200_000), drawn("normal", 200_000)
    assert torch.equal(kept(heavy, gw.SIDCo(**one)), kept(heavy, gw.TopK(density=0.0013)))
    # Nothing is above.
    assert torch.equal(kept(light, gw.SIDCo(**one)), kept(light, gw.TopK(density=0.001)))
    alike = np.where(drawn("normal", 200_000) > 0, np.float32(2), np.float32(-2))
    zeros = np.zeros(200_000, np.float32)
    for model in MODELS:
        for x in (light[:99_999], alike, zeros, np.concatenate([zeros, light[:20]])):
            method = gw.SIDCo(density=0.001, model=model)
            assert torch.equal(kept(x, method), kept(x, gw.TopK(density=0.001)))


@pytest.mark.parametrize("model", MODELS)
def test_zeros_are_no_part_of_the_fit(model: str) -> None:
    """Nine of ten are: with them, the mean logarithm and all moments would describe nothing."""
    x = drawn("laplace", 1_000_000)
    x[np.arange(len(x)) % 10 != 0] = 0
    assert share(np.abs(x), 0.001, model, 1) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_sent(bad: float) -> None:
    x = drawn("normal", 150_000)
    x[77] = bad
    for model in MODELS:
        assert not bool(torch.isfinite(kept(x, gw.SIDCo(model=model))[77]))


@pytest.mark.parametrize("blocks", ["parameter", "model"])
def test_neither_layout_nor_backends_nor_threads_decide_a_bit(blocks: str) -> None:
    g = {"a": torch.from_numpy(drawn("student", 130_000)), "b": torch.from_numpy(drawn("normal", 170_000))}
    method, found, threads = gw.SIDCo(density=0.01, model="gamma", blocks=blocks), [], torch.get_num_threads()
    for order, backend, chunk, number in (
        ("ab", "reference", 1 << 20, 1),
        ("ba", "auto", 80, 2),
        ("ab", "auto", 80, 2),
    ):
        if blocks == "model" and order == "ba":
            continue
        torch.set_num_threads(number)
        like = [(name, torch.empty_like(g[name])) for name in order]
        link = gw.SimulatedLink(like, method, 1, backend=backend, chunk_numel=chunk)
        mean = link.reduce_(torch.cat([g[name] for name in order])[None].clone())
        found.append(dict(zip(order, mean.split([g[name].numel() for name in order]))))
    torch.set_num_threads(threads)
    assert all(torch.equal(found[0][name], other[name]) for other in found for name in "ab")


def test_room_is_set_aside_for_what_may_be_kept_and_no_more() -> None:
    parameter = Parameter("w", (200_000,), (1,))
    codec = gw.SIDCo(density=0.01).codec(get_kernels("reference"), lay_out([parameter]), 1, 0)
    x = torch.from_numpy(drawn("pareto", 200_000))
    out = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8)
    codec.encode(x, codec.summarise(x), Draw(0, 0), out)
    assert len(codec.read(out)[0]) <= 2600
    assert len(out) < 2600 * (32 + 9) / 8 + 100


@pytest.mark.parametrize("numel", [1, 17, 1000, 70_000])
def test_the_bound_of_positions_holds_for_fewer(numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in {1, 2, 3, 5, numel // 50, numel // 3, numel} - {0}:
        bound = most_index_bytes(min(count, numel), numel, fewer=True)
        for fewer in range(0, min(count, numel) + 1, max(1, count // 20)):
            chosen = torch.randperm(numel, generator=generator)[:fewer].sort().values.to(torch.int32)
            form = smallest_format(get_kernels("reference").gap_statistics(chosen, numel))
            assert form.bytes <= bound


def test_an_optimizers_momentum_is_warned_of_as_beside_the_largest_elements() -> None:
    """By the share that is aimed at: the worst vector, of which one element is kept, is none that a fit meets."""
    w = {"w": torch.nn.Parameter(torch.zeros(1_000_000))}
    sgd = torch.optim.SGD(w.values(), lr=0.1, momentum=0.9)
    assert gw.SIDCo.paper().delta_of(1_000_000) == 1e-6
    assert gw.SIDCo.paper().delta_of(50_000) == 1e-3
    assert 0 < gw.SIDCo.paper().delta <= 1e-9
    for density in (0.05, 0.01, 0.0001):
        warned = [
            gw.ErrorFeedback(compressor=kind(density=density)).caution(sgd, w) is not None
            for kind in (gw.SIDCo, gw.TopK)
        ]
        assert warned == [density < 0.05] * 2


def test_fields_are_checked() -> None:
    for bad in (
        {"density": 0},
        {"model": "normal"},
        {"stages": 0},
        {"stages": 17},
        {"stages": True},
        {"blocks": "bucket"},
        {"values": gw.FP16()},
    ):
        with pytest.raises(HyperparameterError, match="SIDCo"):
            gw.SIDCo(**bad)
