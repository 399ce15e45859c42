"""Means that can be worked out by hand, for each kind of operator."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import get_kernels


def mean(rows: torch.Tensor, method: gw.Method, *, round: int = 0, seed: int = 0) -> torch.Tensor:
    """Return the mean of two parameters, "a" and "b", each a half of every worker's row, by the plainest kernels."""
    half = rows.shape[1] // 2
    like = {"a": torch.empty(half), "b": torch.empty(rows.shape[1] - half)}
    link = gw.SimulatedLink(like.items(), method, len(rows), min_numel=0, seed=seed, backend="reference")
    link.round = round
    return link.reduce_(rows.clone())


EXACT = (
    gw.TernGrad(clip=None),
    gw.TernGrad(clip=None, share_scaler=False),
    gw.QSGDinf(levels=1),
    gw.NUQSGD(levels=3, norm="max"),
    gw.NaturalDithering(levels=3, norm="max"),
    gw.QSGDMaxNorm(levels=1),
    gw.Natural(),
    gw.PQuantisation(p="inf"),
)


@pytest.mark.parametrize("method", EXACT, ids=repr)
def test_a_vector_of_the_scale_comes_back(method: gw.Method) -> None:
    """Magnitudes of 4 and 0 alone, on two workers: the mean is exact."""
    rows = torch.tensor([[4.0, -4.0, 0.0, 4.0], [4.0, 4.0, -4.0, 0.0]])
    assert mean(rows, method).tolist() == [4.0, 0.0, -2.0, 2.0]


def test_workers_share_the_largest_scaler() -> None:
    """The mean of trits of 8 and of 2 that share 8 is a multiple of 4, else of 4 and of 1."""
    rows = torch.stack([torch.full((4000,), 8.0), torch.full((4000,), 2.0)])
    shared = mean(rows, gw.TernGrad(clip=None))
    assert set(shared.tolist()) == {4.0, 8.0}
    # 2 / 8 of the second worker's elements, within five deviations.
    assert abs(float((shared == 8.0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    assert set(mean(rows, gw.TernGrad(clip=None, share_scaler=False)).tolist()) == {5.0}


@pytest.mark.parametrize(("p", "norm"), [(1, 7.0), (2, 5.0), ("inf", 4.0)])
def test_p_quantisation_gives_the_norm_or_nothing(p: int | str, norm: float) -> None:
    row = torch.tensor([[3.0, 0.0, -4.0, 0.0] * 2])
    seen = {value for round in range(20) for value in mean(row, gw.PQuantisation(p=p), round=round).tolist()}
    assert seen == {-norm, 0.0, norm}


@pytest.mark.parametrize(
    "method", [gw.TernGrad(clip=None), gw.QSGDinf(levels=1), gw.Natural(), gw.PQuantisation(), gw.Lattice()], ids=repr
)
def test_every_parameter_seed_and_round_has_its_own_draws(method: gw.Method) -> None:
    """Equal vectors under several names, seeds and rounds are rounded differently, and the same is so again."""
    g = torch.full((200,), 0.375)
    g[0] = 1.0
    rows = g.repeat(2)[None]
    draws = [mean(rows, method, seed=seed, round=round) for seed, round in ((0, 0), (1, 0), (0, 1), (0, 0))]
    assert torch.equal(draws[0], draws[3])
    assert len({tuple(half.tolist()) for draw in draws[:3] for half in draw.split(200)}) == 6


def test_ranks_draw_apart() -> None:
    """What two ranks make of the same vector differs, so that their errors cancel."""
    g = torch.full((1, 400), 0.5)
    g[0, [0, 200]] = 1.0
    method = gw.QSGDinf(levels=1, block_size=None)
    assert set(mean(g, method).tolist()) == {0.0, 1.0}
    assert 0.5 in mean(g.expand(2, -1), method).tolist()


def test_a_piece_of_a_parameter_draws_as_the_whole_does() -> None:
    """By the element in the parameter, wherever it lies in a bucket."""
    kernels = get_kernels("reference")
    (whole,) = lay_out([Parameter("w", (320,), (1,))])
    codec = gw.TernGrad().codec(kernels, [whole], 2, 3)
    other = gw.TernGrad().codec(kernels, [whole], 2, 4)
    assert codec.table.key.tolist() != other.table.key.tolist()  # type: ignore[attr-defined]
    assert codec.table.key.tolist() == gw.TernGrad().codec(kernels, [whole], 5, 3).table.key.tolist()  # type: ignore[attr-defined]
