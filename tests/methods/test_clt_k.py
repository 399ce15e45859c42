"""CLT-k, by number of the property in docs/properties.md."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError, PayloadError
from gradwire.exchange.protocols.bucket_plan import PlanSetting
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels
from gradwire.methods.sparse.clt_k import LeadersElements

SIZES = {"a": 3000, "b": 900, "c": 40}
NUMEL = sum(SIZES.values())


def gradients(workers: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=generator) ** 3
    return common + 0.5 * torch.randn(workers, NUMEL, generator=generator)


def link_of(method: gw.Method | str, workers: int) -> gw.SimulatedLink:
    return gw.SimulatedLink([(n, torch.empty(k)) for n, k in SIZES.items()], method, workers, min_numel=100)


def residuals(link: gw.SimulatedLink, workers: int, names: str = "ab") -> torch.Tensor:
    state = link.state_dict()
    return torch.stack([torch.cat([state[f"rank {r}"][f"residual/{n}"] for n in names]) for r in range(workers)])


def largest(x: torch.Tensor, density: float) -> torch.Tensor:
    """Return which elements a worker would choose, by parameter."""
    found = torch.zeros(NUMEL, dtype=torch.bool)
    for at, n in ((0, 3000), (3000, 900)):
        k = max(1, int(density * n))
        found[at + torch.sort(x[at : at + n].abs(), descending=True, stable=True).indices[:k]] = True
    return found


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_each_worker_leads_in_its_turn_and_the_others_follow(workers: int, beta: float) -> None:
    """1, 2 and 4: step by step, also beside what is not compressed. Sums of four numbers up to 100 are rounded."""
    link, kept = link_of(gw.CLTk(density=0.02, beta=beta), workers), torch.zeros(workers, NUMEL)
    for round in range(2 * workers + 1):
        g = gradients(workers, round)
        p = g + kept
        chosen = largest(p[round % workers], 0.02)
        chosen[3900:] = True
        expected = torch.where(chosen, p.mean(0), 0.0)
        found = link.reduce_(g.clone())
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found != 0, chosen)
        kept = torch.where(chosen, (1 - beta) * kept, kept + beta * g)
        kept[:, 3900:] = 0
        assert torch.allclose(residuals(link, workers), kept[:, :3900], rtol=1e-5, atol=1e-5)


def test_nothing_is_lost() -> None:
    """3: on four workers no product with a fourth is rounded, so that what was sent is gone from residuals exactly."""
    link, before = link_of(gw.CLTk(density=0.02), 4), torch.zeros(4, 3900)
    for round in range(6):
        g = gradients(4, round)
        mean = link.reduce_(g.clone())[:3900]
        after = residuals(link, 4)
        assert torch.allclose(mean + after.mean(0), g[:, :3900].mean(0) + before.mean(0), rtol=1e-5, atol=1e-5)
        assert bool((after[:, mean != 0] == 0).all())
        before = after


def test_one_worker_is_top_k_with_error_feedback() -> None:
    """5."""
    ours, theirs = (link_of(m, 1) for m in (gw.CLTk(density=0.02), "ErrorFeedback(TopK(density=0.02))"))
    for round in range(4):
        g = gradients(1, round)
        assert torch.equal(ours.reduce_(g.clone()), theirs.reduce_(g.clone()))


@pytest.mark.parametrize("workers", [4, 8])
def test_traffic_does_not_grow_with_the_workers(workers: int) -> None:
    """6: values once round, positions down a tree; in N rounds every worker sends about the same."""
    link, k = link_of(gw.CLTk(density=0.02), workers), 60 + 18
    for round in range(workers):
        link.reduce_(gradients(workers, round))
    sent = [link.traffic(worker).sent_bytes for worker in range(workers)]
    # Two shares of values, in units of 16 bytes with a header of 32, and as many dense ones; N - 1 copies of positions
    # in each round, shared out over N ranks, of 16 bits an element at most with 112 bytes of heads.
    values = 2 * (workers - 1) * (-(-4 * (k + 40) // (16 * workers)) * 16 + 32)
    most = workers * values + (workers - 1) * (2 * k + 112)
    assert workers * values < min(sent)
    assert max(sent) <= most
    assert max(sent) - min(sent) < 64 * workers


def setting() -> PlanSetting:
    segments = lay_out([Parameter("a", (3000,), (1,)), Parameter("b", (900,), (1,)), Parameter("one", (7,), (1,))])
    return PlanSetting(segments, get_kernels("auto"), 3, "two_shot", 0, 1 << 20)


@pytest.mark.parametrize("ordered", [False, True])
def test_the_leaders_elements_are_read_as_they_were_written(ordered: bool) -> None:
    """7: by position, or in descending order of values within each parameter, of equal ones the first."""
    elements = LeadersElements(setting(), 0.02, ordered=ordered)
    assert elements.counts == [60, 18, 1]
    flat = torch.randn(3907, generator=torch.Generator().manual_seed(0))
    flat[3300:3302] = 9.0
    places = elements.read(elements.write(flat, torch.zeros(elements.codec.payload_bytes(3907), dtype=torch.uint8)))
    for part, (a, b) in zip(places.split(elements.counts), ((0, 3000), (3000, 3900), (3900, 3907))):
        chosen = torch.sort(flat[a:b].abs(), descending=True, stable=True).indices[: len(part)] + a
        assert sorted(part.tolist()) == sorted(chosen.tolist())
        wanted = sorted(chosen.tolist(), key=lambda i: (-float(flat[i]), i) if ordered else i)
        assert part.tolist() == wanted


def test_an_order_that_names_an_element_twice_is_refused() -> None:
    """7: a payload whose checksum is right may still come from a program with a fault."""
    elements = LeadersElements(setting(), 0.02, ordered=True)
    flat = torch.randn(3907, generator=torch.Generator().manual_seed(0))
    parts = elements.write(flat, torch.zeros(elements.codec.payload_bytes(3907), dtype=torch.uint8))
    with pytest.raises(PayloadError, match="one of them twice"):
        elements.read([parts[0], torch.zeros_like(parts[1])])
    other = LeadersElements(setting(), 0.03, ordered=True)
    with pytest.raises(PayloadError, match="79 elements are told, where 118 are needed"):
        other.read(parts)


@pytest.mark.parametrize("fields", [{"density": 0.0}, {"beta": 0.0}, {"beta": 1.5}, {"beta": True}, {"momentum": 1.0}])
def test_fields_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(HyperparameterError):
        gw.CLTk(**fields)
