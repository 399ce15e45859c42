"""Full-batch training of graph networks on a partitioned graph: subgraphs, halos, and methods for their rows."""

from gradwire.graphs.block_model import block_model
from gradwire.graphs.cdfgnn import CDFGNN
from gradwire.graphs.halo_method import Halo, HaloMethod, Isolated
from gradwire.graphs.halo_plan import HaloExchange, HaloPlan, extended
from gradwire.graphs.models import (
    GAT,
    GCN,
    GATLayer,
    GCNLayer,
    GraphLayer,
    GraphNetwork,
    GraphSAGE,
    SAGELayer,
    forward_together,
)
from gradwire.graphs.partition import PARTITIONS, cut_edges, partition
from gradwire.graphs.specs import HALO_METHODS, halo_method
from gradwire.graphs.subgraph import Boundary, Graph, Subgraph, subgraphs, symmetrised
from gradwire.graphs.varco import VARCO

__all__ = [
    "CDFGNN",
    "GAT",
    "GCN",
    "HALO_METHODS",
    "PARTITIONS",
    "VARCO",
    "Boundary",
    "GATLayer",
    "GCNLayer",
    "Graph",
    "GraphLayer",
    "GraphNetwork",
    "GraphSAGE",
    "Halo",
    "HaloExchange",
    "HaloMethod",
    "HaloPlan",
    "Isolated",
    "SAGELayer",
    "Subgraph",
    "block_model",
    "cut_edges",
    "extended",
    "forward_together",
    "halo_method",
    "partition",
    "subgraphs",
    "symmetrised",
]
