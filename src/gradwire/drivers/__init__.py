"""Who executes a protocol: a torch.distributed group, a simulation, or a dry run on sizes."""

from gradwire.drivers.calls import call
from gradwire.drivers.dry_run import dry_run
from gradwire.drivers.lane import Job, Lane, WireError
from gradwire.drivers.local_profiler import LocalProfiler, Stage, profile_locally
from gradwire.drivers.simulation import simulate_ranks
from gradwire.drivers.trace import Span, Trace, profiled
from gradwire.drivers.traffic import Meter, Traffic, dense_bytes
from gradwire.drivers.transfer_order import TransferOrder

__all__ = [
    "Job",
    "Lane",
    "LocalProfiler",
    "Meter",
    "Span",
    "Stage",
    "Trace",
    "Traffic",
    "TransferOrder",
    "WireError",
    "call",
    "dense_bytes",
    "dry_run",
    "profile_locally",
    "profiled",
    "simulate_ranks",
]
