"""Sinks for ``link.metrics()``: TensorBoard, Weights & Biases, MLflow and Prometheus."""

from __future__ import annotations

import os
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any

from gradwire.errors import BackendError, HyperparameterError
from gradwire.link.reports import COUNTERS

PREFIX = "gradwire/"
"""Prefix of every name, so that loggers show the metrics together."""


class Sink(ABC):
    """Receives metrics step by step::

        with gw.integrations.TensorBoardSink("runs/first") as sink:
            for step, batch in enumerate(batches):
                ...
                if step % 50 == 0:
                    sink.log(link.metrics(), step)

    Metrics are those of one rank. Log them on rank 0 only, or on every rank to a separate place.
    """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""

    @abstractmethod
    def close(self) -> None:
        """Write pending metrics, and close what this sink has opened."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()


def needed(module: str, package: str) -> Any:
    """Import a module of a library.

    Raises:
        BackendError: the library is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise BackendError(f"{package} is not installed ({error}): pip install {package}") from error


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


class WandbSink(Sink):
    """Logs metrics as ``gradwire/NAME`` to a run of Weights & Biases.

    The step is logged as a metric, ``gradwire/step``: W&B's own step must increase with every call, and the training
    loop logs at other steps than the sink.

    Args:
        run: A run, which stays open when the sink is closed; by default one is started.
        init: Arguments of ``wandb.init``, such as ``project="..."`` or ``mode="offline"``.

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


class MLflowSink(Sink):
    """Logs metrics as ``gradwire/NAME`` to a run of MLflow.

    Args:
        run_id: Identifier of a run, which stays open when the sink is closed; by default a run is created.
        tracking_uri: Place of the runs, such as ``sqlite:///mlflow.db`` or a server; by default MLflow's own.
        experiment: Name of the experiment for a new run; it is created if it does not exist.

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


class _Page:
    """Collector of all sinks in a registry: a page has each metric once, with the samples of all ranks.

    Attributes:
        latest: Latest metrics of each open sink, by its label.
    """

    def __init__(self, core: Any) -> None:
        self._core, self.latest = core, dict[str, Mapping[str, float]]()

    def collect(self) -> Iterator[Any]:
        """Yield the latest metrics when the registry collects them."""
        # A copy, since sinks are opened and closed on other threads than the server's.
        latest = dict(self.latest)
        for name in dict.fromkeys(name for metrics in latest.values() for name in metrics):
            label = "gradwire_" + re.sub(r"[^a-zA-Z0-9_]", "_", re.sub(r"_s$", "_seconds", name))
            kind = self._core.CounterMetricFamily if name in COUNTERS else self._core.GaugeMetricFamily
            family = kind(label, f"gradwire: {name}", labels=["rank"])
            for rank, metrics in latest.items():
                if name in metrics:
                    family.add_metric([rank], metrics[name])
            yield family


_pages: weakref.WeakKeyDictionary[Any, _Page] = weakref.WeakKeyDictionary()
"""The page of each registry with open sinks."""


class PrometheusSink(Sink):
    """Serves the latest metrics to Prometheus as ``gradwire_NAME``, with a label for the rank.

    Metrics that only increase are counters, such as ``gradwire_sent_bytes_total``, all others gauges; names of
    durations end in ``_seconds``. ``gradwire_step`` is the step of the metrics.

    Args:
        port: HTTP port that serves the metrics at ``/metrics``; None: the program serves ``registry`` itself. Each rank
            on a computer needs its own port.
        rank: Value of the label.
        registry: Registry of the metrics; by default a new one.
        address: Address that the port listens on.

    Raises:
        BackendError: prometheus_client is not installed.
        HyperparameterError: a sink of this rank is open in the registry.
        OSError: the port is taken.
    """

    def __init__(
        self, port: int | None = None, *, rank: int = 0, registry: Any = None, address: str = "127.0.0.1"
    ) -> None:
        library = needed("prometheus_client", "prometheus_client")
        self._rank, self._is_open = str(rank), True
        self.registry = library.CollectorRegistry() if registry is None else registry
        self._server: Any = None
        page = _pages.get(self.registry)
        if page is not None and self._rank in page.latest:
            raise HyperparameterError(
                f"rank: a sink of rank {rank} is in this registry already, and their metrics would have the same "
                "names and labels: close it first, or give each link a registry of its own"
            )
        if port is not None:
            # A port that is taken leaves the registry as it was.
            self._server, self._thread = library.start_http_server(port, addr=address, registry=self.registry)
        if page is None:
            page = _pages[self.registry] = _Page(needed("prometheus_client.core", "prometheus_client"))
            self.registry.register(page)
        self._page = page
        page.latest[self._rank] = {}

    @property
    def port(self) -> int | None:
        """The HTTP port; None if there is none."""
        return None if self._server is None else int(self._server.server_port)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # A single assignment, so that a scrape on the server's thread never sees a part of it.
        if self._is_open:
            self._page.latest[self._rank] = {**metrics, "step": float(step)}

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            del self._page.latest[self._rank]
            if not self._page.latest:
                del _pages[self.registry]
                self.registry.unregister(self._page)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
