"""Readers whose tensors share memory, such as the state_dict of a model with tied weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from weight_cases import copies, nudge, octets, same

import gradwire as gw

Tensors = dict[str, torch.Tensor]
Build = Callable[[int], Tensors]


def tied(seed: int) -> Tensors:
    """Two names of one matrix of several blocks, and one that follows its memory."""
    whole = torch.randn(500_000, generator=torch.Generator().manual_seed(seed)).bfloat16()
    matrix = whole[:400_000].reshape(400, 1000)
    return {"wte.weight": matrix, "lm_head.weight": matrix.view(400, 1000), "norm": whole[400_000:]}


def reshaped(seed: int) -> Tensors:
    tensors = tied(seed)
    return tensors | {"lm_head.weight": tensors["wte.weight"].view(1000, 400)}


def turned(seed: int) -> Tensors:
    tensors = tied(seed)
    return tensors | {"lm_head.weight": tensors["wte.weight"].t()}


def fused(seed: int) -> Tensors:
    """A tensor, and views of its halves."""
    tensors = tied(seed)
    return tensors | {"query": tensors["wte.weight"][:200], "key": tensors["wte.weight"][200:]}


def columns(seed: int) -> Tensors:
    """Two tensors with every other element of one memory each."""
    whole = torch.randn(300, 1000, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {"even": whole[:, ::2], "odd": whole[:, 1::2]}


def dense(tensors: Tensors) -> Tensors:
    """The tensors in contiguous memory, so that their bytes can be compared."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def move(tensors: Tensors, seed: int) -> None:
    """Move a share of the elements of what the names share."""
    base = tensors.get("wte.weight", tensors.get("even"))
    assert base is not None
    changed = torch.rand(base.shape, generator=torch.Generator().manual_seed(seed)) < 0.05
    base.mul_(1 + 0.1 * changed)


@pytest.mark.parametrize("strips", [None, {"*": (0, 4)}], ids=["whole", "strips"])
@pytest.mark.parametrize("build", [tied, reshaped, turned, fused, columns])
def test_patches_move_what_names_share_once(build: Build, strips: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    """One patch an update, several an update, an anchor, and the swap of a staging copy."""
    trained, served, staged = build(0), build(1), build(2)
    publisher = gw.WeightPublisher(trained, tmp_path, strips=strips)
    subscriber, second = gw.WeightSubscriber(served, tmp_path), gw.WeightSubscriber(staged, tmp_path)
    for step in range(6):
        move(trained, step)
        publisher.publish(step)
        if step == 3:
            continue
        assert subscriber.update() == second.update(into="staging") == second.swap() == step
        assert [file.step for file in subscriber.applied] == ([3, 4] if step == 4 else [step])
        assert step == 0 or all(file.name.startswith("patch") for file in subscriber.applied)
        assert same(dense(served), dense(trained))
        assert same(dense(staged), dense(trained))
    names = list(served)
    assert served[names[0]].untyped_storage().data_ptr() == served[names[1]].untyped_storage().data_ptr()
    assert subscriber.update(full=True) == 5
    assert subscriber.applied[0].name.startswith("anchor")
    assert same(dense(served), dense(trained))


def test_a_write_from_outside_to_tied_tensors_is_noticed(tmp_path: Path) -> None:
    trained, served = tied(0), tied(1)
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    for step in range(2):
        move(trained, step)
        publisher.publish(step)
        subscriber.update()
    served["lm_head.weight"][7, 7] += 1
    move(trained, 2)
    publisher.publish(2)
    with pytest.raises(gw.PayloadError, match=r"something else has changed the tensor 'lm_head.weight'"):
        subscriber.update()
    assert subscriber.update() == 2
    assert same(served, trained)


def test_tensors_that_are_tied_after_the_first_update_are_followed(tmp_path: Path) -> None:
    """The memory of a parameter may be replaced between two updates."""
    trained = tied(0)
    served = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in trained.items()}
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    for step in range(3):
        move(trained, step)
        publisher.publish(step)
        assert subscriber.update() == step
        assert all(torch.equal(octets(served[name]), octets(trained[name])) for name in trained)
        served["lm_head.weight"].data = served["wte.weight"].data


@pytest.mark.parametrize("which", ["wte.weight", "lm_head.weight"])
@pytest.mark.parametrize("into", [None, "staging"])
def test_tied_tensors_that_cannot_hold_what_is_published_are_named(
    which: str, into: str | None, tmp_path: Path
) -> None:
    """The trainer's two tensors begin alike, and one of them moves."""
    trained, served = copies(tied(0)), tied(1)
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)

    def follow() -> int | None:
        step = subscriber.update(into)
        return step if into is None else subscriber.swap()

    publisher.publish(0)
    assert follow() == 0
    assert same(served, trained)
    nudge({which: trained[which]}, 1)
    publisher.publish(1)
    for _ in range(2):
        with pytest.raises(gw.IncompatibleError, match=r"'wte.weight' .*share memory here") as caught:
            follow()
        assert "'lm_head.weight'" in str(caught.value)
        assert subscriber.step is None
    # When they are alike again, they are followed again.
    trained["lm_head.weight"].copy_(trained["wte.weight"])
    publisher.publish(2)
    assert follow() == 2
    assert same(served, trained)
