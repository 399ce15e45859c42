"""Weights, steps of them, and files that the tests of publishing share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import gradwire as gw
from gradwire.publish.layout import BY_DTYPE
from gradwire.publish.manifest import Manifest

DTYPES = tuple(BY_DTYPE)


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A matrix of several blocks, a vector, a scalar, integers, and a tensor without elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(300, 1000, generator=generator).to(dtype),
        "layer.bias": torch.randn(77, generator=generator).to(dtype),
        "scale": torch.randn((), generator=generator),
        "steps": torch.arange(5),
        "empty": torch.zeros(0, 3),
    }


def any_bits(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Elements of any bits: NaNs of all payloads, infinities, denormal numbers and both zeros among them."""
    size = numel * dtype.itemsize
    octets = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    if dtype is torch.bool:
        octets &= 1
    return octets.view(dtype)


def nudge(tensors: dict[str, torch.Tensor], seed: int, density: float = 0.02) -> None:
    """Move a share of all elements, most by one unit in the last place, some by more."""
    rng = np.random.default_rng(seed)
    for tensor in tensors.values():
        if tensor.dtype is torch.bool or not tensor.numel():
            continue
        width = tensor.dtype.itemsize
        flat = octets(tensor).numpy().view(f"<i{width}" if not tensor.is_complex() else "<i4")
        chosen = rng.random(flat.size) < max(density, 1 / flat.size)
        flat[chosen] += rng.choice(np.array([1, 1, 1, -1, -1, 3, 100], flat.dtype), int(chosen.sum()))


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether all bytes are equal."""
    return first.keys() == second.keys() and all(torch.equal(octets(first[k]), octets(second[k])) for k in first)


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same types and shapes."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder."""
    return Manifest.parse((folder / "manifest.json").read_bytes())


def files(
    folder: Path, steps: int = 4, seed: int = 0, **settings: int
) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Publish some steps; return the weights of each step, and the names of the files in order."""
    trained = weights(seed)
    publisher = gw.WeightPublisher(trained, folder, **settings)
    states = []
    for step in range(steps):
        publisher.publish(step)
        states.append(copies(trained))
        nudge(trained, 10 * seed + step)
    return states, [file.name for file in manifest(folder).files]
