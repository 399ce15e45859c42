"""Accelerate, Transformers, Lightning and Fabric: each example, its checkpoints, and other numbers of processes."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.integrations.attachment import Attachment
from gradwire.integrations.lightning_strategies import folder_of
from ranks import RankError, Ranks, run_script

pytestmark = [pytest.mark.ranks, pytest.mark.repository]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
METHOD = "ErrorFeedback(TopK(density=0.05))"
IMPORTS = {
    "accelerate": ("accelerate",),
    "trainer": ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning",),
}
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
    words = (*fixed, "--folder", folder, "--steps", 6, *words)
    imports = IMPORTS.get(framework, IMPORTS["lightning"])
    told = run_script(EXAMPLES / script, *words, world_size=world_size, imports=imports)
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


# ---------------------------------------------------------------------- what else is asked of each framework


def asked_of(framework: str, folder: Path, world_size: int = 2) -> Any:
    """Return what the checks of a framework found on rank 0."""
    checks, imports = Path(__file__).with_name("framework_checks.py"), IMPORTS.get(framework, IMPORTS["lightning"])
    told = run_script(checks, framework, folder, world_size=world_size, imports=imports)
    return json.loads(next(line for line in told.splitlines() if line.startswith("found ")).removeprefix("found "))


def test_accelerate_accumulates_scales_and_keeps_every_ranks_optimizer(tmp_path: Path) -> None:
    found = asked_of("accelerate", tmp_path)
    assert found["rounds"] == 2, "four micro-steps, two at a time"
    assert found["scaler"]
    assert "serves one module" in found["a second module"]
    assert "was called for this accelerator before" in found["a second method"]
    assert found["the first one's link"], "it goes on"
    assert found["after free_memory"], "another module takes its place"
    assert "call gw.integrations.accelerate before prepare, or give it what prepare returned" in found["too late"]
    assert "model=Sequential is not wrapped in DistributedDataParallel" in found["not prepared"]
    assert found["rounds of what was prepared before"] == 2
    assert found["the first one's link, still"]
    assert found["exchanges of a prepared optimizer"] == [2, 4], "of four steps, two at a time and each"
    # 64 times as large they would be above one.
    assert 0 < found["largest residual"] < 0.1
    assert found["own come back"] == [[True, True], [True, True]]
    assert found["moments by rank"] == 2


def test_the_trainer_attaches_to_what_it_compiles_and_accumulates(tmp_path: Path) -> None:
    found = asked_of("trainer", tmp_path)
    assert found["states"] == ["run-3/checkpoint-2/gradwire/common.pt"]
    assert (found["compiled"], found["rounds"]) == ("OptimizedModule", 2)
    assert "this trainer has trained already" in found["trained already"]
    assert "would train without the method" in found["with a closed link"]
    for trial in ("trial 0.1", "trial 0.2"):
        assert found[trial] == [2, True], "each trial has a link, and saves its state"
    assert found["begun, rounds"] == [2, 4], "the second attempt goes on from the two rounds of the checkpoint, too"
    assert found["an optimizer of the attempt before"] == "accepted"
    assert found["copied"] == [True], "what copies a checkpoint when it is saved finds all of it"


def test_lightning_resumes_a_link_and_nothing_that_it_validated(tmp_path: Path) -> None:
    found = asked_of("lightning", tmp_path)
    assert found["rounds"] == 4, "eight micro-steps, two at a time"
    assert found["scaler"]
    states = [name for name in found["files"] if name.endswith(".gradwire")]
    assert states == ["epoch=0-step=4.ckpt.gradwire"], "those of removed checkpoints are removed, too"
    assert "last.ckpt" in found["files"]
    assert found["rounds of last.ckpt, resumed"] == 6
    assert found["rounds after a validation"] == 2
    assert "is a remote checkpoint" in found["remote"][0]
    assert not found["remote"][1], "nothing is written beside what cannot be"
    assert found["after a search"] == [2, True], "a search for the learning rate leaves nothing behind"
    assert found["with a search"] == [2, True], "the fit goes on from before the search"
    values, told = found["apart at the end"]
    assert values == 2
    assert "3 optimizer steps lie after the last exchange" in told
    assert "synchronise() in on_train_end" in told
    assert found["synchronised at the end"] == [1], "and nothing is said"


def test_fabric_attaches_to_a_module_that_is_set_up_alone(tmp_path: Path) -> None:
    found = asked_of("fabric", tmp_path)
    assert found["rounds"] == 3, "six micro-steps, two at a time"
    assert found["keys"] == ["model", "optimizer"]
    assert found["rounds after a look"] == 4, "a checkpoint that is only read changes nothing"
    assert found["rounds after a load"] == 3
    assert found["raw weights"] == ["accepted", 3], "a file of weights alone has no state beside it"
    assert found["raw weights before setup"] == "accepted"
    assert "is a remote checkpoint" in found["remote"][0]
    assert not found["remote"][1], "nothing is written beside what cannot be"
    assert found["numbers alone"], "a checkpoint without a module has nothing beside it"
    assert "call fabric.setup first" in found["too early"]
    assert found["rounds of two"] == [2, 3], "each module has a link of its own"
    assert found["optimizers of two"] == [[0.1], [1.1]]
    assert found["rounds of two, one of them loaded"] == [3, 3]
    assert found["the place of a closed link is free"] == [2, True]
    assert found["rounds of each optimizer"] == [[1, "SGD"], [1, "AdamW"]] * 2, "those of closed links count no steps"
    assert found["kept"] == [], "what the program has dropped is freed"
    assert "this checkpoint has 1, and there are 0 now" in found["fewer optimizers"]


def test_on_one_device_lightning_and_fabric_train_and_nothing_is_attached(tmp_path: Path) -> None:
    found = asked_of("one_process", tmp_path, world_size=1)
    assert found == {"fabric": [True, True], "lightning": [True, True]}


def test_on_one_process_a_state_is_left_out_and_said_so(tmp_path: Path) -> None:
    attachment = Attachment(METHOD, False, {})
    attachment.attach(nn.Linear(2, 2))
    assert attachment.link is None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attachment.load(tmp_path)()
        assert not told, "there is nothing to leave out"
        (tmp_path / "common.pt").touch()
        attachment.load(tmp_path)()
    assert ["one process exchanges nothing" in str(one.message) for one in told] == [True]


def with_folders_of_their_own(folder: str) -> str:
    """Load on all ranks, of which rank 0 alone sees the checkpoint; return what is said of that."""
    attachment, module = Attachment(METHOD, True, {"min_numel": 0}), DistributedDataParallel(nn.Linear(30, 20))
    attachment.attach(module)
    assert attachment.link is not None
    attachment.save(Path(folder) / "0")
    try:
        attachment.load(Path(folder) / str(dist.get_rank()))
    except gw.IncompatibleError as error:
        return str(error)
    finally:
        attachment.link.close()
    return "loaded"


def test_a_checkpoint_that_some_ranks_do_not_see_is_refused_by_all(three_ranks: Ranks, tmp_path: Path) -> None:
    """With fresh=True, those who see none would begin to train, and the others wait for them."""
    for told in three_ranks(with_folders_of_their_own, str(tmp_path)):
        assert "common.pt is seen by rank 0 and not by rank 1" in told


def with_scalers_of_their_own(folder: str) -> list[float]:
    """Return this rank's scale after loading it, before and after the framework has loaded that of rank 0."""
    module, scaler = DistributedDataParallel(nn.Linear(30, 20)), torch.amp.GradScaler("cpu", init_scale=64.0)
    attachment, found = Attachment("LocalSGD(every=4)", False, {"min_numel": 0}), list[float]()
    attachment.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), scaler)
    assert attachment.link is not None
    saved = scaler.state_dict()
    # Gradients of rank 1 alone have overflowed.
    scaler.load_state_dict(saved | {"scale": 32.0 if dist.get_rank() == 1 else 64.0})
    attachment.save(Path(folder))
    for load_framework in (False, True):
        scaler.load_state_dict(saved)
        restore = attachment.load(Path(folder))
        if load_framework:
            scaler.load_state_dict(saved)
            restore()
        found.append(scaler.get_scale())
    attachment.link.close()
    return found


def test_with_local_steps_each_ranks_scaler_is_saved(three_ranks: Ranks, tmp_path: Path) -> None:
    assert three_ranks(with_scalers_of_their_own, str(tmp_path)) == [[64.0, 64.0], [32.0, 32.0], [64.0, 64.0]]


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_what_does_not_train_by_ddp_is_refused(kind: str) -> None:
    """Nothing would be attached to, and the training would go on in float32."""
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), ddp_handler=None)
    with pytest.raises(gw.IncompatibleError, match=f"trains by {kind}"):
        gw.integrations.accelerate(accelerator, METHOD)
    with pytest.raises(gw.IncompatibleError, match=f"trains by {kind}"):
        gw.integrations.trainer(SimpleNamespace(accelerator=accelerator), METHOD)


def test_a_state_lies_on_this_machine_or_is_refused(tmp_path: Path) -> None:
    """As a local path, a remote one would put the state into a folder that is lost with the machine."""
    assert folder_of(f"file://{tmp_path}/x") == folder_of(tmp_path / "x") == Path(f"{tmp_path.resolve()}/x.gradwire")
    for path in ("s3://bucket/x.ckpt", "simplecache::gs://bucket/x.ckpt"):
        with pytest.raises(gw.IncompatibleError, match=f"{path} is a remote checkpoint"):
            folder_of(path)


@pytest.mark.parametrize("name", ["ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"])
def test_a_hook_of_lightnings_own_is_refused(name: str) -> None:
    """It would never be registered, and a state of local steps would average parameters all the same."""
    with pytest.raises(gw.IncompatibleError, match=f"ddp has {name}: DDP takes one hook"):
        gw.integrations.lightning(METHOD, ddp={name: 1})


@pytest.mark.parametrize("build", [gw.integrations.lightning, gw.integrations.fabric])
def test_processes_that_would_get_the_strategy_as_a_pickle_are_refused(build: Any) -> None:
    for start in ("spawn", "forkserver"):
        with pytest.raises(gw.IncompatibleError, match=f"start_method='{start}', which pickles the strategy"):
            build(METHOD, ddp={"start_method": start})
