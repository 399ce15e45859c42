"""A link's parameters: what is exchanged, laid out how, and what is refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.planning import own_buckets
from gradwire.link.failures import place
from gradwire.link.found_optimizers import check_kinds, check_scaler, scale_of
from gradwire.link.parameters import check_parameters, gradient, listed, named_parameters
from oracle import layers
from ranks import Ranks


def test_only_what_requires_a_gradient_is_exchanged_by_name_or_number() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    assert list(named_parameters(model.named_parameters())) == ["weight"]
    assert list(named_parameters(model.parameters())) == ["0"]
    assert list(named_parameters(reversed(list(model.parameters())))) == ["1"]
    with pytest.raises(gw.HyperparameterError, match="same name"):
        named_parameters([("a", model.weight), ("a", model.bias)])
    with pytest.raises(gw.HyperparameterError, match="'a' and 'b' are one tensor, which would be exchanged twice"):
        named_parameters([("a", model.weight), ("b", model.weight)])


def test_parameters_may_be_given_as_a_parameter_list() -> None:
    given = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))])
    assert list(named_parameters(listed(given))) == ["0", "1"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nn.Linear(2, 3), "a Linear"),
        (nn.Sequential(nn.Linear(2, 3)), "a Sequential"),
        (nn.Linear(2, 3).state_dict(), "a OrderedDict"),
        (nn.Parameter(torch.zeros(2)), "a Parameter"),
        (["weight", "bias"], "'weight'"),
        ([nn.Linear(2, 3)], "a Linear"),
        (None, "None"),
    ],
)
def test_what_holds_no_parameters_is_refused_with_what_is_needed(given: Any, words: str) -> None:
    needed = "parameters: model.named_parameters(), pairs of a name and a parameter, or parameters are needed, not "
    with pytest.raises(gw.HyperparameterError, match=re.escape(needed + words)):
        named_parameters(listed(given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nn.Linear(2, 3).parameters(), "a generator"),
        (torch.optim.SGD, "<class 'torch.optim.sgd.SGD'>"),
        ("sgd", "'sgd'"),
        ([torch.optim.SGD(nn.Linear(2, 3).parameters())], "a list"),
    ],
)
def test_what_is_no_optimizer_is_refused_with_what_is_needed(given: Any, words: str) -> None:
    needed = "optimizer: the torch optimizer of the parameters is needed, or None, not "
    with pytest.raises(gw.HyperparameterError, match=re.escape(needed + words)):
        check_kinds(None, given)
    check_kinds(None, torch.optim.SGD(nn.Linear(2, 3).parameters()))


class OfItsOwn:
    """An optimizer that is not PyTorch's."""

    def __init__(self, inner: Any = None) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.inner = inner

    def step(self) -> None:
        pass


def test_an_optimizer_whose_steps_nobody_can_hear_is_refused_where_they_count() -> None:
    with pytest.raises(gw.IncompatibleError, match=r"call link\.after_step\(\) after each of them"):
        check_kinds(None, OfItsOwn(), counts=True)
    check_kinds(None, OfItsOwn())
    check_kinds(torch.amp.GradScaler("cpu"), OfItsOwn(), counts=True)
    inside = OfItsOwn(torch.optim.SGD(nn.Linear(2, 3).parameters()))
    for inner in (inside.inner, inside, [inside.inner], {"a": inside.inner}):
        check_kinds(None, OfItsOwn(inner), counts=True)


def test_what_is_no_link_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    for use in (gw.save, gw.load):
        with pytest.raises(
            gw.HyperparameterError, match=r"what gw\.attach or gw\.Link returned is needed, not a Linear"
        ):
            use(cast(Any, nn.Linear(2, 3)), tmp_path)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "no parameter requires a gradient"),
        ({"p": torch.zeros(2, device="meta")}, "parameter 'p' is on meta"),
        ({"p": torch.zeros(2, dtype=torch.int64)}, "parameter 'p' is torch.int64"),
        ({"ok": torch.zeros(2), "p": torch.tensor([0.0, torch.nan])}, "parameter 'p' holds a NaN or inf"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(parameters: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(gw.IncompatibleError, match=words):
        check_parameters(parameters)


def test_a_gradient_lies_as_its_parameter_does_and_zeros_stand_for_none() -> None:
    p = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert not gradient(p).any()
    values = torch.randn(2, 3, 4, 5)
    p.grad = values.clone()
    found = gradient(p)
    assert found.stride() == p.stride() != values.stride()
    assert torch.equal(found, values)
    assert found is p.grad
    p.grad = torch.zeros(2, 3, 4, 5).to_sparse()
    with pytest.raises(gw.IncompatibleError, match="sparse gradient"):
        gradient(p)


def test_buckets_take_parameters_from_the_last_on_up_to_so_many_elements_of_one_type() -> None:
    half = torch.bfloat16
    parameters = {
        "a": torch.zeros(6),
        "b": torch.zeros(4),
        "c": torch.zeros(5, dtype=half),
        "d": torch.zeros(3),
        "e": torch.zeros(7),
        "f": torch.zeros(30),
        "g": torch.zeros(1, dtype=half),
    }
    # Float32: f alone is more than fits, e and d fill ten, b and a another ten.
    assert own_buckets(parameters, 10) == [["g", "c"], ["f"], ["e", "d"], ["b", "a"]]
    assert own_buckets(parameters, 1000) == [["g", "c"], ["f", "e", "d", "b", "a"]]


def test_a_place_is_told_by_bucket_chunk_first_parameter_and_round() -> None:
    assert place(3, None, 17, ["fc.weight", "fc.bias"]) == "bucket 3 (fc.weight and 1 more), round 17"
    assert place(0, 2, 5, ["fc.weight"]) == "bucket 0, chunk 2 (fc.weight), round 5"
    assert place(0, None, 5, []) == "bucket 0 (nothing), round 5"


def test_the_scale_of_a_loss_is_the_scalers() -> None:
    class Scaler:
        def get_scale(self) -> float:
            return 1024.0

    assert scale_of(Scaler()) == 1024.0
    assert scale_of(None) == scale_of(False) == 1.0
    check_scaler(Scaler())
    with pytest.raises(gw.HyperparameterError, match=r"grad_scaler: the torch\.amp\.GradScaler"):
        check_scaler(True)


def inputs() -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


def differentiable(create_graph: bool) -> list[torch.Tensor]:
    """Exchange gradients, which may themselves depend on the parameters."""
    module = layers(2)
    # Its gradient has other strides than itself.
    module[0].weight = nn.Parameter(module[0].weight.detach().t())
    link = gw.Link(module.named_parameters(), "terngrad")
    module(inputs()).square().mean().backward(create_graph=create_graph)
    link.reduce_()
    link.close()
    found = [p.grad.detach().clone() for p in module.parameters()]  # type: ignore[union-attr]
    module.zero_grad()  # the graph refers to the parameters
    return found


@pytest.mark.ranks
def test_gradients_with_a_graph_are_exchanged_as_others_are(three_ranks: Ranks) -> None:
    found, expected = (three_ranks(differentiable, create_graph) for create_graph in (True, False))
    for ours, theirs in zip(found, expected):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


# ---------------------------------------------------------------------- frozen parameters


def thawed(kind: str) -> tuple[str, str]:
    """Let a layer that was frozen when the link was made require gradients; return the error of the next exchange."""
    module = layers(2)
    first = next(module.children())
    first.requires_grad_(False)
    spec = "LocalSGD(every=1)" if "local" in kind else "terngrad"
    ddp = DistributedDataParallel(copy.deepcopy(module)) if "ddp" in kind else None
    trained: Any = ddp or module
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    link = gw.attach(ddp, spec) if ddp else gw.Link(module.named_parameters(), spec, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        trained(inputs()).square().mean().backward()
        if not ddp:
            link.reduce_()
        optimizer.step()

    try:
        step()
        before = f"{link.round} round"
        next((ddp.module if ddp else module).children()).requires_grad_(True)
        step()
    except Exception:
        return before, f"{type(link.error).__name__}: {link.error}"
    finally:
        link.close()
    return before, "no error"


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["loop", "loop of local steps", "ddp", "ddp of local steps"])
def test_a_parameter_that_is_no_longer_frozen_is_not_left_out_in_silence(three_ranks: Ranks, kind: str) -> None:
    for before, told in three_ranks(thawed, kind):
        assert before == "1 round"
        assert told.startswith("IncompatibleError: ")
        assert "parameter '0.weight' was frozen when the link was made" in told


def frozen_later() -> tuple[bool, bool, list[float]]:
    """Freeze a layer during training; return whether it stays as it is, and what the other layer is on each rank."""
    module = layers(2)
    first, last = module
    link = gw.Link(module.named_parameters(), "errorfeedback")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(4):
        if step == 2:
            first.requires_grad_(False)
            before = copy.deepcopy(first)
        optimizer.zero_grad()
        module(inputs()).square().mean().backward()
        link.reduce_()
        optimizer.step()
    link.close()
    stays = all(torch.equal(a, b) for a, b in zip(first.parameters(), before.parameters()))
    return stays, first.weight.grad is None, [float(p.detach().sum()) for p in last.parameters()]


@pytest.mark.ranks
def test_a_parameter_that_is_frozen_later_gets_no_gradient(three_ranks: Ranks) -> None:
    found = three_ranks(frozen_later)
    assert found == [(True, True, found[0][2])] * 3


def frozen_too_late() -> str:
    """Freeze a layer between DDP and attach; return the error of the first backward pass."""
    module = layers(2)
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    module[0].requires_grad_(False)
    link = gw.attach(ddp, "terngrad")
    try:
        ddp(inputs()).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        link.close()
    return "no error"


@pytest.mark.ranks
def test_a_parameter_that_is_frozen_between_ddp_and_attach_is_named(three_ranks: Ranks) -> None:
    for told in three_ranks(frozen_too_late):
        assert told.startswith("IncompatibleError: parameter '0.weight' was frozen after the module was wrapped")


# ---------------------------------------------------------------------- parameters that DDP ignores


def ignored(spec: str) -> tuple[list[float], list[float], int]:
    """Train with a layer and a buffer of each rank's own; return what they hold, what another layer does, and bytes."""
    rank, module = dist.get_rank(), layers(2)
    module.register_buffer("own", torch.full((50,), float(rank)))
    with torch.no_grad():
        module[0].bias.fill_(float(rank))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias", "own"])
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    link = gw.attach(ddp, spec)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(inputs()).square().mean().backward()
        optimizer.step()
    traffic = link.traffic()
    link.close()
    return [float(x.detach().sum()) for x in (module[0].bias, module.own)], [
        float(p.detach().sum()) for p in module[-1].parameters()
    ], traffic.buffer_bytes  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("spec", ["terngrad", "LocalSGD(every=2)"])
def test_what_ddp_ignores_stays_each_ranks_own(three_ranks: Ranks, spec: str) -> None:
    found = three_ranks(ignored, spec)
    biases, buffers = zip(*(own for own, _, _ in found))
    assert len(set(biases)) == 3
    assert list(buffers) == [0.0, 50.0, 100.0]
    assert found[0][1] == found[1][1] == found[2][1]
    assert [sent for _, _, sent in found] == [0] * 3


class WithTable(torch.nn.Module):
    """A parameter of the root module, and a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.table, self.last = torch.nn.EmbeddingBag(10, 2, sparse=True), torch.nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(rows) * self.scale)  # type: ignore[no-any-return]


def ignored_at_the_root() -> tuple[list[float], list[float]]:
    """Let DDP ignore both; return the gradients of the root module's, by a link and by DDP alone, and of the table."""
    found = []
    for spec in ("fp32", None):
        torch.manual_seed(0)
        module = WithTable()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["scale", "table.weight"])
        ddp = DistributedDataParallel(module)
        link = gw.attach(ddp, spec) if spec else None
        ddp(torch.full((1, 2), dist.get_rank())).sum().backward()
        if link is not None:
            link.close()
        assert module.scale.grad is not None
        found.append(module.scale.grad.tolist())
        assert module.table.weight.grad is not None
        assert module.table.weight.grad.coalesce().indices().tolist() == [[dist.get_rank()]]
    return found[0], found[1]


@pytest.mark.ranks
def test_what_ddp_is_told_to_ignore_and_reduces_all_the_same_is_exchanged(three_ranks: Ranks) -> None:
    """DDP knows parameters of the root module by another name than its list has; sparse ones it does ignore stay."""
    found = three_ranks(ignored_at_the_root)
    assert [by_link for by_link, _ in found] == [found[0][1]] * 3
