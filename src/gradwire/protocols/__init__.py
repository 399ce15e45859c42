"""How payloads become the mean. Protocols are generators and do no input or output."""

from gradwire.protocols.all_reduce import all_reduce, gathered_mean, gathered_values
from gradwire.protocols.alltoallv import alltoallv
from gradwire.protocols.broadcast import broadcast, broadcast_values, leader
from gradwire.protocols.collect import collected, collected_values
from gradwire.protocols.context import Context, Outcome, Workspace
from gradwire.protocols.gauges import Gauges
from gradwire.protocols.memory import Memory, ShardMemory
from gradwire.protocols.merged import two_shot_merged
from gradwire.protocols.payloads import Section
from gradwire.protocols.reduce_scatter import REDUCE_SCATTER, ShardSections, reduce_scatter
from gradwire.protocols.round_parts import RoundParts
from gradwire.protocols.sections import all_gather, two_shot
from gradwire.protocols.shares import Share, two_shot_re_encoded
from gradwire.protocols.tree import tree
from gradwire.protocols.two_level import ScopeChecks, agree_on_finite, gather_shards, scatter_shards, within

PROTOCOLS = {"two_shot": two_shot, "all_gather": all_gather, "tree": tree}
"""Those that carry sections of a whole chunk, by name."""
SHARED_OUT = {"two_shot": two_shot_re_encoded, "two_shot_merged": two_shot_merged}
"""Those that carry sections of each rank's share of a chunk: of two of one name, where codes do not add up."""

__all__ = [
    "PROTOCOLS",
    "REDUCE_SCATTER",
    "SHARED_OUT",
    "Context",
    "Gauges",
    "Memory",
    "Outcome",
    "RoundParts",
    "ScopeChecks",
    "Section",
    "ShardMemory",
    "ShardSections",
    "Share",
    "Workspace",
    "agree_on_finite",
    "all_gather",
    "all_reduce",
    "alltoallv",
    "broadcast",
    "broadcast_values",
    "collected",
    "collected_values",
    "gather_shards",
    "gathered_mean",
    "gathered_values",
    "leader",
    "reduce_scatter",
    "scatter_shards",
    "tree",
    "two_shot",
    "two_shot_re_encoded",
    "within",
]
