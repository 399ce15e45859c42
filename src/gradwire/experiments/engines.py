"""Which engine trains a plan."""

from __future__ import annotations

from gradwire.experiments.config import RunConfig
from gradwire.experiments.distributed import DistributedEngine
from gradwire.experiments.simulate import SimulatedEngine

__all__ = ["real_engine", "simulated_engine"]


def real_engine(plan: RunConfig) -> DistributedEngine:
    """Return this worker's engine on the default process group."""
    return DistributedEngine(plan)


def simulated_engine(plan: RunConfig) -> SimulatedEngine:
    """Return the engine that plays all workers."""
    return SimulatedEngine(plan)
