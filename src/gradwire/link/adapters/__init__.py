"""Adapters for PyTorch: the hooks of DistributedDataParallel and of FSDP2."""

from gradwire.link.adapters.attach import attach, compress_weights
from gradwire.link.checkpoint import load, save
from gradwire.link.checks import check_options
from gradwire.link.halo_link import HaloLink
from gradwire.link.link import Link
from gradwire.link.membership.conductor import replay
from gradwire.link.membership.coordinator import Coordinator
from gradwire.link.membership.membership import Membership, join
from gradwire.link.membership.sampler import ElasticSampler
from gradwire.link.membership.trace import MembershipTrace
from gradwire.link.selection.link_cost import probe
from gradwire.link.simulate import SimulatedLink, Simulation, simulate
from gradwire.link.simulated_halo_link import SimulatedHaloLink
from gradwire.link.simulated_local_steps import SimulatedLocalSteps
from gradwire.link.simulated_server import ServerTurn, SimulatedServer
from gradwire.link.site import warm_up
from gradwire.link.weight_link import WeightLink

__all__: list[str] = [
    "Coordinator",
    "ElasticSampler",
    "HaloLink",
    "Link",
    "Membership",
    "MembershipTrace",
    "ServerTurn",
    "SimulatedHaloLink",
    "SimulatedLink",
    "SimulatedLocalSteps",
    "SimulatedServer",
    "Simulation",
    "WeightLink",
    "attach",
    "check_options",
    "compress_weights",
    "join",
    "load",
    "probe",
    "replay",
    "save",
    "simulate",
    "warm_up",
]
