"""Transports, which execute operations between ranks: one class for each kind of connection."""

from gradwire.exchange.drivers.transports.base import Transport
from gradwire.exchange.drivers.transports.choice import Connect, choose_transport, connector, device_of, one_device
from gradwire.exchange.drivers.transports.gloo import GlooTransport, break_off
from gradwire.exchange.drivers.transports.nccl import NCCLTransport
from gradwire.exchange.drivers.transports.staged import StagedTransport

__all__ = [
    "Connect",
    "GlooTransport",
    "NCCLTransport",
    "StagedTransport",
    "Transport",
    "break_off",
    "choose_transport",
    "connector",
    "device_of",
    "one_device",
]
