"""Rows of the kernel benchmark for methods: all that one rank of four computes in a step."""

from __future__ import annotations

import math
from functools import partial

import torch

from gradwire.exchange.drivers import LocalProfiler
from gradwire.exchange.planning import Options, Planner
from gradwire.kernels import Kernels
from gradwire.methods.registry import METHODS
from gradwire.tools.bench.timing import Bench

__all__ = ["bench_methods"]

WORKERS = 4
MLP = ((10,), (10, 2048), (2048,), (2048, 2048), (2048,), (2048, 2048), (2048,), (2048, 784))
"""Shapes of the step benchmark's MLP, last layer first."""

SLOW_ELEMENTS = 100_000  # for the reference, which is there to be read


def bench_methods(bench: Bench, kernels: Kernels, elements: int) -> None:
    """Time the local work of a step by every method with its defaults: statistics, encoder, reduction, decoder, memory.

    The parameters are those of an MLP of 10 M elements, cut to ``elements``; small ones are left out. What the wire
    would take is not in it; what a method computes for its peers' payloads is, three of them where all are gathered.
    """
    if kernels.name == "meta":
        return
    most = min(elements, SLOW_ELEMENTS) if kernels.name == "reference" else elements
    share = min(1.0, most / sum(map(math.prod, MLP)))
    # Of each parameter as many of the first rows.
    shapes = [(int(share * rows), *rest) for rows, *rest in MLP]
    shapes = [shape for shape in shapes if math.prod(shape) >= 1024]
    parameters = {f"p{i}": torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}
    flat = torch.randn(sum(map(math.prod, shapes)), generator=torch.Generator().manual_seed(0))
    # On two levels the work is that of the method inside.
    for kind in (kind for kind in METHODS if not kind.sharded):
        planner = Planner(kind(), parameters, WORKERS, Options(backend=kernels.name))
        planner.compile()
        rehearsal = LocalProfiler(planner.plan(planner.step_order(), 0), flat, WORKERS)
        rehearsal.play()
        bench.take(f"step of {kind.name}", "mlp", flat.numel(), partial(_seconds, rehearsal))


def _seconds(rehearsal: LocalProfiler) -> float:
    return sum(stage.work_s for job in rehearsal.play() for stage in job)
