"""ACP-SGD, by number of the property on the page docs/properties.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire as gw
from factors import COLUMNS, ROWS, held, link, step, workers
from gradwire.exchange.wire.header import HEADER_BYTES
from gradwire.methods.low_rank.factors import draw_factor


def oracle(rounds: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """The paper's algorithm with NumPy's own decompositions, in float64; the first factor is the method's."""
    count, rows, columns = rounds[0].shape
    q = draw_factor("w", columns, rank, 0, 0).double().numpy().T
    p = np.zeros((rows, rank))
    residual, found = np.zeros((count, rows, columns)), []
    for number, g in enumerate(rounds):
        m = g.double().numpy() + residual
        if number % 2 == 0:
            q = np.linalg.qr(q)[0]
            sent = np.stack([(w @ q) @ q.T for w in m])
            p = (m @ q).mean(0)
            found.append(torch.from_numpy(p @ q.T))
        else:
            p = np.linalg.qr(p)[0]
            sent = np.stack([p @ (w.T @ p).T for w in m])
            q = np.einsum("wnm,nr->mr", m, p) / count
            found.append(torch.from_numpy(p @ q.T))
        residual = m - sent
    return found


@pytest.mark.parametrize("count", [1, 3, 5, 7])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rounds_are_the_papers(count: int, rank: int) -> None:
    """The product does not depend on which orthonormal basis spans the factor's columns."""
    rounds = [workers(count, seed) for seed in range(8)]
    ours = link(count, gw.ACPSGD(matrix_rank=rank))
    for expected, g in zip(oracle(rounds, rank), rounds):
        assert torch.allclose(step(ours, g).double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_a_constant_matrix_of_the_rank_arrives_whole_in_every_two_rounds() -> None:
    """3."""
    low = workers(1, 1, ROWS, 2)[0] @ workers(1, 2, 2, COLUMNS)[0]
    ours = link(1, gw.ACPSGD())
    for number in range(4):
        first = step(ours, low[None])
        if number == 0:
            # What two of thirty random directions hold of the rows.
            assert float(first.norm()) < 0.7 * float(low.norm())
        total = first + step(ours, low[None])
        assert torch.allclose(total, 2 * low, rtol=0, atol=2e-5 * float(low.abs().max()))
        assert float(held(ours).abs().max()) < 2e-5 * float(low.abs().max())


def test_a_constant_matrix_comes_as_its_mean_over_rounds() -> None:
    """5: residuals stay bounded, though most of a matrix without structure is left out in every round."""
    ours, g, total = link(2, gw.ACPSGD()), workers(2), torch.zeros(ROWS, COLUMNS)
    errors = []
    for number in range(1, 401):
        total += step(ours, g)
        if number in (100, 400):
            errors.append(float((total / number - g.mean(0)).norm() / g.mean(0).norm()))
    # The error of a mean of n rounds is the residual over n.
    assert errors[1] < 0.4 * errors[0]


def test_the_declared_bits_are_those_of_a_large_square_matrix() -> None:
    ours = gw.SimulatedLink([("w", torch.empty(1000, 1000))], "acp_sgd", 4)
    for _ in range(2):
        ours.reduce_(torch.ones(4, 1_000_000))
    assert ours.traffic().bits_per_element == pytest.approx(gw.ACPSGD.properties.bits_per_element, rel=0.02)


def test_bytes_are_one_factor_and_what_is_not_compressed() -> None:
    """6: counted exactly in both kinds of rounds."""
    rows, columns, vector, rank, count = 400, 300, 500, 2, 4
    parameters = [("w", torch.empty(rows, columns)), ("b", torch.empty(vector))]
    ours = gw.SimulatedLink(parameters, gw.ACPSGD(matrix_rank=rank), count, min_numel=0)
    before = 0
    for length in (rows, columns, rows):
        ours.reduce_(torch.randn(count, rows * columns + vector))
        values = rank * length + vector
        # A share is a whole number of units of four values; two messages to each of three ranks, each with a header.
        share = -(-values // (4 * count)) * 16
        assert ours.traffic().sent_bytes - before == 2 * (count - 1) * (share + HEADER_BYTES)
        before = ours.traffic().sent_bytes
