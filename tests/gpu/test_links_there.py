"""Links whose gradients lie on a GPU have the bits of links in main memory; three ranks share the GPU, over Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import test_devices
import torch
import torch.distributed as dist
from real_gpu import INSTEAD, OnTheGPU, parameters_of
from test_devices import ON_DEVICE, SHAPES

import gradwire as gw
from gradwire.methods.registry import METHODS
from ranks import fresh_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def ranks(three_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> OnTheGPU:
    @contextmanager
    def others(*arguments: Any, **options: Any) -> Iterator[OnTheGPU]:
        with fresh_ranks(*arguments, **options) as fresh:
            yield OnTheGPU(fresh)

    monkeypatch.setattr(test_devices, "fresh_ranks", others)
    for name, value in INSTEAD.items():
        monkeypatch.setattr(test_devices, name, value)
    return OnTheGPU(three_ranks)


@pytest.mark.parametrize("method", ["terngrad", "TopK(density=0.1)", "diana"])
def test_any_method_is_exchanged_by_copies_in_main_memory(ranks: Any, method: str) -> None:
    test_devices.test_any_method_is_exchanged_by_copies_in_main_memory(ranks, method)


@pytest.mark.parametrize("method", ON_DEVICE)
def test_payloads_made_on_the_gpu_have_the_same_bits(ranks: Any, method: str) -> None:
    test_devices.test_payloads_made_on_the_device_have_the_same_bits(ranks, method)


OTHERS = [
    method
    for method in (kind() for kind in METHODS)
    if not (method.traits.needs_optimizer or method.traits.outcomes_differ or method.traits.sharded)
]


@pytest.mark.parametrize("method", OTHERS, ids=repr)
def test_every_method_has_the_same_bits_wherever_it_computes(ranks: Any, method: gw.Method) -> None:
    found = test_devices.same(ranks, repr(method), {})
    assert [record["device"] for _, record, _ in found] == ["cuda:0"] * 3


@pytest.mark.parametrize("method", ["ErrorFeedback(compressor=QSGDinf())", "EF21(compressor=QSGDinf())"])
def test_a_round_with_an_infinity_leaves_no_trace(ranks: Any, method: str) -> None:
    test_devices.test_a_round_with_an_infinity_leaves_no_trace_on_a_device(ranks, method)


@pytest.mark.parametrize(("kind", "what"), [("body", "its checksum differs"), ("head", "round is 9, expected 1")])
@pytest.mark.parametrize("method", ["terngrad", "QSGD()"])
def test_a_payload_that_changed_on_the_way_is_told_before_the_next_round(
    ranks: Any, method: str, kind: str, what: str
) -> None:
    test_devices.test_a_payload_that_changed_on_the_way_to_a_device_is_told_before_the_next_round(
        ranks, method, kind, what
    )


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("method", ["signsgd", "signum"])
def test_ranks_that_do_not_vote_are_told_apart(ranks: Any, method: str, collective: str) -> None:
    test_devices.test_ranks_that_do_not_vote_are_told_apart_on_a_device(ranks, method, collective)


@pytest.mark.parametrize("method", ["QSGD()", "eden", "ErrorFeedback(compressor=QSGDinf())"])
def test_shards_have_the_same_bits(ranks: Any, method: str) -> None:
    test_devices.test_shards_on_a_device_have_the_same_bits_and_all_ranks_the_same_operations(ranks, method)


def test_where_bits_are_compared_the_cause_comes_first(ranks: Any) -> None:
    test_devices.test_where_bits_are_compared_the_cause_comes_first()


def unwaited(method: str) -> int:
    """Exchange rounds in which whatever makes this process wait for the GPU raises; return how many."""
    parameters = parameters_of(SHAPES, True)
    link = gw.Link(parameters.items(), method, min_numel=95, seed=4)
    gradient = torch.Generator(device="cuda").manual_seed(dist.get_rank())
    rounds = 0
    # Rounds 0, 10 and 30 are measured.
    for step in range(8):
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=gradient, device="cuda")
        if step > 2:
            torch.cuda.set_sync_debug_mode("error")
            rounds += 1
        try:
            link.reduce_()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    link.close()
    return rounds


@pytest.mark.parametrize("method", ON_DEVICE)
def test_no_thread_waits_for_the_gpu_but_for_copies(three_ranks: Any, method: str) -> None:
    """PyTorch raises where a call would; events, for which ``staged`` waits, are no such calls."""
    assert three_ranks(unwaited, method) == [5, 5, 5]
