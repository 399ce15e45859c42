"""Modules that FSDP2 has sharded: four real ranks, against gradients computed without sharding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.seeds import shard_seed
from ranks import Ranks, fresh_ranks
from sharded import (
    batch,
    kept_mesh,
    local_gradients,
    loss_of,
    mean_of,
    meshes,
    plain,
    refusal,
    sharded,
    shards_of,
    train,
    values_of,
)

pytestmark = pytest.mark.ranks


@contextlib.contextmanager
def closing(link: gw.Link) -> Iterator[gw.Link]:
    """A link whose number is free afterwards, so that the next one of the process draws as the first."""
    try:
        yield link
    finally:
        link.close()


def rows(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    chunks = whole.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else whole[:0]


# ---------------------------------------------------------------------- the reduce-scatter


def scattered_gradients(spec: str) -> dict[str, bool]:
    """Tell of each parameter whether its shard is that of the simulated mean of unsharded gradients."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    with closing(gw.attach(model, spec, min_numel=256)) as link:
        loss_of(model, rank, 0).backward()
        assert (link.round, link.error) == (1, None)
    expected = mean_of([local_gradients(r) for r in range(4)], spec, min_numel=256, collective="all_gather")
    return {n: torch.equal(g, rows(expected[n], rank, 4)) for n, g in shards_of(model).items()}


@pytest.mark.parametrize("spec", ["terngrad", "EDEN(bits=4)", "qsgd", "errorfeedback", "TopK(density=0.05)"])
def test_every_shard_is_that_of_the_simulated_mean(four_ranks: Ranks, spec: str) -> None:
    for equal in four_ranks(scattered_gradients, spec):
        assert len(equal) == 30
        assert all(equal.values()), [name for name, same in equal.items() if not same]


def divided_gradients(factor: float | None, force_sum: bool, reduce: torch.dtype) -> list[float]:
    """Return the error of each parameter's shard, exchanged in float32, as a share of what roundings may make."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
    for part in model.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            if factor is not None:
                part.set_gradient_divide_factor(factor)
            part.set_force_sum_reduction_for_comms(force_sum)
    with closing(gw.attach(model, "fp32")):
        loss_of(model, rank, 0).backward()
    whole = [local_gradients(r) for r in range(4)]
    errors = []
    for name, found in shards_of(model).items():
        total = rows(sum(g[name] for g in whole), rank, 4) / (factor or 4)  # type: ignore[arg-type]
        # Each rank's gradient is rounded, float16 after a first division, and the outcome, before and after a last one.
        unit = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}[reduce]
        parts = sum(float(rows(g[name], rank, 4).norm()) for g in whole) / (factor or 4)
        tiny = 2**-22 * total.numel() ** 0.5
        errors.append(float((found.float() - total).norm()) / (unit * 2 * (parts + float(total.norm())) + tiny + 1e-30))
    return errors


@pytest.mark.parametrize("factor", [None, 3.0, 4.0])
@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_means_and_multiples(
    four_ranks: Ranks, factor: float | None, force_sum: bool, reduce: torch.dtype
) -> None:
    """AVG, SUM before or after a division, PREMUL_SUM: all that FSDP2 asks for, in all dtypes."""
    for errors in four_ranks(divided_gradients, factor, force_sum, reduce):
        assert max(errors) < 1


def bf16_parameters() -> list[float]:
    flat, _ = meshes()
    found = []
    for attached in (False, True):
        model = sharded(flat, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        link = gw.attach(model, "fp32") if attached else None
        loss_of(model, dist.get_rank(), 0).backward()
        found.append(shards_of(model))
        if link is not None:
            link.close()
    native, ours = found
    return [float((ours[n] - g).norm() / max(float(g.norm()), 1e-20)) for n, g in native.items()]


def test_parameters_of_bfloat16_are_reduced_as_natively(four_ranks: Ranks) -> None:
    # The native sum rounds after each rank, ours once.
    assert max(max(errors) for errors in four_ranks(bf16_parameters)) < 2**-6


def accumulated() -> tuple[int, int, bool]:
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    with closing(gw.attach(model, "EDEN(bits=4)", min_numel=256)) as link:
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, 0).backward()
        before = link.round
        model.set_requires_gradient_sync(True)
        loss_of(model, rank, 1).backward()
        after = link.round
    workers = []
    for r in range(4):
        copy = plain()
        loss_of(copy, r, 0).backward()
        loss_of(copy, r, 1).backward()
        workers.append({n: p.grad for n, p in copy.named_parameters() if p.grad is not None})
    expected = mean_of(workers, "EDEN(bits=4)", min_numel=256, collective="all_gather")
    same = all(torch.allclose(g, rows(expected[n], rank, 4), rtol=1e-3, atol=1e-5) for n, g in shards_of(model).items())
    return before, after, same


def test_gradients_of_several_passes_are_exchanged_once(four_ranks: Ranks) -> None:
    assert four_ranks(accumulated) == [(0, 1, True)] * 4


def alone(kind: str) -> tuple[bool, int, int]:
    found = []
    for attached in (False, True):
        model = plain()
        names = ("replicate", "shard") if kind == "replicas" else ("shard",)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        link = gw.attach(model, "errorfeedback") if attached else None
        train(model, 0, range(3))
        found.append(values_of(model))
    assert link is not None
    sent, rounds = link.traffic().sent_bytes, link.round
    link.load_state_dict(link.state_dict())
    link.close()
    return all(torch.equal(found[0][n], v) for n, v in found[1].items()), sent, rounds


@pytest.mark.parametrize(("kind", "rounds"), [("shards", 0), ("replicas", 3)])
def test_one_rank_trains_as_it_does_natively(kind: str, rounds: int) -> None:
    """FSDP2 calls no reduce-scatter of one rank, so that nothing counts rounds there."""
    with fresh_ranks(1) as ranks:
        assert ranks(alone, kind) == [(True, 0, rounds)]


# ---------------------------------------------------------------------- replicas


def replicated_gradients(spec: str, native: bool) -> tuple[dict[str, bool], dict[str, torch.Tensor], int]:
    """Tell whether each shard's gradient is the simulated mean over replicas of the mean over its shards."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh if native else mesh["shard"])
    given = {} if native else {"process_group": mesh["replicate"].get_group()}
    with closing(gw.attach(model, spec, min_numel=256, **given)) as link:
        loss_of(model, rank, 0).backward()
        sent = link.traffic().sent_bytes
    whole, shard = [local_gradients(r) for r in range(4)], rank % 2
    workers = [{n: rows((whole[2 * i][n] + whole[2 * i + 1][n]) / 2, shard, 2) for n in whole[0]} for i in range(2)]
    expected = mean_of(workers, spec, min_numel=256, seed=shard_seed(0, shard))
    found = shards_of(model)
    return {n: torch.equal(g, expected[n]) for n, g in found.items()}, found, sent


@pytest.mark.parametrize("spec", ["terngrad", "EDEN(bits=4)", "qsgd", "errorfeedback"])
def test_replicas_hold_the_simulated_mean_the_same_bits(four_ranks: Ranks, spec: str) -> None:
    answers = {native: four_ranks(replicated_gradients, spec, native) for native in (True, False)}
    for native, found in answers.items():
        for equal, _, sent in found:
            assert sent > 0
            assert all(equal.values()), (native, [name for name, same in equal.items() if not same])
        for first, second in ((0, 2), (1, 3)):
            assert all(torch.equal(g, found[second][1][n]) for n, g in found[first][1].items())
    assert all(torch.equal(g, answers[False][0][1][n]) for n, g in answers[True][0][1].items())


def rounding_of_equal_shards() -> torch.Tensor:
    """Return how TernGrad rounded this rank's shard of a gradient that is the same in all shards and replicas."""
    _, mesh = meshes()
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    fully_shard(model, mesh=mesh)
    with closing(gw.attach(model, gw.TernGrad(clip=None), seed=3)):
        # Rows of a gradient: all alike, and none of its elements on the grid of trits but the largest.
        model(torch.linspace(0.1, 1.0, 64).repeat(2, 1)).sum().backward()
    return model.weight.grad.to_local().clone()  # type: ignore[union-attr]


def test_shards_draw_independently(four_ranks: Ranks) -> None:
    found = four_ranks(rounding_of_equal_shards)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def micro_steps() -> tuple[list[int], float]:
    rank, (_, mesh) = dist.get_rank(), meshes()
    model, rounds = sharded(mesh), []
    with closing(gw.attach(model, "fp32")) as link:
        for last in (False, True):
            model.set_requires_all_reduce(last)
            loss_of(model, rank, int(last)).backward()
            rounds.append(link.round)
    total = [sum(local_gradients(r, step)["head.weight"] for r in range(4)) for step in (0, 1)]
    found = shards_of(model)["head.weight"]
    expected = rows((total[0] + total[1]) / 4, rank % 2, 2)
    return rounds, float((found - expected).norm() / expected.norm())


def test_replicas_exchange_once_for_several_micro_steps(four_ranks: Ranks) -> None:
    for rounds, error in four_ranks(micro_steps):
        assert rounds == [0, 1]
        assert error < 1e-5


def summed_over_replicas() -> float:
    rank, (_, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh)
    for part in model.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(6.0)
            part.set_force_sum_reduction_for_comms(True)
    with closing(gw.attach(model, "fp32")):
        loss_of(model, rank, 0).backward()
    total = rows(sum(local_gradients(r)["head.weight"] for r in range(4)) / 6, rank % 2, 2)  # type: ignore[arg-type]
    return float((shards_of(model)["head.weight"] - total).norm() / total.norm())


def test_a_divisor_of_ones_own_over_replicas(four_ranks: Ranks) -> None:
    for error in four_ranks(summed_over_replicas):
        assert error < 1e-5


# ---------------------------------------------------------------------- both


def mesh_of(kind: str) -> DeviceMesh:
    return meshes()[0 if kind == "shards" else 1]


def wrapped(kind: str, spec: str, wrap: bool) -> dict[str, torch.Tensor]:
    # More units than are exchanged at a time.
    model = sharded(mesh_of(kind), blocks=4, wrap=wrap)
    with closing(gw.attach(model, spec, min_numel=256)) as link:
        # The second step goes by what the first left behind.
        train(model, dist.get_rank(), range(2))
        assert link.round == 2
        count = link.record()["collectives"]
    assert sum(count.values()) >= (5 if wrap else 1)
    return values_of(model)


@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.parametrize("spec", ["terngrad", "errorfeedback"])
def test_one_wrapped_module_or_five_give_the_same_bits(four_ranks: Ranks, kind: str, spec: str) -> None:
    one, five = (four_ranks(wrapped, kind, spec, wrap)[0] for wrap in (False, True))
    assert [n for n, v in one.items() if not torch.equal(v, five[n])] == []


LEARNING_STEPS = 30


def losses(kind: str, spec: str | None, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    model = sharded(mesh_of(kind), seed=seed)
    link = gw.attach(model, spec, min_numel=256, seed=seed) if spec else None
    found = torch.tensor(train(model, dist.get_rank(), range(100 * seed, 100 * seed + LEARNING_STEPS), 0.3))
    if link is not None:
        link.close()
    dist.all_reduce(found)
    return (found / 4).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def natively(four_ranks: Ranks) -> list[list[float]]:
    """Losses without a method, of two seeds; over replicas they are the same but for roundings."""
    return [four_ranks(losses, "shards", None, seed)[0] for seed in (0, 1)]


# That the means of both kinds are those of the simulation is tested above, for each kind of method: qsgd trains as
# terngrad does, whose code for shards without a memory is the same.
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("shards", "terngrad"),
        ("replicas", "EDEN(bits=4)"),
        ("shards", "errorfeedback"),
        ("replicas", "errorfeedback"),
    ],
)
def test_a_transformer_learns_as_natively(four_ranks: Ranks, natively: list[list[float]], kind: str, spec: str) -> None:
    (native, other), ours = natively, four_ranks(losses, kind, spec, 0)[0]
    drop = native[0] - sum(native[-5:]) / 5
    assert drop > 0.5
    # Two seeds differ by as much, and a tenth of what was learned is far above the noise of five steps.
    spread = abs(sum(native[-5:]) - sum(other[-5:])) / 5
    assert abs(sum(ours[-5:]) - sum(native[-5:])) / 5 < max(0.1 * drop, spread)


def resumed(kind: str, spec: str, folder: str) -> bool:
    """Tell whether a training that was saved and loaded goes on with the same bits."""
    rank, mesh, ends = dist.get_rank(), mesh_of(kind), []
    for stop in (None, 2):
        model = sharded(mesh)
        link = gw.attach(model, spec, min_numel=256)
        train(model, rank, range(stop or 4))
        if stop:
            gw.save(link, folder)
            kept = [p.detach().to_local().clone() for p in model.parameters()]
            link.close()
            model = sharded(mesh, seed=5)
            with torch.no_grad():
                for p, value in zip(model.parameters(), kept):
                    p.to_local().copy_(value)
            link = gw.attach(model, spec, min_numel=256)
            gw.load(link, folder)
            assert link.round == 2
            train(model, rank, range(2, 4))
        link.close()
        ends.append(values_of(model))
    return all(torch.equal(v, ends[1][n]) for n, v in ends[0].items())


@pytest.mark.parametrize(
    ("kind", "spec"), [("shards", "errorfeedback"), ("replicas", "errorfeedback"), ("replicas", "diana")]
)
def test_a_resumed_training_has_the_same_bits(four_ranks: Ranks, kind: str, spec: str, tmp_path: Path) -> None:
    assert four_ranks(resumed, kind, spec, str(tmp_path)) == [True] * 4
    if kind == "replicas":
        assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-0-of-2", "shard-1-of-2"]


def resharded(folder: str) -> tuple[list[str], bool]:
    """Save with four shards, load with two; return which residuals two ranks have, and whether they are their own."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    with closing(gw.attach(model, "errorfeedback", min_numel=256)) as link:
        train(model, rank, range(2))
        before = link.state_dict()["rank"]
        gw.save(link, folder)
    pair = dist.new_group([0, 1])
    if rank > 1:
        return [], True
    model = plain()
    fully_shard(model, mesh=DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("shard",)))
    with closing(gw.attach(model, "errorfeedback", min_numel=256)) as link:
        gw.load(link, folder)
        after = link.state_dict()["rank"]
        same = before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())
        train(model, rank, range(2, 4))
        assert link.round == 4
    return sorted(after), same


def test_residuals_of_whole_parameters_survive_another_number_of_shards(four_ranks: Ranks, tmp_path: Path) -> None:
    answers = four_ranks(resharded, str(tmp_path))
    assert all(same for _, same in answers)
    assert "residual/blocks.0.up.weight" in answers[0][0]


def other_number_of_shards(folder: str) -> str:
    rank, (flat, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh)
    with closing(gw.attach(model, "errorfeedback", min_numel=256)) as link:
        train(model, rank, range(1))
        gw.save(link, folder)
    whole = sharded(init(flat))
    with closing(gw.attach(whole, "errorfeedback", min_numel=256)) as link:
        return refusal(lambda: gw.load(link, folder))


def init(flat: DeviceMesh) -> DeviceMesh:
    """Return four replicas of one shard."""
    return kept_mesh(("replicate", 4), ("shard", 1))


def test_residuals_of_shards_do_not_fit_other_shards(four_ranks: Ranks, tmp_path: Path) -> None:
    for told in four_ranks(other_number_of_shards, str(tmp_path)):
        assert "common.pt does not exist" in told


def overflowed(kind: str) -> tuple[int, bool, bool]:
    rank = dist.get_rank()
    model = sharded(mesh_of(kind))
    with closing(gw.attach(model, "errorfeedback", min_numel=256)) as link:
        loss_of(model, rank, 0).backward()
        before = link.state_dict()["rank"]
        model.zero_grad()
        (loss_of(model, rank, 1) * (float("inf") if rank == 2 else 1.0)).backward()
        after = link.state_dict()["rank"]
        kept = all(torch.equal(v, after[k]) for k, v in before.items())
        lost = not all(bool(torch.isfinite(g).all()) for g in shards_of(model).values())
        return link.skipped_rounds, kept, lost


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_an_overflow_on_one_rank_changes_no_residual_anywhere(four_ranks: Ranks, kind: str) -> None:
    for skipped, kept, lost in four_ranks(overflowed, kind):
        assert (skipped, kept, lost) == (1, True, True)


class Chunked(nn.Module):
    """A loss in two parts, each of which runs the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(12, 40), nn.LayerNorm(40), nn.Linear(40, 30)


def reduced_twice() -> tuple[int, float]:
    rank, (flat, _) = dist.get_rank(), meshes()
    torch.manual_seed(0)
    model = Chunked()
    copy = Chunked()
    copy.load_state_dict(model.state_dict())
    fully_shard(model.head, mesh=flat)
    fully_shard(model, mesh=flat)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank))
    with closing(gw.attach(model.head, "fp32")) as link:
        hidden = torch.relu(copy.body(x)).detach()
        for part in hidden.chunk(2):
            model.head(part.requires_grad_()).square().sum().backward()
        rounds = link.round
    found = model.head.weight.grad.to_local()  # type: ignore[union-attr]
    whole = []
    for r in range(4):
        copy.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(r))
        copy.head(torch.relu(copy.body(x)).detach()).square().sum().backward()
        whole.append(copy.head.weight.grad.clone())  # type: ignore[union-attr]
    expected = rows(sum(whole) / 4, rank, 4)  # type: ignore[arg-type]
    return rounds, float((found - expected).norm() / expected.norm())


def test_each_backward_is_a_round(four_ranks: Ranks) -> None:
    for rounds, error in four_ranks(reduced_twice):
        assert rounds == 2
        assert error < 1e-5


class Checkpointed(nn.Module):
    """Layers between two others, computed again in backward, each in a pass of its own."""

    def __init__(self, ends_are_trained: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 40), nn.Linear(40, 30)
        self.between = nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])
        for end in (self.first, self.last):
            end.requires_grad_(ends_are_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.between:
            x = x + checkpoint(layer, x, use_reentrant=True)
        out: torch.Tensor = self.last(x)
        return out


def checkpointed(kind: str, ends_are_trained: bool) -> list[int]:
    torch.manual_seed(0)
    model = Checkpointed(ends_are_trained)
    for part in (*model.between, model):
        fully_shard(part, mesh=mesh_of(kind))
    found = []
    with closing(gw.attach(model, "errorfeedback", min_numel=0)) as link:
        for step in range(2):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            model(x.requires_grad_()).square().sum().backward()
            found.append(link.round)
    return found


@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.parametrize("ends_are_trained", [True, False])
def test_a_backward_pass_with_passes_within_it_is_one_round(
    four_ranks: Ranks, kind: str, ends_are_trained: bool
) -> None:
    assert four_ranks(checkpointed, kind, ends_are_trained) == [[1, 2]] * 4


def thawed(kind: str) -> tuple[str, list[bool]]:
    """Let a block of frozen parameters require gradients; return the error, and whether replicas are equal."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    one = kind == "one dimension"
    model = plain()
    model.blocks[0].requires_grad_(False)
    if kind == "part of a unit":
        model.blocks[0].up.requires_grad_(True)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"] if one else mesh)
    group = {"process_group": mesh["replicate"].get_group()} if one else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(gw.attach(model, "qsgd", **group)):
        try:
            for step in range(3):
                if step == 1:
                    model.blocks[0].requires_grad_(True)
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        except gw.IncompatibleError as error:
            return str(error), []
    equal = []
    for p in model.parameters():
        own = p.to_local().detach()
        rows = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(rows, own.contiguous(), group=mesh["replicate"].get_group())
        equal.append(torch.equal(*rows))
    return "no error", equal


@pytest.mark.parametrize("kind", ["one dimension", "two dimensions", "part of a unit"])
def test_a_unit_that_is_no_longer_frozen_is_not_left_out_in_silence(four_ranks: Ranks, kind: str) -> None:
    for told, equal in four_ranks(thawed, kind):
        assert all(equal)
        if kind == "two dimensions":
            # FSDP2's own all-reduce is there for the units that the link left out.
            assert told == "no error"
        else:
            assert "parameter 'blocks.0." in told
            assert "was frozen when the link was made" in told


def drifted() -> str:
    """Change the shards of ranks 2 and 3, the second replica, between two steps."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(gw.attach(model, "qsgd", check_every=1)) as link:
        try:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
                if rank > 1 and step == 0:
                    with torch.no_grad():
                        for p in model.parameters():
                            p.to_local().add_(1.0)  # type: ignore[attr-defined]
        except gw.RankMismatchError:
            return str(link.error)
    return "no difference"


def test_replicas_of_a_shard_that_drift_are_an_error() -> None:
    with fresh_ranks(4) as ranks:
        for rank, told in enumerate(ranks(drifted)):
            assert "check_every=1: at the beginning of round 1, parameter " in told
            # By the numbers that the processes were started with, not by those within the group of a shard.
            assert told.startswith(f"rank {rank}, bucket 0 ")
            assert f" of rank {2 + rank % 2} differed from that of rank {rank % 2}." in told


# ---------------------------------------------------------------------- refusals


def refusals() -> dict[str, str]:
    rank, (flat, mesh) = dist.get_rank(), meshes()
    found = {}
    for spec in ("diloco", "dpsgd", "gtopk", "alq"):
        found[f"{spec} between replicas"] = refusal(lambda spec=spec: gw.attach(sharded(mesh), spec))
    for spec in ("diana", "powersgd", "rotated"):
        found[f"{spec} over shards"] = refusal(lambda spec=spec: gw.attach(sharded(flat), spec))
    found["collective"] = refusal(lambda: gw.attach(sharded(flat), "qsgd", collective="two_shot"))
    found["group"] = refusal(lambda: gw.attach(sharded(mesh), "qsgd", process_group=dist.group.WORLD))
    found["overlap"] = refusal(lambda: gw.attach(sharded(mesh["shard"]), "qsgd", process_group=dist.group.WORLD))
    found["not sharded"] = refusal(lambda: gw.attach(plain(), "qsgd"))  # type: ignore[arg-type]
    model = sharded(flat)
    link = gw.attach(model, "qsgd")
    found["twice"] = refusal(lambda: gw.attach(model, "qsgd"))
    link.close()
    gw.attach(model, "qsgd").close()
    model = sharded(flat)
    model.set_all_reduce_hook(lambda out: None)
    found["own hook"] = refusal(lambda: gw.attach(model, "qsgd"))
    columns = plain()
    fully_shard(columns, mesh=flat, shard_placement_fn=lambda p: dist.tensor.Shard(1) if p.shape == (24, 24) else None)
    found["columns"] = refusal(lambda: gw.attach(columns, "qsgd"))
    frozen = plain().requires_grad_(False)
    found["frozen"] = refusal(lambda: gw.attach(fully_shard(frozen, mesh=flat), "qsgd"))
    found["shards in a loop"] = refusal(lambda: gw.Link(sharded(flat).named_parameters(), "qsgd"))
    found["other values"] = refusal(lambda: gw.attach(sharded(mesh, seed=rank // 2), "qsgd"))
    model = plain()
    model.blocks[0].load_state_dict(plain(seed=rank // 2).blocks[0].state_dict())
    for part in (model.blocks[0].requires_grad_(False), model):
        fully_shard(part, mesh=mesh)
    found["other frozen values"] = refusal(lambda: gw.attach(model, "qsgd"))
    return found


def test_what_does_not_fit_is_refused_by_name(four_ranks: Ranks) -> None:
    expected = {
        "diloco between replicas": "takes local steps",
        "dpsgd between replicas": "takes local steps",
        "gtopk between replicas": "needs the gradients of a whole step",
        "alq between replicas": "needs the gradients of a whole step",
        "diana over shards": "cannot travel by a reduce-scatter",
        "powersgd over shards": "cannot travel by a reduce-scatter",
        "rotated over shards": "cannot travel by a reduce-scatter",
        "collective": "is exchanged by a reduce-scatter",
        "group": "differs from the replicas of the module's own mesh",
        "overlap": "the ranks that hold the same shard are needed",
        "not sharded": "attach needs a DistributedDataParallel module, not Transformer",
        "twice": "already exchanges by QSGD",
        "own hook": "has an exchange of its own",
        "columns": "sharded along dimension 1",
        "frozen": "requires a gradient: there is nothing to exchange",
        "shards in a loop": "is a DTensor, and gw.Link exchanges plain tensors: pass the module to gw.attach",
        "other values": "",
        "other frozen values": "",
    }
    for rank, found in enumerate(four_ranks(refusals)):
        expected["other values"] = f'RankMismatchError: rank {2 + rank % 2} differs from rank {rank % 2} in "values of '
        expected["other frozen values"] = expected["other values"] + "parameter 'blocks.0."
        assert found.keys() == expected.keys()
        for case, sentence in expected.items():
            assert sentence in found[case], case


def unused(kind: str, told: bool) -> str:
    model = sharded(mesh_of(kind))
    if told:
        model.set_reduce_scatter_unused_params(True)
    with closing(gw.attach(model, "qsgd")):
        model.forward = lambda x: model.tokens(x).sum()
        try:
            model(batch(dist.get_rank(), 0)).backward()
        except gw.IncompatibleError as error:
            return str(error)
    return "served"


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_a_parameter_without_a_gradient_is_refused_or_counts_as_zeros(four_ranks: Ranks, kind: str) -> None:
    for told in four_ranks(unused, kind, False):
        assert "set_reduce_scatter_unused_params(True)" in told
    assert four_ranks(unused, kind, True) == ["served"] * 4


def closed_link() -> tuple[str, str]:
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    gw.attach(model, "qsgd").close()
    try:
        loss_of(model, rank, 0).backward()
    except gw.ExchangeError as error:
        return str(error), type(error).__name__
    return "", ""


def test_a_closed_link_says_so(four_ranks: Ranks) -> None:
    for told, kind in four_ranks(closed_link):
        assert "this link was closed" in told
        assert kind == "ExchangeError"


def mixed_precision() -> Any:
    """What is found of a scaled loss: methods that keep a residual refuse to run without the scaler."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with closing(gw.attach(model, "errorfeedback", min_numel=256, grad_scaler=scaler)) as link:
        scaler.scale(loss_of(model, rank, 0)).backward()
        scaled = link.state_dict()["rank"]
    model = sharded(flat)
    with closing(gw.attach(model, "errorfeedback", min_numel=256, grad_scaler=False)) as link:
        loss_of(model, rank, 0).backward()
        return max(float((scaled[k] - v).abs().max()) for k, v in link.state_dict()["rank"].items())


def test_residuals_are_kept_unscaled(four_ranks: Ranks) -> None:
    """A power of two scales gradients exactly, so that residuals differ by rounding alone."""
    assert max(four_ranks(mixed_precision)) < 1e-6
