"""Accelerate, Transformers, Lightning and Fabric: each example, its checkpoints, and other numbers of processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ranks import RankError, run_script

pytestmark = [pytest.mark.ranks, pytest.mark.repository]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
METHOD = "ErrorFeedback(TopK(density=0.05))"
SCRIPTS = {
    "accelerate": ("accelerate_digits.py",),
    "trainer": ("trainer_gpt2.py",),
    "lightning": ("lightning_digits.py",),
    "fabric": ("lightning_digits.py", "--fabric"),
}


def loss_of(framework: str, folder: Path, *words: object, world_size: int = 2) -> str:
    """Run an example, and return the loss that it prints, to the last digit."""
    script, *fixed = SCRIPTS[framework]
    if framework in ("lightning", "fabric"):
        fixed += ["--devices", str(world_size)]
    told = run_script(EXAMPLES / script, *fixed, "--folder", folder, "--steps", 6, *words, world_size=world_size)
    found = re.search(r"loss ([\d.]+)", told)
    assert found, told
    return found[1]


@pytest.mark.parametrize("framework", SCRIPTS)
def test_a_training_is_resumed_exactly_and_goes_on_with_other_numbers_of_processes(
    framework: str, tmp_path: Path
) -> None:
    """Residuals are of each rank: lost, or rank 0's on all ranks, they would give another loss."""
    whole = loss_of(framework, tmp_path, "--method", METHOD)
    assert loss_of(framework, tmp_path, "--method", METHOD, "--resume") == whole
    other = loss_of(framework, tmp_path, "--method", METHOD, "--resume", world_size=3)
    assert other != whole
    assert abs(float(other) - float(whole)) < 0.2 * float(whole)


def test_a_checkpoint_without_the_links_state_is_refused(tmp_path: Path) -> None:
    loss_of("accelerate", tmp_path, "--method", "none")
    with pytest.raises(RankError, match=r"has no state of ErrorFeedback.*fresh=True"):
        loss_of("accelerate", tmp_path, "--method", METHOD, "--resume")


def test_with_local_steps_each_ranks_model_and_optimizer_are_saved(tmp_path: Path) -> None:
    method = "DiLoCo(every=4, inner=EDEN(bits=4))"
    whole = loss_of("accelerate", tmp_path, "--method", method)
    assert loss_of("accelerate", tmp_path, "--method", method, "--resume") == whole
