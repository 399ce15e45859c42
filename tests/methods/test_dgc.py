"""Deep Gradient Compression, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import PlanSetting, SectionPlan
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.sparse.dgc import MaskedMomentum
from resumed import assert_resumes


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linked(method: gw.Method, numel: int, workers: int = 1, **options: object) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(numel))], method, workers, min_numel=0, **options)


def held(link: gw.SimulatedLink, kind: str) -> torch.Tensor:
    return torch.stack([link.state_dict()[f"rank {r}"][f"{kind}/w"] for r in range(link.world_size)])


def directions(gradients: torch.Tensor, **settings: object) -> list[torch.Tensor]:
    """What ``torch.optim.SGD`` at a rate of 1 subtracts from zeros that are set anew for each gradient."""
    w = torch.nn.Parameter(torch.zeros(gradients.shape[1]))
    sgd, found = torch.optim.SGD([w], lr=1.0, **settings), []  # type: ignore[arg-type]
    for g in gradients:
        w.data.zero_()
        w.grad = g.clone()
        sgd.step()
        found.append(-w.detach().clone())
    return found


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_with_all_elements_it_is_sgd_with_momentum(nesterov: bool, masking: bool) -> None:
    """1 and 6: the same bits as torch's, of one worker; a stage with density 1 is not masked, as by the authors."""
    rounds = gaussian(6, 300)
    wanted = directions(rounds, momentum=0.9, nesterov=nesterov)
    link = linked(gw.DGC(density=1.0, nesterov=nesterov, factor_masking=masking), 300)
    staged = linked(gw.DGC(warmup_densities=(1.0,), warmup_rounds=6, nesterov=nesterov, factor_masking=masking), 300)
    for g, direction in zip(rounds, wanted):
        assert torch.equal(link.reduce_(g[None].clone()), direction)
        assert torch.equal(staged.reduce_(g[None].clone()), direction)
    assert not bool(held(link, "accumulated").any())


def planned(numel: int) -> PlanSetting:
    segments = lay_out([Parameter("w", (numel,), (1,))])
    return PlanSetting(segments, get_kernels("reference"), 1, "all_gather", 0, 1 << 20)


@pytest.mark.parametrize("nesterov", [False, True])
def test_errors_are_measured_against_the_clipped_gradients_momentum(nesterov: bool) -> None:
    """Also where a part of it was cleared meanwhile: half of the elements of a first round arrive, without error."""
    method = gw.DGC(density=0.5, nesterov=nesterov, clip_norm=2.0)
    plan, context, g = method.plan(planned(300)), Context(0, 1, 0, loss_scale=4.0), 4 * gaussian(300)
    flat, target = g.clone(), g.clone()
    simulate_ranks([plan.whole(context, flat)], [Meter()])
    plan.target_(context, target)
    assert int(flat.count_nonzero()) == 150
    assert torch.equal(flat[flat != 0], target[flat != 0])
    assert float(target.norm()) == pytest.approx(4 * 2.0 * (1.9 if nesterov else 1), rel=1e-5)


def test_masked_with_all_elements_it_would_be_sgd_without_momentum() -> None:
    """1: which is why rounds with density 1 are not masked."""
    setting = planned(300)
    plan = MaskedMomentum(SectionPlan(gw.TopK(density=1.0), setting), setting.segments, 0.9)
    context = Context(0, 1, 0)
    for g in gaussian(4, 300):
        flat = g.clone()
        simulate_ranks([plan.whole(context, flat)], [Meter()])
        context.memory.commit()
        assert torch.equal(flat, g)
        assert not bool(context.memory.read("momentum", setting.segments).any())


def test_what_arrives_of_an_element_is_what_momentum_would_have_added_up() -> None:
    """2: constant gradients, an element every few rounds: sums of u_1 .. u_K, as without compression."""
    slopes = 1.5 ** torch.arange(8.0)
    link, velocity, due = linked(gw.DGC(density=1 / 8, factor_masking=False), 8), torch.zeros(8), torch.zeros(8)
    waited = torch.zeros(8)
    longest = 0.0
    for _ in range(200):
        velocity = 0.9 * velocity + slopes
        due, waited = due + velocity, waited + 1
        mean = link.reduce_(slopes[None].clone())
        (sent,) = mean.nonzero()[:, 0].tolist()
        # 200 roundings at most of sums below a few thousand, by shares of 2^-24 each.
        assert float(mean[sent]) == pytest.approx(float(due[sent]), rel=1e-5)
        longest = max(longest, float(waited[sent]))
        due[sent] = waited[sent] = 0
    assert longest > 8


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_nothing_is_lost_and_memories_are_zero_exactly_where_something_was_sent(masking: bool, nesterov: bool) -> None:
    """3, 4, 5: entrywise and bit for bit; k elements, neither fewer nor more."""
    method = gw.DGC(density=0.02, momentum=0.5, nesterov=nesterov, factor_masking=masking)
    link, workers = linked(method, 1000, 3), 3
    u, v = torch.zeros(workers, 1000), torch.zeros(workers, 1000)
    for round in range(6):
        g = gaussian(workers, 1000, seed=round)
        u = u * 0.5 + g
        v = v + (g + 0.5 * u if nesterov else u)
        mean = link.reduce_(g.clone())
        u_after, v_after = held(link, "momentum"), held(link, "accumulated")
        sent = v_after == 0
        assert sent.sum(1).tolist() == [20] * workers
        # What stays is what was there, whole, and what was sent is the rest.
        assert torch.equal(v_after, torch.where(sent, 0.0, v))
        assert torch.allclose(mean, torch.where(sent, v, 0.0).mean(0), rtol=1e-6, atol=1e-6)
        assert torch.equal(u_after, torch.where(sent, 0.0, u) if masking else u)
        u, v = u_after, v_after


def test_of_ties_and_zeros_no_more_than_k_are_sent() -> None:
    """5."""
    link = linked(gw.DGC(density=0.01), 1000)
    assert int(link.reduce_(torch.ones(1, 1000)).count_nonzero()) == 10
    sparse = torch.zeros(1, 1000)
    sparse[0, 7] = 1
    assert int(linked(gw.DGC(density=0.01), 1000).reduce_(sparse).count_nonzero()) == 1


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("length", [0.5, 3.0, 40.0])
def test_gradients_are_clipped_to_the_norm_over_the_root_of_the_workers(workers: int, length: float) -> None:
    """7: of all parameters together, those that travel in float32 included."""
    parameters = [("a", torch.empty(2000)), ("b", torch.empty(30)), ("c", torch.empty(1500))]
    g = gaussian(3530, seed=1)
    g = length * g / g.norm()
    link = gw.SimulatedLink(parameters, gw.DGC(density=1.0, momentum=0.0, clip_norm=3.0), workers)
    mean = link.reduce_(g.expand(workers, -1).clone())
    bound = min(length, 3.0 / math.sqrt(workers))
    assert float(mean.norm()) == pytest.approx(bound, rel=1e-5)
    assert torch.allclose(mean, g * (bound / length), rtol=1e-5, atol=1e-7)


def test_clipping_acts_on_each_workers_gradient_before_anything_is_added() -> None:
    g = gaussian(2, 1000, seed=2)
    g[0] *= 1000
    link = linked(gw.DGC(density=0.1, momentum=0.5, clip_norm=1.0), 1000, 2)
    for round in range(1, 4):
        link.reduce_(g.clone())
        added = held(link, "momentum")
        # A geometric sum of vectors of a norm of 1 / sqrt(2), less what was cleared.
        assert float(added.norm(dim=1).max()) <= (2 - 0.5 ** (round - 1)) / math.sqrt(2) * (1 + 1e-5)


def quadratic(method: gw.Method, rate: float, steps: int, momentum: float = 0.0) -> list[torch.Tensor]:
    """Descend |x - c|^2_a / 2 in 20 dimensions with curvatures 1 to 5, perhaps with a momentum of the optimizer's."""
    curvature, centre = torch.linspace(1, 5, 20), gaussian(20, seed=3)
    x = torch.nn.Parameter(torch.zeros(20))
    link, sgd, found = linked(method, 20), torch.optim.SGD([x], lr=rate, momentum=momentum), []
    for _ in range(steps):
        x.grad = link.reduce_((curvature * (x.detach() - centre))[None])
        sgd.step()
        found.append(x.detach() - centre)
    return found


def test_a_quadratic_is_solved_but_not_at_any_rate_at_which_momentum_sgd_solves_it() -> None:
    """8: two elements of twenty. The limit of heavy-ball, 2 (1 + m) / 5 = 0.76, is not the limit here."""
    method = gw.DGC(density=0.1)
    solved = quadratic(method, 0.01, 150)
    assert float(solved[-1].norm()) < 0.01 * float(solved[0].norm())
    assert float(quadratic(gw.FP32(), 0.2, 100, momentum=0.9)[-1].norm()) < 0.01 * float(solved[0].norm())
    assert float(quadratic(method, 0.2, 50)[-1].norm()) > 100


def test_momentum_after_the_exchange_leads_elsewhere() -> None:
    """8: by an amount that grows as m / (1 - m) does: 9-fold from 0.5 to 0.9, where steps are as long."""
    apart = []
    for m in (0.5, 0.9):
        rate = 0.05 * (1 - m)
        corrected = quadratic(gw.DGC(density=0.1, momentum=m, factor_masking=False), rate, 20)
        after = quadratic(gw.ErrorFeedback(compressor=gw.TopK(density=0.1)), rate, 20, momentum=m)
        apart.append(float((corrected[-1] - after[-1]).norm()) / rate)
    assert apart[0] > 1
    assert 9 / 2 < apart[1] / apart[0] < 9 * 2


def test_the_density_follows_the_round_alone() -> None:
    method = gw.DGC(density=0.01, warmup_densities=(0.5, 0.1), warmup_rounds=2)
    link, counts = linked(method, 1000, 2), []
    for round in range(6):
        counts.append(int(link.reduce_(gaussian(1, 1000, seed=round).expand(2, -1).clone()).count_nonzero()))
    assert counts == [500, 500, 100, 100, 10, 10]
    late = gw.simulate(gaussian(1, 1000), method, round=3).mean
    assert int(late.count_nonzero()) == 100
    # Rounds in float32 count among them, and leave nothing behind but the momentum.
    link = linked(method, 1000, 1, warmup_steps=3)
    counts = [int(link.reduce_(gaussian(1, 1000, seed=round)).count_nonzero()) for round in range(5)]
    assert counts == [1000, 1000, 1000, 100, 10]


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_warm_up_is_resumed_in_its_stage(cut: int) -> None:
    method = gw.DGC(density=0.02, nesterov=True, clip_norm=5.0, warmup_densities=(0.3, 0.1), warmup_rounds=2)
    rounds = [gaussian(3, 800, seed=s) for s in range(7)]
    assert_resumes(lambda: linked(method, 800, 3), rounds, cut)


def test_a_round_with_an_infinity_changes_nothing() -> None:
    link = linked(gw.DGC(density=0.01, clip_norm=1.0), 500, 2)
    link.reduce_(gaussian(2, 500))
    before = link.state_dict()
    g = gaussian(2, 500, seed=1)
    g[1, 3] = math.inf
    assert not bool(torch.isfinite(link.reduce_(g)).all())
    after = link.state_dict()
    assert set(before["rank 0"]) == {"momentum/w", "accumulated/w"}
    assert all(torch.equal(before[r][k], after[r][k]) for r in ("rank 0", "rank 1") for k in before[r])


def test_without_masking_it_is_error_feedback_with_momentum() -> None:
    one = linked(gw.DGC(density=0.05, factor_masking=False), 600, 3)
    other = linked(gw.ErrorFeedback(compressor=gw.TopK(density=0.05), momentum=0.9), 600, 3)
    for round in range(5):
        g = gaussian(3, 600, seed=round)
        assert torch.equal(one.reduce_(g.clone()), other.reduce_(g.clone()))


def test_fields_are_checked_and_a_second_momentum_is_refused() -> None:
    for bad in (
        {"density": 0},
        {"momentum": 1.0},
        {"nesterov": 1},
        {"factor_masking": None},
        {"clip_norm": 0.0},
        {"clip_norm": math.inf},
        {"warmup_densities": (0.25, 2.0)},
        {"warmup_densities": 0.25},
        {"warmup_rounds": -1},
    ):
        with pytest.raises(HyperparameterError, match="DGC"):
            gw.DGC(**bad)
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(IncompatibleError, match=r"momentum=0\.9 beside it"):
        gw.check_options("dgc", optimizer=torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    gw.check_options("dgc", optimizer=torch.optim.SGD(parameters, lr=0.1))
    gw.check_options("DGC(momentum=0)", optimizer=torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
