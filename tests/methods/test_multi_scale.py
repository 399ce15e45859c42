"""MultiScale: the agreed scale is feasible everywhere, and never worse than the smallest."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Draw, NoSummary
from gradwire.methods.levels.multi_scale import MinimumCodec
from laws import levels, multi_scale


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_agreed_scale_fits_every_worker_and_variance_is_no_more() -> None:
    """6: a coordinate that is large on one worker has the small count on all; what comes back is a multiple of it."""
    g = torch.tensor([[1.0, 0.01, 0.5, 0.012], [0.0, 0.013, 0.01, -0.9]]).repeat(1, 200)
    mean = gw.simulate(g, gw.MultiScale(levels=(3, 24))).mean
    fine = mean.view(-1, 4)[:, 1] * 2 * 24
    coarse = mean.view(-1, 4)[:, [0, 2, 3]] * 2 * 3
    assert torch.allclose(fine, fine.round(), atol=1e-5)
    assert torch.allclose(coarse, coarse.round(), atol=1e-5)
    # 0.023 * 24 is 0.55 of a step: with three levels a whole one would show.
    assert float(fine.abs().max()) <= 2
    for counts in ((3, 24), (15, 255), (1, 2, 8, 64)):
        x = gaussian(3, 5000)
        low = levels(range(counts[0] + 1), None, "max", shared=True)(x).sum()
        assert float(multi_scale(counts, None)(x).sum()) <= float(low)
    # Where the same coordinates are small on all workers there is a gain; independent Gaussian ones seldom are.
    x = gaussian(3, 5000) * torch.exp(2 * gaussian(5000, seed=1))
    assert float(multi_scale((15, 255), None)(x).sum()) < 0.5 * float(
        levels(range(16), None, "max", shared=True)(x).sum()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_same_bits_from_either_protocol(world_size: int) -> None:
    g = gaussian(world_size, 5000)
    found = []
    for collective in ("two_shot", "all_gather"):
        for chunk_numel in (1 << 20, 1000):
            method = gw.MultiScale(levels=(3, 9, 40), block_size=48)
            link = gw.SimulatedLink(
                [("w", torch.empty(5000))], method, world_size, collective=collective, chunk_numel=chunk_numel
            )
            found.append(link.reduce_(g.clone()).clone())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("planes", [1, 3])
def test_masks_are_minima(numel: int, planes: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randint(0, planes + 1, (4, numel), generator=generator).float()
    codec = MinimumCodec(numel, planes)
    rows = torch.zeros(4, codec.payload_bytes(codec.units), dtype=torch.uint8)
    for rank, row in enumerate(rows):
        codec.encode(values[rank], NoSummary(), Draw(0, rank), row)
    found = torch.full((numel,), -1.0)
    codec.decode_rows(rows, NoSummary(), found)
    assert torch.equal(found, values.amin(0))
    assert rows.shape[1] == 16 * planes * -(-numel // 128)
    own = torch.ones(numel)
    codec.add_own(rows[2], NoSummary(), 0.5, own)
    assert torch.equal(own, 1 + 0.5 * values[2])


def test_an_infinity_reaches_everybody() -> None:
    g = gaussian(3, 400)
    g[1, 50] = torch.nan
    assert bool((gw.simulate(g, gw.MultiScale()).mean == torch.inf).all())


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("MultiScale(levels=(15,))", "two or more"),
        ("MultiScale(levels=(15, 15))", "ascending"),
        ("MultiScale(levels=(0, 15))", "1 to 32767"),
        ("MultiScale(levels=15)", "two or more"),
        ("MultiScale(block_size=7)", "multiple of 16"),
        ("ErrorFeedback(compressor=MultiScale(levels=(1, 8)))", "no contraction"),
    ],
)
def test_fields_out_of_range_are_refused(spec: str, part: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=part):
        gw.method(spec)


def test_sums_that_do_not_fit_are_refused() -> None:
    with pytest.raises(gw.IncompatibleError, match="MultiScale: sums over 3 workers"):
        gw.simulate(gaussian(3, 100), gw.MultiScale(levels=(20_000, 30_000)))
    assert gw.method("MultiScale(levels=[1, 2])") == gw.MultiScale(levels=(1, 2))
