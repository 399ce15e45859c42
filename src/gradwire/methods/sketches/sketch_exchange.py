"""Exchange of the large elements of a mean: found in a sum of count sketches, then sent exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.deferred_checks import all_finite
from gradwire.exchange.method import Method, is_whole, require
from gradwire.exchange.ops import Exchange
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import PlanSetting
from gradwire.exchange.protocols.division import join
from gradwire.exchange.segments import divide
from gradwire.exchange.traits import Traits
from gradwire.kernels import MOST_COLUMNS, MOST_ROWS, SegmentTable
from gradwire.methods.low_rank.float_means import Beside, first_of_two, mean_of_floats
from gradwire.methods.sparse.sparse_codec import MOST_UNITS
from gradwire.methods.sparse.top_k import check_density
from gradwire.seeds import SHARED, parameter_key

if TYPE_CHECKING:
    from gradwire.kernels import Kernels


COLUMNS_EACH = 10
"""Default number of columns for each kept element, from the experiments of Ivkin et al."""


class SketchAlgorithm(Method):
    """Base of algorithms that find elements in sketches of all compressed parameters, joined.

    Not a dataclass, so that each method's own fields keep their order in its spec.
    """

    rows: int
    columns: int | None
    density: float
    candidates: int

    tag: ClassVar[int]

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            collectives=("two_shot", "all_gather"),
            whole_step=True,
            joined=True,
            kernels=("sketch", "selection"),
            unbiased=False,
        )

    def check_sketch(self) -> None:
        """Check that fields are in range, and make ``density`` a float.

        Raises:
            HyperparameterError: naming the field.
        """
        owner = type(self).__name__
        require(
            is_whole(self.rows, 1, MOST_ROWS) and self.rows % 2 == 1,
            owner,
            f"rows is an odd number from 1 to {MOST_ROWS}, not {self.rows!r}",
        )
        require(
            self.columns is None or is_whole(self.columns, 1, MOST_COLUMNS),
            owner,
            f"columns is None or a number from 1 to {MOST_COLUMNS}, not {self.columns!r}",
        )
        require(is_whole(self.candidates, 1), owner, f"candidates is at least 1, not {self.candidates!r}")
        object.__setattr__(self, "density", check_density(owner, self.density))

    def kept(self, numel: int) -> int:
        """Return k, the number of elements kept of ``numel``."""
        return max(1, int(self.density * numel))

    def columns_of(self, numel: int) -> int:
        """Return the number of columns of the sketch of ``numel`` elements."""
        return min(COLUMNS_EACH * self.kept(numel), MOST_COLUMNS) if self.columns is None else self.columns


@dataclass(frozen=True, eq=False)
class Asked:
    """Result of an exchange, the same on all ranks except for ``own``.

    Attributes:
        places: Places of the candidates in the bucket, in ascending order of the elements' numbers.
        means: Exact means over ranks at these places, for each vector.
        beside: Means of uncompressed parameters.
        readable: True if the sketch is finite. It includes every element, so any value that is not finite shows.
        finite: True if the sketch and all means are finite.
        own: This rank's values in the order of ``means`` and ``beside``; None unless ``context.wants_sent``.
    """

    places: torch.Tensor
    means: Sequence[torch.Tensor]
    beside: torch.Tensor
    readable: bool
    finite: bool
    own: Sequence[torch.Tensor] | None


class SketchExchange:
    """Exchange of a bucket's sketch, then of candidates' values and uncompressed parameters.

    Attributes:
        runs: Runs of the bucket that are compressed.
        numel: Number of compressed elements.
        kept: Number of elements that the method keeps.
        beside: Segments that are not compressed.
    """

    def __init__(self, method: SketchAlgorithm, setting: PlanSetting) -> None:
        self._kernels, self._collective, self._tag = setting.kernels, setting.collective, method.tag
        light, dense = divide(setting.segments)
        self.beside = Beside(dense)
        self.runs = join((s.offset, s.offset + s.numel) for s in light)
        numel = [s.numel for s in light]
        self.numel = sum(numel)
        if self.numel > MOST_UNITS:
            raise IncompatibleError(
                f"a sketch of {self.numel} elements has positions beyond 31 bits: exclude= some parameters, or take a "
                "method that works bucket by bucket, such as TopK"
            )
        self.kept = method.kept(self.numel) if light else 0
        self._asked = min(self.numel, method.candidates * self.kept)
        self._rows, self._columns = method.rows, method.columns_of(self.numel)
        offset = torch.tensor([s.offset for s in light], dtype=torch.int64, device="cpu")
        size = torch.tensor(numel, dtype=torch.int64, device="cpu")
        # Estimates are stored without gaps.
        self._first = size.cumsum(0) - size
        self._shift = offset - self._first
        key = [parameter_key(setting.seed, s.parameter.name, "sketch") for s in light]
        start = [0] * len(light)
        self._table = SegmentTable(offset.numpy(), numel, start, key)
        self._estimated = SegmentTable(self._first.numpy(), numel, start, key)

    def run(
        self,
        context: Context,
        vectors: Sequence[torch.Tensor],
        flat: torch.Tensor,
        divisor: torch.Tensor | None = None,
    ) -> Exchange[Asked]:
        """Find the large elements of the mean of ``vectors[0]``, and exchange all vectors' values there.

        Args:
            vectors: Vectors laid out as the bucket.
            flat: The bucket, with the uncompressed parameters.
            divisor: Vector laid out as the bucket, by which estimates are divided before they are compared.
        """
        sums = flat.new_empty(self._rows * self._columns if self.numel else 0)
        if self.numel:
            self._kernels.sketch(vectors[0], self._table, self._rows, self._columns, SHARED, sums)
            yield from mean_of_floats(first_of_two(context), self._collective, self._tag, sums)

        # Values of candidates come before uncompressed parameters.
        sizes = [self._asked] * len(vectors) + [self.beside.numel]
        values = flat.new_empty(sum(sizes))
        *means, beside = values.split(sizes)
        places = self._candidates(context, sums, divisor)
        if not flat.is_meta:
            for vector, part in zip(vectors, means):
                torch.index_select(vector, 0, places, out=part)
        self.beside.take(flat, beside)
        own = values.clone().split(sizes) if context.wants_sent else None
        yield from mean_of_floats(context, self._collective, self._tag, values)
        readable = flat.is_meta or bool(all_finite(sums))
        finite = readable and (flat.is_meta or bool(all_finite(values)))
        return Asked(places, means, beside, readable, finite, own)

    def _candidates(self, context: Context, sums: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
        """Return the places in the bucket of the elements with the largest estimates, the same on all ranks."""
        estimates = context.workspace.get("estimates", 4 * self.numel).view(torch.float32)
        if sums.is_meta or not self.numel:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        self._kernels.unsketch(sums, self._estimated, self._rows, self._columns, SHARED, estimates)
        if divisor is not None:
            begin = 0
            for a, b in self.runs:
                estimates[begin : begin + b - a].div_(divisor[a:b])
                begin += b - a
        found = largest(self._kernels, estimates, self._asked)
        return found + self._shift[torch.searchsorted(self._first, found, right=True) - 1]


def largest(kernels: Kernels, values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the ``count`` values of the largest magnitude, ascending, int64."""
    whole = SegmentTable([0], [len(values)], [0], [(0, 0)])
    index = torch.empty(count, dtype=torch.int32, device="cpu")
    kernels.select_largest(values, whole, torch.tensor([count], device="cpu"), index)
    return index.long()
