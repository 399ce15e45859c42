"""Who executes a protocol: a torch.distributed group, a simulation, or a dry run on sizes."""

from gradwire.groups.dry_run import dry_run
from gradwire.groups.lanes import Job, Lane, WireError
from gradwire.groups.rehearsal import Rehearsal, Stage, rehearse
from gradwire.groups.roll_call import Failure, RollCall
from gradwire.groups.simulation import simulate_ranks
from gradwire.groups.traffic import Meter, Traffic, dense_bytes
from gradwire.groups.turns import Turns

__all__ = [
    "Failure",
    "Job",
    "Lane",
    "Meter",
    "Rehearsal",
    "RollCall",
    "Stage",
    "Traffic",
    "Turns",
    "WireError",
    "dense_bytes",
    "dry_run",
    "rehearse",
    "simulate_ranks",
]
