"""Coder of an operator on one vector between one sender and one receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import Constant, Draw
from gradwire.exchange.method import Method
from gradwire.exchange.segments import Parameter, Segment

if TYPE_CHECKING:
    from gradwire.exchange.codecs import Codec
    from gradwire.kernels import Kernels


STREAM = 0
"""Codecs decode the first row as rank 0's."""

_ONLY = Constant(torch.zeros(1, dtype=torch.int64, device="cpu"))
"""Index of the only segment."""


def check_operator(owner: str, method: object) -> None:
    """Check that a method is an operator that one worker can encode and another can decode without a third.

    Raises:
        IncompatibleError: it is not; the message says what to use.
    """
    if not isinstance(method, Method):
        raise IncompatibleError(f"{owner}: a method is needed, such as FP32(), QSGDinf() or TopK(), not {method!r}")
    method.check_between_two(owner)
    if method.traits.shares_scales:
        raise IncompatibleError(f"{owner}: {_of_all(method)}")


def _of_all(method: Method) -> str:
    """Return why one sender and one receiver cannot use a method with a shared scale."""
    return (
        f"{method!r} takes a scale that all workers share, which one sender and one receiver do not have: use an "
        "operator with scales of its own, such as QSGDinf()"
    )


class VectorCoder:
    """Encodes vectors of any length for one receiver, by a codec of gradients bound to one worker.

    Decoded values are those of an exchange with one worker: the bits of :func:`gradwire.simulate` with one row and the
    same name, seed and round.

    Args:
        method: Method that :func:`check_operator` accepted.
        kernels: Kernels of a backend that has compiled the families of the method.
        name: Name on which random numbers depend.
        seed: Likewise.

    Raises:
        IncompatibleError: the codec needs numbers that all workers share.
    """

    def __init__(self, method: Method, kernels: Kernels, name: str, seed: int) -> None:
        self._method, self._kernels, self._name, self._seed = method, kernels, name, seed
        self._latest: tuple[int, Codec] | None = None

    def most_bytes(self, numel: int) -> int:
        """Return the maximum number of bytes of a vector of ``numel`` values."""
        if not numel:
            return 0
        codec = self._codec(numel)
        return codec.packing(codec.units).bound

    def encode(self, values: torch.Tensor, round: int) -> torch.Tensor:
        """Return the bytes of a vector, float32 ``[numel]``."""
        if not len(values):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        codec, values = self._codec(len(values)), values.contiguous()
        summary = codec.summarise(values)
        if summary.shared is not None:
            raise IncompatibleError(_of_all(self._method))
        packing = codec.packing(codec.units)
        body = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8, device="cpu")
        codec.encode(values, summary.select(_ONLY, None), Draw(round, STREAM), body)
        out = torch.zeros(packing.bound, dtype=torch.uint8, device="cpu")
        return out[: packing.pack(body, out)]

    def decode(self, data: torch.Tensor, numel: int, round: int) -> torch.Tensor:
        """Decode a vector of ``numel`` values to float32.

        Raises:
            PayloadError: the bytes do not encode a vector of that length.
        """
        values = torch.zeros(numel, dtype=torch.float32, device="cpu")
        if not numel:
            return values
        codec = self._codec(numel)
        body = torch.zeros(codec.payload_bytes(codec.units), dtype=torch.uint8, device="cpu")
        codec.packing(codec.units).unpack(data, body)
        summary = codec.summarise(values).select(_ONLY, None)
        codec.decode_rows(body[None], codec.remember(summary, values, Draw(round, STREAM), False), values)
        return values

    def _codec(self, numel: int) -> Codec:
        if self._latest is None or self._latest[0] != numel:
            segments = [Segment(Parameter(self._name, (numel,), (1,)), 0, 0, numel)]
            self._latest = numel, self._bind(segments)
        return self._latest[1]

    def _bind(self, segments: list[Segment]) -> Codec:
        return self._method.codec_between_two(self._kernels, segments, self._seed)
