"""Ranks whose parameters are meant to be equal: compared when a link is built, and every so many rounds."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.kernels.checksum.operations import _variant as checksum_loop
from gradwire.link.handshake import digest
from ranks import Ranks, fresh_ranks

EQUAL = (
    "fp32", "terngrad", "ef_signsgd", "powersgd", "local_sgd", "easgd", "diloco", "sparse_loco",
    "StreamingDiLoCo(every=4, fragments=2, delay=2)",
)  # fmt: skip


def test_a_digest_is_that_of_the_values_in_memory_order_of_any_type_and_layout() -> None:
    values = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert digest(values) == digest(values.clone()) == digest(nn.Parameter(values.reshape(-1)))
    # As a link compares strides, too, the same bytes in memory are the same values.
    assert digest(values.to(memory_format=torch.channels_last)) == digest(values.permute(0, 2, 3, 1).contiguous())
    changed = values.clone()
    changed[1, 2, 1, 1] = 23.5
    assert digest(changed) != digest(values)
    gaps = torch.arange(48.0)[::2]
    assert digest(gaps) == digest(gaps.clone())
    half = values.to(torch.bfloat16)
    assert digest(half) == digest(half.clone()) != digest(half * 2)
    assert digest(torch.tensor(3.0)) == digest(torch.tensor([3.0]))
    assert digest(torch.zeros(0, 4)) == digest(torch.zeros(0)) == 0


def built_apart() -> dict[str, str]:
    """Build links on parameters of which one differs in its last bits on rank 2."""
    found = {}
    for spec in (*EQUAL, "dpsgd"):
        first, second = nn.Parameter(torch.ones(40, 30)), nn.Parameter(torch.ones(30, dtype=torch.bfloat16))
        if dist.get_rank() == 2:
            second.data[7] += 1 / 128
        optimizer = torch.optim.SGD([first, second], lr=0.1)
        try:
            link = gw.Link([("w", first), ("b", second)], spec, optimizer=optimizer)
        except gw.GradwireError as error:
            found[spec] = f"{type(error).__name__}: {error}"
        else:
            link.close()
            found[spec] = "accepted"
    return found


def test_a_link_refuses_parameters_that_differ_by_rank_unless_ranks_stay_different(three_ranks: Ranks) -> None:
    """Of a method with local steps they would differ for ever, of any other by as much as they did at first."""
    for found in three_ranks(built_apart):
        assert found.pop("dpsgd") == "accepted"
        for spec in EQUAL:
            told = "RankMismatchError: rank 2 differs from rank 0 in \"values of parameter 'b'\": rank 2 has checksum "
            assert found[spec].startswith(told), spec


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def backward(module: Any, step: int, parts: int = 1) -> None:
    for part in range(parts):
        seed = 100 * step + 10 * part + dist.get_rank()
        rows = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
        with module.no_sync() if part < parts - 1 else contextlib.nullcontext():
            module(rows).square().mean().backward()


def drifting(spec: str, parts: int, leaves_out: int | None, options: dict[str, Any]) -> tuple[int, str]:
    """Train; rank 1 leaves out one optimizer step. Return how far that came, and the link's error."""
    module = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    link = gw.attach(module, spec, min_numel=0, check_every=3, **options)
    step = -1
    try:
        for step in range(12):
            optimizer.zero_grad()
            backward(module, step, parts)
            if dist.get_rank() != 1 or step != leaves_out:
                optimizer.step()
    except Exception:
        return step, f"{type(link.error).__name__}: {link.error}"
    finally:
        link.close()
    return step + 1, str(link.error)


@pytest.mark.ranks
@pytest.mark.parametrize(("spec", "parts"), [("terngrad", 1), ("fp32", 2), ("ErrorFeedback(TopK())", 1), ("cat", 1)])
def test_a_step_that_a_rank_leaves_out_is_an_error_on_all_ranks(spec: str, parts: int) -> None:
    with fresh_ranks(3) as ranks:
        found = ranks(drifting, spec, parts, 4, {})
    for rank, (step, error) in enumerate(found):
        # Compared at the beginning of round 6, judged at that of round 7.
        assert step == 7, error
        assert error.startswith(f"RankMismatchError: rank {rank}, "), error
        assert "at the beginning of round 6, parameter '" in error
        assert " of rank 1 differed from that of ranks 0, 2." in error


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("terngrad", {"warmup_steps": 4}),
        ("dgc", {}),
        ("EDEN(bits=1)", {"fallback": "bf16", "fallback_limit": 0.1}),
        ("auto", {}),
    ],
)
def test_ranks_that_step_alike_pass(three_ranks: Ranks, spec: str, options: dict[str, Any]) -> None:
    assert set(three_ranks(drifting, spec, 2, None, options)) == {(12, "None")}


def compiled_late(spec: str, options: dict[str, Any]) -> tuple[int, int]:
    """Return how often the loop of checksums was made ready by attach, and how often by then and a dozen rounds."""
    module = DistributedDataParallel(nn.Sequential(small(), nn.BatchNorm1d(5)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    checksum_loop.cache_clear()
    link = gw.attach(module, spec, optimizer=optimizer, min_numel=0, **options)
    before = checksum_loop.cache_info().misses
    for step in range(12):
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()
    link.close()
    return before, checksum_loop.cache_info().misses


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("fp32", {"check_every": 3}),
        ("fp32", {"fallback": "bf16", "fallback_limit": 0.1}),
        ("fp16", {}),
        ("LocalSGD(every=4)", {}),
        ("EASGD(every=4)", {}),
        ("Auto(candidates=('fp32', 'bf16'))", {}),
    ],
)
def test_nothing_is_compiled_by_a_message_between_rounds(
    three_ranks: Ranks, spec: str, options: dict[str, Any]
) -> None:
    """Methods without kernels compile no checksums for payloads; on a new machine that would be a stall of seconds."""
    for before, after in three_ranks(compiled_late, spec, options):
        assert before == after


def apart(spec: str, changes: bool) -> list[str]:
    """Train by local steps, and change a global parameter of rank 0 behind the link's back; return all errors."""
    module = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    link = gw.attach(module, spec, optimizer=optimizer, min_numel=0, check_every=2)
    told = "None"
    try:
        for step in range(16):
            optimizer.zero_grad()
            backward(module, step)
            if changes and step == 7 and dist.get_rank() == 0:
                next(iter(link.local.parameters.held.values()))[3] += 1.0  # type: ignore[union-attr]
            optimizer.step()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        link.close()
    return [told, str(link.error)]


LOCAL = ("DiLoCo(every=2)", "EASGD(every=2)", "StreamingDiLoCo(every=4, fragments=2, delay=1)")


@pytest.mark.ranks
@pytest.mark.parametrize("spec", LOCAL[:2])
def test_of_local_steps_the_global_parameters_are_compared(spec: str) -> None:
    with fresh_ranks(3) as ranks:
        for rank, (told, error) in enumerate(ranks(apart, spec, True)):
            assert told == f"RankMismatchError: {error}"
            assert f"rank {rank}, bucket 0" in error
            assert "at the beginning of round 4, parameter '0.weight' of rank 0 differed from " in error


@pytest.mark.parametrize("spec", LOCAL)
def test_local_steps_between_exchanges_are_no_difference(three_ranks: Ranks, spec: str) -> None:
    assert three_ranks(apart, spec, False) == [["None", "None"]] * 3


def ends_apart(spec: str, steps: int) -> list[bool]:
    """Return whether this rank has parameters of its own: after training, a synchronisation, and a change of one."""
    module = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    link = gw.attach(module, spec, optimizer=optimizer, min_numel=0)
    for step in range(steps):
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()
    found = [link.local.parameters.is_apart()]
    link.synchronise()
    found.append(link.local.parameters.is_apart())
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    found.append(link.local.parameters.is_apart())
    link.close()
    return found


@pytest.mark.parametrize(
    ("spec", "steps", "found"),
    [
        (LOCAL[0], 4, [False, False]),
        (LOCAL[0], 5, [True, False]),
        (LOCAL[2], 4, [True, False]),
        ("DPSGD(every=2)", 4, [True, False]),
    ],
)
def test_whether_a_rank_has_parameters_of_its_own_is_known(
    three_ranks: Ranks, spec: str, steps: int, found: list[bool]
) -> None:
    assert three_ranks(ends_apart, spec, steps) == [[*found, True]] * 3


def resumed() -> list[str]:
    """Continue from a state after a difference was gathered: it is no longer there."""
    module = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    link = gw.attach(module, "terngrad", min_numel=0, check_every=2)
    kept = {name: p.clone() for name, p in module.state_dict().items()}, link.state_dict()
    for step in range(6):
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()
        if step == 1 and dist.get_rank() == 1:
            with torch.no_grad():
                next(module.parameters()).add_(1.0)
        if step == 2:
            module.load_state_dict(kept[0])
            link.load_state_dict(kept[1])
    link.close()
    return [str(link.error), str(link.round)]


def test_a_state_that_is_loaded_ends_what_was_gathered_before(three_ranks: Ranks) -> None:
    assert three_ranks(resumed) == [["None", "3"]] * 3


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("dpsgd", {"check_every": 5}, r"check_every=5 compares .*DPSGD.* each rank has its own: leave it out"),
        (
            "EDEN()",
            {"check_every": 5, "collective": "reduce_scatter"},
            "each rank has a shard of its own: leave it out",
        ),
        ("fp32", {"check_every": -1}, "a whole number of at least 0 is needed, not -1"),
    ],
)
def test_what_has_no_replicas_refuses_to_compare_them(method: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(gw.GradwireError, match=told):
        gw.check_options(method, **options)
