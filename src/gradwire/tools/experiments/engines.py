"""Choose the engine for a run."""

from __future__ import annotations

import gradwire as gw
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.distributed import DistributedEngine
from gradwire.tools.experiments.graph_engines import GraphEngine, SimulatedGraphEngine
from gradwire.tools.experiments.simulate import SimulatedEngine, SimulatedLocalEngine
from gradwire.tools.experiments.tasks.graph import GraphTask


def real_engine(plan: RunConfig) -> DistributedEngine:
    """Return this worker's engine on the default process group."""
    return GraphEngine(plan) if isinstance(plan.task, GraphTask) else DistributedEngine(plan)


def simulated_engine(plan: RunConfig) -> SimulatedEngine | SimulatedLocalEngine:
    """Return the engine that plays all workers: with one model, or with a model for each under local steps.

    Raises:
        IncompatibleError: the task is a graph and the method has local steps.
    """
    local = gw.method(plan.method).traits.local_steps > 0
    if isinstance(plan.task, GraphTask):
        if local:
            raise gw.IncompatibleError(
                f"{plan.method}: simulated workers with parts of a graph share one model, and cannot step by "
                "themselves: leave --simulate out, so that workers are real"
            )
        return SimulatedGraphEngine(plan)
    return SimulatedLocalEngine(plan) if local else SimulatedEngine(plan)
