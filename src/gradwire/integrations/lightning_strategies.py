"""Strategies for Lightning's Trainer and for Fabric."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.integrations.attachment import FOLDER, Attachment
from gradwire.integrations.sinks import needed

HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
"""Arguments of Lightning's ``DDPStrategy`` by which it registers a hook itself."""

UNTIL_THE_END = (
    "call self.trainer.strategy.attachment.link.synchronise() in on_train_end of the module, while the link is open"
)


def folder_of(path: Any) -> Path:
    """Return the folder of the link's state beside a checkpoint file, or beside the target of a symbolic link.

    Raises:
        IncompatibleError: the file is in another file system, as that of ``s3://bucket/run.ckpt``.
    """
    if _is_remote(path):
        raise IncompatibleError(
            f"{path} is a remote checkpoint, and what the method remembers on each rank is kept in files beside it: "
            "use a folder of this machine or a mounted one; fresh=True loads a remote checkpoint without that state"
        )
    return Path(f"{os.path.realpath(_local(path))}.{FOLDER}")


def _check_start(ddp: dict[str, Any] | None) -> None:
    """Refuse ways of starting processes that hand them the strategy as a pickle.

    Raises:
        IncompatibleError: ``ddp`` has such a one.
    """
    start = (ddp or {}).get("start_method")
    if start in ("spawn", "forkserver"):
        raise IncompatibleError(
            f"ddp has start_method={start!r}, which pickles the strategy, and one with a method cannot be: leave it "
            'out, or use start_method="fork", as in notebooks'
        )


def _local(path: Any) -> str:
    """Return a path without the prefix by which it may name this machine's file system."""
    return str(path).removeprefix("file://")


def _is_remote(path: Any) -> bool:
    """Return whether a path names another file system than this machine's."""
    return "://" in _local(path)


def lightning(method: str | Method, *, fresh: bool = False, ddp: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a strategy for Lightning's Trainer: DDP with a method that exchanges the gradients, on any device.

    ::

        trainer = lightning.Trainer(strategy=gw.integrations.lightning("EDEN(bits=4)"), devices=2, accelerator="cpu")

    The method's memory on each rank is saved in a folder beside each checkpoint, ``NAME.ckpt.gradwire``, and
    ``ckpt_path`` reads it. Methods that need an optimizer get the module's first one. The link is closed when a fit
    ends: with local steps call its ``synchronise()`` in ``on_train_end``, or a warning says that processes end with
    parameters of their own.

    Args:
        method: A method or its spec.
        fresh: Allow resuming a checkpoint that was saved without gradwire.
        ddp: Arguments of Lightning's ``DDPStrategy``.
        options: Options of :func:`gradwire.attach`.

    Returns:
        The strategy; ``strategy.attachment.link`` is the link during a fit.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: ``ddp`` has a communication hook, or starts processes by a pickle of the strategy. A fit
            raises it if a checkpoint's path is a remote one.
        BackendError: lightning is not installed.
    """
    hooks = [name for name in HOOKS if (ddp or {}).get(name) is not None]
    if hooks:
        raise IncompatibleError(f"ddp has {', '.join(hooks)}: DDP takes one hook, and the method is one: leave it out")
    _check_start(ddp)
    base = needed("lightning.pytorch.strategies", "lightning").DDPStrategy

    class GradwireStrategy(base):  # type: ignore[valid-type, misc]
        """Attaches when the optimizers exist, and saves and loads the link's state with checkpoints."""

        def __init__(self) -> None:
            super().__init__(**(ddp or {}))
            self.attachment = Attachment(method, fresh, options)
            # Each fit has new optimizers.
            self.attachment.optimizers = lambda: self.optimizers
            self._resumed: Any = None
            self._restore: Callable[[], None] | None = None

        def _register_ddp_hooks(self) -> None:
            """Register no hook of Lightning's, which works on CUDA devices only."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            # A checkpoint that is read for a validation is not resumed by a later fit.
            resumed, self._resumed, self._restore = self._resumed, None, None
            if trainer.state.fn != "fit":
                return
            first = self.optimizers[0] if self.optimizers else None
            self.attachment.attach(self.model, first, getattr(self.precision_plugin, "scaler", None))
            if resumed is not None:
                self._resume(resumed)

        def _resume(self, path: Any) -> None:
            """Load the link's state beside the checkpoint that is resumed; a remote one has none."""
            is_left_out = _is_remote(path) and (fresh or self.attachment.link is None)
            self._restore = None if is_left_out else self.attachment.load(folder_of(path))

        def load_model_state_dict(self, checkpoint: Any, *arguments: Any, **more: Any) -> None:
            super().load_model_state_dict(checkpoint, *arguments, **more)
            if self._resumed is not None and self.attachment.is_open:
                # In the middle of a fit, as after a search for the learning rate: no setup follows that would load it.
                resumed, self._resumed = self._resumed, None
                self._resume(resumed)

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            super().load_optimizer_state_dict(checkpoint)
            if self._restore is not None:
                self._restore()

        def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **more: Any) -> Any:
            self._resumed = checkpoint_path
            return super().load_checkpoint(checkpoint_path, *arguments, **more)

        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            if self.attachment.link is None:
                super().save_checkpoint(checkpoint, filepath, storage_options)
                return
            # A remote path is refused before anything is written.
            folder_of(filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            self.attachment.save(folder_of(filepath))

        def remove_checkpoint(self, filepath: Any) -> None:
            super().remove_checkpoint(filepath)
            if self.is_global_zero and not _is_remote(filepath):
                shutil.rmtree(folder_of(filepath), ignore_errors=True)

        def teardown(self) -> None:
            link = self.attachment.link
            if link is not None and self.attachment.is_open:
                # Looked at before parameters are moved to main memory, and while an exchange would still be possible.
                told = link.left_apart(UNTIL_THE_END)
                if told is not None:
                    link._runtime.warnings.once("left apart", told)
            super().teardown()
            if link is not None:
                # Closing frees the link's number for the next fit; its counters remain readable.
                link.close()

    return GradwireStrategy()


def fabric(method: str | Method, *, fresh: bool = False, ddp: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a strategy for Lightning Fabric: DDP with a method that exchanges the gradients, on any device.

    ::

        fabric = lightning.Fabric(strategy=gw.integrations.fabric("EDEN(bits=4)"), devices=2, accelerator="cpu")
        model, optimizer = fabric.setup(model, optimizer)

    ``fabric.save`` and ``fabric.load`` save and load the method's memory on each rank in a folder beside the
    checkpoint's file, ``NAME.gradwire``. Each module that is set up has its own link, until the link is closed.

    Args:
        method: A method or its spec.
        fresh: Allow loading a checkpoint that was saved without gradwire.
        ddp: Arguments of Fabric's ``DDPStrategy``.
        options: Options of :func:`gradwire.attach`.

    Returns:
        The strategy; ``strategy.attachment.link`` is the link after the module was set up. With several modules,
        ``strategy.attachments[i].link`` is the link of the i-th.

    Raises:
        HyperparameterError: the spec is wrong.
        IncompatibleError: ``ddp`` starts processes by a pickle of the strategy. ``fabric.save`` and ``fabric.load``
            raise it if the checkpoint's path is a remote one.
        BackendError: lightning is not installed.
    """
    _check_start(ddp)
    base = needed("lightning.fabric.strategies", "lightning").DDPStrategy

    class GradwireFabricStrategy(base):  # type: ignore[valid-type, misc]
        """Attaches to each module that it sets up, and saves and loads the link's state with checkpoints."""

        def __init__(self) -> None:
            super().__init__(**(ddp or {}))
            self.attachments: list[Attachment] = []
            # Optimizers in the order in which they were set up, with what closes the links that each has served; not
            # kept alive.
            self._known: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
            self._prepare_another()

        @property
        def attachment(self) -> Attachment:
            """The attachment of the first module."""
            return self.attachments[0]

        def _prepare_another(self) -> Attachment:
            another = Attachment(method, fresh, options)
            another.optimizers = lambda: self._set_up_for(another.module) or _of_module(self._known, another.module)
            self.attachments.append(another)
            return another

        def setup_module(self, module: Any) -> Any:
            # Called by itself, or by setup_module_and_optimizers.
            found = super().setup_module(module)
            free = next((one for one in self.attachments if not one.is_open), None) or self._prepare_another()
            ours = self._set_up_for(module)
            # One that has served no link yet was set up for this one.
            first = min(ours, key=lambda one: len(self._known[one]), default=None)
            free.attach(found, first, getattr(self.precision, "scaler", None))
            if free.link is not None:
                for one in ours:
                    self._known[one].append(free.link.close)
            return found

        def setup_module_and_optimizers(self, module: Any, optimizers: Any, *arguments: Any) -> Any:
            self._remember(optimizers)
            return super().setup_module_and_optimizers(module, optimizers, *arguments)

        def setup_optimizer(self, optimizer: Any) -> Any:
            self._remember([optimizer])
            return super().setup_optimizer(optimizer)

        def _remember(self, optimizers: Any) -> None:
            for new in optimizers:
                links = [one.link for one in self.attachments if one.is_open and _of_module([new], one.module)]
                self._known.pop(new, None)
                self._known[new] = [link.close for link in links if link is not None]

        def _set_up_for(self, module: Any) -> list[Any]:
            """Return a module's optimizers, without those whose links were all closed: they may never step again."""
            found = _of_module(self._known, module)
            return [one for one in found if not self._known[one] or any(close.alive for close in self._known[one])]

        def save_checkpoint(self, path: Any, state: Any, *arguments: Any, **more: Any) -> None:
            # A remote path is refused before anything is written.
            self._folders(path, state)
            super().save_checkpoint(path, state, *arguments, **more)
            for attachment, folder in self._folders(path, state):
                attachment.save(folder)

        def _folders(self, path: Any, state: Any) -> list[tuple[Attachment, Path]]:
            """Return the attachments whose modules a checkpoint holds, and the folder of each."""
            modules = _modules(state)
            served = [i for i, one in enumerate(self.attachments) if any(map(one.serves, modules))]
            if not served and (not modules or _is_remote(path)):
                return []
            folder = folder_of(path)
            # If nothing was attached, as with a single process, the first attachment says so.
            return [(self.attachments[i], folder / f"module-{i}" if i else folder) for i in served or [0]]

        def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **more: Any) -> Any:
            if not isinstance(state, dict):
                # It is only looked at, or it is a file of one module or optimizer, which Fabric does not save.
                return super().load_checkpoint(path, state, *arguments, **more)
            if _modules(state) and self.attachment.link is None and self.world_size > 1:
                raise IncompatibleError(
                    f"fabric.load before fabric.setup: {self.attachment.method!r} is not attached yet, and what it "
                    "remembers on each rank would be lost; call fabric.setup first"
                )
            found = super().load_checkpoint(path, state, *arguments, **more)
            if not (fresh and _is_remote(path)):
                for attachment, folder in self._folders(path, state):
                    attachment.load(folder)
            return found

    return GradwireFabricStrategy()


def _modules(state: dict[str, Any]) -> list[nn.Module]:
    """Return the models in a checkpoint's state; it may have none."""
    return [one for one in state.values() if isinstance(one, nn.Module)]


def _of_module(optimizers: Iterable[Any], module: nn.Module | None) -> list[Any]:
    """Return the optimizers that hold a parameter of a module."""
    ours = set() if module is None else {id(p) for p in module.parameters()}
    return [one for one in optimizers if any(id(p) in ours for group in one.param_groups for p in group["params"])]
