"""The exchanges of the step benchmark: computing alone, DDP's own hooks, gradwire's methods, and sharded modules."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.drivers import Span, Trace
from gradwire.model.profile import Recorder, Timeline
from gradwire.tools.bench.compute import CPU, Compute, make_compute
from gradwire.tools.bench.models import Batch, BenchModel
from gradwire.tools.bench.sharded import NATIVE, SHARDED, WEIGHTS, Passes, make_sharded
from gradwire.tools.experiments.errors import UsageError

COMPUTE = "compute"
# DDP's bf16 hook refuses every backend but NCCL.
DDP_VARIANTS = ("ddp fp32", "ddp fp16", "ddp powersgd")
VARIANTS = (COMPUTE, *DDP_VARIANTS, "gradwire fp32", "gradwire bf16", "gradwire terngrad")

POWERSGD_RANK = 2
ONE_BUCKET_MB = 4096


def check_variant(name: str) -> str:
    """Return the name if it is that of a variant: a known one, ``gradwire SPEC``, or one of a sharded module.

    Sharded are ``fsdp SPEC``, ``fsdp+weights SPEC`` and ``hsdp SPEC``, with ``native`` for FSDP2's own exchange.

    Raises:
        UsageError: there is no such variant; the message lists the known ones.
        HyperparameterError: ``SPEC`` is not a method.
    """
    if name == COMPUTE or name in DDP_VARIANTS:
        return name
    kind, _, spec = name.partition(" ")
    if kind not in ("gradwire", *SHARDED) or not spec:
        known = ", ".join((COMPUTE, *DDP_VARIANTS))
        sharded = ", ".join(f"'{kind} SPEC'" for kind in SHARDED)
        raise UsageError(
            f"variant {name!r}: known are {known}, 'gradwire SPEC' with any method, and on sharded modules {sharded}, "
            f"with any method or {NATIVE}"
        )
    if not is_sharded(name) or spec != NATIVE:
        gw.method(spec)
    return name


def is_sharded(name: str) -> bool:
    """Return whether a variant's module is sharded by FSDP2, whose own collectives no link counts."""
    return name.partition(" ")[0] in SHARDED


def follows_the_link(name: str) -> tuple[bool, bool]:
    """Return whether a variant's method chooses among others, and whether it measures the network when it is built."""
    kind, _, spec = name.partition(" ")
    if kind not in ("gradwire", *SHARDED) or spec == NATIVE:
        return False, False
    traits = gw.method(spec).traits
    return bool(traits.tries), traits.needs_link_cost


def dense_wire_bytes(name: str, numel: int, world_size: int) -> int | None:
    """Return the bytes that a rank sends in a ring all-reduce of DDP's fp32 or fp16; None for other exchanges."""
    widths = {"ddp fp32": 4, "ddp fp16": 2}
    if name == COMPUTE:
        return 0
    return round(2 * widths[name] * numel * (world_size - 1) / world_size) if name in widths else None


@dataclass
class Variant:
    """A variant on one rank, with its own module and exchange."""

    compute: Compute
    link: gw.Link | None
    recorder: Recorder | None
    weights: gw.WeightLink | None = None

    @classmethod
    def build(
        cls,
        name: str,
        model: BenchModel,
        batch: Batch,
        timeline: Timeline | None = None,
        device: torch.device = CPU,
        passes: Passes | None = None,
    ) -> Variant:
        """Build a variant (collective); all variants start from the same weights on every rank.

        Args:
            name: See :func:`check_variant`.
            model: The model to train.
            batch: This rank's batch.
            timeline: Timeline to sleep through instead of the model's passes; None: compute for real.
            device: Where to compute for real.
            passes: How a sharded module that sleeps divides the timeline among its units; None: measured on rank 0.
        """
        if is_sharded(name):
            return cls._sharded(name, model, batch, timeline, passes)
        powersgd = name == "ddp powersgd"
        compute = make_compute(model, batch, timeline, ONE_BUCKET_MB if powersgd else None, device)
        ddp, link, recorder = compute.wrapped, None, None
        if name == COMPUTE:
            recorder = Recorder(ddp)
        elif powersgd:
            state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "ddp fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name != "ddp fp32":
            link = gw.attach(ddp, name.partition(" ")[2])
        return cls(compute, link, recorder)

    @classmethod
    def _sharded(
        cls, name: str, model: BenchModel, batch: Batch, timeline: Timeline | None, passes: Passes | None
    ) -> Variant:
        kind, _, spec = name.partition(" ")
        compute = make_sharded(kind, model, batch, timeline, passes)
        link = None if spec == NATIVE else gw.attach(compute.wrapped, spec)
        weights = gw.compress_weights(compute.wrapped) if kind == WEIGHTS else None
        return cls(compute, link, None, weights)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.compute.wrapped.parameters())

    def trace(self, count: int) -> list[Span]:
        """Take steps and return the spans of this thread and of the link's lanes."""
        trace = Trace()
        if self.link is not None:
            self.link.trace(trace)
        try:
            self.steps(count, trace)
        finally:
            if self.link is not None:
                self.link.trace(None)
        return trace.spans()

    def steps(self, count: int, trace: Trace | None = None) -> list[float]:
        """Take steps and return the seconds of each.

        All ranks begin together. The exchange keeps them in step; without one, a barrier does, whose time is not
        counted.
        """
        dist.barrier()
        times: list[float] = []
        last = time.perf_counter()
        for _ in range(count):
            if self.recorder:
                dist.barrier()
                last = time.perf_counter()
                self.recorder.begin()
            marks = [last]
            loss = self.compute.forward()
            marks.append(time.perf_counter())
            if self.recorder:
                self.recorder.forward_ended()
            loss.backward()
            marks.append(time.perf_counter())
            if self.recorder:
                self.recorder.backward_ended()
            self.compute.update()
            if self.recorder:
                self.recorder.end()
            now = time.perf_counter()
            if trace is not None:
                for name, began_s, ended_s in zip(("forward", "backward", "update"), marks, (*marks[1:], now)):
                    trace.add(COMPUTE, name, began_s, ended_s, f"step {len(times)}")
            times.append(now - last)
            last = now
        return times

    def counts(self) -> dict[str, Any]:
        """Return the link's counters so far; of a sharded module's bytes they are only a part."""
        if self.link is None:
            return {}
        t, d = self.link.traffic(), self.link.diagnostics()
        bytes_ = "sent_bytes" if isinstance(self.compute.wrapped, DistributedDataParallel) else "exchange_bytes"
        return {bytes_: t.sent_bytes + t.buffer_bytes, **{k: d[k] for k in ("encode_s", "wire_s", "decode_s")}}

    def close(self) -> None:
        """Close the links, if there are any."""
        for link in (self.link, self.weights):
            if link is not None:
                link.close()
