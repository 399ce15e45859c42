"""What all frameworks have in common: a method that waits for the module, and its state in their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters import Link, attach, load, save
from gradwire.errors import IncompatibleError
from gradwire.methods import Method
from gradwire.spec import method as read_method

__all__ = ["FOLDER", "Attachment"]

FOLDER = "gradwire"
"""Of the link's state, inside a framework's checkpoint or behind its name."""


class Attachment:
    """A method for a module that a framework has not wrapped yet, and the link once it has.

    Args:
        method: A method or its spec.
        fresh: Whether a checkpoint without the link's state may be resumed: what the method remembers then begins anew.
        options: For :func:`gradwire.attach`.

    Attributes:
        link: The link; None before the framework has wrapped the module, and where there is one process.

    Raises:
        HyperparameterError: the spec is wrong.
    """

    def __init__(self, method: str | Method, fresh: bool, options: dict[str, Any]) -> None:
        self.method, self._fresh, self._options = read_method(method), fresh, options
        self.link: Link | None = None
        self._module: DistributedDataParallel | None = None
        self._optimizer: Any = None

    def attach(self, module: Any, optimizer: Any = None, grad_scaler: Any = None) -> None:
        """Attach to a module that was wrapped; nothing where it was not, as with one process.

        Args:
            optimizer: The framework's; options that the user gave come first.
            grad_scaler: Likewise; one that is not enabled counts as none.
        """
        if not isinstance(module, DistributedDataParallel):
            return
        if self.link is not None:
            self.link.close()
        given = {"optimizer": optimizer}
        if grad_scaler is not None and grad_scaler.is_enabled():
            given["grad_scaler"] = grad_scaler
        given |= self._options
        self._module, self._optimizer = module, given["optimizer"]
        self.link = attach(module, self.method, **given)

    def save(self, folder: Path) -> None:
        """Save the link's state (collective), and what is this rank's own under methods with local steps."""
        if self.link is None or self._module is None:
            return
        own = None
        if self.method.local_steps:
            # The framework saves the model and the optimizer of rank 0, and here every rank has its own.
            own = {"model": self._module.module.state_dict()}
            if self._optimizer is not None:
                own["optimizer"] = self._optimizer.state_dict()
        save(self.link, folder, own)

    def load(self, folder: Path) -> Callable[[], None]:
        """Load the link's state (collective), after the model's.

        Returns:
            What restores the optimizer that is this rank's own, for frameworks that load theirs afterwards.

        Raises:
            IncompatibleError: there is no such state, and ``fresh`` is not set.
        """
        if self.link is None or self._module is None:
            return _nothing
        if not (folder / "common.pt").exists() and self._fresh:
            return _nothing
        if not folder.exists():
            raise IncompatibleError(
                f"this checkpoint has no state of {self.method!r} in {folder}: it was saved without gradwire. Pass "
                "fresh=True to resume it and begin anew with what the method remembers"
            )
        own = load(self.link, folder)
        if own is None:
            return _nothing
        optimizer = self._optimizer
        if self.link.method.local_steps:
            self._module.module.load_state_dict(own["model"])

        def restore() -> None:
            if optimizer is not None and "optimizer" in own:
                optimizer.load_state_dict(own["optimizer"])

        restore()
        return restore


def _nothing() -> None:
    """Restore nothing."""
