"""What ``attach`` hands on, and what DDP's hook makes of a bucket: without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from alone import group_of_one
from gradwire.exchange.planning import Options
from gradwire.link.adapters import ddp as adapter
from gradwire.link.checks import caution_about_unused
from gradwire.link.failures import WarnOnce

OPTIONS: dict[str, Any] = {
    "lanes": 3,
    "grad_scaler": False,
    "optimizer": "an optimizer",
    "collective": "all_gather",
    "exclude": ("0.*",),
    "min_numel": 7,
    "warmup_steps": 3,
    "seed": 5,
    "check": True,
    "check_every": 9,
    "fallback": "bf16",
    "fallback_limit": 2.5,
    "backend": "reference",
    "transport": "gloo",
    "chunk_numel": 80,
}
"""A value for each option that differs from what it is by default."""


class FakeLink:
    """Remembers what it was built with, and the buckets that it was handed."""

    built: Any = None

    def __init__(self, parameters: Any, method: Any, **options: Any) -> None:
        self.rank, self.world_size, self.method = 1, 4, gw.method(method)
        self._runtime = SimpleNamespace(warnings=WarnOnce())
        self.buckets: list[tuple[int, list[str], int, bool]] = []
        self._parameters = dict(parameters)
        FakeLink.built = list(self._parameters), method, options

    def exchange(self, index: int, names: list[str], flat: torch.Tensor, last: bool) -> Any:
        self.buckets.append((index, names, flat.numel(), last))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedDataParallel]:
    """A module in a group of this process alone; each parameter has a bucket of its own."""
    monkeypatch.setattr(adapter, "Link", FakeLink)
    inner = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
    with group_of_one():
        yield DistributedDataParallel(inner, bucket_cap_mb=1e-4)


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_every_option_reaches_the_link(module: DistributedDataParallel) -> None:
    gw.attach(module, "qsgd", **OPTIONS)
    names, method, given = FakeLink.built
    assert (names, method) == (NAMES, "qsgd")
    assert given == {**OPTIONS, "group": module.process_group}


def test_without_words_all_is_as_a_link_has_it(module: DistributedDataParallel) -> None:
    gw.attach(module, "qsgd")
    defaults = gw.Link.__init__.__kwdefaults__
    *_, given = FakeLink.built
    known = Options()
    for name, value in given.items():
        if name != "group":
            assert value == (defaults[name] if name in defaults else getattr(known, name)), name


def test_buckets_are_handed_over_whole_by_name_and_the_last_one_is_said(module: DistributedDataParallel) -> None:
    link: Any = gw.attach(module, "qsgd")
    for _ in range(2):
        link.buckets.clear()
        module(torch.randn(8, 4)).sum().backward()
    assert sorted(name for _, names, _, _ in link.buckets for name in names) == sorted(NAMES)
    sizes = {name: p.numel() for name, p in module.module.named_parameters()}
    assert [sum(sizes[n] for n in names) for _, names, _, _ in link.buckets] == [n for *_, n, _ in link.buckets]
    assert len(link.buckets) > 1
    assert [index for index, *_ in link.buckets] == list(range(len(link.buckets)))
    assert [last for *_, last in link.buckets] == [False] * (len(link.buckets) - 1) + [True]


def test_the_bucket_itself_is_handed_over() -> None:
    """What the link makes of it is what DDP sees."""
    flat, taken = torch.zeros(5), list[torch.Tensor]()
    link: Any = SimpleNamespace(exchange=lambda index, names, given, last: taken.append(given))
    state = object.__new__(adapter._Hooked)
    state.link, state.names, state.module = link, {}, lambda: None
    bucket: Any = SimpleNamespace(buffer=lambda: flat, parameters=list, index=lambda: 0, is_last=lambda: True)
    adapter._exchange(state, bucket)
    assert taken[0] is flat


def test_buffers_are_counted_as_their_broadcast_sends_them(module: DistributedDataParallel) -> None:
    link: Any = gw.attach(module, "qsgd")
    size = 2 * 300 * 4 + 8
    # Rank 1 of 4 passes one copy on, before each forward that synchronises.
    for expected in (1, 2):
        module(torch.randn(8, 4)).sum().backward()
        assert link.buffer_bytes() == expected * size
    with module.no_sync():
        module(torch.randn(8, 4)).sum().backward()
        module(torch.randn(8, 4)).sum().backward()
    # The first of these forwards still follows one that synchronised.
    assert link.buffer_bytes() == 3 * size


def test_a_module_that_leaves_out_hooks_of_unused_buckets_is_refused(module: DistributedDataParallel) -> None:
    # Some versions of torch take it as an argument.
    module.skip_all_reduce_unused_params = True
    with pytest.raises(gw.IncompatibleError, match="skip_all_reduce_unused_params=True"):
        gw.attach(module, "terngrad")


@pytest.mark.parametrize(
    ("method", "is_warned"),
    [
        ("terngrad", False),
        ("diana", False),
        ("errorfeedback", True),
        ("dgc", True),
        ("powersgd", True),
        ("DiLoCo(every=4, inner=ErrorFeedback())", False),
    ],
)
@pytest.mark.parametrize("finds", [False, True])
def test_a_residual_beside_unused_parameters_is_warned_of(
    module: DistributedDataParallel, method: str, is_warned: bool, finds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module.find_unused_parameters = finds
    if method.startswith("DiLoCo"):
        caution_about_unused(gw.method(method), WarnOnce())
    else:
        gw.attach(module, method)
    warned = any(message.startswith("find_unused_parameters=True beside") for message in caplog.messages)
    assert warned == (is_warned and finds)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 13])
def test_a_broadcast_makes_one_copy_for_every_other_rank(world_size: int) -> None:
    copies = [adapter._broadcast_copies(rank, world_size) for rank in range(world_size)]
    assert sum(copies) == world_size - 1
    assert copies[0] == (world_size - 1).bit_length(), "the root sends in every round of the tree"


def test_modules_that_cannot_have_a_hook_are_refused(module: DistributedDataParallel) -> None:
    with pytest.raises(gw.IncompatibleError, match="attach needs a DistributedDataParallel module, not Linear"):
        gw.attach(nn.Linear(2, 2), "qsgd")  # type: ignore[arg-type]
    other = dist.new_group([0])
    with pytest.raises(gw.IncompatibleError, match="process_group differs from the module's own"):
        gw.attach(module, "qsgd", process_group=other)
    gw.attach(module, "qsgd")
    with pytest.raises(gw.IncompatibleError, match=r"already exchanges by QSGD.*leave gw\.attach out of a script that"):
        gw.attach(module, "qsgd")
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(gw.IncompatibleError, match="module '0' makes sparse gradients"):
        gw.attach(sparse, "qsgd")


def test_what_a_hook_is_handed_must_be_a_bucket_of_a_link() -> None:
    bucket: Any = SimpleNamespace(buffer=lambda: torch.zeros(2))
    with pytest.raises(gw.IncompatibleError, match="reloaded without its link"):
        adapter._exchange(object(), bucket)
    with pytest.raises(gw.IncompatibleError, match="python_reducer"):
        adapter._exchange(object(), ())  # type: ignore[arg-type]
