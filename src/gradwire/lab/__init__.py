"""An emulated cluster on one Linux machine: hosts are network namespaces, links are rate-limited."""

from gradwire.lab.command import environment, run_command, start
from gradwire.lab.network import Counters, LabError, Network, missing, open_network
from gradwire.lab.rates import Rate, format_rate, parse_rate
from gradwire.lab.topology import Topology

__all__ = [
    "Counters",
    "LabError",
    "Network",
    "Rate",
    "Topology",
    "environment",
    "format_rate",
    "missing",
    "open_network",
    "parse_rate",
    "run_command",
    "start",
]
