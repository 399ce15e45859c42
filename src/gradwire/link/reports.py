"""What a link tells of its exchange: bytes, errors, seconds, numbers for a logger."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from gradwire.exchange.drivers import Trace, Traffic
from gradwire.exchange.method import Method
from gradwire.link.diagnostics import parameter_rows
from gradwire.link.link_runtime import LinkRuntime
from gradwire.link.peers.circle import Wait
from gradwire.link.round import Round

COUNTERS = ("rounds", "skipped_rounds", "sent_bytes", "received_bytes", "encode_s", "wire_s", "decode_s")
"""Names in :meth:`LinkReports.metrics` of numbers that only grow while a link is open."""


class LinkReports:
    """What users ask of a link, and what names the error of a collective beside it."""

    method: Method
    _runtime: LinkRuntime
    _round: Round | None = None
    """The current one, or the last that was begun."""
    buffer_bytes: Callable[[], int]

    def __repr__(self) -> str:
        runtime, sent = self._runtime, self.traffic()
        factor = f"{sent.compression_factor:.1f} times fewer bytes than float32" if sent.sent_bytes else "nothing sent"
        return f"<{type(self).__name__}: {self.method!r}, {len(runtime.ranks)} ranks, round {runtime.round}, {factor}>"

    @property
    def round(self) -> int:
        """Synchronised backward passes so far, also those before a checkpoint."""
        return self._runtime.round

    @property
    def skipped_rounds(self) -> int:
        """Rounds with a non-finite value somewhere, where the method looks, or with one out of its range."""
        self._settle()
        return self._runtime.skipped_rounds

    @property
    def error(self) -> Exception | None:
        """The error that broke the link, in full; DDP shows only a mangled part of it."""
        if self._round is not None:
            self._round.look()
        return self._runtime.failures.told()

    def naming(self, where: str) -> AbstractContextManager[Wait]:
        """Return a context in which the failure of a collective, whoever's it is, becomes the error of this link.

        Entering it returns a function that waits for a gather in main memory, at most until a rank has ended.

        Raises:
            ExchangeError: on leaving the ``with`` block, if a collective broke in it; the message names the rank.
        """
        return self._runtime.failures.naming(where)

    def traffic(self) -> Traffic:
        """Return the bytes that this rank sent and received so far."""
        if self._round is not None:
            self._round.wait()
        return self._runtime.traffic(self.buffer_bytes())

    def diagnostics(self) -> dict[str, Any]:
        """Report how the exchange serves the training.

        Returns:
            ``parameters``: by name, at the last measured round (10, 30, and every 100th), ``relative_error`` and
            ``cosine`` of what this rank sent against its gradient, ``gradient_norm`` and ``sent_norm``, and the share
            of the elements sent that are not zero, ``density``; ``residual_norm``, of what it keeps now to send later,
            where the method keeps such a vector for each parameter; ``dial``, the value in force, where the method
            chooses one for each parameter (``l_greco``). Norms are of unscaled gradients, and where the method applies
            momentum before compression, of that instead. ``gauges``: see :meth:`gauges`. ``skipped_rounds``: rounds
            with a non-finite value somewhere, where the method looks, or one beyond 2^40, where it adds up rounds:
            nothing of them is remembered. ``encode_s``, ``wire_s``, ``decode_s``: seconds this rank's lanes spent so
            far.

        A method of which too much is late, lost or noise in a measured round is warned of, once a link
        (``link/diagnostics.py``).
        """
        runtime = self._runtime
        self._settle()
        rows = parameter_rows(runtime.diagnostics, runtime.memory, self.method.traits.waiting)
        counts = {"rounds": runtime.round, "skipped_rounds": runtime.skipped_rounds}
        return {"parameters": rows, "gauges": self.gauges(), **counts, **runtime.seconds()}

    def gauges(self) -> dict[str, float]:
        """Return the numbers that the method reports of this rank's latest round, by name.

        Their names are those of :class:`gradwire.Traits`, and the method's page says what they mean. A round that
        was skipped leaves those of the round before. There is none before the first round, in rounds of warm-up, and
        where a fallback serves.
        """
        self._settle()
        return dict(self._runtime.gauges.latest)

    def metrics(self) -> dict[str, float]:
        r"""Return numbers for a logger, by name: of this rank, all of them finite or infinite floats.

        Returns:
            What only grows: ``rounds``, ``skipped_rounds``, ``sent_bytes``, ``received_bytes``, and the seconds
            ``encode_s``, ``wire_s`` and ``decode_s``. ``compression_factor`` and ``bits_per_element`` over all rounds,
            see :class:`gradwire.Traffic`. Of the last measured round, where there was one,
            ``gradient_norm`` and ``relative_error``, over all measured parameters p with gradients :math:`g_p` and
            what this rank sent of them :math:`s_p`:

            .. math:: \sqrt{\textstyle\sum_p |g_p|^2}, \qquad
                      \sqrt{\textstyle\sum_p |s_p - g_p|^2 \big/ \sum_p |g_p|^2}

            ``residual_norm``, likewise, where residuals are kept. ``gauge/NAME`` for each of :meth:`gauges`.

        Sinks for TensorBoard, Weights & Biases, MLflow and Prometheus are in ``gradwire.integrations``.
        """
        report, traffic = self.diagnostics(), self.traffic()
        found = {name: float(report[name]) for name in COUNTERS if name in report}
        found |= {"sent_bytes": float(traffic.sent_bytes), "received_bytes": float(traffic.received_bytes)}
        found["compression_factor"] = traffic.compression_factor
        found["bits_per_element"] = traffic.bits_per_element
        rows = list(report["parameters"].values())
        norm = math.hypot(*(row["gradient_norm"] for row in rows))
        if rows and norm > 0:
            errors = (row["relative_error"] * row["gradient_norm"] for row in rows)
            found |= {"gradient_norm": norm, "relative_error": math.hypot(*errors) / norm}
        residual = self._runtime.memory.norm(self.method.traits.waiting)
        if residual is not None:
            found["residual_norm"] = residual
        return found | {f"gauge/{name}": float(value) for name, value in report["gauges"].items()}

    def trace(self, trace: Trace | None) -> None:
        """Let the lanes record what they do from now on; None ends that. What casts do is not recorded."""
        for lane in self._runtime.lanes:
            lane.trace = trace

    def _settle(self) -> None:
        """Wait until the last round has come to its end, before what it leaves is looked at."""
        if self._round is not None:
            self._round.settle()
