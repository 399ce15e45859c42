"""An emulated cluster on one Linux machine, of network namespaces with rate-limited interfaces.

Links that also delay, lose or reorder frames are the kernel's netem, or a process where the kernel has none.
"""

from gradwire.tools.lab.command import PORT, environment, run_command, start
from gradwire.tools.lab.impairments import Impairments, Outage
from gradwire.tools.lab.iproute import Counters, LabError
from gradwire.tools.lab.network import INTERFACE, Emulator, Network, missing, open_network
from gradwire.tools.lab.quantities import Rate, format_rate, parse_delay, parse_rate, parse_share
from gradwire.tools.lab.relay import RelayReport
from gradwire.tools.lab.topology import Topology

__all__ = [
    "INTERFACE",
    "PORT",
    "Counters",
    "Emulator",
    "Impairments",
    "LabError",
    "Network",
    "Outage",
    "Rate",
    "RelayReport",
    "Topology",
    "environment",
    "format_rate",
    "missing",
    "open_network",
    "parse_delay",
    "parse_rate",
    "parse_share",
    "run_command",
    "start",
]
