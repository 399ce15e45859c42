"""Values cast to a float type, with their exponents apart from what looks like noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gradwire.exchange.codecs.base import Codec, Draw, Summary
from gradwire.exchange.codecs.dense import NoSummary, joined_runs
from gradwire.exchange.deferred_checks import Flag, all_finite
from gradwire.exchange.segments import Segment
from gradwire.exchange.wire import ALIGNMENT
from gradwire.kernels import Coder

__all__ = ["CastCodec"]

_WORDS = {2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


class CastCodec(Codec):
    """The mean as sum over ranks of cast(x_r) * float32(1 / world_size), added in the order of ranks, and cast again.

    Sums are float32, so the mean is rounded once, whatever the number of ranks, and it is the same bits whether all
    ranks add up for themselves or the owner of a share does so and sends what was cast again.

    A value's bits, rotated left by one, have the exponent in front and the sign behind. Their foremost byte is a symbol
    for a coder: the exponent of bfloat16 and float32, that of float16 and three bits more. All other bytes are plain. A
    payload is the plain bytes of value after value, little endian, and then the symbols. A unit is sixteen values;
    those that are missing in the last one are zeros.

    Args:
        segments: The runs of the flat vector to carry; neighbours are joined.
        world_size: Number of ranks.
        dtype: A type of two or four bytes.
    """

    grain = 1

    def __init__(self, segments: Sequence[Segment], world_size: int, dtype: torch.dtype) -> None:
        self.runs, self.dtype, self.width = joined_runs(segments), dtype, dtype.itemsize
        self.numel = sum(count for _, count in self.runs)
        self.units = -(-self.numel // ALIGNMENT)
        self.weight = torch.tensor(1.0 / world_size, dtype=torch.float32)

    def use_coder(self, coder: Coder) -> None:
        self.coder = coder

    def summarise(self, flat: torch.Tensor) -> NoSummary:
        return NoSummary()

    def payload_bytes(self, units: int) -> int:
        return ALIGNMENT * self.width * units

    def plain_payload_bytes(self, units: int) -> int:
        return ALIGNMENT * (self.width - 1) * units

    def encode(self, flat: torch.Tensor, summary: Summary, draw: Draw, out: torch.Tensor) -> None:
        unsigned, signed = _WORDS[self.width]
        values = torch.cat([flat[a : a + n] for a, n in self.runs]).to(self.dtype)
        bits = values.view(signed).numpy().view(unsigned)
        octets = ((bits << 1) | (bits >> (8 * self.width - 1))).view(np.uint8).reshape(-1, self.width)
        plain, symbols = self._planes(out)
        plain[: self.numel], plain[self.numel :] = octets[:, :-1], 0
        symbols[: self.numel], symbols[self.numel :] = octets[:, -1], 0

    def decode_rows(self, rows: torch.Tensor, summary: Summary, flat: torch.Tensor) -> None:
        total = self._values(rows[0]) * self.weight
        for row in rows[1:]:
            total.add_(self._values(row) * self.weight)
        mean = total.to(self.dtype).to(torch.float32)
        for (start, count), part in zip(self.runs, mean.split([n for _, n in self.runs])):
            flat[start : start + count].copy_(part)

    def add_own(self, data: torch.Tensor, summary: Summary, weight: float, flat: torch.Tensor) -> None:
        for (start, count), part in zip(self.runs, self._values(data).split([n for _, n in self.runs])):
            flat[start : start + count].add_(part, alpha=weight)

    def is_finite(self, summary: Summary, flat: torch.Tensor) -> Flag:
        return all_finite(*(flat[a : a + n] for a, n in self.runs))

    def _planes(self, data: torch.Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """View the plain bytes of a payload, ``[values, width - 1]``, and its symbols."""
        octets, end = data.numpy(), self.plain_payload_bytes(self.units)
        return octets[:end].reshape(-1, self.width - 1), octets[end : self.payload_bytes(self.units)]

    def _values(self, data: torch.Tensor) -> torch.Tensor:
        """Return the values of a payload in float32."""
        unsigned, _ = _WORDS[self.width]
        plain, symbols = self._planes(data)
        octets = np.empty((self.numel, self.width), np.uint8)
        octets[:, :-1], octets[:, -1] = plain[: self.numel], symbols[: self.numel]
        bits = octets.reshape(-1).view(unsigned)
        words = ((bits >> 1) | (bits << (8 * self.width - 1))).view(f"i{self.width}")
        return torch.from_numpy(words).view(self.dtype).to(torch.float32)
