"""Labelled images held in memory, shared by the image tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire.tools.experiments.order import generator

EVALUATION_BATCH = 250
"""Samples evaluated at once, which bounds memory and does not change results."""


@dataclass(frozen=True)
class Images:
    """Training and evaluation images as uint8 ``[count, channels, height, width]`` with int64 labels.

    An input is ``pixel * scale - shift`` in float32, one scale and shift a channel. ``pad > 0`` or ``crop > 0``
    augments training images: a random crop after zero-padding each side by ``pad`` pixels, and a random left-right
    flip. Crops are ``crop`` pixels high and wide, or as large as the images without it; evaluation takes the central
    ones.
    """

    inputs: Tensor
    labels: Tensor
    eval_inputs: Tensor
    eval_labels: Tensor
    scale: Tensor
    shift: Tensor
    pad: int = 0
    crop: int = 0

    @property
    def samples(self) -> int:
        """Number of training images."""
        return self.inputs.shape[0]

    def batch(self, indices: Tensor, part: slice, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return one worker's images and labels; see :class:`~gradwire.tools.experiments.tasks.base.Source`."""
        mine = indices[part]
        images = self._scaled(self.inputs[mine])
        if self.pad or self.crop:
            draw = generator(seed, "augmentation", step)
            shape = (indices.numel(),)
            height, width = self._size()
            above, beside = (n - m + 2 * self.pad + 1 for n, m in zip(self.inputs.shape[2:], (height, width)))
            top = torch.randint(0, above, shape, generator=draw)[part]
            left = torch.randint(0, beside, shape, generator=draw)[part]
            flip = torch.randint(0, 2, shape, generator=draw)[part]
            images = crop_and_flip(images, self.pad, top, left, flip, (height, width))
        return images, self.labels[mine]

    def evaluation(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return every ``world_size``-th batch of evaluation images."""
        step = EVALUATION_BATCH
        height, width = self._size()
        top, left = ((n - m) // 2 for n, m in zip(self.eval_inputs.shape[2:], (height, width)))
        central = self.eval_inputs[:, :, top : top + height, left : left + width]
        for first in range(rank * step, self.eval_inputs.shape[0], world_size * step):
            last = first + step
            yield self._scaled(central[first:last]), self.eval_labels[first:last]

    def _size(self) -> tuple[int, int]:
        """Return height and width of an input."""
        height, width = self.inputs.shape[2:]
        return self.crop or height, self.crop or width

    def _scaled(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32).mul_(self.scale[:, None, None]).sub_(self.shift[:, None, None])


def crop_and_flip(images: Tensor, pad: int, top: Tensor, left: Tensor, flip: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop each zero-padded image to ``size``, a height and a width, and mirror it where ``flip`` is 1."""
    count, channels = images.shape[:2]
    height, width = size
    frame = F.pad(images, (pad, pad, pad, pad))
    rows = top[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = left[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)
    picked = frame.permute(0, 2, 3, 1)[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).reshape(count, channels, height, width).contiguous()
