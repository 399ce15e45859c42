"""Strategies for Lightning's Trainer and for Fabric."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.integrations.attachment import FOLDER, Attachment
from gradwire.integrations.sink import needed
from gradwire.methods import Method

__all__ = ["fabric", "lightning"]


def folder_of(path: Any) -> Path:
    """Return where the link's state lies beside a checkpoint, which is a file."""
    return Path(f"{path}.{FOLDER}")


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
            self._resumed: Any = None
            self._restore: Callable[[], None] | None = None

        def _register_ddp_hooks(self) -> None:
            """Leave out Lightning's own, which serves CUDA devices alone."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            first = self.optimizers[0] if self.optimizers else None
            self.attachment.attach(self.model, first, getattr(self.precision_plugin, "scaler", None))
            if self._resumed is not None and self.attachment.link is not None:
                self._restore = self.attachment.load(folder_of(self._resumed))

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

        def setup_module_and_optimizers(self, module: Any, optimizers: Any, *arguments: Any) -> Any:
            found = super().setup_module_and_optimizers(module, optimizers, *arguments)
            scaler = getattr(self.precision, "scaler", None)
            self.attachment.attach(found[0], optimizers[0] if optimizers else None, scaler)
            return found

        def save_checkpoint(self, path: Any, *arguments: Any, **more: Any) -> None:
            super().save_checkpoint(path, *arguments, **more)
            self.attachment.save(folder_of(path))

        def load_checkpoint(self, path: Any, *arguments: Any, **more: Any) -> Any:
            found = super().load_checkpoint(path, *arguments, **more)
            self.attachment.load(folder_of(path))
            return found

    return GradwireFabricStrategy()
