"""Planes of bytes: every backend writes those of the formula, wherever numbers lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire import HyperparameterError
from gradwire.kernels import get_kernels
from tests.kernels.kernel_cases import BACKENDS, unaligned_bytes


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes_are_bytes_by_their_place_and_come_back(name: str, width: int) -> None:
    kernels, rng = get_kernels(name), np.random.default_rng(width)
    for numel, shift in ((0, 0), (1, 0), (77, 1), (9001, 3)):
        data = unaligned_bytes(numel * width, shift)
        data.copy_(torch.from_numpy(rng.integers(0, 256, numel * width, dtype=np.uint8)))
        for floating in (False, True):
            planes = torch.zeros(width, numel, dtype=torch.uint8)
            kernels.split_planes(data, width, floating, planes)
            numbers = [int.from_bytes(row.tobytes(), "little") for row in data.numpy().reshape(numel, width)]
            if floating:
                top = 8 * width - 1
                numbers = [(number << 1 | number >> top) % 2 ** (8 * width) for number in numbers]
            expected = b"".join(number.to_bytes(width, "big") for number in numbers)
            assert planes.T.contiguous().numpy().tobytes() == expected
            back = unaligned_bytes(numel * width, 8 - shift)
            kernels.join_planes(planes, width, floating, back)
            assert torch.equal(back, data)


def test_what_does_not_fit_is_refused() -> None:
    kernels, data = get_kernels("reference"), torch.zeros(12, dtype=torch.uint8)
    with pytest.raises(HyperparameterError, match="12 bytes, width 8"):
        kernels.split_planes(data, 8, True, torch.zeros(8, 1, dtype=torch.uint8))
    with pytest.raises(HyperparameterError, match=r"planes is torch\.uint8 of shape"):
        kernels.join_planes(torch.zeros(2, 5, dtype=torch.uint8), 2, True, data)
    with pytest.raises(HyperparameterError, match="data is"):
        kernels.join_planes(torch.zeros(2, 6, dtype=torch.uint8), 2, True, data.float())
