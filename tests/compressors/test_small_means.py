"""Means that can be worked out by hand, for each kind of operator."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.kernels import get_kernels
from gradwire.segments import Parameter, lay_out

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
    assert gw.simulate(rows, method).mean.tolist() == [4.0, 0.0, -2.0, 2.0]


def test_workers_share_the_largest_scaler() -> None:
    """The mean of trits of 8 and of 2 that share 8 is a multiple of 4, else of 4 and of 1."""
    rows = torch.stack([torch.full((4000,), 8.0), torch.full((4000,), 2.0)])
    shared = gw.simulate(rows, gw.TernGrad(clip=None)).mean
    assert set(shared.tolist()) == {4.0, 8.0}
    # 2 / 8 of the second worker's elements, within five deviations.
    assert abs(float((shared == 8.0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    assert set(gw.simulate(rows, gw.TernGrad(clip=None, share_scaler=False)).mean.tolist()) == {5.0}


@pytest.mark.parametrize(("p", "norm"), [(1, 7.0), (2, 5.0), ("inf", 4.0)])
def test_p_quantisation_gives_the_norm_or_nothing(p: int | str, norm: float) -> None:
    seen = set()
    for round in range(40):
        seen |= set(
            gw.simulate(torch.tensor([[3.0, 0.0, -4.0, 0.0]]), gw.PQuantisation(p=p), round=round).mean.tolist()
        )
    assert seen == {-norm, 0.0, norm}


def test_every_parameter_and_seed_has_its_own_draws() -> None:
    """Equal vectors under several names, seeds, rounds and ranks are rounded differently."""
    g = torch.full((400,), 0.5)
    g[0] = 1.0
    for method in (gw.TernGrad(clip=None), gw.QSGDinf(levels=1), gw.Natural(), gw.PQuantisation(), gw.Lattice()):
        row = g if not isinstance(method, gw.Natural) else 0.75 * g
        first = gw.simulate([{"a": row, "b": row}], method).mean
        draws = [first["a"], first["b"]]
        draws += [
            gw.simulate([{"a": row}], method, seed=1).mean["a"],
            gw.simulate([{"a": row}], method, round=1).mean["a"],
        ]
        assert len({tuple(draw.tolist()) for draw in draws}) == 4, method
        assert torch.equal(gw.simulate([{"a": row}], method).mean["a"], first["a"])


def test_ranks_draw_apart() -> None:
    """What two ranks make of the same vector differs, so that their errors cancel."""
    g = torch.full((1, 400), 0.5)
    g[0, 0] = 1.0
    alone = gw.simulate(g, gw.QSGDinf(levels=1, block_size=None)).mean
    both = gw.simulate(g.expand(2, -1), gw.QSGDinf(levels=1, block_size=None)).mean
    assert set(alone.tolist()) == {0.0, 1.0}
    assert 0.5 in both.tolist()


def test_a_piece_of_a_parameter_draws_as_the_whole_does() -> None:
    """By the element in the parameter, wherever it lies in a bucket."""
    kernels = get_kernels("reference")
    (whole,) = lay_out([Parameter("w", (320,), (1,))])
    codec = gw.TernGrad().codec(kernels, [whole], 2, 3)
    other = gw.TernGrad().codec(kernels, [whole], 2, 4)
    assert codec.table.key.tolist() != other.table.key.tolist()  # type: ignore[attr-defined]
    assert codec.table.key.tolist() == gw.TernGrad().codec(kernels, [whole], 5, 3).table.key.tolist()  # type: ignore[attr-defined]
