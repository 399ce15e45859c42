"""Methods that agree on more than scales, on real ranks: the bits of the simulation, the same on all."""

from __future__ import annotations

from typing import Any

import torch

import gradwire as gw

SPECS = ["MultiScale(levels=(7, 56), block_size=64)", "Lattice(distance=20.0)", "QSGDMaxNorm()", "Natural()"]
SHAPES = {"a": (70, 50), "b": (1100,)}


def gradient(rank: int, name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(10 * rank + len(name) + ord(name)))


def exchange(spec: str, far: float) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    parameters = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
    link = gw.Link(parameters.items(), spec)
    for name, p in parameters.items():
        p.grad = gradient(dist.get_rank(), name)
    if dist.get_rank() == 1:
        parameters["b"].grad[3] += far
    link.reduce_()
    link.close()
    return {n: p.grad.clone() for n, p in parameters.items()}


def test_real_ranks_give_the_bits_of_the_simulation(three_ranks: Any) -> None:
    for spec in SPECS:
        expected = gw.simulate([{n: gradient(r, n) for n in SHAPES} for r in range(3)], spec).mean
        for found in three_ranks(exchange, spec, 0.0):
            assert all(torch.equal(found[n], expected[n]) for n in SHAPES)


def exchange_and_listen(spec: str) -> list[str]:
    import logging

    import torch.distributed as dist

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    try:
        parameters = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
        link = gw.Link(parameters.items(), spec)
        for _ in range(2):
            for p in parameters.values():
                p.grad = torch.full_like(p, 9.0 * dist.get_rank())
            link.reduce_()
        link.close()
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    return [text for text in heard if "distance" in text]


def test_one_rank_of_a_link_warns_once_of_a_lattice_too_small(three_ranks: Any) -> None:
    (sentence,), *others = three_ranks(exchange_and_listen, "Lattice(distance=0.5)")
    assert "larger distance" in sentence
    assert others == [[], []]


def test_real_ranks_agree_that_a_lattice_could_not_be_read(three_ranks: Any) -> None:
    """Only some ranks can tell; the mean is infinite on all."""
    for found in three_ranks(exchange, "Lattice(distance=20.0)", 50.0):
        assert bool((found["b"] == torch.inf).all())
