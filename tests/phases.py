"""What the tests of methods with three phases share: gradients, links, and the bytes of what a leader tells."""

from __future__ import annotations

import torch

import gradwire as gw

SIZES = {"a": 2000, "b": 1200, "small": 40}
FULL, TRAINING = 2, 3


def gradients(workers: int, round: int, alike: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(round)
    common = torch.randn(sum(SIZES.values()), generator=generator) ** 3
    return alike * common + 0.3 * torch.randn(workers, sum(SIZES.values()), generator=generator)


def link_of(method: gw.Method | str, workers: int = 3, round: int = 0, seed: int = 0) -> gw.SimulatedLink:
    parameters = [(n, torch.empty(k)) for n, k in SIZES.items()]
    link = gw.SimulatedLink(parameters, method, workers, min_numel=100, seed=seed)
    link.round = round
    return link


def residuals(link: gw.SimulatedLink) -> torch.Tensor:
    state = link.state_dict()
    ranks = [state[f"rank {r}"] for r in range(link.world_size)]
    return torch.stack([torch.cat([rank["residual/a"], rank["residual/b"]]) for rank in ranks])


def chosen(x: torch.Tensor, density: float = 0.03) -> torch.Tensor:
    """Return the places of a worker's largest elements of both compressed parameters, in order of value."""
    found = []
    for at, n in ((0, 2000), (2000, 1200)):
        part = x[at : at + n]
        index = torch.sort(part.abs(), descending=True, stable=True).indices[: int(density * n)].sort().values
        found.append(at + index[torch.sort(part[index], descending=True, stable=True).indices])
    return torch.cat(found)


def sent(link: gw.SimulatedLink, round: int) -> list[int]:
    before = [link.traffic(worker).sent_bytes for worker in range(link.world_size)]
    link.reduce_(gradients(link.world_size, round))
    return [link.traffic(worker).sent_bytes - b for worker, b in enumerate(before)]


def up(count: int) -> int:
    return -(-count // 16) * 16


def two_shot(values: int, workers: int) -> int:
    return 2 * (workers - 1) * (32 + up(-(-4 * values // workers)))


def check_broadcast(counts: list[int], round: int, fixed: int) -> None:
    """Check that a leader told positions, of no more bytes than they may take, once to each of the others."""
    workers = len(counts)
    turned = counts[round % workers :] + counts[: round % workers]
    copies = {3: [2, 0, 0], 4: [2, 1, 0, 0]}[workers]
    one = turned[0] // 2
    assert turned == [n * one for n in copies]
    assert fixed < one <= fixed + up(96 * 7 // 8 + 8)
