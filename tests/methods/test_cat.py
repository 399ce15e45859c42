"""CAT, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.methods.sparse.descent_per_byte import MessageCost, descent

SCHEMES = ("topk", "sign", "stochastic")


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def student(numel: int, seed: int = 0) -> torch.Tensor:
    """Two degrees of freedom: heavy tails."""
    pairs = gaussian(2, numel, seed=seed + 100)
    return gaussian(numel, seed=seed) / (pairs.square().sum(0) / 2).sqrt()


def shares(scheme: str, x: torch.Tensor) -> torch.Tensor:
    sizes = x.abs().double().sort(descending=True).values
    return descent(scheme, sizes, float(sizes.sum()), float(sizes.norm()))


def sent(x: torch.Tensor, **fields: object) -> torch.Tensor:
    return gw.simulate(x[None], gw.CAT(**fields)).mean  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["topk", "sign"])
@pytest.mark.parametrize("fixed_bytes", [0.0, 500.0, 1e6])
def test_a_step_descends_by_what_is_said(scheme: str, fixed_bytes: float) -> None:
    """1: on |x|^2 / 2 with rate 1 the loss falls by share(T) |x|^2 / 2, exactly."""
    x = student(500, seed=1)
    found = sent(x, scheme=scheme, fixed_bytes=fixed_bytes)
    number = int(found.count_nonzero())
    fell = float((x.double().square().sum() - (x - found).double().square().sum()) / x.double().square().sum())
    assert fell == pytest.approx(float(shares(scheme, x)[number - 1]), rel=1e-5)


def test_a_random_step_descends_by_what_is_said_on_average() -> None:
    """1, stochastic: the mean over rounds of the fall on |x|^2 / 2 with rate 1."""
    x = student(200, seed=2)
    link = gw.SimulatedLink([("w", torch.empty(200))], gw.CAT(scheme="stochastic", fixed_bytes=200.0), 1, min_numel=0)
    falls, numbers = [], []
    for _ in range(400):
        found = link.reduce_(x[None].clone())
        falls.append(float((x.square().sum() - (x - found).square().sum()) / x.square().sum()))
        numbers.append(int(found.count_nonzero()))
    number = round(sum(numbers) / 400)
    deviation = float(torch.tensor(falls).std()) / 20
    wanted = shares("stochastic", x)
    assert float(wanted[number - 3]) - 4 * deviation < sum(falls) / 400 < float(wanted[number + 1]) + 4 * deviation


def test_the_shares_of_descent() -> None:
    """2, 9: alpha and omega rise, ever slower, to one; beta is below alpha and largest well inside."""
    x = student(1000, seed=3)
    alpha, beta, omega = (shares(scheme, x) for scheme in SCHEMES)
    for share in (alpha, omega):
        assert bool((share.diff() >= -1e-12).all())
        assert bool((share.diff().diff() <= 1e-12).all())
        assert float(share[-1]) == pytest.approx(1)
    assert bool((beta <= alpha + 1e-12).all())
    assert 1 < int(beta.argmax()) + 1 < 200
    assert float(beta.max()) > 1.5 * float(beta[-1])
    assert float(beta[-1]) == pytest.approx(float(x.abs().sum() ** 2 / (1000 * x.square().sum())), rel=1e-5)
    assert bool((alpha >= torch.arange(1, 1001) / 1000 - 1e-12).all())
    even = shares("topk", torch.ones(50))
    assert torch.allclose(even, torch.arange(1, 51).double() / 50)


def test_omega_is_that_of_the_best_probabilities() -> None:
    """2: against ATOMO's solver, for every number of elements."""
    from gradwire.methods.atoms.atom_codec import probabilities

    x = student(60, seed=4)
    for number in range(1, 61):
        p = probabilities(x, float(number))
        wanted = float(x.double().square().sum() / (x.double().square() / p).sum())
        assert float(shares("stochastic", x)[number - 1]) == pytest.approx(wanted, rel=1e-9)


def test_where_only_bytes_cost_one_element_is_sent() -> None:
    """3: and of random elements, every number up to |g|_1 / |g|_inf pays the same."""
    x = gaussian(1000, seed=5)
    assert int(sent(x, fixed_bytes=0.0).count_nonzero()) == 1
    omega = shares("stochastic", x)
    tie = int(float(x.abs().sum() / x.abs().max()))
    assert torch.allclose(omega[:tie] / torch.arange(1, tie + 1), omega[:1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dearer_messages_are_larger(scheme: str) -> None:
    """4: T does not fall as the fixed cost rises; of a concave share over an affine cost there is one peak."""
    x = student(3000, seed=6)
    numbers = [int(sent(x, scheme=scheme, fixed_bytes=c).count_nonzero()) for c in (0.0, 54.0, 1250.0, 12500.0, 1e7)]
    if scheme != "stochastic":
        assert numbers == sorted(numbers)
    if scheme == "sign":
        return
    assert numbers[-1] > 20 * numbers[0]
    ratio = shares(scheme, x) / (1250.0 + torch.arange(1, 3001) * 44 / 8)
    rises = ratio.diff() > 0
    assert not bool((~rises[:-1] & rises[1:]).any())


def test_packets_are_filled() -> None:
    """5: 44 bits an element of 3000, 265 to a packet of 1458 bytes."""
    x = student(3000, seed=7)
    for fixed in (0.0, 1500.0, 40000.0):
        number = int(sent(x, fixed_bytes=fixed, packet_bytes=1458).count_nonzero())
        assert number == 3000 or number % (1458 * 8 // 44) in (0, 1)
        assert number >= 1458 * 8 // 44 - 1


@pytest.mark.parametrize("scheme", ["topk", "sign"])
def test_scale_and_order_change_nothing(scheme: str) -> None:
    """6."""
    x = student(700, seed=8)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(9))
    found = sent(x, scheme=scheme)
    assert torch.equal(sent(x[order], scheme=scheme), found[order])
    assert torch.equal(sent(-4 * x, scheme=scheme), -4 * found)


@pytest.mark.parametrize("scheme", ["topk", "sign"])
@pytest.mark.parametrize("packet_bytes", [None, 512])
def test_no_fixed_number_has_a_better_ratio(scheme: str, packet_bytes: int | None) -> None:
    """7: of 20 000 elements too, of which not all are looked at."""
    for numel, seed in ((300, 10), (20_000, 11)):
        x = student(numel, seed=seed) if scheme == "topk" else gaussian(numel, seed=seed)
        number = int(sent(x, scheme=scheme, fixed_bytes=3000.0, packet_bytes=packet_bytes).count_nonzero())
        bits = (32 if scheme == "topk" else 1) + math.ceil(math.log2(numel))
        head = 4.0 * (scheme == "sign")
        cost = MessageCost(3000.0, packet_bytes).of(head + torch.arange(1, numel + 1) * bits / 8)
        ratio = shares(scheme, x) / cost
        assert float(ratio[number - 1]) == pytest.approx(float(ratio.max()), rel=1e-9)


def test_rounds_are_bounded_by_the_smallest_share() -> None:
    """8: f = sum of l_i x_i^2 / 2: rounds to a millionth are at most kappa log(10^6) / the smallest share."""
    curvature = torch.linspace(0.2, 1, 60)
    x, rounds, least = torch.ones(60), 0, 1.0
    start = float((curvature * x * x).sum())
    while float((curvature * x * x).sum()) > 1e-6 * start:
        g = curvature * x
        found = sent(g, fixed_bytes=100.0)
        least = min(least, float(shares("topk", g)[int(found.count_nonzero()) - 1]))
        x, rounds = x - found, rounds + 1
    assert rounds <= 5 * math.log(1e6) / least
    assert rounds > 5 * math.log(1e6) / 60


def test_workers_choose_for_themselves() -> None:
    g = torch.stack([student(500, seed=12), torch.ones(500)])
    found = gw.simulate(g, gw.CAT(fixed_bytes=2000.0)).mean
    alone = [sent(row, fixed_bytes=2000.0) for row in g]
    assert int(alone[0].count_nonzero()) != int(alone[1].count_nonzero())
    assert torch.allclose(found, (alone[0] + alone[1]) / 2)


@pytest.mark.parametrize(
    "fields",
    [{"scheme": "best"}, {"fixed_bytes": -1}, {"fixed_bytes": math.inf}, {"packet_bytes": 8}, {"blocks": "bucket"}],
)
def test_fields_are_checked(fields: dict[str, object]) -> None:
    with pytest.raises(HyperparameterError):
        gw.CAT(**fields)  # type: ignore[arg-type]
