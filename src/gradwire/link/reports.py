"""Reports of a link about its exchange: bytes, errors, seconds, and numbers for a logger."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from gradwire.exchange.drivers import Trace, Traffic
from gradwire.exchange.method import Method
from gradwire.link.diagnostics import parameter_rows, squares_of, wait_report
from gradwire.link.link_runtime import LinkRuntime
from gradwire.link.peers.circle import Wait
from gradwire.link.round import Round
from gradwire.link.selection.autotune import Selection

COUNTERS = ("rounds", "skipped_rounds", "sent_bytes", "received_bytes", "encode_s", "wire_s", "decode_s")
"""Names in :meth:`LinkReports.metrics` of numbers that only grow while a link is open, unless a state is loaded."""


def _took(choice: Mapping[str, Any] | None) -> list[str]:
    """Return the choice of a link that chooses its method, with its reason, as a list of at most one text."""
    if choice is None:
        return []
    if choice["chosen"] is None:
        return ["no choice yet"]
    return [f"took {choice['chosen']} ({'; '.join(filter(None, (choice['reason'], choice['note'])))})"]


class LinkReports:
    """Reports of a link to users, and the context that turns the failure of another collective into its error."""

    method: Method
    optimizer: Any
    _compressed: Mapping[str, torch.Tensor]
    """The parameters that are not sent in float32, by name."""
    _runtime: LinkRuntime
    _selection: Selection
    _round: Round | None = None
    """The current or the latest round."""
    buffer_bytes: Callable[[], int]

    def __repr__(self) -> str:
        runtime, sent = self._runtime, self.traffic()
        factor = f"{sent.compression_factor:.1f} times fewer bytes than float32" if sent.sent_bytes else "nothing sent"
        parts = [repr(self.method), *_took(self._selection.record())]
        parts += [f"{len(runtime.ranks)} ranks", f"round {runtime.round}", factor]
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @property
    def round(self) -> int:
        """Synchronised backward passes, or exchanges of local steps, so far, also those before a checkpoint."""
        return self._runtime.round

    @property
    def skipped_rounds(self) -> int:
        """Rounds with a non-finite value anywhere, if the method checks for it, or with one out of its range."""
        self._settle()
        return self._runtime.skipped_rounds

    @property
    def error(self) -> Exception | None:
        """The error that broke the link, in full; DDP shows only a mangled part of it."""
        if self._round is not None:
            self._round.look()
        return self._runtime.failures.told()

    def naming(self, where: str) -> AbstractContextManager[Wait]:
        """Return a context in which the failure of any collective becomes the error of this link.

        It yields a function that waits for a gather in main memory, at most until a rank has ended.

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
        """Return the measured errors of the exchange, its gauges and its times.

        Returns:
            ``parameters``: by name, for the last measured round (0, 10, 30, and every 100th): ``relative_error`` and
            ``cosine`` of the vector that this rank sent to its gradient, ``gradient_norm`` and ``sent_norm``, and
            ``density``, the share of the elements sent that are not zero; ``residual_norm``, the norm of the current
            residual, if the method keeps one for each parameter; ``dial``, the value in force, if the method chooses
            one for each parameter (``l_greco``). Norms are those of unscaled gradients, or of the momentum if the
            method applies it before compression. ``gauges``: see :meth:`gauges`. ``skipped_rounds``: rounds with a
            non-finite value anywhere, if the method checks for it, or with one beyond 2^40, if it adds up rounds; they
            do not change the state. ``rounds``: rounds so far. ``encode_s``, ``wire_s``, ``decode_s``: seconds that
            this rank's lanes have spent so far; ``wire_s`` adds up casts that are exchanged side by side, so that it
            may exceed the lanes' time. ``wait``: a dict about the number of rounds that a part of a gradient
            waits on average in the residual before it is sent. Its ``expected_rounds`` is the number that the method
            in force declares, (1 - delta) / delta if each round sends a share delta of the residual; None if there is
            no residual or the number is not known. ``measured_rounds`` is |residual|^2 / |sent|^2 of this rank in the
            last measured round, over compressed parameters; for random blocks it changes much from round to round.
            ``advice`` is the warning about the given optimizer, such as a momentum where either number is above five;
            None if there is no warning.

        Each link warns once if in a measured round too much of the gradient is late, lost or noise
        (``link/diagnostics.py``).
        """
        runtime = self._runtime
        self._settle()
        rows = parameter_rows(runtime.diagnostics, runtime.memory, self.method.traits.waiting)
        counts = {"rounds": runtime.round, "skipped_rounds": runtime.skipped_rounds}
        in_force = self._selection.planner.method
        wait = wait_report(in_force, self.optimizer, self._compressed, runtime.diagnostics.wait())
        return {"parameters": rows, "wait": wait, "gauges": self.gauges(), **counts, **runtime.seconds()}

    def gauges(self) -> dict[str, float]:
        """Return the numbers that the method reports of this rank's latest round, by name.

        The names are those of :class:`gradwire.Traits`, and the method's page explains them. A skipped round keeps
        those of the round before. There are none before the first round, in warm-up rounds, and under a fallback.
        """
        self._settle()
        return dict(self._runtime.gauges.latest)

    def metrics(self) -> dict[str, float]:
        r"""Return numbers of this rank for a logger, by name, as finite or infinite floats.

        Returns:
            Counters: ``rounds``, ``skipped_rounds``, ``sent_bytes``, ``received_bytes``, and the seconds ``encode_s``,
            ``wire_s`` and ``decode_s``. ``compression_factor`` and ``bits_per_element`` over all rounds, see
            :class:`gradwire.Traffic`. For the last measured round, ``gradient_norm`` and ``relative_error``, over all
            measured parameters p with gradients :math:`g_p` and vectors sent by this rank :math:`s_p`:

            .. math:: \sqrt{\textstyle\sum_p |g_p|^2}, \qquad
                      \sqrt{\textstyle\sum_p |s_p - g_p|^2 \big/ \sum_p |g_p|^2}

            Both are left out if there was no such round or its gradient is zero or NaN, and the error if the gradient
            is infinite. ``residual_norm``, likewise, if residuals are kept. ``gauge/NAME`` for each of :meth:`gauges`.

        Sinks for TensorBoard, Weights & Biases, MLflow and Prometheus are in ``gradwire.integrations``.
        """
        report, traffic = self.diagnostics(), self.traffic()
        found = {name: float(report[name]) for name in COUNTERS if name in report}
        found |= {"sent_bytes": float(traffic.sent_bytes), "received_bytes": float(traffic.received_bytes)}
        found["compression_factor"] = traffic.compression_factor
        found["bits_per_element"] = traffic.bits_per_element
        off, square = squares_of(report["parameters"].values())
        if square > 0:
            found["gradient_norm"] = math.sqrt(square)
        if 0 < square < math.inf:
            found["relative_error"] = math.sqrt(off / square)
        residual = self._runtime.memory.norm(self.method.traits.waiting)
        if residual is not None:
            found["residual_norm"] = residual
        return found | {f"gauge/{name}": float(value) for name, value in report["gauges"].items()}

    def trace(self, trace: Trace | None) -> None:
        """Let the lanes record their work from now on; None ends that. The work of casts is not recorded."""
        for lane in self._runtime.lanes:
            lane.trace = trace

    def _settle(self) -> None:
        """Wait for the end of the last round, before its results are read."""
        if self._round is not None:
            self._round.settle()
