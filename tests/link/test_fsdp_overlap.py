"""Exchanges of FSDP2's units beside its backward pass: when they are waited for, and that no bit depends on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

import gradwire as gw
from gradwire.link.adapters.fsdp import IN_FLIGHT
from gradwire.link.adapters.fsdp_pending import Pending, PendingTensor
from ranks import Ranks, fresh_ranks, wait_until_watched
from sharded import kept_mesh, loss_of, meshes, sharded, shards_of

pytestmark = pytest.mark.ranks

KINDS = ("shards", "replicas", "replicas of one shard", "replicas by a group")


def attached(kind: str, spec: str, **options: Any) -> tuple[Any, gw.Link]:
    """Return a model on four ranks, and its link; options of ``fully_shard`` begin with ``shard_``."""
    flat, mesh = meshes()
    own = {name.removeprefix("shard_"): options.pop(name) for name in list(options) if name.startswith("shard_")}
    if kind == "replicas by a group":
        options["process_group"] = mesh["replicate"].get_group()
    where = {
        "shards": flat,
        "replicas": mesh,
        "replicas by a group": mesh["shard"],
        "replicas of one shard": kept_mesh(("replicate", 4), ("shard", 1)),
    }[kind]
    model = sharded(where, **own)
    return model, gw.attach(model, spec, min_numel=256, **options)


def parts_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def wait_in_place(model: nn.Module) -> None:
    """Let every exchange be waited for where it is started, as FSDP2's own are."""

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    for part in parts_of(model):
        part._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm.allocate = allocate


# ---------------------------------------------------------------------- when


class Noted:
    """A future that notes when it is waited for."""

    def __init__(self, future: Any, note: Callable[[], None]) -> None:
        self._future, self._note = future, note

    def wait(self) -> Any:
        self._note()
        return self._future.wait()


def order_of_events(kind: str) -> list[str]:
    """Return what happens in a backward pass through six blocks, in its order."""
    flat, mesh = meshes()
    model, events = sharded(flat if kind == "shards" else mesh, blocks=6), list[str]()
    link = gw.attach(model, "qsgd", min_numel=256)
    exchange = link.exchange

    def noted(index: int, names: Sequence[str], flat: torch.Tensor, last: bool) -> Any:
        events.append(f"start {index}")
        return Noted(exchange(index, names, flat, last), lambda: events.append(f"wait {index}"))

    link.exchange = noted  # type: ignore[method-assign]
    for number, block in enumerate(model.blocks):
        block.register_full_backward_pre_hook(lambda *_, number=number: events.append(f"block {number}"))
    loss_of(model, dist.get_rank(), 0).backward()
    link.close()
    return events


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_backward_goes_on_while_at_most_three_units_are_exchanged(four_ranks: Ranks, kind: str) -> None:
    assert IN_FLIGHT == 3
    expected = """
        block 5, start 0, block 4, start 1, block 3, start 2,
        block 2, wait 0, start 3, block 1, wait 1, start 4, block 0, wait 2, start 5,
        wait 3, start 6, wait 4, wait 5, wait 6
    """
    for events in four_ranks(order_of_events, kind):
        assert ", ".join(events) == " ".join(expected.split())


class Work(dist.Work):
    """A gather that notes when it is waited for."""

    def __init__(self, work: Any, note: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._note = work, note

    def wait(self, *given: Any) -> bool:
        self._note()
        return self._work.wait(*given)  # type: ignore[no-any-return]

    def is_completed(self) -> bool:
        return self._work.is_completed()  # type: ignore[no-any-return]


def order_of_gathers(what: str) -> list[str]:
    """Return when units are gathered in a step, where each prefetches the one that comes next in forward."""
    flat, mesh = meshes()
    model, events = sharded(mesh if what == "method" else flat, blocks=3), list[str]()
    for part, following in zip((model, *model.blocks), model.blocks):
        part.set_modules_to_forward_prefetch([following])
    link: Any = gw.attach(model, "terngrad") if what == "method" else gw.compress_weights(model)

    def begin(number: int, native: Any, *given: Any) -> Work:
        events.append(f"gather {number}")
        return Work(native(*given), lambda: events.append(f"use {number}"))

    for number, block in enumerate(model.blocks):
        if what == "method":
            named = block._get_fsdp_state()._fsdp_param_group._all_gather_comm
            native = named.native
            named.native = partial(begin, number, native)
            named.native.allocate = native.allocate
        block.norm1.register_forward_hook(lambda *_, number=number: events.append(f"forward {number}"))
        block.down.register_full_backward_pre_hook(lambda *_, number=number: events.append(f"backward {number}"))
    if what == "weights":
        gather = link.start_gather

        def started(name: str, own: torch.Tensor) -> Callable[[], torch.Tensor]:
            if name == "the root":
                return gather(name, own)
            number = int(name.removeprefix("blocks."))
            events.append(f"gather {number}")
            ended = gather(name, own)
            return lambda: (events.append(f"use {number}"), ended())[1]

        link.start_gather = started
    loss_of(model, dist.get_rank(), 0).backward()
    link.close()
    return events


@pytest.mark.parametrize("what", ["method", "weights"])
def test_the_next_units_gather_runs_beside_this_ones_passes(four_ranks: Ranks, what: str) -> None:
    """FSDP2 gathers the next unit before a backward pass anyway, and before a forward pass if it is told to."""
    expected = """
        gather 0, use 0, gather 1, forward 0, use 1, gather 2, forward 1, use 2, forward 2,
        gather 2, use 2, gather 1, backward 2, use 1, gather 0, backward 1, use 0, backward 0
    """
    for events in four_ranks(order_of_gathers, what):
        assert ", ".join(events) == " ".join(expected.split())


# ---------------------------------------------------------------------- bits

SETTINGS: dict[str, dict[str, Any]] = {
    "one lane": {"lanes": 1},
    "two lanes": {},
    "four lanes": {"lanes": 4},
    "added to gradients": {},
    "without synchronising": {},
    "without an all-reduce": {},
    "bfloat16": {"shard_mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "float16": {"shard_mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "bfloat16 reduced in float32": {
        "shard_mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "divided by 3": {},
    "sums": {},
    "kept after forward": {"shard_reshard_after_forward": False},
    "offloaded": {"shard_offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
ALIKE = ("two lanes", "one lane", "four lanes", "kept after forward", "offloaded")
"""Settings that change no bit, so that what is waited for in place in the first is compared with all of them."""


def trained(kind: str, spec: str, setting: str, in_place: bool) -> list[torch.Tensor]:
    """Take two steps; return gradients, weights and norms of this rank."""
    rank, options = dist.get_rank(), SETTINGS[setting]
    model, link = attached(kind, spec, **options)
    if in_place:
        wait_in_place(model)
    for part in parts_of(model):
        if setting == "divided by 3":
            part.set_gradient_divide_factor(3.0)
        # Gloo's own reduce-scatter multiplies nothing.
        if setting == "sums" or (setting == "divided by 3" and kind != "shards"):
            part.set_force_sum_reduction_for_comms(True)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), list[torch.Tensor]()
    for step in range(2):
        if setting != "added to gradients":
            optimizer.zero_grad()
        if setting.startswith("without"):
            chosen = model.set_requires_gradient_sync if "sync" in setting else model.set_requires_all_reduce
            for last in (False, False, True):
                chosen(last)
                loss_of(model, rank, 10 * step + int(last)).backward()
        else:
            loss_of(model, rank, step).backward()
        found += shards_of(model).values()
        assert all(type(p.grad.to_local()) is torch.Tensor for p in model.parameters())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())  # type: ignore[attr-defined]
        optimizer.step()
    found += [p.detach().to_local().clone() for p in model.parameters()]
    link.close()
    return found


def same_bits(kind: str, spec: str, settings: Sequence[str]) -> list[str]:
    """Return in which settings waiting later gives other bits than waiting in place."""
    wrong, in_place = [], cache(partial(trained, kind, spec, in_place=True))
    for setting in settings:
        late, expected = trained(kind, spec, setting, False), in_place(ALIKE[0] if setting in ALIKE else setting)
        if len(late) < 90 or not all(torch.equal(a, b) for a, b in zip(late, expected, strict=True)):
            wrong.append(setting)
    return wrong


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_waiting_later_changes_no_bit_in_any_mode(four_ranks: Ranks, kind: str) -> None:
    settings = [s for s in SETTINGS if kind == "replicas" or s != "without an all-reduce"]
    assert four_ranks(same_bits, kind, "errorfeedback", settings) == [[]] * 4


# The last two kinds are replicas that are told in other ways: what a method makes of their gradients is the same code.
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *((kind, spec) for kind in KINDS[:2] for spec in ("fp32", "bf16", "terngrad", "EDEN(bits=4)")),
        *((kind, spec) for kind in KINDS[2:] for spec in ("fp32", "terngrad")),
    ],
)
def test_waiting_later_changes_no_bit_of_any_kind_of_method(four_ranks: Ranks, kind: str, spec: str) -> None:
    assert four_ranks(same_bits, kind, spec, ["two lanes"]) == [[]] * 4


# ---------------------------------------------------------------------- reading inside of backward


def read_early(kind: str) -> tuple[list[str], bool]:
    """Read the gradients of each block in the hook of the one before; tell their kind, and whether they were final."""
    rank = dist.get_rank()
    model, link = attached(kind, "terngrad")
    kinds, seen = list[str](), dict[str, torch.Tensor]()

    def look(*_: Any) -> None:
        for name, p in model.blocks[1].named_parameters():
            local = p.grad._local_tensor
            kinds.append(type(local).__name__)
            seen[name] = local.clone()
            seen[f"{name} as an array"] = torch.from_numpy(p.grad.to_local().numpy().copy())

    model.blocks[0].register_full_backward_pre_hook(look)
    loss_of(model, rank, 0).backward()
    final = {name: p.grad.to_local() for name, p in model.blocks[1].named_parameters()}
    alike = all(torch.equal(value, final[name.removesuffix(" as an array")]) for name, value in seen.items())
    link.close()
    return kinds, alike


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_a_gradient_that_is_read_in_backward_is_waited_for(four_ranks: Ranks, kind: str) -> None:
    for kinds, alike in four_ranks(read_early, kind):
        # The first one that is read ends the exchange of its unit.
        assert kinds == ["PendingTensor"] + ["Tensor"] * 11
        assert alike


def stepped_in_backward(kind: str, in_backward: bool) -> list[torch.Tensor]:
    model, link = attached(kind, "errorfeedback")
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    if in_backward:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(model, dist.get_rank(), number).backward()
        if not in_backward:
            for p in model.parameters():
                step(p)
    link.close()
    return [p.detach().to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_an_optimizer_in_backward_steps_by_the_mean(four_ranks: Ranks, kind: str) -> None:
    after, within = (four_ranks(stepped_in_backward, kind, when) for when in (False, True))
    for one, other in zip(after, within):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def interrupted(kind: str, in_place: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Leave a backward pass by an exception of one's own, with an exchange under way, and return the next one's end."""
    rank = dist.get_rank()
    model, link = attached(kind, "errorfeedback")
    if in_place:
        wait_in_place(model)
    handle = model.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, rank, 5).backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    link.close()
    return link.round, shards_of(model)


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_a_pass_that_was_left_ends_with_the_next_one(four_ranks: Ranks, kind: str) -> None:
    late, in_place = (four_ranks(interrupted, kind, where) for where in (False, True))
    for (rounds, found), (expected_rounds, expected) in zip(late, in_place):
        assert rounds == expected_rounds == 2
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


# ---------------------------------------------------------------------- failures


def broken(kind: str) -> tuple[str, str]:
    """Let rank 2 fail at the second unit of the second step, on its lane; give the error and the link's own."""
    from gradwire.methods.ternary.terngrad import TernaryCodec

    rank = dist.get_rank()
    model, link = attached(kind, "TernGrad(clip=2.5, share_scaler=False)")
    wait_until_watched()
    encode, calls = TernaryCodec.encode, [0]

    def failing(self: Any, *given: Any, **named: Any) -> Any:
        if rank == 2 and link.round == 1:
            calls[0] += 1
            if calls[0] == 2:
                raise KeyError("boom")
        return encode(self, *given, **named)

    TernaryCodec.encode = failing  # type: ignore[method-assign]
    for step in range(4):
        try:
            loss_of(model, rank, step).backward()
        except gw.ExchangeError as error:
            return str(error), str(link.error)
    return "no error", ""


@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.timeout(120)
def test_what_fails_in_the_background_is_raised_on_all_ranks_in_full(kind: str) -> None:
    """Long before the group's timeout. Ranks of other shards are told when those that have the error end by it."""
    with fresh_ranks(4, group_timeout_s=600) as ranks:
        ranks.start(broken, kind)
        first = range(4) if kind == "shards" else (0, 2)
        found = {rank: ranks.pipes[rank].recv() for rank in first if ranks.pipes[rank].poll(60)}
        for rank in found:
            ranks.pipes[rank].send(None)
        found |= {rank: ranks.pipes[rank].recv() for rank in {*range(4)} - {*first} if ranks.pipes[rank].poll(60)}
    assert sorted(found) == [0, 1, 2, 3]
    for rank, (outcome, value) in found.items():
        assert outcome == "ok", value
        error, kept = value
        assert "rank 2 failed at bucket" in error
        assert "round 1: KeyError: 'boom'" in error
        assert error.startswith("rank 2 failed" if rank == 2 else f"rank {rank} could not go on at ")
        assert error == kept


# ---------------------------------------------------------------------- the tensor


@contextlib.contextmanager
def under_way(plain: torch.Tensor, mean: torch.Tensor) -> Iterator[tuple[PendingTensor, list[str]]]:
    """A result that is written when it is waited for, and when that was."""
    pending, waits = Pending(), list[str]()

    def finish() -> None:
        waits.append("waited")
        plain.copy_(mean)

    pending.begin(finish)
    yield PendingTensor(plain, pending), waits


def test_views_casts_and_divisions_do_not_wait_and_come_in_their_order() -> None:
    mean = torch.arange(1.0, 13.0)
    with under_way(torch.zeros(12), mean) as (result, waits):
        result.div_(3.0)
        half = result.to(torch.bfloat16)
        view = torch.as_strided(half, (2, 3), (3, 1), 6)
        assert [type(t) for t in (half, view)] == [PendingTensor] * 2
        assert (view.shape, view.dtype, view.stride()) == ((2, 3), torch.bfloat16, (3, 1))
        assert waits == []
        expected = (mean / 3.0).to(torch.bfloat16)[6:].view(2, 3)
        assert torch.equal(view.clone(), expected)
        assert waits == ["waited"]
        assert type(view.t()) is torch.Tensor
        assert torch.equal(result.wait(), mean / 3.0)
        assert view.tolist() == expected.tolist()
        assert waits == ["waited"]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.norm(),
        lambda t: t.item() if t.numel() == 1 else t.sum().item(),
        lambda t: t.numpy().copy(),
        lambda t: torch.zeros(12).add_(t),
        lambda t: torch.cat([t[:3], torch.ones(2)]),
        lambda t: repr(t),
        lambda t: t.mul_(2.0),
        lambda t: torch._foreach_norm([torch.ones(2), t]),
    ],
)
def test_all_else_waits(read: Callable[[torch.Tensor], Any]) -> None:
    with under_way(torch.zeros(12), torch.arange(12.0)) as (result, waits):
        found, expected = read(result), read(torch.arange(12.0))
    assert waits == ["waited"]
    if not isinstance(expected, str):
        for one, other in zip(*(v if isinstance(v, (list, tuple)) else [v] for v in (found, expected))):
            assert bool((torch.as_tensor(one) == torch.as_tensor(other)).all())


def test_a_result_that_fails_fails_each_time_it_is_read() -> None:
    pending = Pending()
    result = PendingTensor(torch.zeros(3), pending)
    # Nothing is under way yet: it is an ordinary tensor.
    assert result.sum().item() == 0.0

    def finish() -> None:
        raise gw.ExchangeError("gone")

    pending.begin(finish)
    for _ in range(2):
        with pytest.raises(gw.ExchangeError, match="gone"):
            result.sum()
