"""Who executes a protocol: a torch.distributed group, a simulation, or a dry run on sizes."""

from gradwire.exchange.drivers.calls import call
from gradwire.exchange.drivers.devices import Device, HostDevice
from gradwire.exchange.drivers.dry_run import dry_run
from gradwire.exchange.drivers.lane import Job, Lane, WireError
from gradwire.exchange.drivers.late_checks import LateChecks, Verdict
from gradwire.exchange.drivers.local_profiler import LocalProfiler, Stage, profile_locally
from gradwire.exchange.drivers.simulation import simulate_ranks
from gradwire.exchange.drivers.trace import Span, Trace, profiled
from gradwire.exchange.drivers.traffic import Meter, Traffic, dense_bytes
from gradwire.exchange.drivers.transfer_order import TransferOrder
from gradwire.exchange.drivers.transports import choose_transport, connector, device_of, group_timeout, one_device

__all__ = [
    "Device",
    "HostDevice",
    "Job",
    "Lane",
    "LateChecks",
    "LocalProfiler",
    "Meter",
    "Span",
    "Stage",
    "Trace",
    "Traffic",
    "TransferOrder",
    "Verdict",
    "WireError",
    "call",
    "choose_transport",
    "connector",
    "dense_bytes",
    "device_of",
    "dry_run",
    "group_timeout",
    "one_device",
    "profile_locally",
    "profiled",
    "simulate_ranks",
]
