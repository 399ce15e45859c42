"""What carries operations between ranks: one class for each kind of connection."""

from gradwire.drivers.transports.base import Transport
from gradwire.drivers.transports.choice import (
    Connect,
    choose_transport,
    connector,
    device_of,
    group_timeout,
    one_device,
)
from gradwire.drivers.transports.gloo import GlooTransport
from gradwire.drivers.transports.nccl import NCCLTransport
from gradwire.drivers.transports.staged import StagedTransport

__all__ = [
    "Connect",
    "GlooTransport",
    "NCCLTransport",
    "StagedTransport",
    "Transport",
    "choose_transport",
    "connector",
    "device_of",
    "group_timeout",
    "one_device",
]
