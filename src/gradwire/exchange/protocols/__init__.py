"""Protocols, which compute the mean from payloads. They are generators and do no input or output."""

from gradwire.exchange.protocols.all_reduce import all_reduce, gathered_mean, gathered_values
from gradwire.exchange.protocols.context import Context, Gauges, Outcome, RoundParts, Workspace
from gradwire.exchange.protocols.direct import (
    alltoallv,
    broadcast,
    broadcast_values,
    collected,
    collected_values,
    leader,
)
from gradwire.exchange.protocols.memory import Memory, ShardMemory
from gradwire.exchange.protocols.payloads import Section
from gradwire.exchange.protocols.sections import all_gather, two_shot
from gradwire.exchange.protocols.shares import REDUCE_SCATTER, ShardSections, Share, reduce_scatter, two_shot_re_encoded
from gradwire.exchange.protocols.tree import tree, two_shot_merged
from gradwire.exchange.protocols.two_level import ScopeChecks, agree_on_finite, gather_shards, scatter_shards, within

PROTOCOLS = {"two_shot": two_shot, "all_gather": all_gather, "tree": tree}
"""Protocols for the sections of a whole chunk, by name."""
SHARED_OUT = {"two_shot": two_shot_re_encoded, "two_shot_merged": two_shot_merged}
"""Protocols for the sections of each rank's share of a chunk; "two_shot" is here for codes that do not add up."""

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
