"""Metrics in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gradwire.integrations.sink import PREFIX, Sink, needed

__all__ = ["MLflowSink"]


class MLflowSink(Sink):
    """Logs metrics as ``gradwire/NAME`` to a run of MLflow.

    Args:
        run_id: Of a run, which stays open when the sink is closed; by default one is created.
        tracking_uri: Where runs are kept, as ``sqlite:///mlflow.db`` or a server; by default as MLflow has it.
        experiment: Name of the experiment of a run that is created; it is created, too, where there is none.

    Raises:
        BackendError: mlflow is not installed.
    """

    def __init__(
        self, run_id: str | None = None, *, tracking_uri: str | None = None, experiment: str = "gradwire"
    ) -> None:
        library = needed("mlflow", "mlflow")
        self._entities = needed("mlflow.entities", "mlflow")
        self._client: Any = library.MlflowClient(tracking_uri=tracking_uri)
        self._owns = run_id is None
        self.run_id = self._started(experiment) if run_id is None else run_id

    def _started(self, experiment: str) -> str:
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        return str(self._client.create_run(number).info.run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        rows = [self._entities.Metric(PREFIX + name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def close(self) -> None:
        if self._owns:
            self._client.set_terminated(self.run_id)
