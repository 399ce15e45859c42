"""Which backend serves: the fastest that agrees, measured once, and what is recorded of it."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import pytest
import torch

from gradwire.kernels import FAMILIES, Kernels, SegmentTable, chosen, get_kernels, self_test
from gradwire.kernels import backends as select
from gradwire.kernels.backends import BACKENDS, Automatic


class Clock:
    """A clock by which each backend takes as long as it is told to."""

    def __init__(self, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.measured = 0.0, 0
        for family, test in self_test.SELF_TESTS.items():

            def slow(kernels: Kernels, size: int = 1, test=test) -> list[torch.Tensor]:
                if size > 1:
                    self.now += seconds[kernels.name]
                    self.measured += 1
                    return []
                return test(kernels)

            monkeypatch.setitem(self_test.SELF_TESTS, family, slow)

    def __call__(self) -> float:
        return self.now


def measured(clock: Clock, file: Path | None, *families: str) -> Automatic:
    """Return the backend after it has timed the variants of families."""
    backend = selected(clock, file)
    for family in families:
        backend.measure(family)
    return backend


def selected(clock: Clock, file: Path | None = None) -> Automatic:
    return Automatic({name: BACKENDS[name](1) for name in ("cpu", "cpu-plain", "reference")}, clock, file)


@pytest.fixture(autouse=True)
def own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_chosen", {})


def test_a_wait_for_the_processor_is_no_variants_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is kept: one made while others use the processor must be the same."""
    test = self_test.SELF_TESTS["moments"]

    def timed(kernels: Kernels, size: int = 1) -> list[torch.Tensor]:
        if size == 1:
            return test(kernels)
        if kernels.name == "cpu":
            time.sleep(0.02)
            return []
        began = time.process_time()
        while time.process_time() - began < 0.004:
            pass
        return []

    monkeypatch.setitem(self_test.SELF_TESTS, "moments", timed)
    backends = {name: BACKENDS[name](1) for name in ("cpu", "cpu-plain", "reference")}
    backend = Automatic(backends, file=None)
    backend.measure("moments")
    assert backend.family("moments").simd is True


@pytest.mark.parametrize(
    ("plain_s", "winner"), [(2.0, "cpu"), (1.0, "cpu"), (0.98, "cpu"), (0.96, "cpu-plain"), (0.1, "cpu-plain")]
)
def test_the_faster_one_serves_and_vectors_win_within_noise(
    plain_s: float, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock({"cpu": 1.0, "cpu-plain": plain_s}, monkeypatch)
    backend = measured(clock, None, "moments")
    assert backend.family("moments").simd == (True if winner == "cpu" else None)
    row = chosen()["moments"]
    assert row["backend"] == winner
    assert row["reason"] == "the fastest that agrees"
    assert row["times_s"] == pytest.approx({"cpu": 1.0, "cpu-plain": plain_s})
    assert list(chosen()) == ["moments"]


def test_families_are_chosen_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"cpu": 1.0, "cpu-plain": 2.0}
    backend = selected(Clock(times, monkeypatch))
    kernels = Kernels(backend)
    kernels.measure(["moments"])
    times["cpu-plain"] = 0.5
    kernels.measure(["natural"])
    assert {family: row["backend"] for family, row in chosen().items()} == {"moments": "cpu", "natural": "cpu-plain"}
    assert kernels.name == "cpu"


def test_times_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "times.json"
    clock = Clock({"cpu": 1.0, "cpu-plain": 0.5}, monkeypatch)
    for family in ("moments", "natural"):
        measured(clock, file, family)
    first = clock.measured
    again = selected(clock, file)
    for family in ("moments", "natural"):
        assert again.family(family).simd is None
    assert clock.measured == first > 0
    assert chosen()["moments"]["times_s"] == {"cpu": 1.0, "cpu-plain": 0.5}
    assert sorted(json.loads(file.read_text())["times_s"]) == ["moments", "natural"]
    assert [path.name for path in file.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"moments"', '"signs"'),
        lambda text: json.dumps({**json.loads(text), "machine": "another"}),
        lambda text: json.dumps({**json.loads(text), "sources": "0" * 16}),
        lambda text: json.dumps({**json.loads(text), "times_s": {"moments": {"cpu": "fast"}}}),
        lambda text: json.dumps({**json.loads(text), "times_s": {"moments": {"cpu": 1.0, "gpu": 0.1}}}),
        lambda text: json.dumps({**json.loads(text), "times_s": {"moments": {"cpu": -1.0}}}),
    ],
    ids=["cut", "list", "null", "other family", "other machine", "other sources", "word", "unknown", "negative"],
)
def test_times_that_are_damaged_or_foreign_count_for_nothing(
    damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "times.json"
    clock = Clock({"cpu": 1.0, "cpu-plain": 0.5}, monkeypatch)
    measured(clock, file, "moments")
    file.write_text(damage(file.read_text()))
    before = clock.measured
    assert selected(clock, file).family("moments").simd is True
    assert clock.measured == before
    measured(clock, file, "moments")
    assert json.loads(file.read_text())["times_s"]["moments"] == {"cpu": 1.0, "cpu-plain": 0.5}


def test_a_file_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock({"cpu": 1.0, "cpu-plain": 2.0}, monkeypatch)
    backend = measured(clock, tmp_path / "file" / "times.json", "moments")
    assert backend.family("moments").simd is True
    assert chosen()["moments"]["reason"] == "the fastest that agrees"


def test_nothing_is_measured_before_a_training_and_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"cpu": 1.0, "cpu-plain": 0.1}, monkeypatch)
    Kernels(selected(clock)).warm_up(["moments"])
    assert clock.measured == 0
    row = chosen()["moments"]
    assert (row["backend"], row["times_s"]) == ("cpu", {})
    assert "not measured on this machine" in row["reason"]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_agree_with_the_reference_without_a_warning(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert self_test.agree(family, get_kernels("cpu"), get_kernels("reference"))
        assert self_test.agree(family, get_kernels("cpu-plain"), get_kernels("reference"))


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_that_differ_fall_back_aloud(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family is compared before its first use, and one that differs leaves no trust in the others."""
    right = self_test.SELF_TESTS[family]

    def wrong(kernels: Kernels, size: int = 1) -> list[torch.Tensor]:
        return [right(kernels)[0].double() + (kernels.name == "cpu")]

    other = "moments" if family != "moments" else "natural"
    Clock({"cpu": 1.0, "cpu-plain": 2.0}, monkeypatch)
    monkeypatch.setitem(self_test.SELF_TESTS, family, wrong)
    backend = selected(lambda: 0.0)
    assert backend.family(other).simd is True
    with pytest.warns(UserWarning, match=rf"\({family}: its results differ.*cpu-plain"):
        assert backend.family(family).simd is None
    assert backend.name == "cpu-plain"
    assert backend.family(other).simd is None
    assert chosen()[family]["reason"] == "cpu does not serve: its results differ from the reference"
    assert chosen()[other]["reason"] == "the vectors of another family do not serve here"


def test_what_does_not_compile_is_replaced_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kernels: Kernels, size: int = 1) -> list[torch.Tensor]:
        raise OSError("no such instruction")

    monkeypatch.setitem(self_test.SELF_TESTS, "signs", broken)
    kernels = Kernels(selected(lambda: 0.0))
    with pytest.warns(UserWarning, match="signs: its code does not compile: OSError: no such instruction"):
        finite = kernels.finite(torch.zeros(9), SegmentTable([0], [9], [0], [(0, 0)]))
    assert kernels.name == "cpu-plain"
    assert finite.tolist() == [True]


def test_scalar_loops_that_differ_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"cpu": 1.0, "cpu-plain": 0.1}, monkeypatch)
    right = self_test.SELF_TESTS["moments"]

    def wrong(kernels: Kernels, size: int = 1) -> list[torch.Tensor]:
        results = right(kernels, size)
        return [result.double() + 1 for result in results] if kernels.name == "cpu-plain" else results

    monkeypatch.setitem(self_test.SELF_TESTS, "moments", wrong)
    assert measured(clock, None, "moments").family("moments").simd is True
    assert chosen()["moments"] == {"backend": "cpu", "reason": "the only one that agrees", "times_s": {"cpu": 1.0}}
