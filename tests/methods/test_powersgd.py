"""PowerSGD, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire as gw
from factors import COLUMNS, ROWS, held, link, step, workers
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.exchange.wire.header import HEADER_BYTES
from gradwire.methods.low_rank.factors import draw_factor, matrices

NARROW = gw.PowerSGD(values=gw.BF16())


def oracle(rounds: list[torch.Tensor], rank: int, seed: int = 0) -> list[torch.Tensor]:
    """The paper's algorithms 1 and 2 with NumPy's own decompositions, in float64; the first factor is the method's."""
    count, rows, columns = rounds[0].shape
    segment = lay_out([Parameter("w", (rows, columns), (columns, 1))])
    (matrix,) = matrices(segment, rank, 1.0)
    q = draw_factor("w", columns, matrix.rank, seed, 0).double().numpy().T
    residual, found = np.zeros((count, rows, columns)), []
    for g in rounds:
        m = g.double().numpy() + residual
        p = (m @ q).mean(0)
        p = np.linalg.qr(p)[0]
        q = np.einsum("wnm,nr->mr", m, p) / count
        product = p @ q.T
        residual = m - product
        found.append(torch.from_numpy(product))
    return found


@pytest.mark.parametrize("count", [1, 3, 5, 7])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rounds_are_the_papers(count: int, rank: int) -> None:
    """The product does not depend on which orthonormal basis spans the left factor's columns."""
    rounds = [workers(count, seed) for seed in range(8)]
    ours = link(count, gw.PowerSGD(matrix_rank=rank))
    for expected, g in zip(oracle(rounds, rank), rounds):
        assert torch.allclose(step(ours, g).double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_a_product_is_a_projection_and_residuals_are_the_rest() -> None:
    """2 and 5: with M the mean of gradients and residuals, M - product is orthogonal to it, and the residuals' mean."""
    ours, residual = link(3, gw.PowerSGD()), torch.zeros(ROWS, COLUMNS)
    for seed in range(4):
        g = workers(3, seed)
        mean = g.mean(0) + residual
        product = step(ours, g)
        residual = mean - product
        assert float((residual * product).sum()) == pytest.approx(0, abs=1e-3)
        assert torch.allclose(held(ours).mean(0), residual, rtol=0, atol=1e-5)


def test_a_matrix_of_the_rank_is_exact_and_another_tends_to_its_best_product() -> None:
    """3: each step starts where the last ended."""
    low = workers(1, 1, ROWS, 2)[0] @ workers(1, 2, 2, COLUMNS)[0]
    assert torch.allclose(step(link(1, gw.PowerSGD()), low[None]), low, rtol=0, atol=1e-4)
    g = workers(1)[0]
    s = torch.linalg.svdvals(g)
    best = float(s[2:].square().sum().sqrt())
    ours = link(1, gw.PowerSGD())
    left = []
    for _ in range(60):
        left.append(float((step(ours, g[None]) - g).norm()))
        # Without what was left out the matrix stays as it is.
        state = ours.state_dict()
        state["rank 0"]["residual/w"].zero_()
        ours.load_state_dict(state)
    assert left[0] > 1.02 * best
    assert left[-1] == pytest.approx(best, rel=1e-3)


def test_what_is_orthogonal_to_the_factor_is_seen_later() -> None:
    """6: nothing of it at first, and nothing that is not a number; the residual then turns the factor."""
    ours = link(1, gw.PowerSGD(matrix_rank=1))
    first = workers(1)
    step(ours, first)
    factor = ours.state_dict()["replicated"]["factor/w"]
    # A row space orthogonal to the factor, and a residual of zero.
    other = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(5)).double()
    other -= (other @ factor.double()) / (factor.double() @ factor.double()) * factor.double()
    g = torch.outer(torch.ones(ROWS), other.float())[None]
    state = ours.state_dict()
    state["rank 0"]["residual/w"].zero_()
    ours.load_state_dict(state)
    found = [step(ours, g) for _ in range(12)]
    assert all(bool(torch.isfinite(f).all()) for f in found)
    total = torch.stack(found).sum(0)
    assert float((total - 12 * g[0]).norm()) < 3 * float(g.norm())


@pytest.mark.parametrize(("rows", "columns"), [(3, 500), (500, 3), (4, 4)])
def test_a_full_rank_is_lossless(rows: int, columns: int) -> None:
    """7."""
    g = workers(3, 0, rows, columns)
    ours = link(3, gw.PowerSGD(matrix_rank=4, least_saving=1), rows, columns)
    assert torch.allclose(step(ours, g), g.mean(0), rtol=0, atol=1e-5)


def test_the_declared_bits_are_those_of_a_large_square_matrix() -> None:
    ours = gw.SimulatedLink([("w", torch.empty(1000, 1000))], "powersgd", 4)
    ours.reduce_(torch.ones(4, 1_000_000))
    assert ours.traffic().bits_per_element == pytest.approx(gw.PowerSGD.properties.bits_per_element, rel=0.02)


def test_bytes_are_two_factors_and_what_is_not_compressed() -> None:
    rows, columns, vector, rank, count = 400, 300, 500, 2, 4
    parameters = [("w", torch.empty(rows, columns)), ("b", torch.empty(vector))]
    ours = gw.SimulatedLink(parameters, gw.PowerSGD(matrix_rank=rank), count, min_numel=0)
    ours.reduce_(torch.randn(count, rows * columns + vector))
    values = rank * (rows + columns) + vector
    least = 4 * 2 * (count - 1) / count * values
    # Four messages to each of three ranks, with headers and shares rounded up.
    assert least <= ours.traffic().sent_bytes <= least + 4 * 3 * (32 + 16)


def test_what_narrow_factors_lose_stays_in_the_residuals() -> None:
    """8: the product is another one, and nothing is lost of the mean."""
    wide, ours, residual = link(3, gw.PowerSGD()), link(3, NARROW), torch.zeros(ROWS, COLUMNS)
    for number in range(4):
        g = workers(3, number)
        product = step(ours, g)
        mean = g.mean(0) + residual
        if number == 0:
            # Half a unit in the last of eight places of each number of two factors, of vectors of rank two.
            rounding = float((product - step(wide, g)).norm()) / float(product.norm())
            assert 2**-11 < rounding < 2**-7
        residual = held(ours).mean(0)
        assert torch.allclose(product + residual, mean, rtol=0, atol=1e-5)


def test_narrow_factors_have_half_the_bytes_and_one_outcome_by_either_collective() -> None:
    rows, columns, vector, rank, count = 400, 300, 500, 2, 4
    parameters = [("w", torch.empty(rows, columns)), ("b", torch.empty(vector))]
    g, found = torch.randn(count, rows * columns + vector, generator=torch.Generator().manual_seed(0)), []
    for collective in ("two_shot", "all_gather"):
        ours = gw.SimulatedLink(parameters, NARROW, count, min_numel=0, collective=collective)
        found.append(torch.stack([ours.reduce_(g.clone()).clone() for _ in range(2)]))
        if collective == "two_shot":
            # Shares are units of eight factors and four other values; three peers get two payloads each.
            shares = [-(-rank * n // (8 * count)) for n in (rows, columns)] + [-(-vector // (4 * count))]
            assert ours.traffic().sent_bytes == 2 * 2 * (count - 1) * (16 * sum(shares) + 2 * HEADER_BYTES)
    assert torch.equal(found[0], found[1])
    # What is not compressed is the mean in float32.
    assert torch.allclose(found[0][0][-vector:], g[:, -vector:].mean(0), rtol=0, atol=1e-6)
