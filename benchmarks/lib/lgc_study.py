"""The phases, densities and rates that the studies of LGC share."""

from __future__ import annotations

from typing import Any

import gradwire as gw

FULL, TRAINING = 30, 90
DENSITY = {"mnist": 0.0025, "cifar10": 0.005}
INNOVATION = 0.0002
RATE = {"mnist": 0.02, "cifar10": 0.05}
MOMENTUM = 0.9
USUAL = 1024

Row = dict[str, Any]


def lgc(task: str, **fields: Any) -> gw.LGC:
    """Return LGC with the phases of this study."""
    defaults = {"innovation": INNOVATION, "full_rounds": FULL, "training_rounds": TRAINING, "momentum": MOMENTUM}
    return gw.LGC(density=DENSITY[task], **(defaults | fields))
