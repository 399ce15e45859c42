"""Runners of tests take files that compute beside files that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduling import LONGEST, WAITING, next_file, waits

FOLDER = Path(__file__).parent


@pytest.mark.repository
def test_what_is_named_exists() -> None:
    assert [file for file in LONGEST if not (FOLDER.parent / file).is_file()] == []
    assert [folder for folder in WAITING if not (FOLDER / folder).is_dir()] == []


def test_each_runner_takes_the_longest_file_of_its_kind() -> None:
    tests = {
        "tests/methods/test_shared_properties.py": 9,
        "tests/methods/test_eden.py": 5,
        "tests/kernels/test_moments.py": 7,
        "tests/link/test_spikes.py": 8,
        "tests/link/test_fsdp.py": 2,
        "tests/test_wheel.py": 1,
        "tests/exchange/test_delays.py": 7,
    }
    left, computed, waited = dict(tests), [], []
    while len(computed) < 4:
        computed.append(next_file(left, computing=True))
        del left[computed[-1]]
    while left:
        waited.append(next_file(left, computing=False))
        del left[waited[-1]]
    assert computed == [
        "tests/methods/test_shared_properties.py",
        "tests/exchange/test_delays.py",
        "tests/kernels/test_moments.py",
        "tests/methods/test_eden.py",
    ]
    assert waited == ["tests/test_wheel.py", "tests/link/test_fsdp.py", "tests/link/test_spikes.py"]


def test_a_runner_without_a_file_of_its_kind_takes_one_of_the_other() -> None:
    assert next_file({"tests/link/test_spikes.py": 3}, computing=True) == "tests/link/test_spikes.py"
    assert next_file({"tests/methods/test_eden.py": 3}, computing=False) == "tests/methods/test_eden.py"


def test_files_outside_of_folders_are_not_taken_for_folders() -> None:
    assert waits("tests/test_wheel.py")
    assert waits("tests/link/test_spikes.py")
    assert not waits("tests/kernels/test_moments.py")
