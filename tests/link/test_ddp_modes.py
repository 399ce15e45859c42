"""Every mode of DDP against a run that knows nothing of DDP: the same bits on all ranks."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.link.accumulation import LOOKS, Accumulation, UsedOutcome
from modes import MODES, SMALL_BUCKETS_MB, STEPS, run_mode, train
from oracle import batch, digest, layers, simulated_run, square_loss

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("mode", MODES)
def test_mode_gives_the_bits_of_the_simulation(three_ranks: Any, mode: str) -> None:
    ddp_options, options, micro_steps = MODES[mode]
    found = three_ranks(run_mode, "terngrad", ddp_options, options, micro_steps)
    expected = digest(simulated_run(layers(), square_loss, "terngrad", 3, STEPS, micro_steps=micro_steps))
    assert {d for d, _ in found} == {expected}


@pytest.mark.parametrize("method", ["TernGrad(clip=None)", "TernGrad(share_scaler=False)"])
@pytest.mark.parametrize("exclude", [(), ("5.*",)])
def test_variants_give_the_bits_of_the_simulation(three_ranks: Any, method: str, exclude: tuple[str, ...]) -> None:
    options = {"exclude": exclude, "warmup_steps": 2}
    found = three_ranks(run_mode, method, {"bucket_cap_mb": 0.05}, options, 1)
    expected = digest(simulated_run(layers(), square_loss, method, 3, STEPS, **options))
    assert {d for d, _ in found} == {expected}
    assert ("5.weight" in found[0][1]["dense_parameters"]) is bool(exclude)


# ---------------------------------------------------------------------- parameters that are not used


class Branches(nn.Module):
    """Two branches and a dead parameter; which branch runs depends on rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.dead = layers(2, 48, 1), layers(2, 48, 2), layers(1, 48, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x)


def branch_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    left = rank == 0 or step % 2 == 0  # step 0: `right` unused on all ranks; step 1: on rank 0 alone
    return module(batch(rank, step, (8, 48)), left).square().mean()


def run_branches(method: str) -> tuple[str, bool]:
    import torch.distributed as dist

    module = Branches()
    ddp = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.01)
    link = gw.attach(ddp, method)
    train(module, ddp, branch_loss, dist.get_rank(), STEPS)
    link.close()
    return digest(module), all(p.grad is None for p in module.dead.parameters())


@pytest.mark.parametrize("method", ["terngrad", "signsgd"])
def test_parameters_unused_on_one_rank_and_on_all(three_ranks: Any, method: str) -> None:
    found = three_ranks(run_branches, method)
    expected = digest(simulated_run(Branches(), branch_loss, method, 3, STEPS))
    assert found == [(expected, True)] * 3


# ---------------------------------------------------------------------- memory formats and dtypes


class Pictures(nn.Module):
    """A convolution whose weight lies in channels_last order, and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.conv, self.head = nn.Conv2d(4, 32, 3), layers(1, 32, 4)
        with torch.no_grad():
            for p in self.conv.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]


def picture_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(batch(rank, step, (4, 4, 8, 8))).square().mean()


def run_pictures(bucket_cap_mb: float) -> tuple[str, bool]:
    import torch.distributed as dist

    module = Pictures()
    ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
    link = gw.attach(ddp, "terngrad")
    train(module, ddp, picture_loss, dist.get_rank(), STEPS)
    link.close()
    return digest(module), module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bucket_cap_mb", [0.003, 25])
def test_channels_last(three_ranks: Any, bucket_cap_mb: float) -> None:
    found = three_ranks(run_pictures, bucket_cap_mb)
    expected = digest(simulated_run(Pictures(), picture_loss, "terngrad", 3, STEPS))
    assert found == [(expected, True)] * 3


class Mixed(nn.Module):
    """A bfloat16 layer among float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low, self.last = layers(1, 64, 6), layers(1, 64, 7).bfloat16(), layers(1, 64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.low(self.first(x).bfloat16()).float())  # type: ignore[no-any-return]


def run_mixed(method: str) -> tuple[str, str]:
    import torch.distributed as dist

    module = Mixed()
    ddp = DistributedDataParallel(module)
    link = gw.attach(ddp, method)
    train(module, ddp, square_loss, dist.get_rank(), STEPS)
    link.close()
    return digest(module), str(module.low[0].weight.grad.dtype)


def test_bfloat16_layers(three_ranks: Any) -> None:
    found = three_ranks(run_mixed, "terngrad")
    expected = digest(simulated_run(Mixed(), square_loss, "terngrad", 3, STEPS))
    assert found == [(expected, "torch.bfloat16")] * 3


# ---------------------------------------------------------------------- uneven inputs, two modules, a sub-group


def run_join(check_every: int) -> tuple[str, int]:
    import torch.distributed as dist

    module = layers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
    link = gw.attach(ddp, "terngrad", check_every=check_every)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    rank = dist.get_rank()
    with ddp.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            square_loss(ddp, rank, step).backward()
            optimizer.step()
    rounds = link.traffic().rounds
    link.close()
    return digest(module), rounds


@pytest.mark.parametrize("check_every", [0, 1])
def test_join_with_uneven_inputs(three_ranks: Any, check_every: int) -> None:
    """Replicas are compared without those that have joined, which take no optimizer steps."""
    found = three_ranks(run_join, check_every)
    # DDP broadcasts the last rank's parameters at the end of join; all ranks took part in all rounds.
    assert len({d for d, _ in found}) == 1
    assert [rounds for _, rounds in found] == [7, 7, 7]


def accumulated(spec: str, way: str) -> tuple[str, bool]:
    """Take a step of two backward passes whose gradients are 1 and -3; return what was said, and if all signs are -."""
    module = nn.Linear(2048, 1, bias=False)
    nn.init.zeros_(module.weight)
    ones, told = torch.ones(1, 2048), ""
    if way == "loop":
        ddp, link = module, gw.Link(module.named_parameters(), spec)
    else:
        ddp = DistributedDataParallel(module)
        link = gw.attach(ddp, spec)
    try:
        for step in range(2):
            # A gradient that is not added to others, before these are cleared, changes nothing.
            torch.autograd.grad(module(ones).sum(), module.weight)
            if way == "no_sync":
                # Nor does a pass through the module whose gradients nobody uses.
                with ddp.no_sync():
                    ddp(5 * ones).sum().backward()
            ddp.zero_grad(set_to_none=step == 0)
            for scale in (1.0, -3.0):
                with ddp.no_sync() if way == "no_sync" and scale > 0 else nullcontext():
                    ddp(scale * ones).sum().backward()
                if way == "loop":
                    link.reduce_()
    except (RuntimeError, gw.GradwireError) as error:
        told = str(error)
    finally:
        link.close()
    return told, bool((module.weight.grad < 0).all())


@pytest.mark.parametrize("spec", ["signsgd", "ErrorFeedback(TopK(density=0.5), momentum=0.9)"])
@pytest.mark.parametrize("way", ["every pass", "loop"])
def test_accumulation_without_no_sync_is_refused_where_an_outcome_is_no_gradient(
    three_ranks: Any, spec: str, way: str
) -> None:
    for told, _ in three_ranks(accumulated, spec, way):
        assert "use module.no_sync() for all but the last" in told
        assert "or to what the program has put in its place" in told


@pytest.mark.parametrize(("spec", "way"), [("signsgd", "no_sync"), ("fp32", "every pass"), ("fp32", "loop")])
def test_other_accumulation_has_the_signs_of_the_sum(three_ranks: Any, spec: str, way: str) -> None:
    assert three_ranks(accumulated, spec, way) == [("", True)] * 3


def used_apart(way: str, spec: str) -> str:
    """Take steps by gradients that are put in place of outcomes, or of one layer alone; return what was said."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.ones(1, 64)
    if way == "replaced":
        ddp, link = module, gw.Link(module.named_parameters(), spec)
    else:
        ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
        link = gw.attach(ddp, spec)
    stepped = {"first layer": module[0], "last layer": module[1]}.get(way, module)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=1e-3)
    try:
        for _ in range(4):
            if way == "replaced":
                for p, g in zip(module.parameters(), torch.autograd.grad(module(x).sum(), [*module.parameters()])):
                    p.grad = g
                link.reduce_()
            else:
                optimizer.zero_grad()
                ddp(x).sum().backward()
            optimizer.step()
    except (RuntimeError, gw.GradwireError) as error:
        return str(error)
    finally:
        link.close()
    return ""


@pytest.mark.parametrize("way", ["replaced", "first layer", "last layer"])
def test_outcomes_that_no_step_uses_again_may_stay(three_ranks: Any, way: str) -> None:
    """They are replaced by other gradients, or are of a layer that no optimizer steps."""
    assert three_ranks(used_apart, way, "signsgd") == [""] * 3


def stepped(way: str, spec: str) -> list[str]:
    """Take three steps with several backward passes each; return the warnings that a link logged meanwhile."""
    module = nn.Linear(2048, 1, bias=False)
    ddp = DistributedDataParallel(module)
    link, told = gw.attach(ddp, spec), list[str]()
    optimizer, ones = torch.optim.SGD(module.parameters(), lr=1e-3), torch.ones(1, 2048)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    for _ in range(3):
        if way != "never cleared":
            optimizer.zero_grad(set_to_none=way != "set to zero")
        for scale in (1.0, 3.0):
            with ddp.no_sync() if way == "no_sync" and scale == 1 else nullcontext():
                ddp(scale * ones).sum().backward()
        if way != "unknown optimizer":
            optimizer.step()
        if "generator" in way:
            with ddp.no_sync() if "no_sync" in way else nullcontext():
                ddp(2 * ones).sum().backward()
    logging.getLogger("gradwire").removeHandler(handler)
    link.close()
    return told


@pytest.mark.parametrize("spec", ["ErrorFeedback(TopK(density=0.1))", "PowerSGD()", "DIANA()"])
@pytest.mark.parametrize("way", ["generator", "never cleared"])
def test_gradients_added_to_a_used_outcome_are_told_once(three_ranks: Any, way: str, spec: str) -> None:
    first, *others = three_ranks(stepped, way, spec)
    (sentence,) = [text for text in first if "an optimizer's step has used" in text]
    assert "a generator's through its discriminator, run it under discriminator.no_sync()" in sentence
    assert others == [[], []]


@pytest.mark.parametrize("way", ["every pass", "no_sync", "set to zero", "generator, no_sync", "unknown optimizer"])
def test_nothing_is_told_of_passes_that_one_step_uses(three_ranks: Any, way: str) -> None:
    for told in three_ranks(stepped, way, "ErrorFeedback(TopK(density=0.1))"):
        assert not any("an optimizer's step has used" in text for text in told)


def test_nothing_is_told_where_a_method_keeps_nothing(three_ranks: Any) -> None:
    assert not any("has used" in text for told in three_ranks(stepped, "generator", "terngrad") for text in told)


def test_a_used_outcome_is_looked_at_in_so_many_rounds_only() -> None:
    """On a device a look at its values waits for them."""
    p = nn.Parameter(torch.ones(4))
    optimizer, used = torch.optim.SGD([p], lr=0.1), UsedOutcome(p)
    for round in range(LOOKS + 1):
        p.sum().backward()
        assert not used.was_added
        used.begin_anew()
        optimizer.step()
        if round < LOOKS:
            optimizer.zero_grad(set_to_none=False)
    p.sum().backward()
    assert not used.was_added
    used.end()
    assert not p._backward_hooks


def test_a_parameter_that_the_pass_before_did_not_use_tells_nothing_of_accumulation() -> None:
    """It has no gradient yet, although those of the others were not cleared."""
    used, unused = (nn.Parameter(torch.ones(4)) for _ in range(2))
    accumulation = Accumulation(gw.method("signsgd"), {"used": used, "unused": unused})
    used.sum().backward()
    accumulation.refuse()
    accumulation.begin_anew()
    (used + unused).sum().backward()
    with pytest.raises(gw.IncompatibleError, match="added gradients to the outcome"):
        accumulation.refuse()
    used.grad = None
    (used + unused).sum().backward()
    accumulation.refuse()
    accumulation.end()
    assert not used._backward_hooks


def test_an_empty_parameter_tells_nothing_of_accumulation() -> None:
    """All of its values are zeros."""
    full, empty = nn.Parameter(torch.ones(1 << 18)), nn.Parameter(torch.ones(0))
    accumulation = Accumulation(gw.method("signsgd"), {"full": full, "empty": empty})
    (full.sum() + empty.sum()).backward()
    accumulation.begin_anew()
    (full.sum() + empty.sum()).backward()
    with pytest.raises(gw.IncompatibleError, match="added gradients to the outcome"):
        accumulation.refuse()
    accumulation.end()


def test_accumulation_is_noticed_after_a_round_that_was_repeated() -> None:
    """Members repeat a round with the gradients at hand."""
    p = nn.Parameter(torch.ones(4))
    accumulation = Accumulation(gw.method("signsgd"), {"p": p})
    p.sum().backward()
    for _ in range(2):
        accumulation.refuse()
        accumulation.begin_anew()
    p.sum().backward()
    with pytest.raises(gw.IncompatibleError, match="added gradients to the outcome"):
        accumulation.refuse()
    accumulation.end()


def run_join_with_local_steps(spec: str) -> str:
    import torch.distributed as dist

    ddp = DistributedDataParallel(layers())
    link = gw.attach(ddp, spec)
    try:
        with ddp.join():
            for step in range(1 + dist.get_rank()):
                square_loss(ddp, dist.get_rank(), step).backward()
    except (RuntimeError, gw.IncompatibleError) as error:
        return str(error)
    finally:
        link.close()
    return "accepted"


@pytest.mark.parametrize("spec", ["DiLoCo(every=3)", "DPSGD()"])
def test_join_beside_local_steps_is_refused_before_anybody_waits(three_ranks: Any, spec: str) -> None:
    for told in three_ranks(run_join_with_local_steps, spec):
        assert "leave out module.join(), and give all ranks the same number of batches" in told


def run_after_join(spec: str) -> tuple[int, str]:
    import torch.distributed as dist

    ddp = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join():
        for step in range(1 + dist.get_rank()):
            square_loss(ddp, dist.get_rank(), step).backward()
    link = gw.attach(ddp, spec)
    for step in range(3):
        square_loss(ddp, dist.get_rank(), step).backward()
        optimizer.step()
    link.close()
    return link.round, digest(ddp.module)


def test_local_steps_may_follow_a_join_that_has_ended(three_ranks: Any) -> None:
    found = three_ranks(run_after_join, "LocalSGD(every=3)")
    assert [rounds for rounds, _ in found] == [1] * 3
    assert len({d for _, d in found}) == 1


def run_lonely_vote() -> torch.Tensor:
    import torch.distributed as dist

    weight = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(weight.weight)
    ddp = DistributedDataParallel(weight)
    link = gw.attach(ddp, "signsgd")
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with ddp.join():
        for _ in range(1 + 2 * (rank == 2)):
            optimizer.zero_grad()
            ddp(torch.full((1, 64), -1.0)).sum().backward()
            optimizer.step()
    link.close()
    return weight.weight.detach().clone()


def test_ranks_that_have_joined_do_not_vote(three_ranks: Any) -> None:
    # Two of three have nothing to say in the last two rounds; counted as votes for +1 they would turn the third back.
    for found in three_ranks(run_lonely_vote):
        assert torch.equal(found, torch.full((1, 64), 3.0))


def run_two_modules() -> list[str]:
    import torch.distributed as dist

    modules = [layers(3, 64, 1), layers(3, 64, 2)]
    ddps = [DistributedDataParallel(m, bucket_cap_mb=SMALL_BUCKETS_MB) for m in modules]
    links = [gw.attach(d, "terngrad") for d in ddps]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        # One backward through both: their hooks interleave.
        sum(square_loss(d, dist.get_rank(), step) for d in ddps).backward()  # type: ignore[union-attr]
        optimizer.step()
    for link in links:
        link.close()
    return [digest(m) for m in modules]


def test_two_modules_in_one_process(three_ranks: Any) -> None:
    found = three_ranks(run_two_modules)
    expected = [
        digest(simulated_run(layers(3, 64, seed), square_loss, "terngrad", 3, STEPS, number=number))
        for number, seed in enumerate((1, 2))
    ]
    assert found == [expected] * 3


def run_sub_group() -> str | None:
    import torch.distributed as dist

    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    module = layers(3)
    ddp = DistributedDataParallel(module, process_group=group)
    link = gw.attach(ddp, "terngrad")
    train(module, ddp, square_loss, dist.get_rank(group), STEPS)
    link.close()
    return digest(module)


def test_sub_group(three_ranks: Any) -> None:
    expected = digest(simulated_run(layers(3), square_loss, "terngrad", 2, STEPS))
    assert three_ranks(run_sub_group) == [expected, None, expected]


# ---------------------------------------------------------------------- identity is DDP


def run_against_ddp(method: str | None, ddp_options: dict[str, Any]) -> str:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module = layers()
    ddp = DistributedDataParallel(module, **ddp_options)
    link = None
    if method == "torch's fp16 hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method is not None:
        link = gw.attach(ddp, method)
    train(module, ddp, square_loss, dist.get_rank(), STEPS)
    if link is not None:
        link.close()
    return digest(module)


def run_mixed_fp32(attach: bool) -> str:
    import torch.distributed as dist

    module = Mixed()
    ddp = DistributedDataParallel(module)
    link = gw.attach(ddp, "fp32") if attach else None
    train(module, ddp, square_loss, dist.get_rank(), STEPS)
    if link is not None:
        link.close()
    return digest(module)


def test_fp32_leaves_a_bfloat16_layer_as_ddp_does(three_ranks: Any) -> None:
    assert three_ranks(run_mixed_fp32, True) == three_ranks(run_mixed_fp32, False)


@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"bucket_cap_mb": SMALL_BUCKETS_MB},
        {"static_graph": True, "bucket_cap_mb": 0.05},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.05},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05},
    ],
)
def test_fp32_is_ddp_bit_for_bit(three_ranks: Any, ddp_options: dict[str, Any]) -> None:
    plain = three_ranks(run_against_ddp, None, ddp_options)
    ours = three_ranks(run_against_ddp, "fp32", ddp_options)
    assert ours == plain
    assert len(set(ours)) == 1


def test_fp16_is_torch_s_hook_bit_for_bit(three_ranks: Any) -> None:
    options = {"bucket_cap_mb": 0.05}
    assert three_ranks(run_against_ddp, "fp16", options) == three_ranks(run_against_ddp, "torch's fp16 hook", options)


# ---------------------------------------------------------------------- order


def run_many_buckets() -> tuple[str, dict[str, int]]:
    import torch.distributed as dist

    module = layers(20, 32)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.004)
    link = gw.attach(ddp, "terngrad", lanes=3, collective="two_shot", min_numel=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(24):
        optimizer.zero_grad()
        ddp(batch(dist.get_rank(), step, (4, 32))).square().mean().backward()
        optimizer.step()
    record = link.record()["collectives"]
    link.close()
    return digest(module), record


def test_twenty_small_buckets_two_phases_many_steps(three_ranks: Any) -> None:
    found = three_ranks(run_many_buckets)
    assert len({d for d, _ in found}) == 1
    # One bucket before the rebuild, at least twenty after it.
    assert found[0][1]["two_shot"] >= 21
