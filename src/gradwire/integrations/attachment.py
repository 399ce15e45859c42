"""What all frameworks have in common: a method that waits for the module, and its state in their checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.link.adapters import Link, attach, load, save
from gradwire.methods.spec import method as read_method

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
        optimizers: Returns all of the framework's, whose state is this rank's own under methods with local steps.

    Raises:
        HyperparameterError: the spec is wrong.
    """

    def __init__(self, method: str | Method, fresh: bool, options: dict[str, Any]) -> None:
        self.method, self._fresh, self._options = read_method(method), fresh, options
        self.link: Link | None = None
        self.optimizers: Callable[[], Sequence[Any]] = tuple
        self._module: DistributedDataParallel | None = None

    def attach(self, module: Any, optimizer: Any = None, grad_scaler: Any = None) -> None:
        """Attach to a module that was wrapped, and compiled or not; nothing where it was not, or on one process alone.

        Args:
            optimizer: The framework's; options that the user gave come first.
            grad_scaler: Likewise; one that is not enabled counts as none.
        """
        module = wrapped(module)
        if module is None or module.process_group.size() == 1:
            # Some frameworks wrap it all the same on one process, which exchanges nothing.
            return
        if self.link is not None:
            self.link.close()
        given = {"optimizer": optimizer}
        if grad_scaler is not None and grad_scaler.is_enabled():
            given["grad_scaler"] = grad_scaler
        self._module = module
        self.link = attach(module, self.method, **given | self._options)

    @property
    def module(self) -> Any:
        """The user's own module inside what was attached to; None before."""
        return None if self._module is None else self._module.module

    @property
    def is_open(self) -> bool:
        """Whether there is a link that was not closed."""
        return self.link is not None and self.link.close.alive

    def serves(self, module: object) -> bool:
        """Return whether a module, wrapped or not, is the one that was attached to."""
        return module is not None and (module is self._module or module is self.module)

    def save(self, folder: Path) -> None:
        """Save the link's state (collective), and what is this rank's own under methods with local steps."""
        if self.link is None or self._module is None:
            return
        own = None
        if self.method.traits.local_steps:
            # The framework saves the model and the optimizers of rank 0, and here every rank has its own.
            own = {"model": self._module.module.state_dict()}
            own["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers()]
        save(self.link, folder, own)

    def load(self, folder: Path) -> Callable[[], None]:
        """Load the link's state (collective), after the model's.

        Returns:
            What restores the optimizers that are this rank's own, for frameworks that load theirs afterwards.

        Raises:
            IncompatibleError: there is no such state, and ``fresh`` is not set.
        """
        if self.link is None or self._module is None:
            if (folder / "common.pt").exists():
                warnings.warn(
                    f"{folder} holds what {self.method!r} remembers on each rank, and one process exchanges nothing: "
                    "it is left out",
                    stacklevel=2,
                )
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
        self._module.module.load_state_dict(own["model"])

        def restore() -> None:
            for optimizer, state in zip(self.optimizers(), own["optimizers"], strict=True):
                optimizer.load_state_dict(state)

        restore()
        return restore


def wrapped(module: Any) -> DistributedDataParallel | None:
    """Return the DDP module that a framework gives back, compiled or not; None if it is none."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _nothing() -> None:
    """Restore nothing."""
