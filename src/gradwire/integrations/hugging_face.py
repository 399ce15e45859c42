"""Integrations with Accelerate, and with the Trainer of Transformers, which uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.integrations.attachment import FOLDER, Attachment, wrapped
from gradwire.integrations.sinks import needed

ANOTHER = (
    "gw.integrations.accelerate serves one module, and this accelerator prepares a second one: prepare both before you "
    "call it, name the one that it serves (model=...), and use gw.attach on the other"
)

AGAIN = (
    "gw.integrations.accelerate serves one module of an accelerator, and its checkpoints hold one link's state: it was "
    "called for this accelerator before; use gw.attach on the other module, with gw.save and gw.load, or close the "
    "first link (attachment.link.close())"
)

LATE = (
    "this accelerator has prepared a model already, to which nothing would be attached: call "
    "gw.integrations.accelerate before prepare, or give it what prepare returned (model=...)"
)

UNUSED = (
    "this trainer would train without the method: it wraps no module in DistributedDataParallel, or the link was "
    "closed; build a new Trainer, and call gw.integrations.trainer before train"
)


def accelerate(
    accelerator: Any, method: str | Method, *, model: Any = None, fresh: bool = False, **options: Any
) -> Attachment:
    """Use a method to exchange the gradients of the module that an ``Accelerator`` prepares.

    ::

        accelerator = Accelerator()
        attachment = gw.integrations.accelerate(accelerator, "EDEN(bits=4)")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Call this on all processes before ``prepare``, or with the model that it returned. ``accelerator.save_state`` and
    ``load_state`` then save and load the method's memory on each rank, in a folder ``gradwire`` of the checkpoint.

    Args:
        accelerator: An accelerator that prepares one module by DDP.
        method: A method or its spec.
        model: The module as ``prepare`` returned it; None: the module that is prepared from now on.
        fresh: Let ``load_state`` load a checkpoint that was saved without gradwire; the method's memory then starts
            empty.
        options: Options of :func:`gradwire.attach`; ``optimizer`` for methods that need it.

    Returns:
        The attachment, whose ``link`` is the link after the module was prepared.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: the accelerator has one of PyTorch's communication hooks, does not train by DDP, serves a
            module of an earlier call, or has prepared a module already and ``model`` is None. ``prepare`` raises it
            for a second module.
    """
    if "optimizer" in options:
        options["optimizer"] = _unwrapped(options["optimizer"])
    attachment = Attachment(method, fresh, options)
    _check_ddp(accelerator)
    _check_free(accelerator)
    if model is not None:
        _attach_to_prepared(accelerator, attachment, model)
    elif accelerator._models and accelerator.num_processes > 1:
        raise IncompatibleError(LATE)
    _attach_when_prepared(accelerator, attachment, lambda: None, ANOTHER)
    # Accelerate has no public list of what it has prepared, and its own checkpoints use this one.
    attachment.optimizers = lambda: accelerator._optimizers
    loaded: list[Path] = []

    def before_save(models: Any, weights: Any, folder: str) -> None:
        if accelerator.gradwire is attachment:
            attachment.save(Path(folder) / FOLDER)

    def before_load(models: Any, folder: str) -> None:
        loaded[:] = [Path(folder)] if accelerator.gradwire is attachment else []

    original = accelerator.load_state

    def load_state(*arguments: Any, **more: Any) -> None:
        original(*arguments, **more)
        # The hook, which knows the folder, runs before the model's weights are read.
        if loaded:
            attachment.load(loaded.pop() / FOLDER)

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
    accelerator.load_state, accelerator.gradwire = load_state, attachment
    return attachment


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer in what ``prepare`` has returned for it, which has no hooks of steps."""
    kind = needed("accelerate.optimizer", "accelerate").AcceleratedOptimizer
    return optimizer.optimizer if isinstance(optimizer, kind) else optimizer


def _check_free(accelerator: Any) -> None:
    """Refuse an accelerator that serves a module already, since its checkpoints hold the state of one link.

    Raises:
        IncompatibleError: there is an attachment whose module is still trained, or not prepared yet.
    """
    earlier = getattr(accelerator, "gradwire", None)
    if earlier is not None and accelerator.num_processes > 1:
        is_kept = earlier.is_open and any(map(earlier.serves, accelerator._models))
        if is_kept or earlier.link is None:
            raise IncompatibleError(AGAIN)


def _attach_to_prepared(accelerator: Any, attachment: Attachment, model: Any) -> None:
    """Attach to a module that an accelerator has wrapped.

    Raises:
        IncompatibleError: the module is not wrapped.
    """
    if wrapped(model) is None and accelerator.num_processes > 1:
        raise IncompatibleError(
            f"model={type(model).__name__} is not wrapped in DistributedDataParallel: give what accelerator.prepare "
            "returned for it"
        )
    attachment.attach(model, None, accelerator.scaler)


def _check_ddp(accelerator: Any) -> None:
    """Refuse an accelerator that would train without the method.

    Raises:
        IncompatibleError: it trains by FSDP, DeepSpeed and so on, or has a communication hook.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise IncompatibleError(
            f"this accelerator trains by {kind}, and a method is attached to what it wraps in DistributedDataParallel "
            "alone: leave out its plugin, or, with FSDP2, call gw.attach on the model that prepare returned"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and hook.value != "no":
        raise IncompatibleError(
            f"this accelerator has the communication hook {hook.value!r}, and DDP takes one: leave out comm_hook"
        )


def _attach_when_prepared(
    accelerator: Any, attachment: Attachment, optimizer: Callable[[], Any], only: str | None = None
) -> None:
    """Attach to the module that an accelerator wraps next, whether it is compiled afterwards or not.

    Args:
        only: Message that refuses a second module; None: a second module replaces the first.
    """
    prepare = accelerator.prepare_model

    def prepare_model(model: Any, *arguments: Any, **more: Any) -> Any:
        found = prepare(model, *arguments, **more)
        inner = wrapped(found)
        if inner is None or attachment.serves(inner):
            # A module that is only evaluated, a single process, or a module that was prepared before.
            return found
        # A module that was freed, as between two trainings, may be replaced.
        is_kept = any(attachment.serves(one) for one in accelerator._models)
        if only is not None and is_kept and not attachment.serves(model):
            raise IncompatibleError(only)
        attachment.attach(found, optimizer(), accelerator.scaler)
        return found

    # Accelerate's own place for hooks is a handler, which it looks up by its exact class and the Trainer replaces.
    accelerator.prepare_model = prepare_model


def trainer(trainer: Any, method: str | Method, *, fresh: bool = False, **options: Any) -> Attachment:
    """Use a method to exchange the gradients of a ``transformers.Trainer``.

    ::

        trainer = Trainer(model, arguments, train_dataset=...)
        attachment = gw.integrations.trainer(trainer, "EDEN(bits=4)")
        trainer.train(resume_from_checkpoint=True)

    Call this on all processes before ``train``. Checkpoints then have a folder ``gradwire`` with the method's memory on
    each rank, and ``resume_from_checkpoint`` reads it. ``save_total_limit`` removes it with the rest of a checkpoint.
    In ``hyperparameter_search`` each trial has a link and a state of its own.

    Args:
        trainer: The trainer.
        method: A method or its spec. A method that needs the optimizer gets the trainer's.
        fresh: Let ``train`` resume a checkpoint that was saved without gradwire.
        options: Options of :func:`gradwire.attach`.

    Returns:
        The attachment, whose ``link`` is the link after the training has begun.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: the trainer does not train by DDP, or has trained before. ``train`` raises it if several
            processes would train without the method.
        BackendError: transformers is not installed.
    """
    library, utilities = needed("transformers", "transformers"), needed("transformers.trainer_utils", "transformers")
    attachment = Attachment(method, fresh, options)
    attachment.optimizers = lambda: [trainer.optimizer]
    _check_ddp(trainer.accelerator)
    if wrapped(trainer.model_wrapped) is not None:
        raise IncompatibleError(
            "this trainer has trained already, and keeps the module that it wrapped, to which nothing would be "
            "attached: call gw.integrations.trainer before train, or build a new Trainer"
        )
    _attach_when_prepared(trainer.accelerator, attachment, lambda: _unwrapped(trainer.optimizer))
    asked: list[Path] = []
    original, create = trainer.train, trainer.create_accelerator_and_postprocess

    def create_accelerator_and_postprocess() -> None:
        # Each trial of a search for hyperparameters begins with another accelerator.
        create()
        _check_ddp(trainer.accelerator)
        _attach_when_prepared(trainer.accelerator, attachment, lambda: _unwrapped(trainer.optimizer))

    def train(resume_from_checkpoint: Any = None, *arguments: Any, **more: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = utilities.get_last_checkpoint(trainer.args.output_dir) or True
        asked[:] = [Path(resume_from_checkpoint)] if isinstance(resume_from_checkpoint, str | Path) else []
        return original(resume_from_checkpoint, *arguments, **more)

    class Keeper(library.TrainerCallback):  # type: ignore[name-defined, misc]
        """Saves and loads on every process, whereas the trainer itself writes on one."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if args.world_size > 1 and not attachment.is_open:
                raise IncompatibleError(UNUSED)
            # Training begins once more where a batch size that fits is sought.
            if asked:
                attachment.load(asked[0] / FOLDER)

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            name = f"{utilities.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            # In a hyperparameter search each trial has its own folder.
            folder = trainer._get_output_dir(getattr(trainer, "_trial", None))
            attachment.save(Path(folder) / name / FOLDER)

    trainer.train, trainer.create_accelerator_and_postprocess = train, create_accelerator_and_postprocess
    # The first: others, as those of Weights & Biases and MLflow, copy the checkpoint when it is saved.
    trainer.callback_handler.callbacks.insert(0, Keeper())
    return attachment
