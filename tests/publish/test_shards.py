"""Ranks that publish the shards of one model, and readers with another sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from weight_cases import manifest, octets, same

import gradwire as gw
from ranks import Ranks

ROWS, COLUMNS = 50, 36


def step_of(step: int) -> dict[str, torch.Tensor]:
    """The whole weights of a step."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "matrix": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "cube": torch.randn(6, 5, 8, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "count": torch.tensor(step),
    }
    for name in ("matrix", "cube"):
        flat = octets(found[name]).view(torch.int16)
        flat[::7] += step
    return found


def sharded(tensors: dict[str, torch.Tensor], mesh: DeviceMesh, *placements: Any) -> dict[str, torch.Tensor]:
    """Shard the tensors that have the dimensions."""
    deepest = max((getattr(p, "dim", 0) for p in placements), default=0)
    return {
        name: distribute_tensor(t, mesh, placements) if t.dim() > deepest else t.clone() for name, t in tensors.items()
    }


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    return tensors


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def publish_and_follow(folder: str) -> list[str]:
    """Four ranks publish in several shardings; all follow in several others."""
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    faults = []
    writers: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "replicas": (grid, [Replicate(), Shard(0)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "twice": (grid, [Shard(0), Shard(0)]),
    }
    readers = writers | {"depth": (grid, [Shard(1), Shard(0)])}
    for name, (mesh, placements) in writers.items():
        for strips in (None, {"*": (1, 3)}) if name == "rows" else (None,):
            where = f"{folder}/{name}-{strips is not None}"
            publisher = gw.WeightPublisher(sharded(step_of(0), mesh, *placements), where, 2, strips=strips)
            served = {n: blank(sharded(step_of(0), m, *p)) for n, (m, p) in readers.items()}
            served["plain"] = blank(step_of(0))
            subscribers = {n: gw.WeightSubscriber(tensors, where) for n, tensors in served.items()}
            for step in range(4):
                publication = publisher.publish(step, sharded(step_of(step), mesh, *placements))
                if publication.elements != sum(t.numel() for t in step_of(0).values()):
                    faults.append(f"{where}: {publication}")
                for n, subscriber in subscribers.items():
                    if subscriber.update() != step or (step and "patch" not in subscriber.applied[0].name):
                        faults.append(f"{where} {n}: {subscriber.step} {subscriber.applied}")
                    if not same(whole(served[n]), step_of(step)):
                        faults.append(f"{where} {n}: other bytes at step {step}")
                dist.barrier()
    return faults


@pytest.mark.ranks
def test_any_sharding_is_followed_in_any_other(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks(publish_and_follow, str(tmp_path)) == [[]] * 4
    found = manifest(tmp_path / "rows-False")
    assert (found.sharded, len(found.parts)) == (True, 4)
    assert len(manifest(tmp_path / "replicas-False").parts) == 2
    # Without any rank: two and three readers of slices, of rows and of columns.
    for dimension, count in ((0, 2), (0, 3), (1, 2), (1, 3)):
        for place in tmp_path.iterdir():
            parts = []
            for reader in range(count):
                cut = [t.chunk(count, dimension)[reader] if t.dim() == 2 else t for t in step_of(3).values()]
                served = dict(zip(step_of(3), [torch.zeros_like(t) for t in cut]))
                each = -(-(ROWS, COLUMNS)[dimension] // count)
                ranges = [slice(None), slice(None)]
                ranges[dimension] = slice(each * reader, min(each * (reader + 1), (ROWS, COLUMNS)[dimension]))
                subscriber = gw.WeightSubscriber(served, place, slices={"matrix": ranges})
                assert subscriber.update() == 3
                parts.append(served["matrix"])
            assert torch.equal(octets(torch.cat(parts, dimension)), octets(step_of(3)["matrix"]))


def train(folder: str) -> tuple[list[int], list[int], bool]:
    """Train a model under FSDP2, and publish it in bfloat16 without gathering it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 7))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    publisher = gw.WeightPublisher(model, folder, dtype=torch.bfloat16)
    served = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 7)).bfloat16()
    subscriber, sizes, right = gw.WeightSubscriber(served, folder), [], True
    for step in range(4):
        published = publisher.publish(step)
        sizes.append(published.patch_bytes or published.anchor_bytes)
        subscriber.update()
        for (_, trained), (_, follows) in zip(model.named_parameters(), served.named_parameters()):
            full = trained.full_tensor().bfloat16()  # type: ignore[attr-defined]
            right &= torch.equal(octets(full), octets(follows))
        dist.barrier()
        optimizer.zero_grad()
        model(torch.randn(8, 30, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    # A restart of all ranks goes on with the run.
    again = gw.WeightPublisher(model, folder, dtype=torch.bfloat16, resume=True)
    publisher.publish(4)
    dist.barrier()
    other = gw.WeightPublisher(model, folder, dtype=torch.bfloat16, resume=True)
    return sizes, [again.step, other.step, int(other.run == publisher.run)], right


@pytest.mark.ranks
def test_a_model_under_fsdp2_is_published_without_being_gathered(four_ranks: Ranks, tmp_path: Path) -> None:
    told = four_ranks(train, str(tmp_path))
    assert all(found == told[0] for found in told)
    sizes, (again, other, same_run), right = told[0]
    assert right
    assert all(size < sizes[0] for size in sizes[1:])
    # After the optimizer's step the weights were those of no published step.
    assert (again, other, same_run) == (-1, 4, 1)


def refusals(folder: str) -> list[str]:
    """What one rank cannot do is an error on all."""
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    told = []

    def expect(kind: type[Exception], call: Any) -> None:
        try:
            call()
        except kind as error:
            told.append(str(error))
        else:
            told.append("nothing")
        dist.barrier()

    trained = sharded(step_of(0), mesh, Shard(0))
    summed = {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
    expect(gw.GradwireError, lambda: gw.WeightPublisher(summed, folder))
    expect(gw.IncompatibleError, lambda: gw.WeightPublisher(trained, dist.group.WORLD))
    # Rank 0 alone is not all that hold a shard; it is asked with a group of its own.
    groups = [dist.new_group([r]) for r in range(4)]
    expect(gw.IncompatibleError, lambda: gw.WeightPublisher(trained, f"{folder}/{rank}", group=groups[rank]))
    publisher = gw.WeightPublisher(trained, folder)
    publisher.publish(0)
    expect(gw.ExchangeError, lambda: publisher.publish(1 + rank))
    other = {"matrix": torch.zeros(3)} if rank == 2 else trained
    expect(gw.GradwireError, lambda: publisher.publish(9, other))
    told.append(str(publisher.publish(10).anchor_bytes == 0))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr("gradwire.publish.publisher.read_manifest", _unreachable)
        expect(Exception, lambda: gw.WeightPublisher(trained, folder, resume=True))
    return told


def _unreachable(place: object) -> None:
    raise OSError("the place cannot be reached")


@pytest.mark.ranks
def test_what_one_rank_refuses_all_raise(four_ranks: Ranks, tmp_path: Path) -> None:
    told = four_ranks(refusals, str(tmp_path))
    for rank, (partial, group, alone, steps, layout, patched, resumed) in enumerate(told):
        assert "publish shards and replicas" in partial
        assert "a process group takes whole tensors" in group
        assert "are not the whole tensor" in alone
        assert "ranks publish different steps: [1, 2, 3, 4]" in steps
        assert ("the tensors differ from the first" if rank == 2 else "rank 2 could not begin step") in layout
        assert patched == "True"
        assert ("rank 0 could not read the manifest: OSError: " if rank else "the place cannot be reached") in resumed


def train_in_two_dimensions(folder: str) -> tuple[str, int, bool]:
    """FSDP2 over shards of tensor parallelism, rows of which are divided twice."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 20))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    publisher, served = (
        gw.WeightPublisher(model, folder),
        nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 20)),
    )
    publisher.publish(0)
    step = gw.WeightSubscriber(served, folder).update()
    right = all(
        torch.equal(trained.full_tensor(), follows)  # type: ignore[attr-defined]
        for trained, follows in zip(model.parameters(), served.parameters())
    )
    dist.barrier()
    return str(model[0].weight.placements), step or 0, right


@pytest.mark.ranks
def test_shards_of_two_dimensions_are_published(four_ranks: Ranks, tmp_path: Path) -> None:
    for placements, step, right in four_ranks(train_in_two_dimensions, str(tmp_path)):
        assert "_StridedShard" in placements
        assert (step, right) == (0, True)
