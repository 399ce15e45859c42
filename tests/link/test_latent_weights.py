"""Models whose weights are quantised in the forward pass, as ``docs/weights-and-activations.md`` has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw

PAGE = Path(__file__).parents[2] / "docs" / "weights-and-activations.md"
LATENT = "2.parametrizations.weight.original"


def step_latent_weights(program: str) -> tuple[list[float], int, bool, list[float]]:
    """Run the page's program and two steps on this rank's own data.

    Return the values of the quantised weights, how many values the latent weight's mean gradient had, whether its
    parameter was among those that were exchanged, and what it came to.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40))
    names: dict[str, Any] = {"model": inner, "torch": torch, "gw": gw}
    names["DistributedDataParallel"] = DistributedDataParallel
    exec(program, names)
    model, link = names["model"], names["link"]
    latent = dict(inner.named_parameters())[LATENT]
    values = inner[2].weight.detach().unique() / latent.detach().abs().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=draw)).square().mean().backward()
        optimizer.step()
    known = LATENT in link.diagnostics()["parameters"]
    link.close()
    return values.tolist(), len(latent.grad.unique()), known, latent.detach().flatten().tolist()


@pytest.mark.repository
@pytest.mark.ranks
def test_the_pages_program_exchanges_gradients_of_latent_weights(three_ranks: Any) -> None:
    """As it is printed: two values in the forward pass, summed trits of latent weights, the same ones on all ranks."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = three_ranks(step_latent_weights, program)
    for values, levels, known, latent in found:
        # A division by the mean that the weights were multiplied by.
        assert values == pytest.approx([-1.0, 1.0], abs=2.0**-22)
        assert 3 < levels <= 7
        assert known
        assert latent == found[0][3]


def test_a_latent_weights_stream_goes_by_its_name() -> None:
    """Another name, another stream: the same gradient as under the plain name comes back with other draws."""
    g = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    found = [gw.simulate([{name: row} for row in g], gw.DoReFa(bits=2)).mean[name] for name in ("2.weight", LATENT)]
    assert not torch.equal(*found)


def test_bounds_of_latent_weights_are_a_proximal_step() -> None:
    w = nn.Parameter(torch.tensor([0.95, -0.2, -0.99]))
    optimizer = gw.ProximalSGD([w], lr=1.0, prox=gw.Box(low=-1.0, high=1.0))
    w.grad = torch.tensor([-0.25, 0.1, 0.5])
    optimizer.step()
    # A sum of two numbers in float32.
    assert w.tolist() == pytest.approx([1.0, -0.3, -1.0], abs=2.0**-24)
