"""PyTorch's ends: DDP's hook, loops without DDP, simulated workers."""

from gradwire.adapters.checkpoint import load, save
from gradwire.adapters.checks import check_options
from gradwire.adapters.ddp import attach
from gradwire.adapters.link import Link
from gradwire.adapters.probe import probe
from gradwire.adapters.simulated import SimulatedLink, Simulation, simulate
from gradwire.planning.buckets import warm_up

__all__ = [
    "Link",
    "SimulatedLink",
    "Simulation",
    "attach",
    "check_options",
    "load",
    "probe",
    "save",
    "simulate",
    "warm_up",
]
