"""Drivers, which execute protocols: over a torch.distributed group, in a simulation, or as a dry run on sizes."""

from gradwire.exchange.drivers.delays import count_delays, count_step_delays
from gradwire.exchange.drivers.devices import Device, HostDevice, LateChecks, Verdict
from gradwire.exchange.drivers.dry_run import LocalProfiler, Stage, dry_run, profile_locally
from gradwire.exchange.drivers.future import Future
from gradwire.exchange.drivers.groups import Group, TorchGroup, group_of
from gradwire.exchange.drivers.lane import LANES, Lane, WireError
from gradwire.exchange.drivers.simulation import simulate_ranks
from gradwire.exchange.drivers.traffic import Meter, Span, Trace, Traffic, dense_bytes, profiled
from gradwire.exchange.drivers.transfer_order import TransferOrder
from gradwire.exchange.drivers.transports import break_off, choose_transport, connector, device_of, one_device
from gradwire.exchange.drivers.transports.in_process import Meetings

__all__ = [
    "LANES",
    "Device",
    "Future",
    "Group",
    "HostDevice",
    "Lane",
    "LateChecks",
    "LocalProfiler",
    "Meetings",
    "Meter",
    "Span",
    "Stage",
    "TorchGroup",
    "Trace",
    "Traffic",
    "TransferOrder",
    "Verdict",
    "WireError",
    "break_off",
    "choose_transport",
    "connector",
    "count_delays",
    "count_step_delays",
    "dense_bytes",
    "device_of",
    "dry_run",
    "group_of",
    "one_device",
    "profile_locally",
    "profiled",
    "simulate_ranks",
]
