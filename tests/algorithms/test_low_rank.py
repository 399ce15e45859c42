"""What PowerSGD and ACP-SGD have in common: the arithmetic of factors, buckets, states."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from factors import COLUMNS, ROWS, link, step, workers
from gradwire.algorithms.low_rank import matrices, shape_of
from gradwire.drivers import Meter, simulate_ranks
from gradwire.kernels import get_kernels
from gradwire.protocols import Context, Memory
from gradwire.protocols.bucket_plan import make_plan
from gradwire.segments import Parameter, lay_out

METHODS = [gw.PowerSGD(), gw.ACPSGD()]
ALL = [*METHODS, gw.PowerSGD(factor_dtype="bfloat16")]


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


@pytest.mark.parametrize("method", METHODS, ids=repr)
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
