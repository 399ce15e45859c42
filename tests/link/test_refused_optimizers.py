"""Optimizers that would be silently wrong beside a link: of other ranks' parameters, and within the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.methods.feedback.optimizers import not_stepped_here
from ranks import Ranks

pytestmark = pytest.mark.ranks

SGD = torch.optim.SGD


class Around(torch.optim.Optimizer):
    """Steps by another optimizer, as Accelerate's and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def rows() -> torch.Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(dist.get_rank()))


def shared_out(spec: str, how: str) -> str:
    """Train one step by an optimizer of which each rank has a part; return the refusal."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = small()
    module = DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizers: dict[str, Any] = {
        "zero": lambda: ZeroRedundancyOptimizer(parameters, SGD, lr=0.1),
        # More ranks than parameters: one has none to step.
        "zero of two": lambda: ZeroRedundancyOptimizer(parameters[:2], SGD, lr=0.1),
        "around zero": lambda: Around(ZeroRedundancyOptimizer(parameters, SGD, lr=0.1)),
        "around": lambda: Around(SGD(parameters, lr=0.1)),
        "a part": lambda: SGD(parameters[dist.get_rank() : dist.get_rank() + 1], lr=0.1),
        "two": lambda: SGD(parameters[1:], lr=0.1),
    }
    optimizer = optimizers[how.removesuffix(", given").removesuffix(", then zero")]()
    link = None
    try:
        link = gw.attach(module, spec, min_numel=0, **({"optimizer": optimizer} if how.endswith("given") else {}))
        for _ in range(2):
            module(rows()).square().mean().backward()
            optimizer.step()
            if how.startswith("around, then zero"):
                optimizer = optimizers["zero"]()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if link is not None:
            link.close()
    return "accepted"


@pytest.mark.parametrize(
    "how", ["zero", "zero, given", "zero of two", "around zero, given", "around, then zero", "around, then zero, given"]
)
@pytest.mark.parametrize("spec", ["DiLoCo(every=2)", "DPSGD(every=2)"])
def test_local_steps_refuse_an_optimizer_that_steps_a_share_of_the_parameters(
    three_ranks: Ranks, spec: str, how: str
) -> None:
    """The ranks broadcast what they have stepped: none has parameters of its own, and nothing is left to exchange."""
    for found in three_ranks(shared_out, spec, how):
        assert found.startswith("IncompatibleError: "), found
        assert f"{spec.partition('(')[0]}(" in found
        assert "steps only a share of the parameters on each rank" in found


def test_what_steps_all_parameters_on_each_rank_is_no_share(three_ranks: Ranks) -> None:
    for spec, how in (("LocalSGD(every=2)", "around"), ("LocalSGD(every=2)", "two, given"), ("terngrad", "zero")):
        assert three_ranks(shared_out, spec, how) == ["accepted"] * 3


def test_parameters_that_are_shared_out_by_hand_are_refused_where_the_optimizer_is_given(three_ranks: Ranks) -> None:
    for found in three_ranks(shared_out, "LocalSGD(every=2)", "a part, given"):
        assert found.startswith(
            "RankMismatchError: rank 1 differs from rank 0 in 'parameters that the optimizer steps'"
        )


def test_the_optimizers_inside_one_say_what_it_steps() -> None:
    w, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    named = {"w": w, "b": b}
    assert not_stepped_here(SGD([w, b], lr=0.1), named) == []
    assert not_stepped_here(Around(SGD([w, b], lr=0.1)), named) == []
    partly = Around(SGD([w, b], lr=0.1))
    partly.inner = SGD([b], lr=0.1)
    assert not_stepped_here(partly, named) == ["w"]
    assert not_stepped_here(Around(partly), named) == ["w"]
    unrelated = Around(SGD([w, b], lr=0.1))
    unrelated.inner = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not_stepped_here(unrelated, named) == []


def in_backward(spec: str, kind: str) -> tuple[str, str]:
    """Train one step by optimizers that step as soon as a gradient is there; return what was raised, and the link's."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = small()
    module: Any = model
    link = None
    try:
        if kind.startswith("before"):
            _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
        if kind == "sharded":
            fully_shard(model)
        elif not kind.endswith("link"):
            module = DistributedDataParallel(model)
        if kind == "fused":
            module._register_fused_optim(SGD, lr=0.1)
        link = (
            gw.Link(model.named_parameters(), spec) if kind.endswith("link") else gw.attach(module, spec, min_numel=0)
        )
        if kind in ("after", "link"):
            _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
        if kind in ("hooks", "sharded"):
            for p in model.parameters():
                optimizer = SGD([p], lr=0.1)
                p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        module(rows()).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", str(link and link.error)
    finally:
        if link is not None:
            link.close()
    return "accepted", str(link.error)


@pytest.mark.parametrize("spec", ["terngrad", "LocalSGD(every=2)"])
@pytest.mark.parametrize("kind", ["link", "hooks"])
def test_an_optimizer_that_steps_in_backward_is_refused_at_its_first_step(
    three_ranks: Ranks, spec: str, kind: str
) -> None:
    """It would step by the gradient of one rank, before the exchange."""
    for told, error in three_ranks(in_backward, spec, kind):
        assert told.startswith(("IncompatibleError", "RuntimeError")), told
        assert "a step of SGD: SGD steps parameter '" in error
        assert "during the backward pass, before " in error


@pytest.mark.parametrize("kind", ["before", "before, link"])
def test_optimizers_that_were_put_into_backward_are_refused_before_the_link_is_built(
    three_ranks: Ranks, kind: str
) -> None:
    for told, _ in three_ranks(in_backward, "terngrad", kind):
        assert told.startswith("IncompatibleError: ")
        assert "parameter '0.weight' has an optimizer that steps during the backward pass" in told


def test_an_optimizer_fused_into_ddps_own_hook_is_refused(three_ranks: Ranks) -> None:
    for told, _ in three_ranks(in_backward, "terngrad", "fused"):
        assert "already exchanges by another communication hook" in told
    for told, _ in three_ranks(in_backward, "terngrad", "after"):
        # By DDP itself. One that was built for GPUs, where there is none, fails before that with errors of CUDA.
        known = "register_comm_hook or register_builtin_comm_hook can only be called once"
        assert known in told or (torch.backends.cuda.is_built() and told != "accepted")


def test_fsdp2_exchanges_a_gradient_before_it_steps_by_it(three_ranks: Ranks) -> None:
    assert three_ranks(in_backward, "qsgd", "sharded") == [("accepted", "None")] * 3
