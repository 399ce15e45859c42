"""Where ``link.metrics()`` goes: what all sinks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import Any

from gradwire.errors import BackendError

__all__ = ["PREFIX", "Sink", "needed"]

PREFIX = "gradwire/"
"""In front of every name, so that loggers show them together."""


class Sink(ABC):
    """Takes metrics step by step::

        with gw.integrations.TensorBoardSink("runs/first") as sink:
            for step, batch in enumerate(batches):
                ...
                if step % 50 == 0:
                    sink.log(link.metrics(), step)

    Metrics are of one rank. Log those of rank 0, or of every rank to a place of its own.
    """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics after a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is not written yet, and let go of what this sink itself has opened."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()


def needed(module: str, package: str) -> Any:
    """Import a library.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise BackendError(f"{package} is not installed ({error}): pip install {package}") from error
