"""PyTorch's ends: DDP's hook, loops without DDP, simulated workers."""

from gradwire.adapters.attach import attach, compress_weights
from gradwire.planning.planner import warm_up
from gradwire.runtime.checkpoint import load, save
from gradwire.runtime.checks import check_options
from gradwire.runtime.halo_link import HaloLink
from gradwire.runtime.link import Link
from gradwire.runtime.selection.link_probe import probe
from gradwire.runtime.simulate import SimulatedLink, Simulation, simulate
from gradwire.runtime.simulated_halo_link import SimulatedHaloLink
from gradwire.runtime.simulated_local_steps import SimulatedLocalSteps
from gradwire.runtime.weight_link import WeightLink

__all__ = [
    "HaloLink",
    "Link",
    "SimulatedHaloLink",
    "SimulatedLink",
    "SimulatedLocalSteps",
    "Simulation",
    "WeightLink",
    "attach",
    "check_options",
    "compress_weights",
    "load",
    "probe",
    "save",
    "simulate",
    "warm_up",
]
