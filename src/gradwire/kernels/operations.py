"""The operations of all families, in one class."""

from __future__ import annotations

from gradwire.kernels.fourier.operations import FourierOperations
from gradwire.kernels.indices.operations import IndexOperations
from gradwire.kernels.lattice.operations import LatticeOperations
from gradwire.kernels.levels.operations import LevelOperations
from gradwire.kernels.low_rank.operations import LowRankOperations
from gradwire.kernels.moments.operations import MomentOperations
from gradwire.kernels.natural.operations import NaturalOperations
from gradwire.kernels.patches.operations import PatchOperations
from gradwire.kernels.planes.operations import PlaneOperations
from gradwire.kernels.rotation.operations import RotationOperations
from gradwire.kernels.selection.operations import SelectionOperations
from gradwire.kernels.shifts.operations import ShiftOperations
from gradwire.kernels.signs.operations import SignOperations
from gradwire.kernels.sketch.operations import SketchOperations
from gradwire.kernels.ternary.operations import TernaryOperations


class Operations(
    MomentOperations,
    TernaryOperations,
    LevelOperations,
    NaturalOperations,
    LatticeOperations,
    SignOperations,
    RotationOperations,
    SelectionOperations,
    IndexOperations,
    SketchOperations,
    LowRankOperations,
    FourierOperations,
    ShiftOperations,
    PatchOperations,
    PlaneOperations,
):
    """Arithmetic on blocks and bits. Every backend gives the same bits; ``reference`` defines them.

    Tensors are in the memory of the backend's device, and contiguous unless stated otherwise. The caller allocates
    outputs, except for statistics of segments. Vectors and byte buffers may start at any element of a larger tensor.
    ``N`` stands for ``world_size``, ``S`` for ``len(table)``. If a tensor has another type or shape than stated, an
    operation raises :class:`~gradwire.errors.HyperparameterError` before it reads or writes memory.
    """
