"""The base of compressors that round blocks to levels."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import is_whole, require
from gradwire.exchange.wire import ALIGNMENT

__all__ = ["LevelCompressor", "check_blocks"]


def check_blocks(owner: str, block_size: int | None, blocks: str) -> None:
    """Check the fields ``block_size`` and ``blocks``, which determine the values that share a scale.

    Raises:
        HyperparameterError: ``block_size`` is not None or a multiple of 16, or ``blocks`` is neither of the two words.
    """
    whole = is_whole(block_size)
    require(
        block_size is None or (whole and block_size >= ALIGNMENT and block_size % ALIGNMENT == 0),
        owner,
        f"block_size is a multiple of {ALIGNMENT}, or None for one block a parameter, not {block_size!r}",
    )
    require(
        blocks in ("parameter", "model"),
        owner,
        f"blocks is 'parameter' (cut from each parameter's start) or 'model' (across parameters), not {blocks!r}",
    )


class LevelCompressor(Compressor):
    """A compressor that rounds blocks to levels without bias, with the fields ``block_size`` and ``blocks``.

    It is gathered as published. By ``collective="two_shot"`` the owner of a share encodes the mean once more, block by
    block of its share: what a rank sends then does not grow with the workers, and the mean has the variance of one more
    rounding.

    It is no dataclass, so that each method's own fields keep their order in its spec.
    """

    block_size: int | None
    blocks: str

    unbiased: ClassVar[bool] = True

    @abstractmethod
    def block_omega(self, numel: int) -> float | None:
        """Return the variance constant for blocks of ``numel`` values; None where none is known."""

    def omega_of(self, numel: int | None = None) -> float | None:
        size = self.block_size
        if numel is not None and self.blocks == "parameter":
            size = max(1, min(numel, size or numel))
        return None if size is None else self.block_omega(size)

    @property
    def collectives(self) -> tuple[str, ...]:  # type: ignore[override]
        """Two-shot for blocks of a size: the scale of a whole parameter is not that of a share of it."""
        return ("all_gather", "two_shot") if self.block_size else ("all_gather",)

    @property
    def re_encoding(self) -> bool:  # type: ignore[override]
        """Whether two-shot can carry it."""
        return self.block_size is not None

    @property
    def share_cut(self) -> int:  # type: ignore[override]
        """Blocks stay whole."""
        return math.lcm(self.cut, self.block_size or 1)

    @property
    def whole_step(self) -> bool:  # type: ignore[override]
        """Whether blocks cross parameters: they then need the gradients of all of them."""
        return self.joined

    @property
    def joined(self) -> bool:  # type: ignore[override]
        """Whether blocks cross parameters."""
        return self.blocks == "model"
