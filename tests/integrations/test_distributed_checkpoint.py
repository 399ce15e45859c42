"""A link's state in a distributed checkpoint, on as many ranks and on others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from ranks import Ranks, fresh_ranks
from sharded import meshes, shards_of

pytestmark = pytest.mark.ranks

METHOD = "ErrorFeedback(compressor=TopK(density=0.1), momentum=0.5)"


def started(method: str = METHOD) -> tuple[nn.Module, gw.Link]:
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    return model, gw.Link(model.named_parameters(), method, min_numel=0)


def steps(model: nn.Module, link: gw.Link, first: int, last: int) -> torch.Tensor:
    """Exchange some rounds, and return the last mean."""
    for step in range(first, last):
        draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        model.zero_grad()
        model(torch.randn(8, 30, generator=draw)).square().mean().backward()
        link.reduce_()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone()


def entries(model: nn.Module, link: gw.Link) -> dict[str, Any]:
    return {"model": model.state_dict(), "link": gw.integrations.StatefulLink(link)}


def saved(folder: str) -> torch.Tensor:
    warnings.simplefilter("ignore")
    model, link = started()
    steps(model, link, 0, 3)
    dcp.save(entries(model, link), checkpoint_id=folder)
    mean = steps(model, link, 3, 5)
    link.close()
    return mean


def resumed(folder: str, partial: bool) -> tuple[torch.Tensor, set[str], int]:
    warnings.simplefilter("ignore")
    model, link = started()
    # What is there before is not to be taken for what was loaded.
    steps(model, link, 0, 1)
    dcp.load(
        entries(model, link),
        checkpoint_id=folder,
        planner=DefaultLoadPlanner(allow_partial_load=True) if partial else None,
    )
    kept, round = set(link.state_dict()["rank"]), link.round
    mean = steps(model, link, 3, 5)
    link.close()
    return mean, kept, round


def test_on_as_many_ranks_it_goes_on_with_the_same_bits(three_ranks: Ranks, tmp_path: Path) -> None:
    expected = three_ranks(saved, str(tmp_path))
    for mean, (again, kept, round) in zip(expected, three_ranks(resumed, str(tmp_path), False)):
        assert torch.equal(mean, again)
        assert kept == {f"{kind}/{name}" for kind in ("residual", "momentum") for name in ("weight", "bias")}
        assert round == 3


def learning(folder: str) -> bool:
    """Save while an autoencoder is trained; return whether the first mean of codes has the same bits when resumed."""
    warnings.simplefilter("ignore")
    method = "LGC(density=0.1, full_rounds=0, training_rounds=3)"
    model, link = started(method)
    steps(model, link, 0, 2)
    dcp.save(entries(model, link), checkpoint_id=folder)
    expected = steps(model, link, 2, 4)
    link.close()
    model, link = started(method)
    dcp.load(entries(model, link), checkpoint_id=folder)
    mean = steps(model, link, 2, 4)
    link.close()
    return torch.equal(mean, expected)


def test_values_that_rank_0_alone_holds_come_back(three_ranks: Ranks, tmp_path: Path) -> None:
    """Of what all ranks offer, a distributed checkpoint holds the copy of any rank."""
    assert three_ranks(learning, str(tmp_path)) == [True] * 3


@pytest.mark.parametrize("count", [2, 4])
def test_on_other_numbers_of_ranks_residuals_stay_with_those_that_exist(
    three_ranks: Ranks, count: int, tmp_path: Path
) -> None:
    three_ranks(saved, str(tmp_path))
    with fresh_ranks(count, group_timeout_s=60) as ranks:
        found = ranks(resumed, str(tmp_path), count > 3)
    assert [bool(kept) for _, kept, _ in found] == [rank < 3 for rank in range(count)]
    assert {round for *_, round in found} == {3}
    assert all(torch.equal(found[0][0], mean) for mean, *_ in found)


def incomplete(folder: str) -> list[str]:
    """Return what is said of a checkpoint without a link, of one without a rank's part, and of local steps."""
    warnings.simplefilter("ignore")
    model, link = started()
    found = []
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/none")
    state = gw.integrations.StatefulLink(link).state_dict()
    # As another job of three ranks would leave it whose second rank did not write.
    kept = {key: value for key, value in state.items() if key != "rank 1"}
    dcp.save({"model": model.state_dict(), "link": kept}, checkpoint_id=f"{folder}/torn")
    for name in ("none", "torn"):
        found.append(
            refusal(lambda name=name: dcp.load(entries(model, link), checkpoint_id=f"{folder}/{name}", planner=planner))
        )
    found.append(refusal(lambda: dcp.load(entries(model, link), checkpoint_id=f"{folder}/none")))
    link.close()
    local = gw.Link(model.named_parameters(), "DiLoCo(every=4)", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found.append(refusal(lambda: gw.integrations.StatefulLink(local)))
    local.close()
    return found


def between_replicas(spec: str) -> tuple[Any, gw.Link]:
    """Two replicas of two shards, which are equally long: state of one would be accepted as that of the other."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(30, 20), mesh=meshes()[1])
    return model, gw.attach(model, spec, min_numel=0)


def passes(model: Any, first: int, last: int) -> torch.Tensor:
    """Run some backward passes, in which gradients are exchanged, and return this rank's shards of the last ones."""
    for step in range(first, last):
        draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        model.zero_grad()
        model(torch.randn(8, 30, generator=draw)).square().mean().backward()
    return torch.cat([gradient.reshape(-1) for gradient in shards_of(model).values()])


def resumed_between_replicas(folder: str, spec: str) -> tuple[dict[str, torch.Tensor], list[str], bool]:
    """Save and load; return this rank's saved state, what differs from it when loaded, and whether means agree."""
    warnings.simplefilter("ignore")
    model, link = between_replicas(spec)
    passes(model, 0, 3)
    dcp.save(entries(model, link), checkpoint_id=folder)
    saved = link.state_dict()
    expected = passes(model, 3, 5)
    link.close()
    model, link = between_replicas(spec)
    passes(model, 0, 1)
    dcp.load(entries(model, link), checkpoint_id=folder)
    loaded = link.state_dict()
    differing = [key for part in saved for key, x in saved[part].items() if not torch.equal(x, loaded[part][key])]
    mean = passes(model, 3, 5)
    link.close()
    return saved["rank"], differing, torch.equal(mean, expected)


@pytest.mark.parametrize("spec", ["errorfeedback", "diana"])
def test_between_replicas_each_rank_of_each_shard_loads_its_own_state(
    four_ranks: Ranks, spec: str, tmp_path: Path
) -> None:
    found = four_ranks(resumed_between_replicas, str(tmp_path), spec)
    assert [(differing, same) for _, differing, same in found] == [([], True)] * 4
    # Ranks 0 and 1 are the first ones of their links, of different shards.
    first, second = found[0][0], found[1][0]
    assert any(not torch.equal(value, second[key]) for key, value in first.items())


def refusal(build: Callable[[], object]) -> str:
    try:
        build()
    except (gw.GradwireError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_checkpoint_without_the_link_or_a_part_of_it_is_refused_on_all_ranks(
    three_ranks: Ranks, tmp_path: Path
) -> None:
    for none, torn, strict, local in three_ranks(incomplete, str(tmp_path)):
        assert none == "IncompatibleError: rank 0: the distributed checkpoint has no 'common' of this link"
        assert torn == "IncompatibleError: rank 1: the distributed checkpoint has no 'rank 1' of this link"
        assert "Missing key in checkpoint state_dict: link." in strict
        assert "keeps those of one rank" in local


def test_an_entry_is_read_where_its_device_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradwire.integrations.distributed_checkpoint import _packed, _unpacked

    with monkeypatch.context() as there:
        # As torch.save marks tensors of the eighth GPU.
        there.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        entry = _packed({"residual/w": torch.arange(3.0)})
    assert _unpacked(entry)["residual/w"].tolist() == [0.0, 1.0, 2.0]
