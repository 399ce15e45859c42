"""What is asked of one framework, in one start of its processes: ``framework_checks.py FRAMEWORK FOLDER``.

Rank 0 prints what it found as JSON. Importing a framework takes longer than all that is asked of it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

warnings.filterwarnings("ignore")
METHOD = "ErrorFeedback(TopK(density=0.05))"
LOCAL = "DiLoCo(every=8, inner=EDEN(bits=4))"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 80), nn.ReLU(), nn.Linear(80, 5))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


def refusal(build: Callable[[], Any]) -> str:
    try:
        build()
    except gw.GradwireError as error:
        return str(error)
    return "accepted"


def everywhere(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def with_accelerate(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def started(method: str, **options: Any) -> tuple[Any, gw.integrations.Attachment, Any, Any]:
        AcceleratorState._reset_state(reset_partial_state=False)
        accelerator, model = Accelerator(cpu=True, **options), net()
        if options.get("mixed_precision"):
            # Accelerate builds a scaler for float16 on GPUs alone; one that is there is used as on those.
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        attachment = gw.integrations.accelerate(accelerator, method)
        return accelerator, attachment, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs(step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    found: dict[str, Any] = {}
    accelerator, attachment, model, optimizer = started(METHOD, gradient_accumulation_steps=2, mixed_precision="bf16")
    train(accelerator, model, optimizer, range(4))
    found["rounds"] = attachment.link.round
    found["scaler"] = attachment.link.grad_scaler is accelerator.scaler
    scaled = {key: float(value.abs().max()) for key, value in attachment.link.state_dict()["rank"].items()}
    found["largest residual"] = max(scaled.values())
    other = nn.Linear(3, 3)
    found["a second module"] = refusal(lambda: accelerator.prepare(other))
    found["a second method"] = refusal(lambda: gw.integrations.accelerate(accelerator, METHOD, model=model))
    found["the first one's link"] = attachment.link.close.alive
    # As between two trainings, or where a batch that fits is sought.
    accelerator.free_memory()
    accelerator.prepare(other)
    found["after free_memory"] = attachment.module is other and attachment.link.close.alive
    attachment.link.close()

    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator, model = Accelerator(cpu=True), net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    found["too late"] = refusal(lambda: gw.integrations.accelerate(accelerator, METHOD))
    found["not prepared"] = refusal(lambda: gw.integrations.accelerate(accelerator, METHOD, model=net()))
    attachment = gw.integrations.accelerate(accelerator, METHOD, model=model)
    train(accelerator, model, optimizer, range(2))
    found["rounds of what was prepared before"] = attachment.link.round
    # Only evaluated, or prepared once more: neither takes the place of the first.
    accelerator.prepare_model(nn.Linear(3, 3), evaluation_mode=True)
    accelerator.prepare(model)
    found["the first one's link, still"] = attachment.link.close.alive
    attachment.link.close()

    for spec in ("DiLoCo(every=2)", "DIANA(prox=L1(strength=0.001))"):
        AcceleratorState._reset_state(reset_partial_state=False)
        accelerator, model = Accelerator(cpu=True), net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        attachment = gw.integrations.accelerate(accelerator, spec, model=model, optimizer=optimizer)
        train(accelerator, model, optimizer, range(4))
        found.setdefault("exchanges of a prepared optimizer", []).append(attachment.link.round)
        attachment.link.close()

    # The optimizer is not named to the method, and still is each rank's own.
    accelerator, attachment, model, optimizer = started(LOCAL)
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(str(folder / "local"))
    before = [model.module[0].weight.clone(), optimizer.state[model.module[0].weight]["exp_avg"].clone()]
    train(accelerator, model, optimizer, range(3, 5))
    # Accelerate's main process writes the weights after all others have gone on, and none of the steps was an exchange.
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder / "local"))
    after = [model.module[0].weight, optimizer.state[model.module[0].weight]["exp_avg"]]
    found["own come back"] = everywhere([torch.equal(a, b) for a, b in zip(before, after)])
    found["moments by rank"] = len(set(everywhere(round(float(before[1].double().sum()), 12))))
    attachment.link.close()
    return found


def with_trainer(folder: Path) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import HPSearchBackend

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    rows = [{"x": torch.randn(20, generator=torch.Generator().manual_seed(i))} for i in range(64)]
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }

    class Copies(TrainerCallback):  # type: ignore[misc]
        """Copies a checkpoint when it is saved, as callbacks of loggers do."""

        seen: ClassVar[list[bool]] = []

        def on_save(self, *arguments: Any, **more: Any) -> None:
            self.seen += [any(folder.rglob("gradwire/common.pt"))]

    def started(method: str = METHOD, **options: Any) -> tuple[Any, gw.integrations.Attachment]:
        arguments = TrainingArguments(**usual, **options)
        trainer = Trainer(Squares(), arguments, train_dataset=rows, callbacks=[Copies()])
        return trainer, gw.integrations.trainer(trainer, method)

    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer, attachment = started(max_steps=2, save_strategy="steps", save_steps=2, **compiled)
    # As where hyperparameters are searched.
    trainer._get_output_dir = lambda trial: str(folder / "run-3")
    trainer.train()
    link = attachment.link
    dist.barrier()
    found = {
        "trained already": refusal(lambda: gw.integrations.trainer(trainer, METHOD)),
        "compiled": type(trainer.model_wrapped).__name__,
        "rounds": None if link is None else link.round,
        "states": sorted(str(path.relative_to(folder)) for path in folder.rglob("common.pt")),
        "copied": list(Copies.seen),
    }
    attachment.link.close()
    found["with a closed link"] = refusal(trainer.train)

    # As a backend of a search for hyperparameters does, with a new accelerator for each trial.
    arguments = TrainingArguments(**usual, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = Trainer(model_init=Squares, args=arguments, train_dataset=rows)
    attachment = gw.integrations.trainer(trainer, METHOD)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.WANDB, None
    trainer._get_output_dir = lambda trial: str(folder / f"rate-{trial['learning_rate']}")
    for rate in (0.1, 0.2):
        trainer.train(trial={"learning_rate": rate})
        is_saved = (folder / f"rate-{rate}" / "checkpoint-2" / "gradwire" / "common.pt").exists()
        found[f"trial {rate}"] = [attachment.module is trainer.model and attachment.link.round, is_saved]
    attachment.link.close()

    class TooLarge(TrainerCallback):  # type: ignore[misc]
        """Ends the first training as a batch does that does not fit."""

        begun = 0

        def on_train_begin(self, *arguments: Any, **more: Any) -> None:
            self.begun += 1
            if self.begun == 1:
                raise RuntimeError("CUDA out of memory.")

    trainer, attachment = started(max_steps=4, save_strategy="no", auto_find_batch_size=True)
    too_large = TooLarge()
    trainer.add_callback(too_large)
    trainer.train(resume_from_checkpoint=str(folder / "run-3" / "checkpoint-2"))
    found["begun, rounds"] = [too_large.begun, attachment.link.round]

    # The optimizer that a first attempt has prepared.
    once = {"max_steps": 1, "save_strategy": "no", "auto_find_batch_size": True, "optim": "sgd"}
    trainer, attachment = started("SketchedAMSGrad()", **once)
    trainer.add_callback(TooLarge())
    found["an optimizer of the attempt before"] = refusal(trainer.train)
    return found


def with_lightning(folder: Path) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Squares(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return self.net(x).square().mean()

        def validation_step(self, x: torch.Tensor, number: int) -> None:
            self.log("loss", self.net(x).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = torch.randn(128, 20, generator=torch.Generator().manual_seed(0))

    def loader() -> Any:
        return torch.utils.data.DataLoader(rows, batch_size=8)

    def trainer(steps: int, method: str = METHOD, **options: Any) -> tuple[Any, Any]:
        strategy = gw.integrations.lightning(method)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        made = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_steps=steps,
            default_root_dir=folder,
            **quiet,
            **options,
        )
        return made, strategy.attachment

    found: dict[str, Any] = {}
    made, attachment = trainer(2, enable_checkpointing=False)
    made.fit(alone := Squares(), loader())
    made, attachment = trainer(2, enable_checkpointing=False)
    module = Squares()
    Tuner(made).lr_find(module, loader(), num_training=3, update_attr=False)
    made.fit(module, loader())
    found["after a search"] = [attachment.link.round, torch.equal(module.net[0].weight, alone.net[0].weight)]
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    made, attachment = trainer(2, callbacks=[finder], enable_checkpointing=False)
    made.fit(module := Squares(), loader())
    found["with a search"] = [attachment.link.round, torch.equal(module.net[0].weight, alone.net[0].weight)]

    told, logger = list[str](), logging.getLogger("gradwire")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    for ends in (False, True):

        class Ending(Squares):
            def on_train_end(self, ends: bool = ends) -> None:
                if ends:
                    self.trainer.strategy.attachment.link.synchronise()

        made, attachment = trainer(3, method=LOCAL, enable_checkpointing=False)
        made.fit(module := Ending(), loader())
        mine = float(module.net[0].weight.detach().double().sum())
        found["synchronised at the end" if ends else "apart at the end"] = [len(set(everywhere(mine))), *told]
        told.clear()
    logger.removeHandler(handler)

    # Every link that is made while there is a scaler must be given it.
    keeper = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_last="link", save_top_k=1, monitor=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    mixed = {"accumulate_grad_batches": 2, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    made, attachment = trainer(4, callbacks=[keeper], **mixed)
    made.fit(Squares(), loader())
    found["rounds"], found["scaler"] = attachment.link.round, attachment.link.grad_scaler is scaler
    dist.barrier()
    found["files"] = sorted(path.name for path in folder.iterdir())
    last = str(folder / "last.ckpt")

    mixed["enable_checkpointing"] = False
    made, attachment = trainer(6, **mixed)
    made.fit(Squares(), loader(), ckpt_path=last, weights_only=False)
    found["rounds of last.ckpt, resumed"] = attachment.link.round
    told = refusal(lambda: made.save_checkpoint("memory://away/a.ckpt"))
    found["remote"] = [told, fsspec.filesystem("memory").exists("/away/a.ckpt")]

    made, attachment = trainer(2, **mixed)
    module = Squares()
    made.validate(module, loader(), ckpt_path=last, weights_only=False, verbose=False)
    made.fit(module, loader())
    found["rounds after a validation"] = attachment.link.round
    return found


def with_fabric(folder: Path) -> dict[str, Any]:
    import lightning

    def started(method: str = METHOD) -> tuple[Any, gw.integrations.Attachment]:
        strategy = gw.integrations.fabric(method)
        fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
        fabric.launch()
        return fabric, strategy.attachment

    def train(fabric: Any, model: Any, optimizer: Any, steps: int) -> None:
        for step in range(2 * steps):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward(model(inputs(step)).square().mean())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    found: dict[str, Any] = {}
    fabric, attachment = started()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    train(fabric, model, optimizer, 3)
    found["rounds"] = None if attachment.link is None else attachment.link.round
    fabric.save(folder / "a.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, 1)
    numbers = fabric.load(folder / "a.ckpt")
    found["keys"], found["rounds after a look"] = sorted(numbers), attachment.link.round
    fabric.load(folder / "a.ckpt", {"model": model, "optimizer": optimizer})
    found["rounds after a load"] = attachment.link.round
    if dist.get_rank() == 0:
        torch.save(net().state_dict(), folder / "raw.pt")
    fabric.barrier()
    found["raw weights"] = [refusal(lambda: fabric.load_raw(folder / "raw.pt", model)), attachment.link.round]
    told = refusal(lambda: fabric.save("memory://away/a.ckpt", {"model": model}))
    found["remote"] = [told, fsspec.filesystem("memory").exists("/away/a.ckpt")]
    fabric.save("memory://away/b.ckpt", {"step": 3})
    found["numbers alone"] = fsspec.filesystem("memory").exists("/away/b.ckpt")
    attachment.link.close()

    fabric, attachment = started()
    attachments = fabric.strategy.attachments
    pairs = []
    for i in range(2):
        model = net()
        pairs.append(fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1 + i)))
    for pair in pairs:
        train(fabric, *pair, 2)
    train(fabric, *pairs[1], 1)
    found["rounds of two"] = [one.link.round for one in attachments]
    found["optimizers of two"] = [
        [group["lr"] for o in one.optimizers() for group in o.param_groups] for one in attachments
    ]
    both = {"a": pairs[0][0], "b": pairs[1][0]}
    fabric.save(folder / "both.ckpt", both)
    for pair in pairs:
        train(fabric, *pair, 1)
    fabric.load(folder / "both.ckpt", {"b": both["b"]}, strict=False)
    found["rounds of two, one of them loaded"] = [one.link.round for one in attachments]
    attachments[0].link.close()
    third = net()
    fabric.setup(third, torch.optim.SGD(third.parameters(), lr=0.1))
    found["the place of a closed link is free"] = [len(attachments), attachments[0].module is third]
    for one in attachments:
        one.link.close()

    fabric, attachment = started()
    bare = net()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    found["too early"] = refusal(lambda: fabric.load(folder / "a.ckpt", {"model": bare, "optimizer": optimizer}))
    found["raw weights before setup"] = refusal(lambda: fabric.load_raw(folder / "raw.pt", bare))

    fabric, attachment = started("DiLoCo(every=2, inner=EDEN(bits=4))")
    found["rounds of each optimizer"], made = [], list[Any]()
    for alone in (False, True):
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            optimizer = kind(bare.parameters(), lr=0.01)
            made.append(weakref.ref(optimizer))
            if alone:
                model = fabric.setup_module(bare)
                optimizer = fabric.setup_optimizers(optimizer)
            else:
                model, optimizer = fabric.setup(bare, optimizer)
            train(fabric, model, optimizer, 2)
            names = [type(one).__name__ for one in attachment.optimizers()]
            found["rounds of each optimizer"].append([attachment.link.round, *names])
            made.append(weakref.ref(model._forward_module))
            attachment.link.close()
    model = optimizer = None
    gc.collect()
    found["kept"] = [type(one()).__name__ for one in made if one() is not None]

    fabric, attachment = started(LOCAL)
    model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.01))
    fabric.save(folder / "apart.ckpt", {"model": model})
    attachment.link.close()
    fabric, attachment = started(LOCAL)
    model = fabric.setup_module(bare)
    found["fewer optimizers"] = refusal(lambda: fabric.load(folder / "apart.ckpt", {"model": model}))
    return found


def with_one_process(folder: Path) -> dict[str, Any]:
    """Train on one device, for which Lightning and Fabric wrap the module in DDP all the same."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Squares(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return self.net(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found: dict[str, Any] = {}
    strategy = gw.integrations.fabric(METHOD)
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    model = net()
    before = model[0].weight.clone()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(wrapped(inputs(0)).square().mean())
    optimizer.step()
    fabric.save(folder / "a.ckpt", {"model": wrapped})
    fabric.load(folder / "a.ckpt", {"model": wrapped})
    fabric.save("memory://away/a.ckpt", {"model": wrapped})
    fabric.load("memory://away/a.ckpt", {"model": wrapped})
    found["fabric"] = [strategy.attachment.link is None, not torch.equal(model[0].weight, before)]

    strategy = gw.integrations.lightning(METHOD)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, default_root_dir=folder, **quiet
    )
    trainer.fit(Squares(), torch.utils.data.DataLoader(torch.ones(16, 20), batch_size=8))
    found["lightning"] = [strategy.attachment.link is None, trainer.global_step == 2]
    return found


if __name__ == "__main__":
    found = globals()[f"with_{sys.argv[1]}"](Path(sys.argv[2]))
    if os.environ["RANK"] == "0":
        print("found", json.dumps(found))
