"""The recorder: buckets in their order, marks in theirs, by hand and by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from alone import group_of_one
from gradwire.model.profile import Profile, Recorder, Timeline
from gradwire.tools.bench.profile import profile_name, profile_script
from gradwire.tools.experiments.errors import UsageError, WorkerError

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def recorded(automatic: bool) -> Profile:
    with group_of_one():
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.005)
        recorder = Recorder(ddp, automatic=automatic)
        for _ in range(5):
            if not automatic:
                recorder.begin()
            loss = ddp(torch.ones(2, 64)).sum()
            if not automatic:
                recorder.forward_ended()
            loss.backward()
            if not automatic:
                recorder.backward_ended()
                recorder.end()
        return Profile.of("here", module, recorder)


@pytest.mark.parametrize("automatic", [False, True])
def test_every_parameter_is_in_one_bucket_and_time_moves_forward(automatic: bool) -> None:
    found = recorded(automatic)
    buckets = found.timeline.buckets
    assert sorted(n for b in buckets for n in b.names) == sorted(found.parameters)
    assert len(buckets) > 1
    assert [b.ready_s for b in buckets] == sorted(b.ready_s for b in buckets)
    assert 0 < buckets[0].ready_s <= found.timeline.backward_s
    assert found.timeline.forward_s > 0
    assert Timeline.from_json(found.timeline.to_json()) == found.timeline


def test_scaling_keeps_proportions() -> None:
    found = recorded(False).timeline
    twice = found.scaled(2 * found.compute_s)
    assert twice.compute_s == pytest.approx(2 * found.compute_s)
    assert twice.buckets[0].ready_s == pytest.approx(2 * found.buckets[0].ready_s)


def test_a_model_and_a_task_are_profiled_by_name() -> None:
    assert profile_name("lenet").numel == 431_080
    assert profile_name("digits").timeline.compute_s > 0
    with pytest.raises(UsageError, match="did you mean lenet"):
        profile_name("lenett")


@pytest.mark.ranks
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not in the wheel")
def test_an_unchanged_script_is_profiled() -> None:
    found = profile_script(EXAMPLE, ["--steps", "200"])
    assert found.numel == 64 * 256 + 256 + 256 * 10 + 10
    assert found.timeline.compute_s > 0


@pytest.mark.ranks
def test_a_script_that_trains_nothing_is_refused_with_its_last_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('no such data')\n")
    with pytest.raises(WorkerError, match="no such data"):
        profile_script(script, [])
    with pytest.raises(UsageError, match="does not exist"):
        profile_script(tmp_path / "other.py", [])
    assert sys.argv[0] != str(script)
