"""Ascending positions packed into bits, and back: checked operations, defined in plain PyTorch."""

from __future__ import annotations

import torch

from gradwire.errors import HyperparameterError, PayloadError
from gradwire.kernels.front import Front, check_vector
from gradwire.kernels.indices.formats import MOST_PARAMETER, GapStatistics, check_format
from gradwire.kernels.selection.operations import MAX_POSITIONS

GAPS_WRONG, NO_ROOM, TOO_WIDE = -1, -2, -3
"""Errors that an encoder returns instead of the number of bytes."""


class IndexOperations(Front):
    """The operations of the family ``indices`` on ascending int32 positions below ``numel <= 2^31 - 1``.

    The gap before a position is ``index[i] - index[i-1] - 1``, with ``index[-1] = -1``. Bit i of a packed list is bit
    ``i % 8``, the least significant first, of its byte ``i // 8``; a number's bits are packed from the least
    significant up, and the last byte is filled up with zeros. A list has one of three formats with a parameter:

    - ``bitmap``: numel bits, of which those at the positions are 1. The parameter is 0.
    - ``rice``: for each gap ``gap >> r`` zeros, a 1, and the r lowest bits of the gap, r from 0 to 30
      (Golomb-Rice codes; Rice and Plaunt, IEEE Transactions on Communication Technology 19(6), 1971).
    - ``width``: for each gap its w lowest bits, w from 0 to 31; every gap is below 2^w.
    """

    def gap_statistics(self, index: torch.Tensor, numel: int) -> GapStatistics:
        """Return the statistics of the positions ``index``, from which their bytes in every format follow.

        Raises:
            HyperparameterError: the positions do not ascend within 0 to ``numel - 1``.
        """
        check_vector("index", index, torch.int32, index.numel())
        _check_numel(numel)
        sums = torch.zeros(32, dtype=torch.int64, device="cpu")
        family = self._serve("indices")
        if index.numel():
            family.gap_statistics(index, numel, sums)
        *shifted, largest = sums.tolist()
        if largest < 0:
            raise _disorder(numel)
        return GapStatistics(index.numel(), numel, largest, tuple(shifted))

    def encode_indices(self, index: torch.Tensor, numel: int, format: str, parameter: int, out: torch.Tensor) -> int:
        """Pack the positions ``index`` into the first bytes of ``out`` (uint8); return the number of bytes.

        :func:`~gradwire.kernels.index_bytes` computes the number beforehand, ``out`` may be longer. The backend
        ``meta`` writes nothing and returns 0.

        Raises:
            HyperparameterError: the positions do not ascend within 0 to ``numel - 1``, a gap does not fit the width,
                there is no such format, or ``out`` is too short; its content is unspecified then.
        """
        check_vector("index", index, torch.int32, index.numel())
        check_vector("out", out, torch.uint8, out.numel())
        _check_numel(numel)
        check_format(format, parameter)
        written = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._serve("indices").encode_indices(index, numel, format, parameter, out, written)
        size = int(written)
        if size == GAPS_WRONG:
            raise _disorder(numel)
        if size == NO_ROOM:
            raise HyperparameterError(f"out has {out.numel()} bytes: the positions need more in the format {format!r}")
        if size == TOO_WIDE:
            raise HyperparameterError(f"a gap between positions does not fit {parameter} bits")
        return size

    def decode_indices(
        self, data: torch.Tensor, format: str, parameter: int, count: int, numel: int, index: torch.Tensor
    ) -> None:
        """Unpack ``count`` positions from ``data`` (uint8) into ``index`` (int32 ``[count]``).

        ``data`` may hold any bytes: nothing outside of it is read, and nothing outside of ``index`` is written.

        Raises:
            PayloadError: ``data`` is not what :meth:`encode_indices` writes for any ``count`` positions below
                ``numel``, or there is no such format; ``index`` is unspecified then.
        """
        check_vector("data", data, torch.uint8, data.numel())
        _check_numel(numel)
        if not 0 <= parameter <= MOST_PARAMETER.get(format, -1):
            raise PayloadError(
                f"indices are said to be in the format {format!r} with parameter {parameter}, not a known one"
            )
        if not 0 <= count <= numel:
            raise PayloadError(f"{count} positions below {numel} are announced, more than there are")
        check_vector("index", index, torch.int32, count)
        valid = torch.ones(1, dtype=torch.bool, device="cpu")
        self._serve("indices").decode_indices(data, format, parameter, count, numel, index, valid)
        if not bool(valid):
            raise PayloadError(
                f"{data.numel()} bytes are not {count} ascending positions below {numel} in the format {format!r} with "
                f"parameter {parameter}: the payload was damaged, or encoded for another layout"
            )

    def add_at(self, flat: torch.Tensor, index: torch.Tensor, offset: int, values: torch.Tensor, weight: float) -> bool:
        """Add ``weight values[i]`` to ``flat[offset + index[i]]``, in the order of i.

        ``flat`` and ``values`` are float32, ``index`` is int32 and as long as ``values``. The weight is rounded to
        float32, and so is each product before it is added.

        Returns:
            Whether all products are finite.

        Raises:
            HyperparameterError: a place is outside of ``flat``, which is unspecified then.
        """
        check_vector("flat", flat, torch.float32, flat.numel())
        check_vector("index", index, torch.int32, index.numel())
        check_vector("values", values, torch.float32, index.numel())
        state = torch.zeros(2, dtype=torch.int64, device="cpu")
        family = self._serve("indices")
        if index.numel():
            family.add_at(flat, index, offset, values, weight, state)
        infinite, outside = state.tolist()
        if outside:
            raise HyperparameterError(f"{outside} places of index are outside of the {flat.numel()} elements of flat")
        return not infinite


def _check_numel(numel: int) -> None:
    if not 0 <= numel <= MAX_POSITIONS:
        raise HyperparameterError(f"numel {numel} is outside 0..{MAX_POSITIONS}")


def _disorder(numel: int) -> HyperparameterError:
    return HyperparameterError(f"index does not ascend within 0..{numel - 1}")


def gap_statistics(index: torch.Tensor, numel: int, sums: torch.Tensor) -> None:
    gaps = _gaps(index)
    for r in range(31):
        sums[r] = (gaps >> r).sum()
    sums[31] = gaps.max() if _ascends(index, gaps, numel) else -1


def encode_indices(
    index: torch.Tensor, numel: int, format: str, parameter: int, out: torch.Tensor, written: torch.Tensor
) -> None:
    gaps = _gaps(index)
    if not _ascends(index, gaps, numel):
        written[0] = GAPS_WRONG
        return
    if format == "width" and bool((gaps >> parameter).any()):
        written[0] = TOO_WIDE
        return
    if format == "bitmap":
        ones, lengths = index.long(), torch.tensor([numel], device="cpu")
    else:
        # For each code, the place of its low bits and its number of bits.
        quotients = gaps >> parameter if format == "rice" else torch.zeros_like(gaps)
        head = quotients + 1 if format == "rice" else quotients
        lengths = head + parameter
        begin = lengths.cumsum(0) - lengths + head
        low = [begin[(gaps >> bit) & 1 == 1] + bit for bit in range(parameter)]
        ones = torch.cat([*low, begin - 1] if format == "rice" else [*low, begin[:0]])
    size = -(-int(lengths.sum()) // 8)
    if size > out.numel():
        written[0] = NO_ROOM
        return
    bits = torch.zeros(8 * size, dtype=torch.int64, device="cpu")
    bits[ones] = 1
    out[:size] = (bits.reshape(-1, 8) << torch.arange(8, device="cpu")).sum(1)
    written[0] = size


def decode_indices(
    data: torch.Tensor, format: str, parameter: int, count: int, numel: int, index: torch.Tensor, valid: torch.Tensor
) -> None:
    bits = (data[:, None].int() >> torch.arange(8, device="cpu") & 1).reshape(-1)
    if format == "bitmap":
        found, used = bits.nonzero()[:, 0].tolist(), numel
    else:
        found, used = _codes(bits, count, format, parameter)
    fits = len(found) == count and -(-used // 8) == len(data) and not bool(bits[used:].any())
    valid[0] = fits and (count == 0 or found[-1] < numel)
    if bool(valid):
        index.copy_(torch.tensor(found, dtype=torch.int32, device="cpu"))


def add_at(
    flat: torch.Tensor, index: torch.Tensor, offset: int, values: torch.Tensor, weight: float, state: torch.Tensor
) -> None:
    """Add, and count in ``state`` products that are not finite, and places outside of ``flat``."""
    places, products = index.long() + offset, values * torch.tensor(weight, dtype=torch.float32, device="cpu")
    within = (places >= 0) & (places < len(flat))
    state[0], state[1] = (~torch.isfinite(products)).sum(), (~within).sum()
    flat.index_add_(0, places[within], products[within])


def _codes(bits: torch.Tensor, count: int, format: str, parameter: int) -> tuple[list[int], int]:
    """Return the positions of ``count`` codes, or of as many as ``bits`` holds, and the number of bits used."""
    text = "".join(map(str, bits.tolist()))
    found: list[int] = []
    at, position = 0, -1
    while len(found) < count:
        quotient, begin = 0, at
        if format == "rice":
            one = text.find("1", at)
            quotient, begin = one - at, one + 1
        end = begin + parameter
        if quotient < 0 or end > len(text):
            break
        position += (quotient << parameter) + int(text[begin:end][::-1] or "0", 2) + 1
        found.append(position)
        at = end
    return found, at


def _gaps(index: torch.Tensor) -> torch.Tensor:
    return torch.diff(index.long(), prepend=torch.tensor([-1], device="cpu")) - 1


def _ascends(index: torch.Tensor, gaps: torch.Tensor, numel: int) -> bool:
    return not len(index) or (int(gaps.min()) >= 0 and int(index[-1]) < numel)
