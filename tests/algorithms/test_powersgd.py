"""PowerSGD, by number of the property in the paper's summary (docs/properties.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.algorithms.low_rank import draw_columns, matrices, multiply_out, orthonormalise, shape_of
from gradwire.drivers import Meter, simulate_ranks
from gradwire.kernels import get_kernels
from gradwire.protocols import Context, Memory
from gradwire.protocols.bucket_plan import make_plan
from gradwire.segments import Parameter, lay_out

ROWS, COLUMNS = 40, 30


def workers(count: int, seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))


def link(
    count: int, method: gw.PowerSGD, rows: int = ROWS, columns: int = COLUMNS, **options: object
) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(rows, columns))], method, count, min_numel=0, **options)  # type: ignore[arg-type]


def step(link: gw.SimulatedLink, g: torch.Tensor) -> torch.Tensor:
    return link.reduce_(g.reshape(len(g), -1).clone()).view(g.shape[1:])


def oracle(rounds: list[torch.Tensor], rank: int, seed: int = 0) -> list[torch.Tensor]:
    """The paper's algorithms 1 and 2 with NumPy's own decompositions, in float64; the first factor is the method's."""
    count, rows, columns = rounds[0].shape
    segment = lay_out([Parameter("w", (rows, columns), (columns, 1))])
    (matrix,) = matrices(segment, rank, 1.0)
    q = draw_columns(matrix, seed, 0).double().numpy().T
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


def test_workers_do_as_one_with_their_mean() -> None:
    """1: linear in the matrices, up to rounding."""
    many, one = link(4, gw.PowerSGD()), link(1, gw.PowerSGD())
    for seed in range(5):
        g = workers(4, seed)
        assert torch.allclose(step(many, g), step(one, g.mean(0, keepdim=True)), rtol=0, atol=1e-5)


def test_a_product_is_a_projection_and_residuals_are_the_rest() -> None:
    """2 and 5: with M the mean of gradients and residuals, M - product is orthogonal to it, and the residuals' mean."""
    ours, residual = link(3, gw.PowerSGD()), torch.zeros(ROWS, COLUMNS)
    for seed in range(4):
        g = workers(3, seed)
        mean = g.mean(0) + residual
        product = step(ours, g)
        residual = mean - product
        assert float((residual * product).sum()) == pytest.approx(0, abs=1e-3)
        state = ours.state_dict()
        held = torch.stack([state[f"rank {r}"]["residual/w"].view(ROWS, COLUMNS) for r in range(3)])
        assert torch.allclose(held.mean(0), residual, rtol=0, atol=1e-5)


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


def test_zeros_stay_zero_and_the_factor_is_drawn_anew() -> None:
    ours = link(2, gw.PowerSGD())
    assert bool((step(ours, torch.zeros(2, ROWS, COLUMNS)) == 0).all())
    assert bool((step(ours, torch.zeros(2, ROWS, COLUMNS)) == 0).all())
    g = workers(2)
    assert float(step(ours, g).norm()) > 0.2 * float(g.mean(0).norm())


@pytest.mark.parametrize("count", [3, 5, 7])
def test_many_buckets_do_as_one(count: int) -> None:
    """All ranks end with the same bits, and the layout changes no more than a library's rounding."""
    shapes = [(40, 30), (50,), (64, 100), (8, 75), (7, 2)]
    parameters = [Parameter(str(i), s, (s[1], 1) if len(s) > 1 else (1,)) for i, s in enumerate(shapes)]
    found = []
    for buckets in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [4, 3]]):
        memories = [Memory() for _ in range(count)]
        totals = {}
        for round in range(3):
            for number, bucket in enumerate(buckets):
                segments = lay_out(parameters[i] for i in bucket)
                plan = make_plan(
                    gw.PowerSGD(), segments, kernels=get_kernels("meta"), world_size=count, collective="two_shot",
                    seed=0, chunk_numel=1 << 20,
                )  # fmt: skip
                rows = torch.cat([gradient(parameters[i], count, round) for i in bucket], 1)
                contexts = [Context(r, count, round, number, memory=m) for r, m in enumerate(memories)]
                simulate_ranks([plan.whole(c, row) for c, row in zip(contexts, rows)], [Meter()] * count)
                assert all(torch.equal(rows[0], row) for row in rows)
                for s in segments:
                    totals[s.parameter.name, round] = rows[0][s.offset : s.offset + s.numel].clone()
            for memory in memories:
                memory.commit()
        found.append(totals)
    assert found[0].keys() == found[1].keys()
    assert all(torch.allclose(found[0][key], found[1][key], rtol=0, atol=1e-5) for key in found[0])


def gradient(parameter: Parameter, count: int, round: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round + int(parameter.name))
    return torch.randn(count, parameter.numel, generator=generator)


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


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((8, 3, 5, 5), (75, 25, 5, 1), (8, 75)),
        ((8, 3, 5, 5), (75, 1, 15, 3), (8, 75)),
        ((30, 40), (1, 30), (40, 30)),
        ((1, 40), (40, 1), (1, 40)),
        ((50,), (1,), (1, 50)),
        ((), (), (1, 1)),
    ],
)
def test_rows_are_the_outermost_dimension_in_memory(
    shape: tuple[int, ...], stride: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert shape_of(Parameter("w", shape, stride)) == expected


def test_only_what_factors_shorten_is_compressed() -> None:
    segments = lay_out(Parameter(str(i), s, (s[1], 1)) for i, s in enumerate([(10, 10), (100, 4), (64, 64), (1, 900)]))
    found = {rank: [m.segment.parameter.name for m in matrices(segments, rank, 2.0)] for rank in (1, 2, 8)}
    assert found == {1: ["0", "1", "2"], 2: ["0", "2"], 8: ["2"]}


@pytest.mark.parametrize("rows", [1, 5, 64, 1000])
def test_columns_become_orthonormal_and_what_depends_on_others_zero(rows: int) -> None:
    factor = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    factor[:, 3] = 2 * factor[:, 0] - factor[:, 1]
    found = orthonormalise([factor.t()])[0].t().double()
    kept = min(rows, 3)
    gram = found.T @ found
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[:kept, :kept] = torch.eye(kept)
    assert torch.allclose(gram, expected, rtol=0, atol=1e-6)
    along = found @ (found.T @ factor.double())
    assert torch.allclose(along, factor.double(), rtol=0, atol=1e-5)
    spoilt = factor.clone()
    spoilt[0, 1] = torch.nan
    assert bool(torch.isnan(orthonormalise([spoilt.t()])[0][1]).all())
    # Neither what is done beside it nor what spoils that changes a bit.
    others = [torch.randn(4, n, generator=torch.Generator().manual_seed(n)) for n in (rows + 1, max(1, rows - 1), 3)]
    assert torch.equal(orthonormalise([others[0], spoilt.t(), factor.t(), *others])[2].t().double(), found)


def test_a_product_is_added_column_by_column() -> None:
    left, right = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (700, 300))
    out = torch.empty(700, 300)
    multiply_out(left.t(), right.t(), out)
    expected = left[:, :1] * right[:, 0]
    expected = expected + left[:, 1:2] * right[:, 1]
    expected = expected + left[:, 2:3] * right[:, 2]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matrix_rank": 0}, "matrix_rank is at least 1"),
        ({"matrix_rank": 1.5}, "matrix_rank is at least 1"),
        ({"least_saving": 0.5}, "least_saving is at least 1"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=message):
        gw.PowerSGD(**fields)  # type: ignore[arg-type]


def test_a_factor_of_another_size_is_refused() -> None:
    ours = link(2, gw.PowerSGD())
    step(ours, workers(2))
    for kind, scope in (("factor", "replicated"), ("residual", "rank 0")):
        state = ours.state_dict()
        state[scope][f"{kind}/w"] = state[scope][f"{kind}/w"][:-1].clone()
        with pytest.raises(gw.IncompatibleError, match=f"'{kind}/w' in '{scope}' is .* floats are needed"):
            ours.load_state_dict(state)


def test_a_resumed_run_ends_in_the_same_bits() -> None:
    ours, rounds = link(3, gw.PowerSGD()), [workers(3, seed) for seed in range(6)]
    found = [step(ours, g) for g in rounds[:3]]
    other = link(3, gw.PowerSGD())
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(step(ours, g), step(other, g)) for g in rounds[3:])
    assert not torch.equal(found[0], found[1])
