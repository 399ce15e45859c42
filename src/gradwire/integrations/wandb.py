"""Metrics in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.integrations.sink import PREFIX, Sink, needed

__all__ = ["WandbSink"]


class WandbSink(Sink):
    """Logs metrics as ``gradwire/NAME`` to a run of Weights & Biases.

    Steps are a metric of their own, ``gradwire/step``: W&B's own step has to grow from call to call, and a training
    logs by it at other steps than the sink.

    Args:
        run: A run, which stays open when the sink is closed; by default one is started.
        init: For ``wandb.init``, as ``project="..."`` or ``mode="offline"``.

    Raises:
        BackendError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        self._owns = run is None
        self._run = needed("wandb", "wandb").init(**init) if run is None else run
        self._run.define_metric(f"{PREFIX}step")
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({PREFIX + name: value for name, value in metrics.items()} | {f"{PREFIX}step": step})

    def close(self) -> None:
        if self._owns:
            self._run.finish()
