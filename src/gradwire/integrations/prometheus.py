"""Metrics for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gradwire.integrations.sink import Sink, needed
from gradwire.link.reports import COUNTERS

__all__ = ["PrometheusSink"]


class PrometheusSink(Sink):
    """Offers the latest metrics to Prometheus, as ``gradwire_NAME``, with a label for the rank.

    What only grows is a counter, ``gradwire_sent_bytes_total`` and so on, all else a gauge; seconds end in
    ``_seconds``. ``gradwire_step`` is the step that they belong to.

    Args:
        port: On which they are served by HTTP, at ``/metrics``; None where ``registry`` is served by someone else. Each
            rank of a computer needs a port of its own.
        rank: For the label.
        registry: To which they are added; by default one of the sink's own.
        address: On which the port listens.

    Raises:
        BackendError: prometheus_client is not installed.
    """

    def __init__(
        self, port: int | None = None, *, rank: int = 0, registry: Any = None, address: str = "127.0.0.1"
    ) -> None:
        library = needed("prometheus_client", "prometheus_client")
        self._core = needed("prometheus_client.core", "prometheus_client")
        self._rank, self._latest = str(rank), dict[str, float]()
        self.registry = library.CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        self._server: Any = None
        if port is not None:
            self._server, self._thread = library.start_http_server(port, addr=address, registry=self.registry)

    @property
    def port(self) -> int | None:
        """The port that serves them; None where none does."""
        return None if self._server is None else int(self._server.server_port)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # In one assignment: a scrape on the server's thread sees either all of it or nothing.
        self._latest = {**metrics, "step": float(step)}

    def collect(self) -> Iterator[Any]:
        """Yield the latest metrics, as a registry asks for them."""
        for name, value in self._latest.items():
            label = "gradwire_" + re.sub(r"[^a-zA-Z0-9_]", "_", re.sub(r"_s$", "_seconds", name))
            kind = self._core.CounterMetricFamily if name in COUNTERS else self._core.GaugeMetricFamily
            family = kind(label, f"gradwire: {name}", labels=["rank"])
            family.add_metric([self._rank], value)
            yield family

    def close(self) -> None:
        self.registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
