"""The walk of a bucket in ``docs/how-it-works.md`` is the way that a real bucket takes."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire as gw
from ranks import Ranks

PACKAGE = Path(gradwire.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "how-it-works.md"


def walk() -> list[str]:
    """Return the files that the page numbers, in its order."""
    section = PAGE.read_text().split("## The way of a bucket")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)


def files_of_a_step() -> list[str]:
    """Train three steps; return the files of the package that the third one enters, in the order of first calls."""
    entered: list[str] = []
    listening = threading.Event()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and listening.is_set():
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
    files = walk()
    assert len(files) >= 10
    assert len(set(files)) == len(files)
    assert [file for file in files if not (PACKAGE / file).is_file()] == []
    text = PAGE.read_text()
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)
    assert [name for name in named if not (PACKAGE / name).is_file() and not (PAGE.parents[1] / name).is_file()] == []


@pytest.mark.repository
@pytest.mark.ranks
def test_a_bucket_meets_the_files_in_the_order_of_the_page(three_ranks: Ranks) -> None:
    for entered in three_ranks(files_of_a_step):
        assert [file for file in entered if file in walk()] == walk()
