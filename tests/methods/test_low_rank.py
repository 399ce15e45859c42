"""What PowerSGD and ACP-SGD have in common: the arithmetic of factors, buckets, states."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from factors import COLUMNS, ROWS, held, link, step, workers
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.exchange.wire.header import HEADER_BYTES
from gradwire.kernels import get_kernels
from gradwire.methods.low_rank.factors import matrices, shape_of
from plans import make_plan

METHODS = [gw.PowerSGD(), gw.ACPSGD()]
CODED = [
    gw.PowerSGD(values=gw.QSGDinf(levels=7, block_size=64)),
    gw.PowerSGD(values=gw.QSGDMaxNorm(levels=7)),
    gw.ACPSGD(values=gw.QSGDinf(levels=7, block_size=64)),
]
"""Factors in levels: of each block's maximum, and of one that ranks share."""
ALL = [*METHODS, gw.PowerSGD(values=gw.BF16()), gw.ACPSGD(values=gw.BF16()), *CODED]
WRAPPED = [
    gw.Coded(CODED[0], coder="huffman"),
    gw.Coded(CODED[2], coder="huffman"),
    gw.Hierarchical(gw.Coded(CODED[0], coder="huffman"), node_size=1),
    gw.LocalSGD(every=1, inner=gw.Coded(CODED[0], coder="huffman")),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_workers_do_as_one_with_their_mean(method: gw.Method) -> None:
    """1: linear in the matrices, up to rounding."""
    many, one = link(4, method), link(1, method)
    for seed in range(5):
        g = workers(4, seed)
        assert torch.allclose(step(many, g), step(one, g.mean(0, keepdim=True)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_zeros_stay_zero_and_the_factor_is_drawn_anew(method: gw.Method) -> None:
    ours = link(2, method)
    assert bool((step(ours, torch.zeros(2, ROWS, COLUMNS)) == 0).all())
    assert bool((step(ours, torch.zeros(2, ROWS, COLUMNS)) == 0).all())
    g = workers(2)
    assert float(step(ours, g).norm()) > 0.2 * float(g.mean(0).norm())


@pytest.mark.parametrize("method", [*METHODS, CODED[1]], ids=repr)
@pytest.mark.parametrize("count", [3, 5, 7])
def test_many_buckets_do_as_one(count: int, method: gw.Method) -> None:
    """All ranks end with the same bits, which the layout does not change."""
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
                    method, segments, kernels=get_kernels("cpu"), world_size=count, collective="two_shot",
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
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def gradient(parameter: Parameter, count: int, round: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round + int(parameter.name))
    return torch.randn(count, parameter.numel, generator=generator)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matrix_rank": 0}, "matrix_rank is at least 1"),
        ({"matrix_rank": 1.5}, "matrix_rank is at least 1"),
        ({"least_saving": 0.5}, "least_saving is at least 1"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
@pytest.mark.parametrize("kind", [gw.PowerSGD, gw.ACPSGD])
def test_fields_out_of_range_are_refused(kind: type[gw.Method], fields: dict[str, object], message: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=message):
        kind(**fields)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_residual_is_what_its_worker_has_not_sent(method: gw.Method) -> None:
    """Each worker's is orthogonal to what it sent, whatever the others sent; on average nothing is lost."""
    ours, residual = link(3, method), torch.zeros(3, ROWS, COLUMNS)
    for number in range(6):
        m = workers(3, number) + residual
        product = step(ours, m - residual)
        residual = held(ours)
        sent = m - residual
        for w in range(3):
            assert float((residual[w] * sent[w]).sum()) == pytest.approx(0, abs=1e-3)
            assert float(residual[w].norm()) < float(m[w].norm())
        # Products of numbers of some ten units, each rounded to float32 a few times.
        assert torch.allclose(product + residual.mean(0), m.mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        (gw.PowerSGD(), {"factor": "replicated", "residual": "rank 0"}),
        (gw.ACPSGD(), {"left_factor": "replicated", "right_factor": "replicated", "residual": "rank 0"}),
    ],
    ids=repr,
)
def test_a_factor_of_another_size_is_refused(method: gw.Method, kinds: dict[str, str]) -> None:
    ours = link(2, method)
    for _ in range(2):
        step(ours, workers(2))
    for kind, scope in kinds.items():
        state = ours.state_dict()
        state[scope][f"{kind}/w"] = state[scope][f"{kind}/w"][:-1].clone()
        with pytest.raises(gw.IncompatibleError, match=f"'{kind}/w' in '{scope}' is .* floats are needed"):
            ours.load_state_dict(state)


@pytest.mark.parametrize("method", ALL, ids=repr)
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_resumed_run_ends_in_the_same_bits(method: gw.Method, before: int) -> None:
    """After an even number of rounds and after an odd one."""
    ours, rounds = link(3, method), [workers(3, seed) for seed in range(6)]
    found = [step(ours, g) for g in rounds[:before]]
    other, anew = link(3, method), link(3, method)
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(step(ours, g), step(other, g)) for g in rounds[before:])
    # The state decides: without it the next round is another one.
    assert not torch.equal(step(anew, rounds[before]), step(other, rounds[before]))
    assert all(bool(torch.isfinite(f).all()) for f in found)


@pytest.mark.parametrize("method", WRAPPED, ids=repr)
def test_a_method_around_factors_says_how_long_they_are(method: gw.Method) -> None:
    parameter = Parameter("w", (40, 30), (30, 1))
    kept = {kind for kind in method.traits.remembers if "factor" in kind}
    inner = CODED[2] if "left_factor" in kept else CODED[0]
    assert kept
    assert {k: method.remembered_numel(k, parameter) for k in kept} == {
        k: inner.remembered_numel(k, parameter) for k in kept
    }


@pytest.mark.parametrize("method", WRAPPED[:3], ids=repr)
def test_a_method_around_factors_goes_on_from_its_own_state(method: gw.Method) -> None:
    ours, rounds = link(3, method), [workers(3, seed) for seed in range(3)]
    step(ours, rounds[0])
    other = link(3, method)
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(step(ours, g), step(other, g)) for g in rounds[1:])


@pytest.mark.parametrize("method", ALL, ids=repr)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("before", [1, 2])
def test_a_value_that_is_not_finite_reaches_all_and_changes_no_state(
    method: gw.Method, bad: float, before: int
) -> None:
    ours = link(3, method)
    for seed in range(before):
        step(ours, workers(3, seed))
    state, spoilt = ours.state_dict(), workers(3, before)
    spoilt[1, 7, 5] = bad
    assert not bool(torch.isfinite(step(ours, spoilt)).all())
    after = ours.state_dict()
    assert int(after["global"].pop("round")) == int(state["global"].pop("round")) + 1
    for scope, part in state.items():
        assert part.keys() == after[scope].keys()
        assert all(torch.equal(value, after[scope][key]) for key, value in part.items())
    assert bool(torch.isfinite(step(ours, workers(3, before))).all())


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("dense_steps", [1, 2])
def test_rounds_of_warm_up_are_whole_and_leave_no_factor(method: gw.Method, dense_steps: int) -> None:
    """Whichever half of a step comes first."""
    ours = link(3, method, warmup_steps=dense_steps)
    for seed in range(dense_steps):
        g = workers(3, seed)
        assert torch.allclose(step(ours, g), g.mean(0), rtol=0, atol=1e-6)
        assert not ours.state_dict()["replicated"]
    g = workers(3, dense_steps)
    first = step(ours, g)
    # A projection on two of thirty or forty dimensions at random leaves most of a matrix without structure.
    assert 0 < float(first.norm()) < 0.7 * float(g.mean(0).norm())
    assert torch.linalg.matrix_rank(first, rtol=1e-5) == 2


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_vector_of_a_factor_that_depended_on_the_others_is_drawn_anew(method: gw.Method) -> None:
    """After gradients of rank one a factor has one direction; of others, it has two again after a round at most."""
    one, two = workers(1, 1, ROWS, 1)[0] @ workers(1, 2, 1, COLUMNS)[0], workers(1, 3)[0]
    ours = link(1, method)
    for _ in range(3):
        step(ours, one[None])
    state = ours.state_dict()
    ranks = [torch.linalg.matrix_rank(value.view(2, -1), rtol=1e-4) for value in state["replicated"].values()]
    assert min(ranks) == 1
    step(ours, two[None])
    assert torch.linalg.matrix_rank(step(ours, two[None]), rtol=1e-4) == 2


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_what_rounding_takes_stays_in_the_residuals(method: gw.Method) -> None:
    """The sum of all outcomes and what the residuals hold on average are the sum of all means."""
    ours, total, expected = link(3, method), torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    for seed in range(6):
        g = workers(3, seed)
        total += step(ours, g)
        expected += g.mean(0)
        state = ours.state_dict()
        residual = torch.stack([state[f"rank {r}"]["residual/w"].view(ROWS, COLUMNS) for r in range(3)]).mean(0)
        # Of float32 sums of a few dozen values below 20, with products of two.
        assert torch.allclose(total + residual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("method", CODED, ids=repr)
def test_differences_between_workers_do_not_add_up_where_an_operator_rounds(method: gw.Method) -> None:
    """An operator errs by a share of what it is given: workers' own residuals must not grow with the rounds.

    Matrices of rank two that cancel out: all of a worker's matrix is sent, but for what rounding takes.
    """
    left = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))
    right = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(1))
    g = (left @ right).expand(2, ROWS, COLUMNS) * torch.tensor([1.0, -0.5]).view(2, 1, 1)
    ours, lengths = link(2, method), []
    for _ in range(60):
        step(ours, g)
        state = ours.state_dict()
        lengths.append(max(float(state[f"rank {r}"]["residual/w"].norm()) for r in range(2)))
    # Were the residuals less the mean, the difference of 1.5 would be added in every round: 45 times the mean's share.
    assert max(lengths[30:]) < 3 * float(g[0].norm())


@pytest.mark.parametrize("kind", [gw.PowerSGD, gw.ACPSGD])
def test_factors_in_levels_take_the_bytes_of_their_levels(kind: type[gw.PowerSGD] | type[gw.ACPSGD]) -> None:
    """Of 600 by 400 in rank 2: both sides in one round or in two, gathered from each of the other ranks."""
    rows, columns, count, rank = 600, 400, 4, 2
    method = kind(values=gw.QSGDinf(levels=7, block_size=64))
    ours = gw.SimulatedLink([("w", torch.empty(rows, columns))], method, count, min_numel=0)
    for seed in range(1 if kind is gw.PowerSGD else 2):
        ours.reduce_(workers(count, seed, rows, columns).view(count, -1))
    # Two of fifteen digits a byte in groups of eighty, and a scale for each 64 elements, of each vector by itself.
    bodies = [rank * (40 * -(-length // 80) + 4 * -(-length // 64)) for length in (rows, columns)]
    assert ours.traffic().sent_bytes == (count - 1) * sum(HEADER_BYTES + -(-body // 16) * 16 for body in bodies)


@pytest.mark.parametrize("kind", [gw.PowerSGD, gw.ACPSGD])
def test_values_that_factors_cannot_have_are_refused(kind: type[gw.PowerSGD] | type[gw.ACPSGD]) -> None:
    with pytest.raises(gw.HyperparameterError, match=r"values is FP32\(\), BF16\(\) or an operator .* not FP16\(\)"):
        kind(values=gw.FP16())
    with pytest.raises(gw.HyperparameterError, match="no contraction"):
        kind(values=gw.QSGD(levels=1))
    with pytest.raises(gw.HyperparameterError, match="values is FP32"):
        kind(values=gw.ErrorFeedback())


def test_no_owner_rounds_the_mean_of_coded_factors() -> None:
    """What that takes would be in no rank's residual."""
    assert gw.PowerSGD(values=gw.QSGDinf(block_size=64)).traits.collectives == ("all_gather",)
    assert gw.PowerSGD(values=gw.QSGDMaxNorm()).traits.collectives == ("two_shot", "all_gather")
    with pytest.raises(gw.IncompatibleError, match="two_shot"):
        link(3, gw.PowerSGD(values=gw.QSGDinf(block_size=64)), collective="two_shot")


BESIDE = [("matrix", torch.empty(128, 48)), ("vector", torch.empty(2000))]


@pytest.mark.parametrize("kind", [gw.PowerSGD, gw.ACPSGD])
def test_what_is_sent_exactly_has_no_residual(kind: type[gw.PowerSGD] | type[gw.ACPSGD]) -> None:
    link = gw.SimulatedLink(BESIDE, kind(), 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        rows = torch.randn(2, 128 * 48 + 2000, generator=generator)
        assert torch.equal(link.reduce_(rows.clone())[128 * 48 :], rows[:, 128 * 48 :].mean(0))
    state = link.state_dict()
    assert [key for key in state["rank 0"] if key.startswith("residual/")] == ["residual/matrix"]
    # Nor does another method find one.
    other = gw.SimulatedLink(BESIDE, "ErrorFeedback(TopK(density=1.0))", 2)
    other.load_state_dict(state)
    assert other.reduce_(torch.zeros(2, 128 * 48 + 2000))[128 * 48 :].abs().max() == 0


@pytest.mark.parametrize("after", [gw.PowerSGD(), gw.ACPSGD()])
def test_a_residual_of_what_is_now_sent_exactly_is_sent_once(after: gw.Method) -> None:
    before = gw.SimulatedLink(BESIDE, "ErrorFeedback(TopK(density=0.1))", 2)
    rows = torch.randn(2, 128 * 48 + 2000, generator=torch.Generator().manual_seed(0))
    came = before.reduce_(rows.clone())
    link = gw.SimulatedLink(BESIDE, after, 2)
    link.load_state_dict(before.state_dict())
    for _ in range(3):
        came += link.reduce_(torch.zeros_like(rows))
    torch.testing.assert_close(came[128 * 48 :], rows[:, 128 * 48 :].mean(0))
    assert link.state_dict()["rank 0"]["residual/vector"].abs().max() == 0
