"""The common part of all integrations: attach a method when a framework wraps the module, and save its state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.link.adapters import Link, attach, load, save
from gradwire.link.checkpoint import seen_alike
from gradwire.methods.spec import method as read_method

FOLDER = "gradwire"
"""Name of the folder of a link's state, inside a framework's checkpoint or as a suffix of its name."""


class Attachment:
    """A method that is attached to a module when a framework wraps it.

    Args:
        method: A method or its spec.
        fresh: Whether a checkpoint without the link's state may be resumed; the method's memory then starts empty.
        options: Options of :func:`gradwire.attach`.

    Attributes:
        link: The link; None before the framework has wrapped the module, and with a single process.
        optimizers: Returns all optimizers of the framework; under local steps their state differs between ranks.

    Raises:
        HyperparameterError: the spec is wrong.
    """

    def __init__(self, method: str | Method, fresh: bool, options: dict[str, Any]) -> None:
        self.method, self._fresh, self._options = read_method(method), fresh, options
        self.link: Link | None = None
        self.optimizers: Callable[[], Sequence[Any]] = tuple
        # A module that the program has dropped, as between two trainings, is freed.
        self._wrapped: Callable[[], DistributedDataParallel | None] = _nothing
        self._inner: Callable[[], nn.Module | None] = _nothing

    def attach(self, module: Any, optimizer: Any = None, grad_scaler: Any = None) -> None:
        """Attach to a wrapped module, compiled or not; do nothing if it is not wrapped, or with a single process.

        Args:
            module: The module, as the framework returns it.
            optimizer: The framework's optimizer; the user's options take precedence.
            grad_scaler: The framework's scaler, likewise; a disabled one counts as none.
        """
        module = wrapped(module)
        if module is None or module.process_group.size() == 1:
            # Some frameworks wrap the module also with a single process, which exchanges nothing.
            return
        if self.link is not None:
            self.link.close()
        given = {"optimizer": optimizer}
        if grad_scaler is not None and grad_scaler.is_enabled():
            given["grad_scaler"] = grad_scaler
        self._wrapped, self._inner = weakref.ref(module), weakref.ref(module.module)
        self.link = attach(module, self.method, **given | self._options)

    @property
    def module(self) -> Any:
        """The user's own module inside the wrapped one; None before it is attached to, and after it was freed."""
        return self._inner()

    @property
    def is_open(self) -> bool:
        """Whether there is a link that is not closed."""
        return self.link is not None and self.link.close.alive

    def serves(self, module: object) -> bool:
        """Return whether a module, wrapped or not, is the one with the link."""
        return module is not None and (module is self._wrapped() or module is self.module)

    def save(self, folder: Path) -> None:
        """Save the link's state (collective), and under local steps this rank's model, optimizers and scaler."""
        if self.link is None or self.module is None:
            return
        own = None
        if self.method.traits.local_steps:
            # The framework saves those of rank 0, and here they differ between ranks.
            own = {"model": self.module.state_dict()}
            own["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers()]
            own["scaler"] = self.link.grad_scaler.state_dict() if self.link.grad_scaler else {}
        save(self.link, folder, own)

    def load(self, folder: Path) -> Callable[[], None]:
        """Load the link's state (collective), and under local steps this rank's model, optimizers and scaler.

        Call it after the framework has loaded the model. With a single process it loads nothing, and warns if the
        folder has a state.

        Returns:
            A function that restores this rank's optimizers and scaler again, for frameworks that load these afterwards.
            It does nothing if the checkpoint has none of them.

        Raises:
            IncompatibleError: the checkpoint has no state of the link, and ``fresh`` is not set, it has more or fewer
                optimizers than there are, or only some ranks see it.
        """
        if self.link is None or self.module is None:
            if (folder / "common.pt").exists():
                warnings.warn(
                    f"{folder} holds what {self.method!r} remembers on each rank, and one process exchanges nothing: "
                    "it is left out",
                    stacklevel=2,
                )
            return _nothing
        if not seen_alike(self.link, folder / "common.pt"):
            if self._fresh:
                return _nothing
            raise IncompatibleError(
                f"this checkpoint has no state of {self.method!r} in {folder}: it was saved without gradwire, or not "
                "to the end. Pass fresh=True to resume it, so that the method's memory starts empty"
            )
        own, scaler = load(self.link, folder), self.link.grad_scaler
        if own is None:
            return _nothing
        self.module.load_state_dict(own["model"])

        def restore() -> None:
            optimizers, states = self.optimizers(), own["optimizers"]
            if len(optimizers) != len(states):
                raise IncompatibleError(
                    f"{self.method!r} keeps the optimizers of each rank: this checkpoint has {len(states)}, and there "
                    f"are {len(optimizers)} now; set up the same ones before it is loaded"
                )
            for optimizer, state in zip(optimizers, states):
                optimizer.load_state_dict(state)
            # Checkpoints had none before.
            if scaler and own.get("scaler"):
                scaler.load_state_dict(own["scaler"])

        restore()
        return restore


def wrapped(module: Any) -> DistributedDataParallel | None:
    """Return the DDP module in a module that may be compiled; None if there is none."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _nothing() -> None:
    """Restore nothing."""
