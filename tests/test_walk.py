"""``docs/contributing/way-of-a-bucket.md`` names every file that a real bucket enters, in the order of the way."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire as gw
from gradwire.exchange.drivers import Lane
from ranks import Ranks

PACKAGE = Path(gradwire.__file__).parent
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "contributing" / "way-of-a-bucket.md"


def walk() -> list[str]:
    """Return the files that the page numbers, in its order."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE.read_text(), re.M)


def beside() -> list[str]:
    """Return the files that the page lists as also entered."""
    lines = re.findall(r"^- (`[\w/]+\.py`(?:, `[\w/]+\.py`)*): ", PAGE.read_text(), re.M)
    return [name for line in lines for name in re.findall(r"`([^`]+)`", line)]


def lanes_rest(link: gw.Link) -> bool:
    """Return whether the threads of all lanes wait for a job, and did a moment ago: they may have begun to take one."""
    if not all(lane._jobs.empty() for lane in link._runtime.lanes):
        # On a busy machine a thread may not have seen it for a long time.
        return False
    lanes = [thread.ident for thread in threading.enumerate() if thread.name.startswith("gradwire lane")]
    for _ in range(2):
        time.sleep(0.05)
        frames = sys._current_frames()
        found = [frames[ident] for ident in lanes if ident in frames]
        if not all(frame.f_code is Lane._loop.__code__ and "job" not in frame.f_locals for frame in found):
            return False
    return bool(lanes)


def files_of_a_step() -> list[str]:
    """Train three steps; return the files of the package that the third one enters, in the order of first calls.

    Threads that watch peers (``link/peers/``) run at times of their own and carry no bucket, so they are left out.
    """
    entered: list[str] = []
    watching = {"gradwire peers", "gradwire introductions"}
    listening = threading.Event()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and listening.is_set() and threading.current_thread().name not in watching:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and str(path.relative_to(PACKAGE)) not in entered:
                entered.append(str(path.relative_to(PACKAGE)))

    threading.setprofile(note)  # for the lanes' threads, which attach starts
    sys.setprofile(note)
    try:
        module = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
        link = gw.attach(module, "terngrad", lanes=1)
        for step in range(3):
            if step == 2:
                # The lane still prepares for this step when the one before has its gradients.
                while not lanes_rest(link):
                    time.sleep(0.01)
                listening.set()
            module(torch.ones(4, 64)).square().sum().backward()
        listening.clear()
        link.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return entered


@pytest.mark.repository
def test_the_page_names_files_that_exist_once() -> None:
    files = walk() + beside()
    assert len(walk()) >= 10
    assert len(beside()) >= 10
    assert len(set(files)) == len(files)
    assert [file for file in files if not (PACKAGE / file).is_file()] == []
    for page in (PAGE, ROOT / "docs" / "how-it-works.md"):
        named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text())
        assert [name for name in named if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()] == []


@pytest.mark.repository
@pytest.mark.ranks
def test_a_bucket_enters_the_files_of_the_page_and_no_others(three_ranks: Ranks) -> None:
    for entered in three_ranks(files_of_a_step):
        assert [file for file in entered if file not in beside()] == walk()
        assert [file for file in beside() if file not in entered] == []
