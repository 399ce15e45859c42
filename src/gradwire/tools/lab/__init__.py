"""An emulated cluster on one Linux machine, of network namespaces with rate-limited interfaces."""

from gradwire.tools.lab.command import PORT, environment, run_command, start
from gradwire.tools.lab.network import INTERFACE, Counters, LabError, Network, missing, open_network
from gradwire.tools.lab.topology import Rate, Topology, format_rate, parse_delay, parse_rate

__all__ = [
    "INTERFACE",
    "PORT",
    "Counters",
    "LabError",
    "Network",
    "Rate",
    "Topology",
    "environment",
    "format_rate",
    "missing",
    "open_network",
    "parse_delay",
    "parse_rate",
    "run_command",
    "start",
]
