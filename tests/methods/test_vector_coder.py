"""Operators between one sender and one receiver: the bits of an exchange of gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.kernels import get_kernels
from gradwire.methods.gossip.vector_coder import VectorCoder

OPERATORS = [
    "FP32()",
    "BF16()",
    "FP16()",
    "QSGD(levels=4, block_size=64)",
    "QSGDinf(levels=7)",
    "NUQSGD()",
    "TernGrad(share_scaler=False)",
    "Natural()",
    "NaturalDithering()",
    "ScaledSign()",
    "PQuantisation()",
    "EDEN(bits=3)",
    "DRIVE()",
    "TopK(density=0.1)",
    "TopK(density=0.1, values=QSGDinf(levels=7))",
    "Threshold(threshold=0.5)",
    "SIDCo(density=0.1)",
    "ATOMO(density=0.1)",
    "RandK(density=0.1, coordinates='private')",
    "RandK(density=0.1, coordinates='private', rescale=True)",
]


def coder(spec: str, seed: int = 5) -> VectorCoder:
    method = gw.method(spec)
    kernels = get_kernels("auto")
    if method.traits.kernels:
        kernels.warm_up(method.traits.kernels)
    return VectorCoder(method, kernels, "0", seed)


@pytest.mark.parametrize("spec", OPERATORS)
def test_a_receiver_decodes_the_bits_of_an_exchange_of_gradients(spec: str) -> None:
    """The name, the seed and the round are those of gw.simulate, whose one worker is rank 0."""
    x = torch.randn(700, generator=torch.Generator().manual_seed(1))
    here, there = coder(spec), coder(spec)
    for round in (0, 3):
        data = here.encode(x, round)
        assert len(data) <= here.most_bytes(700)
        expected = gw.simulate(x.clone()[None], spec, seed=5, round=round).mean
        assert torch.equal(there.decode(data, 700, round), expected)


@pytest.mark.parametrize("spec", ["FP32()", "QSGDinf(levels=7)", "TopK(density=0.1)"])
def test_lengths_may_change_from_vector_to_vector(spec: str) -> None:
    one = coder(spec)
    for numel in (1, 17, 0, 300, 17):
        x = torch.randn(numel)
        data = one.encode(x, 0)
        assert len(data) <= one.most_bytes(numel)
        found = coder(spec).decode(data, numel, 0)
        assert found.shape == (numel,)
        assert numel == 0 or float((found - x).abs().max()) <= float(x.abs().max())


@pytest.mark.parametrize("spec", ["FP32()", "QSGDinf(levels=7)", "TopK(density=0.1)", "RandK(coordinates='private')"])
def test_bytes_of_another_length_are_refused(spec: str) -> None:
    data = coder(spec).encode(torch.randn(100), 0)
    with pytest.raises(gw.PayloadError):
        coder(spec).decode(data[:-1], 100, 0)
    with pytest.raises(gw.PayloadError):
        coder(spec).decode(torch.cat([data, data[:1]]), 100, 0)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("TernGrad()", "give it share_scaler=False"),
        ("Lattice(distance=None)", "scale that all workers share"),
        ("QSGDMaxNorm()", "scale that all workers share"),
        ("PowerSGD()", "an operator on one vector"),
        ("ErrorFeedback(TopK())", "an operator on one vector"),
        ("QSGDinf(blocks='model')", "blocks='parameter'"),
        ("CAT(fixed_bytes=None, blocks='parameter')", "what a message costs"),
    ],
)
def test_what_needs_more_than_two_workers_or_a_memory_is_refused(spec: str, told: str) -> None:
    with pytest.raises(gw.IncompatibleError, match=told):
        gw.halo_method(spec)


@pytest.mark.parametrize("spec", ["Lattice(distance=None)", "QSGDMaxNorm()"])
def test_scales_that_all_workers_share_are_refused(spec: str) -> None:
    with pytest.raises(gw.IncompatibleError, match="scale that all workers share"):
        coder(spec).encode(torch.randn(100), 0)
