"""Small models, whose buckets are exchanged as one: the same bits in every mode of DDP, with fewer messages."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.planning import Options, Planner, planner
from modes import MODES, SMALL_BUCKETS_MB, STEPS, run_mode
from oracle import batch, digest, layers, simulated_run, square_loss

NUMEL = sum(p.numel() for p in layers().parameters())


def joined(limit: int, function: Any, *args: Any) -> Any:
    """Run a function on this rank with another limit of what is joined."""
    before, planner.JOINED_NUMEL = planner.JOINED_NUMEL, limit
    try:
        return function(*args)
    finally:
        planner.JOINED_NUMEL = before


def run_joined(method: str, mode: str) -> tuple[str, Any]:
    ddp_options, options, micro_steps = MODES[mode]
    return joined(NUMEL, run_mode, method, ddp_options, options, micro_steps)  # type: ignore[no-any-return]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "one bucket"])
def test_a_joined_step_has_the_bits_of_the_simulation(three_ranks: Any, mode: str) -> None:
    _, _, micro_steps = MODES[mode]
    found = three_ranks(run_joined, "terngrad", mode)
    expected = digest(simulated_run(layers(), square_loss, "terngrad", 3, STEPS, micro_steps=micro_steps))
    assert {d for d, _ in found} == {expected}


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["TernGrad(ahead=True)", "coded", "ErrorFeedback(TopK(density=0.01))", "diana"])
def test_methods_with_state_and_lengths_have_the_bits_of_the_simulation(three_ranks: Any, method: str) -> None:
    found = three_ranks(run_joined, method, "buckets rebuilt")
    expected = digest(simulated_run(layers(), square_loss, method, 3, STEPS))
    assert {d for d, _ in found} == {expected}


def sent(limit: int, method: str) -> int:
    """Return the bytes of one round after DDP has laid out its buckets for good."""
    import torch.distributed as dist

    ddp = DistributedDataParallel(layers(), bucket_cap_mb=SMALL_BUCKETS_MB)
    link = joined(limit, gw.attach, ddp, method)
    for step in range(3):
        before = link.traffic().sent_bytes
        joined(limit, square_loss(ddp, dist.get_rank(), step).backward)
    found = link.traffic().sent_bytes - before
    link.close()
    return int(found)


@pytest.mark.ranks
def test_only_a_small_model_is_joined_and_only_where_the_bits_are_the_same(three_ranks: Any) -> None:
    parameters = dict(layers().named_parameters())
    whole = Planner(gw.method("terngrad"), parameters, 3, Options()).sent_bytes(list(parameters))
    assert set(three_ranks(sent, NUMEL, "terngrad")) == {whole}
    # Six layers are six buckets; each has headers, and scalers with a checksum, of its own.
    assert min(three_ranks(sent, NUMEL - 1, "terngrad")) > whole
    assert three_ranks(sent, NUMEL, "fp32") == three_ranks(sent, 0, "fp32")


def left_out(limit: int) -> tuple[str, str]:
    """Train a model, a layer of which has no gradient in every other step."""
    import torch.distributed as dist

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(2, 64, 1), layers(2, 64, 2)

    found = []
    for bound in (limit, 0):
        model = Sometimes()
        named = list(model.named_parameters())
        link = joined(bound, gw.Link, named, "terngrad")
        for step in range(4):
            for p in model.parameters():
                p.grad = None
            parts = [model.first] if step % 2 else [model.first, model.second]
            sum(part(batch(dist.get_rank(), step)).square().mean() for part in parts).backward()
            joined(bound, link.reduce_)
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.05 * p.grad
        link.close()
        found.append(digest(model))
    return found[0], found[1]


@pytest.mark.ranks
def test_a_layer_without_a_gradient_makes_no_difference(three_ranks: Any) -> None:
    found = three_ranks(left_out, NUMEL)
    assert len({d for pair in found for d in pair}) == 1


IN_MODEL_ORDER, COMPRESSED_FIRST = "Coded(BF16())", "QSGDinf(levels=7, blocks='model')"
SIZES = {"w1": 2000, "b1": 100, "w2": 2000, "b2": 100}


def after_another(*specs: str) -> list[int]:
    """Return the checksum of the mean after a round by each of the candidates."""
    import torch.distributed as dist

    parameters = {name: nn.Parameter(torch.zeros(numel)) for name, numel in SIZES.items()}
    method = gw.Auto(candidates=(IN_MODEL_ORDER, COMPRESSED_FIRST))
    link, found = gw.Link(parameters.items(), method, chunk_numel=512), list[int]()
    for step, spec in enumerate(specs):
        link._selection.fix(spec, "the test")  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator)
        link.reduce_()
        found.append(crc32(torch.cat([p.grad for p in parameters.values() if p.grad is not None]).numpy().tobytes()))
    link.close()
    return found


@pytest.mark.ranks
def test_a_candidate_has_a_step_in_its_own_order(three_ranks: Any) -> None:
    """The first compresses all parameters, in the order of the model; the second the large ones, which come first."""
    planners = [
        Planner(gw.method(s), {n: torch.empty(k) for n, k in SIZES.items()}, 3, Options())
        for s in (IN_MODEL_ORDER, COMPRESSED_FIRST)
    ]
    assert [p.step_order() for p in planners] == [["w1", "b1", "w2", "b2"], ["w1", "w2", "b1", "b2"]]
    assert all(p.joins_buckets for p in planners)
    usual = three_ranks(joined, 4200, after_another, COMPRESSED_FIRST, COMPRESSED_FIRST)
    changed = three_ranks(joined, 4200, after_another, IN_MODEL_ORDER, COMPRESSED_FIRST)
    assert len({bits[1] for bits in (*usual, *changed)}) == 1


def test_a_step_counts_the_delays_of_one_bucket() -> None:
    parameters = {f"w{i}": torch.empty(200, 200) for i in range(3)}
    found = Planner(gw.method("terngrad"), parameters, 8, Options())
    assert found.joins_buckets
    assert not Planner(gw.method("terngrad"), {"w": torch.empty((1 << 20) + 1)}, 8, Options()).joins_buckets
    for spec in ("fp32", "bf16", "LocalSGD(every=4)", "dpsgd"):
        assert not Planner(gw.method(spec), parameters, 8, Options()).joins_buckets
    assert found.delays([["w0"], ["w1"], ["w2"]]) == found.delays([list(parameters)])
