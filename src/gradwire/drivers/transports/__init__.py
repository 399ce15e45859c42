"""What carries operations between ranks: one class for each kind of connection."""

from gradwire.drivers.transports.base import Transport
from gradwire.drivers.transports.gloo import GlooTransport

__all__ = ["GlooTransport", "Transport"]
