"""Strategies for Lightning's Trainer and for Fabric."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gradwire.errors import IncompatibleError
from gradwire.integrations.attachment import FOLDER, Attachment
from gradwire.integrations.sink import needed
from gradwire.methods import Method

__all__ = ["fabric", "lightning"]


def folder_of(path: Any) -> Path:
    """Return where the link's state lies beside a checkpoint, which is a file, or a link to one as ``last.ckpt``."""
    return Path(f"{os.path.realpath(path)}.{FOLDER}")


def lightning(method: str | Method, *, fresh: bool = False, ddp: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a strategy for Lightning's Trainer: DDP whose gradients are exchanged by a method, on any device.

    ::

        trainer = lightning.Trainer(strategy=gw.integrations.lightning("EDEN(bits=4)"), devices=2, accelerator="cpu")

    What the method remembers on each rank is saved in a folder beside each checkpoint, ``NAME.ckpt.gradwire``, and
    ``ckpt_path`` reads it. The module's first optimizer is given to methods that need one.

    Args:
        method: A method or its spec.
        fresh: Let a checkpoint be resumed that was saved without gradwire.
        ddp: For Lightning's ``DDPStrategy``.
        options: For :func:`gradwire.attach`.

    Returns:
        The strategy; ``strategy.attachment.link`` is the link while it fits.

    Raises:
        HyperparameterError: the spec is wrong.
        BackendError: lightning is not installed.
    """
    base = needed("lightning.pytorch.strategies", "lightning").DDPStrategy

    class GradwireStrategy(base):  # type: ignore[valid-type, misc]
        """Attaches when the optimizers are there, and takes its state along with checkpoints."""

        def __init__(self) -> None:
            super().__init__(**(ddp or {}))
            self.attachment = Attachment(method, fresh, options)
            # Optimizers come anew with each fit.
            self.attachment.optimizers = lambda: self.optimizers
            self._resumed: Any = None
            self._restore: Callable[[], None] | None = None

        def _register_ddp_hooks(self) -> None:
            """Leave out Lightning's own, which serves CUDA devices alone."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            # A checkpoint that is read for a validation is none that a later fit resumes.
            resumed, self._resumed, self._restore = self._resumed, None, None
            if trainer.state.fn != "fit":
                return
            first = self.optimizers[0] if self.optimizers else None
            self.attachment.attach(self.model, first, getattr(self.precision_plugin, "scaler", None))
            if resumed is not None:
                self._restore = self.attachment.load(folder_of(resumed))

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            super().load_optimizer_state_dict(checkpoint)
            if self._restore is not None:
                self._restore()

        def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **more: Any) -> Any:
            self._resumed = checkpoint_path
            return super().load_checkpoint(checkpoint_path, *arguments, **more)

        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            self.attachment.save(folder_of(filepath))

        def remove_checkpoint(self, filepath: Any) -> None:
            super().remove_checkpoint(filepath)
            if self.is_global_zero:
                shutil.rmtree(folder_of(filepath), ignore_errors=True)

        def teardown(self) -> None:
            super().teardown()
            if self.attachment.link is not None:
                # Its number is free for the link of the next fit; what it counted can still be asked for.
                self.attachment.link.close()

    return GradwireStrategy()


def fabric(method: str | Method, *, fresh: bool = False, ddp: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a strategy for Lightning Fabric: DDP whose gradients are exchanged by a method, on any device.

    ::

        fabric = lightning.Fabric(strategy=gw.integrations.fabric("EDEN(bits=4)"), devices=2, accelerator="cpu")
        model, optimizer = fabric.setup(model, optimizer)

    ``fabric.save`` and ``fabric.load`` keep what the method remembers on each rank in a folder beside the checkpoint's
    file, ``NAME.gradwire``.

    Args:
        method: A method or its spec.
        fresh: Let a checkpoint be loaded that was saved without gradwire.
        ddp: For Fabric's ``DDPStrategy``.
        options: For :func:`gradwire.attach`.

    Returns:
        The strategy; ``strategy.attachment.link`` is the link once the module was set up.

    Raises:
        HyperparameterError: the spec is wrong.
        BackendError: lightning is not installed.
    """
    base = needed("lightning.fabric.strategies", "lightning").DDPStrategy

    class GradwireFabricStrategy(base):  # type: ignore[valid-type, misc]
        """Attaches to the module that it sets up, and takes its state along with checkpoints."""

        def __init__(self) -> None:
            super().__init__(**(ddp or {}))
            self.attachment = Attachment(method, fresh, options)
            self._known: list[Any] = []
            self.attachment.optimizers = lambda: self._known

        def setup_module(self, module: Any) -> Any:
            # Alone, or called by setup_module_and_optimizers.
            found = super().setup_module(module)
            first = self._known[0] if self._known else None
            self.attachment.attach(found, first, getattr(self.precision, "scaler", None))
            return found

        def setup_module_and_optimizers(self, module: Any, optimizers: Any, *arguments: Any) -> Any:
            self._known = list(optimizers)
            return super().setup_module_and_optimizers(module, optimizers, *arguments)

        def setup_optimizer(self, optimizer: Any) -> Any:
            if not any(optimizer is one for one in self._known):
                self._known.append(optimizer)
            return super().setup_optimizer(optimizer)

        def save_checkpoint(self, path: Any, state: Any, *arguments: Any, **more: Any) -> None:
            super().save_checkpoint(path, state, *arguments, **more)
            if _has_module(state):
                self.attachment.save(folder_of(path))

        def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **more: Any) -> Any:
            if _has_module(state) and self.attachment.link is None and self.world_size > 1:
                raise IncompatibleError(
                    f"fabric.load before fabric.setup: {self.attachment.method!r} is not attached yet, and what it "
                    "remembers on each rank would be lost; call fabric.setup first"
                )
            found = super().load_checkpoint(path, state, *arguments, **more)
            if _has_module(state):
                self.attachment.load(folder_of(path))
            return found

    return GradwireFabricStrategy()


def _has_module(state: Any) -> bool:
    """Return whether a checkpoint is one of a model, other than of numbers alone or one that is only looked at."""
    return any(isinstance(value, nn.Module) for value in (state.values() if isinstance(state, dict) else [state]))
