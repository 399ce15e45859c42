"""RankCurve, by number of the property in docs/properties.md."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from phases import FULL, SIZES, TRAINING, check_broadcast, chosen, gradients, link_of, residuals, sent, two_shot, up

COUNTS = [60, 36]


def curve(**fields: Any) -> gw.RankCurve:
    return gw.RankCurve(**({"density": 0.03, "full_rounds": FULL, "training_rounds": TRAINING} | fields))


def scales(leaders: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each parameter's values, an element each."""
    parts = leaders.split(COUNTS)
    return torch.cat([part.double().square().mean().sqrt().float().expand(len(part)) for part in parts])


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_first_two_phases_are_the_dense_mean_and_the_leaders_elements(workers: int) -> None:
    """1: bit for bit, residuals too."""
    ours, dense = link_of(curve(), workers), link_of("fp32", workers)
    for round in range(FULL):
        g = gradients(workers, round)
        assert torch.equal(ours.reduce_(g.clone()), dense.reduce_(g.clone()))
    theirs = link_of("CLTk(density=0.03)", workers, FULL)
    for round in range(FULL, FULL + TRAINING):
        g = gradients(workers, round)
        assert torch.equal(ours.reduce_(g.clone()), theirs.reduce_(g.clone()))
        assert torch.equal(residuals(ours), residuals(theirs))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_outcome_is_the_curve_at_the_leaders_order_and_scales(workers: int) -> None:
    """2: recomputed from the means of the second phase and from what the leader has; zero everywhere else."""
    link, curves = link_of(curve(), workers), []
    for round in range(FULL + TRAINING):
        p = gradients(workers, round)
        if round > FULL:
            p[:, :3200] += residuals(link)
        mean = link.reduce_(gradients(workers, round))
        if round >= FULL:
            places = chosen(p[round % workers])
            curves.append((mean[places] / scales(p[round % workers, places])).double())
    wanted = torch.stack(curves).mean(0)
    state = link.state_dict()["global"]
    assert int(state["rank_curve_rounds"]) == TRAINING
    assert torch.allclose(state["rank_curve"] / TRAINING, wanted, rtol=1e-6)
    for round in range(FULL + TRAINING, FULL + TRAINING + 3):
        p = gradients(workers, round)
        p[:, :3200] += residuals(link)
        mean = link.reduce_(gradients(workers, round))
        places = chosen(p[round % workers])
        found = scales(p[round % workers, places]) * wanted.float()
        assert torch.allclose(mean[places], found, rtol=1e-5, atol=1e-6)
        outside = torch.ones(3240, dtype=torch.bool)
        outside[places] = outside[3200:] = False
        assert not bool(mean[outside].any())
        assert torch.allclose(mean[3200:], gradients(workers, round)[:, 3200:].mean(0), atol=1e-6)
    assert torch.equal(link.state_dict()["global"]["rank_curve"], state["rank_curve"])


def test_values_that_are_always_the_same_curve_are_exact() -> None:
    """3: a permutation, a sign for all and a scale of one vector a round and parameter, the same on all workers."""
    link = link_of(curve(full_rounds=0, training_rounds=1), 2)
    shape = torch.zeros(3240)
    shape[:60], shape[2000:2036] = torch.linspace(-3, 4, 60), torch.linspace(-1, 1, 36)
    for round in range(4):
        draw = torch.Generator().manual_seed(round)
        g = (round + 1) * torch.cat([part[torch.randperm(len(part), generator=draw)]
                                     for part in shape.split(list(SIZES.values()))])  # fmt: skip
        mean = link.reduce_(g.expand(2, -1).clone())
        assert torch.allclose(mean, g, rtol=1e-5, atol=1e-6 * float(g.abs().max()))


def test_what_residuals_keep() -> None:
    """4: all but the elements that were chosen; or all that is not in the outcome, so that nothing is lost."""
    for feedback in ("selection", "reconstruction"):
        link = link_of(curve(feedback=feedback), 4)
        for round in range(FULL + TRAINING):
            link.reduce_(gradients(4, round))
        g = gradients(4, 5)
        p = g[:, :3200] + residuals(link)
        mean, after = link.reduce_(g.clone())[:3200], residuals(link)
        if feedback == "reconstruction":
            assert torch.allclose(after, p - mean, rtol=1e-5, atol=1e-5)
            continue
        wanted = p.clone()
        wanted[:, chosen(p[5 % 4])] = 0
        assert torch.equal(after, wanted)


@pytest.mark.parametrize("workers", [3, 4])
def test_bytes_of_each_phase(workers: int) -> None:
    """5: to the byte but for positions, of which 96 take at most 96 * 7 / 8 + 8 bytes."""
    link = link_of(curve(), workers)
    for round in range(FULL):
        assert sent(link, round) == [two_shot(3240, workers)] * workers
    maximum = (workers - 1) * (2 * 4 + 8)
    for round in range(FULL, FULL + TRAINING + 3):
        values = 96 + 40 if round < FULL + TRAINING else 40
        counts = [count - two_shot(values, workers) - maximum for count in sent(link, round)]
        check_broadcast(counts, round, 8 + 32 + 16 + 16 + up(-(-96 * 6 // 8)))


def test_fewer_bytes_than_lgc_in_both_of_the_later_phases() -> None:
    """5: no values of workers for a trainer, no autoencoder, no code."""
    lgc = link_of(gw.LGC(density=0.03, full_rounds=FULL, training_rounds=TRAINING), 4)
    ours, seen = link_of(curve(), 4), (0, 0)
    for round in range(FULL + TRAINING + 2):
        for link in (lgc, ours):
            link.reduce_(gradients(4, round))
        now = tuple(sum(link.traffic(worker).sent_bytes for worker in range(4)) for link in (lgc, ours))
        if round >= FULL:
            assert now[1] - seen[1] < now[0] - seen[0]
        seen = now


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_training_is_resumed_in_any_phase(stop: int) -> None:
    """6: bit for bit, from tensors alone."""
    whole, state, expected = link_of(curve()), {}, torch.empty(0)
    for round in range(8):
        if round == stop:
            file = io.BytesIO()
            torch.save(whole.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        expected = whole.reduce_(gradients(3, round)).clone()
    other = link_of(curve())
    other.load_state_dict(state)
    for round in range(stop, 8):
        found = other.reduce_(gradients(3, round))
    assert torch.equal(found, expected)
    assert torch.equal(residuals(other), residuals(whole))


def test_the_second_phase_goes_on_until_a_round_of_it_was_finite() -> None:
    """7: a round with an infinity adds nothing to the curve; without any, no round sends a curve."""
    link, other = link_of(curve(full_rounds=0, training_rounds=1)), link_of("CLTk(density=0.03)")
    spoilt = gradients(3, 0)
    spoilt[1, 7] = torch.inf
    assert not bool(torch.isfinite(link.reduce_(spoilt.clone())[7]))
    assert "rank_curve" not in link.state_dict()["global"]
    other.reduce_(spoilt.clone())
    g = gradients(3, 1)
    assert torch.equal(link.reduce_(g.clone()), other.reduce_(g.clone()))
    assert int(link.state_dict()["global"]["rank_curve_rounds"]) == 1
    spoilt = gradients(3, 2)
    spoilt[2, 2100] = torch.nan
    mean, before = link.reduce_(spoilt), residuals(link)
    assert bool((mean[2000:3200] == torch.inf).all())
    assert bool(torch.isfinite(mean[:2000]).all())
    assert torch.equal(residuals(link), before)


@pytest.mark.parametrize(
    "fields",
    [{"feedback": "none"}, {"full_rounds": -1}, {"training_rounds": 0}, {"training_rounds": 1.0}, {"density": 0},
     {"momentum": -0.1}],
)  # fmt: skip
def test_fields_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(HyperparameterError):
        gw.RankCurve(**fields)


def test_with_another_number_of_workers_the_curve_is_fitted_anew(caplog: pytest.LogCaptureFixture) -> None:
    """8: values of two workers cancel less than those of four, by which the curve was fitted."""
    before, link = link_of(curve(), 4), link_of(curve(), 2)
    for round in range(FULL + TRAINING + 1):
        before.reduce_(gradients(4, round))
    link.load_state_dict(before.state_dict())
    assert "by 4 ranks, and there are 2 now: 'rank_curve', 'rank_curve_rounds', 'workers' of" in caplog.text
    for round in range(FULL + TRAINING + 1, FULL + 2 * TRAINING + 2):
        p = gradients(2, round)
        p[:, :3200] += residuals(link)
        fitted = link.state_dict()["global"].get("rank_curve_rounds", torch.tensor(0))
        assert int(fitted) == min(round - (FULL + TRAINING + 1), TRAINING)
        places, mean = chosen(p[round % 2]), link.reduce_(gradients(2, round))
        assert torch.allclose(mean[places], p.mean(0)[places], rtol=1e-5) == (int(fitted) < TRAINING)
