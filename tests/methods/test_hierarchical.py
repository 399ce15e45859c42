"""Two levels: exact inside a node, any method between nodes, and each rank of a node keeps a shard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from contributions import contributed
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.protocols import Memory, agree_on_finite
from gradwire.exchange.segments import Parameter, cut_into_shards
from gradwire.seeds import shard_seed
from ranks import Ranks

M, L = 2, 2
SPECS = (
    "TernGrad()",
    "QSGD(levels=4)",
    "EDEN(bits=4, block_size=256)",
    "ErrorFeedback(compressor=TopK(density=0.1))",
    "ErrorFeedback(compressor=QSGDinf(levels=7, block_size=64), momentum=0.9)",
    "DIANA()",
    "ALQ()",
    "GTopK(density=0.1)",
    "Coded(compressor=TernGrad(), coder='rans')",
)
"""Bit-stable ones, without memory and with vectors, values and whole steps."""


def around(spec: str, **fields: Any) -> gw.Method:
    return gw.Hierarchical(compressor=gw.method(spec), **(fields or {"node_size": L}))


def gradients(seed: int, ranks: int = M * L) -> list[dict[str, torch.Tensor]]:
    """Return gradients of a matrix with an odd number of rows, and of two small parameters, by rank."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "w": torch.randn(41, 30, generator=draw),
            "b": torch.randn(41, generator=draw),
            "s": torch.randn((), generator=draw),
        }
        for _ in range(ranks)
    ]


def flat(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in parts.values()])


def link_of(method: gw.Method, ranks: int, like: dict[str, torch.Tensor], **options: Any) -> gw.SimulatedLink:
    return gw.SimulatedLink(like.items(), method, ranks, **{"min_numel": 50} | options)


@pytest.mark.parametrize("spec", SPECS)
def test_between_nodes_it_is_the_method_on_the_means_of_nodes(spec: str) -> None:
    """Each shard, by itself, has the bits of a plain exchange between as many workers as there are nodes."""
    link = link_of(around(spec), M * L, gradients(0)[0])
    plain: list[gw.SimulatedLink] = []
    for step in range(4):
        rows = gradients(step)
        found = link.reduce_(torch.stack([flat(row) for row in rows]))
        outcome = dict(zip(rows[0], found.split([p.numel() for p in rows[0].values()])))
        for place in range(L):
            parts = {
                part.name: [
                    # Products of float32, added up in the order of ranks.
                    sum(rows[node * L + r][name].reshape(-1)[begin : begin + part.numel] * 0.5 for r in range(L))
                    for node in range(M)
                ]
                for name, p in rows[0].items()
                for part, begin in [cut_into_shards(Parameter.of(name, p), L)[place]]
                if part.numel
            }
            like = {name: torch.empty(_shape(name, values[0])) for name, values in parts.items()}
            if step == 0:
                plain.append(link_of(gw.method(spec), M, like, seed=shard_seed(0, place)))
            expected = plain[place].reduce_(torch.stack([torch.cat([v[m] for v in parts.values()]) for m in range(M)]))
            for name, values in zip(parts, expected.split([v[0].numel() for v in parts.values()])):
                whole = name.partition("[")[0]
                begin = next(
                    b for part, b in cut_into_shards(Parameter.of(whole, rows[0][whole]), L) if part.name == name
                )
                assert torch.equal(outcome[whole][begin : begin + len(values)], values), (step, name)


def _shape(name: str, values: torch.Tensor) -> tuple[int, ...]:
    return (values.numel() // 30, 30) if name.startswith("w") else tuple(values.shape)


def test_without_loss_it_is_the_mean_over_all_ranks() -> None:
    rows = torch.stack([flat(row) for row in gradients(3, 12)])
    link = link_of(around("FP32()", node_size=4), 12, gradients(0)[0])
    torch.testing.assert_close(link.reduce_(rows.clone()), rows.double().mean(0).float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("spec", ["TernGrad()", "ErrorFeedback(compressor=TopK(density=0.1))"])
def test_with_one_rank_a_node_it_is_the_method_alone(spec: str) -> None:
    two = [link_of(m, 3, gradients(0)[0]) for m in (gw.method(spec), around(spec, node_size=1))]
    for step in range(3):
        rows = torch.stack([flat(row) for row in gradients(step, 3)])
        ours, theirs = (link.reduce_(rows.clone()) for link in two)
        assert torch.equal(ours, theirs)
    assert two[1].traffic().sent_within == {"between nodes": two[0].traffic().sent_bytes}


def test_nodes_need_not_be_in_the_order_of_ranks() -> None:
    rows = gradients(5)
    groups = ((0, 3), (2, 1))
    order = [rank for group in groups for rank in group]
    ours = link_of(around("TernGrad()", groups=groups), 4, rows[0]).reduce_(torch.stack([flat(r) for r in rows]))
    sorted_rows = torch.stack([flat(rows[rank]) for rank in order])
    assert torch.equal(ours, link_of(around("TernGrad()"), 4, rows[0]).reduce_(sorted_rows))


def test_bytes_between_nodes_are_the_methods_and_inside_floats() -> None:
    """Per rank: between nodes the method's of half of the elements; inside a row of half of them, there and back."""
    numel = 20_000
    rows = torch.randn(M * L, numel, generator=torch.Generator().manual_seed(0))
    found = gw.simulate(rows, around("QSGDinf()")).traffic
    half = gw.simulate(torch.randn(M, numel // L), "QSGDinf()").traffic
    assert found.sent_within["between nodes"] == half.sent_bytes
    headers = 2 * 32 + 12
    assert 0 <= found.sent_within["node"] - 2 * 4 * numel // L <= headers
    assert found.sent_bytes == sum(found.sent_within.values())


def test_rounds_of_warm_up_lose_nothing_and_stay_on_two_levels() -> None:
    rows = torch.stack([flat(row) for row in gradients(1)])
    link = link_of(around("TernGrad()"), M * L, gradients(0)[0], warmup_steps=1)
    torch.testing.assert_close(link.reduce_(rows.clone()), rows.mean(0))
    assert set(link.traffic().sent_within) == {"node", "between nodes"}


@pytest.mark.parametrize("spec", [*SPECS, "FP32()", "DGC(density=0.1)"])
def test_the_outcome_is_the_mean_over_nodes_of_what_ranks_say_they_sent(spec: str) -> None:
    """Each of its own shard, in whatever chunks and unit of the loss."""
    like, memories = gradients(0)[0], [Memory() for _ in range(M * L)]
    method = around(spec)
    if method.traits.open_coders:
        method = method.with_coder(method.traits.open_coders[0])
    planner = Planner(method, like, M * L, Options(min_numel=50, chunk_numel=320))
    for round in range(3):
        rows = 4 * torch.stack([flat(row) for row in gradients(round)])
        sent = contributed(planner.plan(list(like), round), rows, memories, round, loss_scale=4.0)
        # Sums of few values below 64 in float32.
        assert torch.allclose(sent.sum(0) / M, rows[0], rtol=1e-5, atol=4e-5), round
        shard = torch.zeros(L, rows.shape[1], dtype=torch.bool)
        at = 0
        for name, p in like.items():
            for place, (part, begin) in enumerate(cut_into_shards(Parameter.of(name, p), L)):
                shard[place, at + begin : at + begin + part.numel] = True
            at += p.numel()
        assert all(not sent[rank, ~shard[rank % L]].any() for rank in range(M * L))


@pytest.mark.parametrize("where", [0, 3])
def test_a_value_that_is_not_finite_reaches_all_ranks_and_is_not_remembered(where: int) -> None:
    """It is in one shard of one node; no rank keeps what it has of the others."""
    spec = "ErrorFeedback(compressor=TopK(density=0.1))"
    link = link_of(around(spec), M * L, gradients(0)[0])
    link.reduce_(torch.stack([flat(row) for row in gradients(0)]))
    before = link.state_dict()
    rows = torch.stack([flat(row) for row in gradients(1)])
    rows[where, 1000] = float("inf")
    assert not torch.isfinite(link.reduce_(rows)[1000])
    after = link.state_dict()
    for rank in range(M * L):
        assert {k: v.tolist() for k, v in after[f"rank {rank}"].items()} == {
            k: v.tolist() for k, v in before[f"rank {rank}"].items()
        }


def test_each_part_has_the_learning_rate_of_its_parameter() -> None:
    """With one rank a node, the bits of the method alone, whose steps go by the rates."""
    spec, outcomes = "SketchedAMSGrad(columns=300, density=0.1, candidates=2)", []
    for method in (gw.method(spec), around(spec, node_size=1)):
        parameters = {name: torch.nn.Parameter(torch.zeros_like(p)) for name, p in gradients(0)[0].items()}
        groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters.values(), (0.5, 0.01, 0.1))]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        link = link_of(method, 3, parameters, min_numel=0, optimizer=optimizer)
        for step in range(3):
            for group, factor in zip(optimizer.param_groups, (0.1, 20.0, 1.0)):
                group["lr"] *= factor
            found = link.reduce_(torch.stack([flat(row) for row in gradients(step, 3)]))
        outcomes.append(found)
    assert torch.equal(*outcomes)


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        ((True, True), True),
        ((True, None), None),
        ((None, None), None),
        ((None, False), False),
        ((False, True), False),
    ],
)
def test_a_node_is_as_finite_as_its_worst_shard(told: tuple[bool | None, ...], answer: bool | None) -> None:
    assert simulate_ranks([agree_on_finite(finite) for finite in told], [Meter(), Meter()]) == [answer, answer]


def test_each_rank_keeps_its_shard() -> None:
    link = link_of(around("ErrorFeedback(compressor=TopK(density=0.1))"), M * L, gradients(0)[0])
    link.reduce_(torch.stack([flat(row) for row in gradients(0)]))
    state = link.state_dict()
    assert [list(state[f"rank {r}"]) for r in range(4)] == [["residual/w[0:20]"], ["residual/w[20:41]"]] * 2
    assert state["replicated"] == {}
    again = link_of(around("ErrorFeedback(compressor=TopK(density=0.1))"), M * L, gradients(0)[0])
    again.load_state_dict(state)
    rows = torch.stack([flat(row) for row in gradients(1)])
    assert torch.equal(link.reduce_(rows.clone()), again.reduce_(rows.clone()))


def test_what_was_kept_of_other_shards_is_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    spec = "ErrorFeedback(compressor=TopK(density=0.1))"
    saved = link_of(around(spec), M * L, gradients(0)[0])
    saved.reduce_(torch.stack([flat(row) for row in gradients(0)]))
    other = link_of(around(spec, node_size=4), 8, gradients(0)[0])
    other.load_state_dict(saved.state_dict())
    assert "'residual of other shards' dropped" in caplog.text
    assert other.round == 1
    with pytest.raises(IncompatibleError, match="belongs to no parameter"):
        link_of(gw.method(spec), M * L, gradients(0)[0]).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("fields", "ranks", "sentence"),
    [
        ({"node_size": 3}, 4, "no multiple of 3"),
        ({"node_size": 4}, 4, "all 4 ranks are on one node"),
        ({"groups": ((0, 1), (2, 3))}, 6, "other ranks than the 6"),
        ({}, 4, "LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_nodes_that_cannot_be_are_refused(
    fields: dict[str, Any], ranks: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    method = gw.Hierarchical(compressor=gw.TernGrad(), **fields)
    with pytest.raises(IncompatibleError, match=sentence):
        link_of(method, ranks, gradients(0)[0])


def test_torchrun_says_how_large_a_node_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert gw.Hierarchical().nodes(6) == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"compressor": gw.DiLoCo()}, "put Hierarchical inside"),
        ({"compressor": gw.DPSGD()}, "put Hierarchical inside|one outcome for all ranks"),
        ({"compressor": gw.Hierarchical(node_size=2)}, "of two levels itself"),
        ({"compressor": gw.method("auto")}, "name one"),
        ({"compressor": gw.DGC(clip_norm=1.0)}, "only a shard: use DGC.clip_norm=None. and clip"),
        ({"compressor": gw.Coded(compressor=gw.DGC(clip_norm=1.0)), "node_size": 8}, "only a shard"),
        ({"compressor": gw.Scheduled(compressor=gw.DGC(clip_norm=1.0))}, "only a shard"),
        ({"node_size": 0}, "at least 1 rank"),
        ({"node_size": 2, "groups": ((0, 1),)}, "leave one of them out"),
        ({"groups": ((0, 1), (2,))}, "as many ranks for each node"),
        ({"groups": ((0, 1), (1, 2))}, "each rank from 0 on once"),
    ],
)
def test_fields_that_cannot_be_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HyperparameterError, match=sentence):
        gw.Hierarchical(**fields)


def test_its_spec_reads_back() -> None:
    for spec in ("Hierarchical(TernGrad(), node_size=8)", "Hierarchical(QSGD(), groups=((0, 1), (2, 3)))"):
        assert gw.method(repr(gw.method(spec))) == gw.method(spec)


# ---------------------------------------------------------------------- real ranks


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, which: Sequence[int]) -> None:
    for step in which:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def trained(spec: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train through DDP in several buckets, save half way, and go on from there once more."""
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    for part in ("whole", "resumed"):
        model = DistributedDataParallel(module(), bucket_cap_mb=options.get("bucket_cap_mb", 25))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        link = gw.attach(model, spec, optimizer=optimizer, min_numel=0, check=True, chunk_numel=160)
        if part == "whole":
            steps(model, optimizer, rank, range(3))
            gw.save(link, folder)
            middle = [p.detach().clone() for p in model.parameters()]
        else:
            gw.load(link, folder)
            for p, value in zip(model.parameters(), middle):
                p.data.copy_(value)
        steps(model, optimizer, rank, range(3, 6))
        found[part] = flat(dict(model.named_parameters())).detach()
        found["traffic"], found["state"] = link.traffic().sent_within, link.state_dict()
        link.close()
    return found


def simulated(spec: str) -> tuple[torch.Tensor, gw.SimulatedLink]:
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    link = gw.SimulatedLink(model.named_parameters(), spec, M * L, min_numel=0, optimizer=optimizer)
    for step in range(6):
        rows = []
        for rank in range(M * L):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        link.scatter_(link.reduce_(torch.stack(rows)))
        optimizer.step()
    return flat(dict(model.named_parameters())).detach(), link


@pytest.mark.ranks
@pytest.mark.parametrize("spec", SPECS)
def test_real_ranks_have_the_simulations_bits_and_resume_exactly(four_ranks: Ranks, spec: str, tmp_path: Path) -> None:
    """In buckets of any layout, with each rank's bits compared after every bucket."""
    method = repr(around(spec))
    expected, link = simulated(method)
    state = link.state_dict()
    for name, options in (("one", {}), ("several", {"bucket_cap_mb": 0.001})):
        for rank, found in enumerate(four_ranks(trained, method, options, str(tmp_path / name))):
            assert torch.equal(found["whole"], expected)
            assert torch.equal(found["resumed"], expected)
            ours, theirs = state[f"rank {rank}"], found["state"]["rank"]
            assert set(ours) == set(theirs)
            assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def diverging(spec: str, count: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    rank, model = torch.distributed.get_rank(), module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    link = gw.Link(model.named_parameters(), spec, optimizer=optimizer, min_numel=0)
    rows = []
    for step in range(count):
        steps(model, optimizer, rank, [step])
        rows.append(flat(dict(model.named_parameters())).detach().clone())
    sent = link.traffic().sent_within
    link.close()
    return rows, sent


@pytest.mark.ranks
@pytest.mark.parametrize(
    "spec",
    [
        "DiLoCo(every=3, inner=Hierarchical(ErrorFeedback(TopK(density=0.1)), node_size=2))",
        "StreamingDiLoCo(every=4, fragments=2, delay=1, inner=Hierarchical(EDEN(bits=4), node_size=2))",
    ],
)
def test_it_is_the_outer_level_of_local_steps(four_ranks: Ranks, spec: str) -> None:
    """The simulated workers' parameters, step by step; nothing leaves a node but at exchanges."""
    models = [module() for _ in range(M * L)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    link = gw.SimulatedLocalSteps([model.named_parameters() for model in models], spec, min_numel=0)
    expected: list[list[torch.Tensor]] = [[] for _ in models]
    for step in range(7):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers)):
            steps(model, optimizer, rank, [step])
        link.after_step()
        for rows, model in zip(expected, models):
            rows.append(flat(dict(model.named_parameters())).detach().clone())
    for rows, (found, sent) in zip(expected, four_ranks(diverging, spec, 7)):
        assert all(torch.equal(a, b) for a, b in zip(rows, found))
        assert set(sent) == {"node", "between nodes"}


def of_other_nodes() -> str:
    groups = ((0, 1), (2, 3)) if torch.distributed.get_rank() < 3 else ((0, 2), (1, 3))
    try:
        gw.Link(module().named_parameters(), gw.Hierarchical(compressor=gw.TernGrad(), groups=groups))
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_other_sizes() -> str:
    """As torchrun may say on machines that have different numbers of ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if torch.distributed.get_rank() == 3 else "2"
    try:
        gw.Link(module().named_parameters(), "Hierarchical(TernGrad())")
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return "no error"


@pytest.mark.ranks
def test_ranks_that_see_other_nodes_are_told(four_ranks: Ranks) -> None:
    for answer in four_ranks(of_other_sizes):
        assert answer.startswith('RankMismatchError: rank 3 differs from rank 0 in "nodes"') or answer.startswith(
            "RankMismatchError: rank 3 differs from rank 0 in 'nodes'"
        )
    for answer in four_ranks(of_other_nodes):
        assert answer.startswith("RankMismatchError: rank 3 differs from rank 0")


def measured(spec: str) -> dict[str, Any]:
    rank, model = torch.distributed.get_rank(), module()
    link = gw.Link(model.named_parameters(), spec, min_numel=0)
    model(batch(rank, 0)).square().mean().backward()
    link.reduce_()
    found = link.diagnostics()["parameters"]
    link.close()
    return found


@pytest.mark.ranks
def test_errors_are_measured_of_a_ranks_own_shard(four_ranks: Ranks) -> None:
    for found in four_ranks(measured, "Hierarchical(QSGDinf(levels=7, block_size=64), node_size=2)"):
        assert 0.01 < found["0.weight"]["relative_error"] < 0.3
    for found in four_ranks(measured, "Hierarchical(FP32(), node_size=2)"):
        assert found["0.weight"]["relative_error"] < 1e-6
