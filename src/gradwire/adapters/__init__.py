"""PyTorch's ends: DDP's hook, loops without DDP, simulated workers."""

from gradwire.adapters.buckets import warm_up
from gradwire.adapters.checkpoint import load, save
from gradwire.adapters.ddp import attach
from gradwire.adapters.link import Link
from gradwire.adapters.options import Options
from gradwire.adapters.simulated import SimulatedLink, Simulation, simulate

__all__ = ["Link", "Options", "SimulatedLink", "Simulation", "attach", "load", "save", "simulate", "warm_up"]
