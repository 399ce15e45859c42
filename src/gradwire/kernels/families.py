"""The modules and classes that compute each family of kernels, by backend, as plain imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradwire.kernels.fourier import operations as fourier
from gradwire.kernels.indices import operations as indices
from gradwire.kernels.lattice import operations as lattice
from gradwire.kernels.levels import operations as levels
from gradwire.kernels.low_rank import operations as low_rank
from gradwire.kernels.moments import operations as moments
from gradwire.kernels.natural import operations as natural
from gradwire.kernels.patches import operations as patches
from gradwire.kernels.planes import operations as planes
from gradwire.kernels.rotation import operations as rotation
from gradwire.kernels.selection import operations as selection
from gradwire.kernels.shifts import operations as shifts
from gradwire.kernels.signs import operations as signs
from gradwire.kernels.sketch import operations as sketch
from gradwire.kernels.ternary import operations as ternary

if TYPE_CHECKING:
    from gradwire.kernels.numba_core.compiled import Compiled

OPERATIONS: Mapping[str, Any] = {
    "moments": moments,
    "ternary": ternary,
    "levels": levels,
    "natural": natural,
    "lattice": lattice,
    "signs": signs,
    "rotation": rotation,
    "selection": selection,
    "indices": indices,
    "sketch": sketch,
    "low_rank": low_rank,
    "fourier": fourier,
    "shifts": shifts,
    "patches": patches,
    "planes": planes,
}
"""The module of each family that has a function in plain PyTorch for each operation; these define the bits."""


def compiled_loops(family: str) -> Callable[[bool, int], Compiled]:
    """Return the class of a family's compiled loops.

    A module is imported when its family is needed: Numba takes half a second to import, and each family a few
    milliseconds.
    """
    if family == "moments":
        from gradwire.kernels.moments.loops import MomentsLoops

        return MomentsLoops
    if family == "ternary":
        from gradwire.kernels.ternary.loops import TernaryLoops

        return TernaryLoops
    if family == "levels":
        from gradwire.kernels.levels.loops import LevelsLoops

        return LevelsLoops
    if family == "natural":
        from gradwire.kernels.natural.loops import NaturalLoops

        return NaturalLoops
    if family == "lattice":
        from gradwire.kernels.lattice.loops import LatticeLoops

        return LatticeLoops
    if family == "signs":
        from gradwire.kernels.signs.loops import SignsLoops

        return SignsLoops
    if family == "rotation":
        from gradwire.kernels.rotation.loops import RotationLoops

        return RotationLoops
    if family == "selection":
        from gradwire.kernels.selection.loops import SelectionLoops

        return SelectionLoops
    if family == "indices":
        from gradwire.kernels.indices.loops import IndicesLoops

        return IndicesLoops
    if family == "sketch":
        from gradwire.kernels.sketch.loops import SketchLoops

        return SketchLoops
    if family == "low_rank":
        from gradwire.kernels.low_rank.loops import LowRankLoops

        return LowRankLoops
    if family == "fourier":
        from gradwire.kernels.fourier.loops import FourierLoops

        return FourierLoops
    if family == "shifts":
        from gradwire.kernels.shifts.loops import ShiftsLoops

        return ShiftsLoops
    if family == "patches":
        from gradwire.kernels.patches.loops import PatchesLoops

        return PatchesLoops
    if family == "planes":
        from gradwire.kernels.planes.loops import PlanesLoops

        return PlanesLoops
    raise KeyError(family)


def triton_module(family: str) -> Any:
    """Return the module of a family's Triton kernels, which can be imported only if Triton is installed."""
    if family == "moments":
        from gradwire.kernels.moments import triton as moments_triton

        return moments_triton
    if family == "ternary":
        from gradwire.kernels.ternary import triton as ternary_triton

        return ternary_triton
    if family == "levels":
        from gradwire.kernels.levels import triton as levels_triton

        return levels_triton
    if family == "natural":
        from gradwire.kernels.natural import triton as natural_triton

        return natural_triton
    if family == "signs":
        from gradwire.kernels.signs import triton as signs_triton

        return signs_triton
    if family == "rotation":
        from gradwire.kernels.rotation import triton as rotation_triton

        return rotation_triton
    if family == "selection":
        from gradwire.kernels.selection import triton as selection_triton

        return selection_triton
    if family == "shifts":
        from gradwire.kernels.shifts import triton as shifts_triton

        return shifts_triton
    raise KeyError(family)
