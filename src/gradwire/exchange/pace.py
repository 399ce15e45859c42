"""The interface of methods whose workers go at their own pace, as a simulation and the performance model use it."""

from __future__ import annotations

from typing import Any, Protocol


class AtOwnPace(Protocol):
    """A method with the trait ``at_own_pace``, see :class:`gradwire.methods.wrappers.async_server.AsyncServer`."""

    @property
    def inner(self) -> Any:
        """Method that compresses what a worker pushes."""

    @property
    def fetch(self) -> Any:
        """Method that compresses the changes of parameters that a worker fetches."""

    @property
    def staleness(self) -> int | None:
        """Number of clocks that a worker may be ahead of the slowest; None: any number."""
