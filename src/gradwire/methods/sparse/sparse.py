"""Base class of compressors that keep some elements and leave out the others."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Method, cast_of, require
from gradwire.exchange.segments import Parameter, Segment
from gradwire.exchange.traits import Traits
from gradwire.methods.sparse.sparse_codec import Rule, SparseCodec
from gradwire.methods.sparse.sparse_values import CastValues, CodedValues, KeptValues, UnitTable

if TYPE_CHECKING:
    from gradwire.exchange.codecs import Codec
    from gradwire.kernels import Kernels


UNITS = ("element", "row", "kernel")


class Sparse(Compressor):
    """Base of compressors that keep units by a rule, with the fields ``unit``, ``blocks`` and ``values``.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    unit: str
    blocks: str
    values: Method

    def declare(self) -> Traits:
        # Kernels of positions, of the units' norms, and of the values.
        norms = () if self.unit == "element" else ("moments",)
        kernels = ("selection", "indices", *norms, *self.values.traits.kernels)
        return replace(
            super().declare(),
            collectives=("all_gather",),
            cut=1 << 40,
            # Comparing units of all parameters needs all gradients.
            kernels=tuple(dict.fromkeys(kernels)),
            whole_step=(self.blocks == "model"),
            joined=self.blocks == "model",
        )

    @abstractmethod
    def rule(self) -> Rule:
        """Return the rule by which units are kept."""

    def block(self) -> int | None:
        """Return the number of units of a block, to which the rule is applied; None for all of a parameter."""
        return None

    def check_sparse(self) -> None:
        """Check the common fields.

        Raises:
            HyperparameterError: a field is out of range, or two exclude each other.
        """
        owner = type(self).__name__
        require(self.unit in UNITS, owner, f"unit is one of {', '.join(UNITS)}, not {self.unit!r}")
        require(
            self.blocks in ("parameter", "model"),
            owner,
            f"blocks is 'parameter' (units of a parameter are compared) or 'model' (those of all), not {self.blocks!r}",
        )
        require(
            self.unit == "element" or self.blocks == "parameter",
            owner,
            f"unit={self.unit!r} compares units within a parameter, so that blocks is 'parameter'",
        )
        check_values(owner, self.values)

    def codec(self, kernels: Kernels, segments: Sequence[Segment], world_size: int, seed: int) -> SparseCodec:
        units = UnitTable(segments, [unit_length(self.unit, s.parameter) for s in segments])
        return SparseCodec(
            kernels,
            units,
            world_size,
            rule=self.rule(),
            block=self.block(),
            values=sparse_values(self.values, kernels, segments, seed),
        )


def check_values(owner: str, values: Method) -> None:
    """Check the field ``values`` of a method that keeps some elements.

    Raises:
        HyperparameterError: it is neither a cast to float32 or bfloat16 nor an operator with levels and its own scales.
    """
    fits = cast_of(values) in (torch.float32, torch.bfloat16) or (
        isinstance(values, Method)
        and values.as_operator is not None
        and values.traits.quantises_blocks
        and values.traits.collectives[0] == "all_gather"
        and not values.traits.joined
    )
    require(
        fits,
        owner,
        "values is FP32(), BF16() or an operator with levels whose blocks are of a parameter, such as QSGDinf(), not "
        f"{values!r}",
    )


def sparse_values(operator: Method, kernels: Kernels, segments: Sequence[Segment], seed: int) -> KeptValues:
    """Return the encoding of kept values, by a method that :func:`check_values` accepted."""
    if operator.cast_dtype is not None:
        return CastValues(operator.cast_dtype)
    compressor = operator.as_operator
    if compressor is None:
        raise TypeError(f"{operator!r} is no operator on one vector")

    def bind(kept: Sequence[Segment]) -> Codec:
        return compressor.codec(kernels, kept, 1, seed)

    return CodedValues(bind, [s.parameter.name for s in segments])


def unit_length(unit: str, parameter: Parameter) -> int:
    """Return the number of elements of a unit of a parameter.

    A row has one index of the first dimension. A kernel has one index of each of the first two dimensions if there are
    at least three, and is an element otherwise; a row of a vector is an element, too.

    Raises:
        IncompatibleError: a unit's elements are not adjacent in memory, for example kernels of ``channels_last``
            parameters.
    """
    leading = {"element": len(parameter.shape), "row": 1, "kernel": 2}[unit]
    if len(parameter.shape) <= leading:
        return 1
    inner = parameter.shape[leading:]
    length = math.prod(inner)
    reach = sum((n - 1) * stride for n, stride in zip(inner, parameter.stride[leading:]))
    if reach >= length:
        raise IncompatibleError(
            f"{parameter.name}: the elements of a {unit} are not neighbours in memory (shape {parameter.shape}, stride "
            f"{parameter.stride}): use unit='element', or parameters in the default memory format"
        )
    return length
