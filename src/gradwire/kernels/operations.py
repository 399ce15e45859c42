"""What can be asked of the kernels: the operations of all families, whoever computes them."""

from __future__ import annotations

from gradwire.kernels.fourier.operations import FourierOperations
from gradwire.kernels.indices.operations import IndexOperations
from gradwire.kernels.lattice.operations import LatticeOperations
from gradwire.kernels.levels.operations import LevelOperations
from gradwire.kernels.low_rank.operations import LowRankOperations
from gradwire.kernels.moments.operations import MomentOperations
from gradwire.kernels.natural.operations import NaturalOperations
from gradwire.kernels.rotation.operations import RotationOperations
from gradwire.kernels.selection.operations import SelectionOperations
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
):
    """Arithmetic on blocks and bits. Every backend gives the same bits; ``reference`` defines them.

    Tensors lie in CPU memory and are contiguous unless said otherwise; outputs are the caller's, except for statistics
    of segments. Vectors and byte buffers may start at any element of a larger tensor. ``N`` stands for ``world_size``,
    ``S`` for ``len(table)``. All operations raise :class:`~gradwire.errors.HyperparameterError` for tensors of another
    type or shape than they state, before memory is touched.
    """
