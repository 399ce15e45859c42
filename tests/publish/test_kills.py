"""A publisher that ends anywhere: readers find the state before or the state after, never a half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_cases import copies, manifest, nudge, same, weights, zeros

import gradwire as gw
from gradwire.publish.stores import FolderPlace


class Crash(BaseException):
    """Ends a publisher, as a kill does: nothing behind it runs."""


class Breaker:
    """Makes the n-th call of what writes end the publisher, before or in the middle of its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.last = 0, -1
        # Publishers of several threads may call at once, and each call has a number of its own.
        self._counting = threading.Lock()
        for name in ("open", "write", "fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._broken(name, getattr(os, name)))

    def _broken(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            with self._counting:
                self.calls += 1
                is_last = self.calls == self.last
            if is_last:
                if name == "write":
                    function(words[0], words[1][: len(words[1]) // 2])
                raise Crash
            return function(*words, **options)

        return call

    @property
    def crashed(self) -> bool:
        """Whether the call came."""
        return 0 <= self.last <= self.calls

    def arm(self, call: int) -> None:
        """Break a call, counted from 1; 0: none."""
        self.calls, self.last = 0, call or -1


@pytest.fixture
def breaker(monkeypatch: pytest.MonkeyPatch) -> Breaker:
    return Breaker(monkeypatch)


def test_readers_never_see_a_half_whichever_write_is_the_last(breaker: Breaker, tmp_path: Path) -> None:
    """Steps with a patch alone, with an anchor, and with files to remove."""
    number, ended = 0, 0
    while True:
        number += 1
        folder, trained = tmp_path / str(number), weights()
        breaker.arm(0)
        publisher = gw.WeightPublisher(trained, folder, anchor_every=2, keep_anchors=1)
        publisher.publish(0)
        served = zeros(trained)
        subscriber = gw.WeightSubscriber(served, folder)
        subscriber.update()
        states = {0: copies(trained)}
        breaker.arm(number)
        try:
            for step in (1, 2):
                nudge(trained, step)
                states[step] = copies(trained)
                publisher.publish(step)
        except Crash:
            ended += 1
        crashed = breaker.crashed
        breaker.arm(0)
        found, late = subscriber.update(), zeros(trained)
        assert same(served, states[found or 0])
        assert gw.WeightSubscriber(late, folder).update() == found
        assert same(late, served)
        # The one that follows mends all, and removes what was left.
        nudge(trained, 7)
        gw.WeightPublisher(trained, folder).publish(3)
        assert subscriber.update() == 3
        assert same(served, trained)
        listed = {file.name for file in manifest(folder).files}
        assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}
        if not crashed:
            break
    assert ended == number - 1 >= 20


def test_a_publisher_goes_on_after_a_write_that_failed(breaker: Breaker, tmp_path: Path) -> None:
    """The step that failed is written with the next one, and readers need no anchor."""
    trained = weights()
    publisher, served = gw.WeightPublisher(trained, tmp_path), zeros(trained)
    publisher.publish(0)
    subscriber = gw.WeightSubscriber(served, tmp_path)
    subscriber.update()
    for number in (1, 2, 3, 4):
        nudge(trained, number)
        breaker.arm(number)
        with pytest.raises(Crash):
            publisher.publish(2 * number)
        breaker.arm(0)
        nudge(trained, 100 + number)
        publisher.publish(2 * number + 1)
        assert subscriber.update() == 2 * number + 1
        assert [file.step for file in subscriber.applied] == [2 * number, 2 * number + 1]
        assert same(served, trained)


@pytest.mark.parametrize("failures", [4, 5])
def test_an_outage_longer_than_the_weights_ends_in_an_anchor(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, served = {"w": torch.randn(4000, generator=torch.Generator().manual_seed(0))}, {"w": torch.zeros(4000)}
    publisher, subscriber = gw.WeightPublisher(trained, tmp_path), gw.WeightSubscriber(served, tmp_path)
    publisher.publish(0)
    subscriber.update()
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
        for step in range(1, failures + 1):
            trained["w"] *= 1.1
            with pytest.raises(OSError, match="no space left"):
                publisher.publish(step)
    trained["w"] *= 1.1
    publication = publisher.publish(failures + 1)
    assert (publication.patch_bytes, publication.anchor_bytes > 12000) == (0, True)
    assert subscriber.update() == failures + 1
    assert same(served, trained)


PUBLISHER = """
import sys, torch, gradwire as gw
torch.manual_seed(0)
trained = {f"w{i}": torch.randn(50_000).bfloat16() for i in range(4)}
publisher = gw.WeightPublisher(trained, sys.argv[1], anchor_every=5)
for step in range(100_000):
    publisher.publish(step)
    print(step, flush=True)
    for tensor in trained.values():
        tensor.view(torch.int16)[step % 7 :: 97] += 1
"""


def test_a_publisher_that_is_killed_leaves_a_state_of_its_own(tmp_path: Path) -> None:
    """SIGKILL, at any time; a reader in another process follows meanwhile."""
    served = {f"w{i}": torch.zeros(50_000).bfloat16() for i in range(4)}
    subscriber = gw.WeightSubscriber(served, tmp_path)
    process = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        out = process.stdout
        assert out is not None
        for _ in range(12):
            out.readline()
            subscriber.update()
        time.sleep(0.013)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.communicate()
    last = subscriber.update()
    assert last is not None
    assert last >= 11
    expected = dict(zip(served, map(torch.Tensor.bfloat16, reference(4))))
    for step in range(last):
        for tensor in expected.values():
            tensor.view(torch.int16)[step % 7 :: 97] += 1
    assert same(served, expected)


def reference(number: int) -> list[torch.Tensor]:
    """Return what the publisher's process draws first."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(50_000, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("ahead", [2, 3])
def test_two_publishers_that_go_on_with_one_run_do_not_mix(ahead: int, tmp_path: Path) -> None:
    trained, other = weights(), weights()
    gw.WeightPublisher(trained, tmp_path).publish(1)
    first, second = (gw.WeightPublisher(tensors, tmp_path, resume=True) for tensors in (trained, other))
    assert first.run == second.run
    nudge(trained, 0)
    first.publish(2)
    nudge(other, 1)
    with pytest.raises(gw.ExchangeError, match=r"another publisher has gone on with run .* to step 2"):
        second.publish(ahead)
    nudge(trained, 2)
    first.publish(4)
    assert gw.WeightSubscriber(served := zeros(trained), tmp_path).update() == 4
    assert same(served, trained)


def test_a_manifest_that_was_written_though_its_write_failed_is_the_publishers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, write = weights(), FolderPlace.write
    publisher = gw.WeightPublisher(trained, tmp_path)
    publisher.publish(0)

    def failing(place: FolderPlace, name: str, pieces: Any) -> None:
        write(place, name, pieces)
        if name == "manifest.json":
            raise OSError("the answer is lost")

    with monkeypatch.context() as context:
        context.setattr(FolderPlace, "write", failing)
        for step in (1, 2):
            nudge(trained, step)
            with pytest.raises(OSError, match="the answer is lost"):
                publisher.publish(step)
    nudge(trained, 3)
    publisher.publish(3)
    assert gw.WeightSubscriber(served := zeros(trained), tmp_path).update() == 3
    assert same(served, trained)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_patch_that_was_not_written_is_flushed(call: int, breaker: Breaker, tmp_path: Path) -> None:
    trained = weights()
    publisher, served = gw.WeightPublisher(trained, tmp_path), zeros(trained)
    assert publisher.flush() is None
    publisher.publish(0)
    assert publisher.flush() is None
    subscriber = gw.WeightSubscriber(served, tmp_path)
    subscriber.update()
    before = copies(trained)
    for step in (1, 2):
        nudge(trained, step)
        breaker.arm(call)
        with pytest.raises(Crash):
            publisher.publish(step)
        breaker.arm(0)
    assert publisher.step == 2
    published, patches = copies(trained), ["patch from step 0 to step 1", "patch from step 1 to step 2"]
    # What has changed since then waits for the next step.
    nudge(trained, 3)
    publication = publisher.flush()
    assert publication is not None
    assert (publication.step, publication.anchor_bytes) == (2, 0)
    assert 0 < publication.changed < publication.elements
    assert publisher.flush() is None
    assert subscriber.update() == 2
    assert [file.name for file in subscriber.applied] == patches
    assert same(served, published)
    assert not same(served, before)
    publisher.publish(3)
    assert subscriber.update() == 3
    assert same(served, trained)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_step_whose_anchor_was_not_written_may_be_repeated(call: int, breaker: Breaker, tmp_path: Path) -> None:
    trained = weights()
    publisher = gw.WeightPublisher(trained, tmp_path)
    breaker.arm(call)
    with pytest.raises(Crash):
        publisher.publish(5)
    breaker.arm(0)
    assert (publisher.step, publisher.flush()) == (-1, None)
    nudge(trained, 1)
    publisher.publish(5)
    nudge(trained, 2)
    assert publisher.publish(6).anchor_bytes == 0
    assert gw.WeightSubscriber(served := zeros(trained), tmp_path).update() == 6
    assert same(served, trained)
