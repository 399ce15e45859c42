"""Metrics in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradwire.integrations.sink import PREFIX, Sink, needed

__all__ = ["TensorBoardSink"]


class TensorBoardSink(Sink):
    """Writes metrics as scalars ``gradwire/NAME`` for TensorBoard.

    Args:
        target: A folder, or a ``torch.utils.tensorboard.SummaryWriter``, which stays open when the sink is closed.

    Raises:
        BackendError: tensorboard is not installed.
    """

    def __init__(self, target: Any) -> None:
        library = needed("torch.utils.tensorboard", "tensorboard")
        self._owns = isinstance(target, (str, os.PathLike))
        self._writer: Any = library.SummaryWriter(os.fspath(target)) if self._owns else target

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(PREFIX + name, value, step)

    def close(self) -> None:
        if self._owns:
            self._writer.close()
        else:
            self._writer.flush()
