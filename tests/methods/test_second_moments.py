"""Second moments and ratios of learning rates, as a round changes them."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.methods.sketches.second_moments import RateRatios, SecondMoments

SEGMENTS = lay_out([Parameter("a", (300,), (1,)), Parameter("b", (20,), (1,)), Parameter("c", (80,), (1,))])
U = 2.0**-24


def context(memory: Memory, **known: object) -> Context:
    return Context(0, 1, 0, memory=memory, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(("beta", "eps"), [(0.9, 1e-8), (0.999, 1e-2), (0.0, 1.0)])
def test_moments_are_amsgrads_of_the_rounds_in_which_an_element_is_seen(beta: float, eps: float) -> None:
    """And no moment ever falls below eps, or a maximum below itself."""
    memory, generator = Memory(), torch.Generator().manual_seed(0)
    v, w = (torch.full((400,), eps, dtype=torch.float64) for _ in range(2))
    rounds = 60
    for _ in range(rounds):
        seen = torch.randperm(400, generator=generator)[:100]
        h = torch.randn(100, generator=generator) * torch.randn(100, generator=generator).exp()
        moments = SecondMoments(beta, eps, context(memory), SEGMENTS)
        before = moments.highest.clone()
        root = moments.update(seen, h)
        memory.commit()
        v[seen] = beta * v[seen] + (1 - beta) * h.double().square()
        w = torch.maximum(w, v)
        # Each round rounds the moment once to float32, less eps, of numbers up to w; root and sum are two more.
        assert bool(((root - w[seen].sqrt()).abs() <= (rounds + 3) * U * w[seen].sqrt()).all())
        after = SecondMoments(beta, eps, context(memory), SEGMENTS).highest
        assert bool((after >= before).all())
        assert bool((before >= 0).all())
        unseen = torch.ones(400, dtype=torch.bool).index_fill(0, seen, False)
        assert torch.equal(after[unseen], before[unseen])
        memory.discard()


def test_a_square_beyond_float32_counts_as_its_largest_number() -> None:
    memory = Memory()
    moments = SecondMoments(0.999, 1e-8, context(memory), SEGMENTS)
    root = moments.update(slice(0, 3), torch.tensor([1e38, 1e18, 0.0]))
    most = torch.finfo(torch.float32).max
    assert root.tolist() == pytest.approx([most**0.5, 1e18 * 0.001**0.5, 1e-4], rel=1e-6)
    memory.commit()
    assert bool(torch.isfinite(torch.cat(list(memory.state()["replicated"].values()))).all())


def test_a_round_that_is_discarded_leaves_no_moment() -> None:
    memory = Memory()
    for _ in range(2):
        moments = SecondMoments(0.5, 1.0, context(memory), SEGMENTS)
        assert moments.update(slice(0, 1), torch.tensor([7.0])).tolist() == [5.0]
        memory.discard()


def test_a_ratio_is_of_the_last_rate_above_zero() -> None:
    memory, ratios = Memory(), RateRatios(SEGMENTS)

    def told(*rates: float | None) -> list[tuple[int, int, float]]:
        known = {name: rate for name, rate in zip("abc", rates) if rate is not None}
        found = ratios.read(context(memory, learning_rates=known or None))
        memory.commit()
        return found

    assert told(None, None, None) == [(0, 400, 1.0)]
    assert told(0.5, 0.5, 0.25) == [(0, 400, 1.0)]
    assert told(0.25, 0.25, 0.25) == [(0, 320, 2.0), (320, 400, 1.0)]
    assert told(0.0, 0.5, 0.25) == [(0, 300, 0.0), (300, 320, 0.5), (320, 400, 1.0)]
    # What waited while its rate was zero goes on from the rate before.
    assert told(0.125, 0.5, 0.25) == [(0, 300, 2.0), (300, 400, 1.0)]
    assert told(None, None, None) == [(0, 400, 1.0)]
    assert told(0.125, 0.25, 0.5) == [(0, 300, 1.0), (300, 320, 2.0), (320, 400, 0.5)]


def test_a_rate_that_starts_at_zero_has_nothing_to_be_a_ratio_of() -> None:
    memory, ratios = Memory(), RateRatios(SEGMENTS[:1])
    for rate, expected in ((0.0, 0.0), (0.25, 1.0), (0.5, 0.5)):
        assert ratios.read(context(memory, learning_rates={"a": rate})) == [(0, 300, expected)]
        memory.commit()


def test_rates_of_a_round_that_is_discarded_are_forgotten() -> None:
    memory, ratios = Memory(), RateRatios(SEGMENTS[:1])
    for rate in (1.0, 0.5):
        assert ratios.read(context(memory, learning_rates={"a": 1.0})) == [(0, 300, 1.0)]
        memory.commit()
        assert ratios.read(context(memory, learning_rates={"a": rate})) == [(0, 300, 1.0 / rate)]
        memory.discard()
