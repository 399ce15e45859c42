"""What the performance model expects of a comparison on a slow link, beside what was measured on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gradwire.errors import GradwireError
from gradwire.model.forecast import Scenario, forecast
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.tools.bench.calibration import default_path
from gradwire.tools.bench.profile import profile_name
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.report.verdict import seconds_text

__all__ = ["expected"]

BITS_PER_S = 100_000_000
"""Of the link: what a workstation's wide-area or shared connection has."""

DELAY_S = 1e-4


def expected(plan: RunConfig, methods: Sequence[str]) -> list[str]:
    """Return lines about the same training on as many machines, or none where the model knows nothing of it.

    The workers of one machine exchange through its memory, faster than over any network, so that what they measure says
    little of one.
    """
    if plan.simulate or plan.lab is not None:
        return []
    setting = Scenario(
        hosts=plan.workers,
        cores=os.cpu_count(),
        link=LinkModel(bandwidth_bytes_per_s=BITS_PER_S / 8, latency_s=DELAY_S),
    )
    try:
        calibrated = default_path().exists()
        machine = Machine.read(default_path()) if calibrated else DEFAULT
        forecasts, _ = forecast(profile_name(plan.task.name, plan.task.settings()["data"]), methods, setting, machine)
    except (GradwireError, NotImplementedError):
        # A graph's training, for one, has no gradients alone on its way.
        return []
    steps = [f"{f.method} {seconds_text(f.step_s)}" for f in forecasts if f.method in methods and f.apart is None]
    if not steps:
        return []
    whose = "this machine's" if calibrated else "a reference machine's"
    return [
        f"Predicted, not measured: on {plan.workers} machines at 100 Mbit/s a step would take {', '.join(steps)} "
        f"(by the model, with the speed of {whose} collectives).",
        f"gradwire plan --profile {plan.task.name} predicts other links and numbers of machines.",
    ]
