"""Shifts of DIANA and EF21: each worker's reference, to which it sends compressed differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.exchange.method import Method, require
from gradwire.exchange.protocols import Context, Outcome
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.memory import WORKERS
from gradwire.exchange.segments import Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.wrappers.wrapper import WrappedPlan, as_sent, pieces

SHIFTS = ("workers", "shift", "mean_shift")
"""State of methods with shifts: the number of workers, this rank's shift, and the mean of all shifts."""

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def shift_dtype(owner: str, name: object) -> torch.dtype:
    """Return the type of shifts, given its name.

    Raises:
        HyperparameterError: it is neither "float64" nor "float32".
    """
    given = isinstance(name, str) and name in _DTYPES
    require(given, owner, f"shifts is 'float64' or 'float32', not {name!r}")
    return _DTYPES[str(name)]


class ShiftAlgorithm(Method):
    """Base of algorithms that compress differences to shifts.

    With x_i worker i's vector, h_i its shift and h the mean of all, zero at first, and C the compressor::

        D_i = C(x_i - h_i)                 h_i <- h_i + rate D_i
        D   = (1 / N) sum_i D_i            outcome: h + D                h <- h + rate D

    Every worker computes h from the bytes that all receive. Shifts are stored without the loss scale under automatic
    mixed precision. With another number of workers after a checkpoint they restart from zero, since h would not be the
    mean of the remaining h_i.

    The compressor's payloads are gathered, not encoded again by the owners of shares. With the owner's D' = D + v in
    place of D, E v = 0, ranks would know D' alone, and h <- h + rate D' would leave e = h - mean h_i with e <- e + rate
    v: a sum of errors that no later round makes smaller. The outcome would be that mean plus e, and as x_i - h_i go to
    zero, v would too, and e stay where it is. A shift that all ranks learn from what is applied, h_i = h, has e = 0,
    but then x_i - h goes to x_i - mean x_i and not to zero, as without shifts.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    compressor: Method
    shifts: str

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=as_sent(self.compressor),
            re_encoding=False,
            needs_loss_scale=True,
            sends_differences=True,
            kernels=(*self.compressor.traits.kernels, "shifts"),
        )

    def refusal_of_collective(self, collective: str) -> str | None:
        if collective != "two_shot" or not self.compressor.traits.re_encoding:
            return None
        return (
            "the owner of a share would encode the mean difference again, with an error that is in no rank's shift, so "
            "that the mean of all shifts would drift away from the one that ranks keep, and nothing leads it back"
        )

    def differences(self, setting: PlanSetting, rate: float) -> BucketPlan:
        """Return the plan of a bucket with shifts of learning rate ``rate``."""
        inner = self.compressor.plan(setting)
        return _Differences(inner, setting, rate, shift_dtype(type(self).__name__, self.shifts))


def memory_pair(
    context: Context, kind: str, segments: Sequence[Segment], dtype: torch.dtype, *, replicated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored vector of a kind, and its staged successor."""
    memory = context.memory
    return (
        memory.read(kind, segments, replicated=replicated, dtype=dtype),
        memory.stage(kind, segments, replicated=replicated, dtype=dtype),
    )


class _Differences(WrappedPlan):
    def __init__(self, inner: BucketPlan, setting: PlanSetting, rate: float, dtype: torch.dtype) -> None:
        super().__init__(inner, setting.segments)
        self._kernels, self._rate, self._dtype = setting.kernels, rate, dtype

    def before(self, context: Context, flat: torch.Tensor) -> None:
        memory, workers = context.memory, context.memory.value(WORKERS)
        if workers is not None and int(workers) != context.world_size:
            # From a checkpoint: h is no longer the mean of the remaining h_i, and would never become it again.
            memory.forget("shift")
            memory.forget("mean_shift")
        memory.stage_value(WORKERS, torch.tensor(context.world_size, device="cpu"))
        reference, _ = self._pair(context, "shift", replicated=False)
        for a, b in self.all_runs:
            self._kernels.subtract_shift(flat[a:b], reference[a:b], context.loss_scale)

    def after(self, context: Context, flat: torch.Tensor, outcome: Outcome) -> Outcome:
        rate, scale = self._rate / context.loss_scale, context.loss_scale
        inner = outcome.sent
        if inner is None:
            raise TypeError("an inner plan did not say what it sent")
        sent = context.workspace.bucket.get("sent", 4 * flat.numel()).view(torch.float32)
        runs = self.runs[context.chunk]
        for a, b in runs:
            sent[a:b].zero_()
        inner(sent, 1.0)
        reference, shift = self._pair(context, "shift", replicated=False)
        held, staged = self._pair(context, "mean_shift", replicated=True)
        for a, b in runs:
            self._kernels.step_shift(reference[a:b], sent[a:b], rate, shift[a:b])
            # The outcome uses the old mean of the shifts.
            self._kernels.step_mean_shift(held[a:b], flat[a:b], rate, scale, staged[a:b])

        def contributed(out: torch.Tensor, weight: float) -> None:
            inner(out, weight)
            for a, b in pieces(runs, flat):
                out[a:b] += reference[a:b].to(out.dtype) * (weight * scale)

        return replace(outcome, sent=contributed)

    def _pair(self, context: Context, kind: str, *, replicated: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return memory_pair(context, kind, self.segments, self._dtype, replicated=replicated)
