"""Which engine trains a plan."""

from __future__ import annotations

import gradwire as gw
from gradwire.experiments.config import RunConfig
from gradwire.experiments.distributed import DistributedEngine
from gradwire.experiments.simulate import SimulatedEngine
from gradwire.experiments.simulate_local import SimulatedLocalEngine

__all__ = ["real_engine", "simulated_engine"]


def real_engine(plan: RunConfig) -> DistributedEngine:
    """Return this worker's engine on the default process group."""
    return DistributedEngine(plan)


def simulated_engine(plan: RunConfig) -> SimulatedEngine | SimulatedLocalEngine:
    """Return the engine that plays all workers: with one model, or a model each where parameters differ."""
    return SimulatedLocalEngine(plan) if gw.method(plan.method).local_steps else SimulatedEngine(plan)
