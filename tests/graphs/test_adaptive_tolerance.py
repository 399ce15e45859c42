"""CDFGNN's adaptive tolerance: its rule, that workers share it, what it sends, and that a state keeps it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from small_graphs import CLASSES, FEATURES, Run, link_of, parts_of, random_graph

import gradwire as gw
from gradwire.exchange.protocols import Context, Memory
from gradwire.graphs import GCN
from gradwire.graphs.halo_method import ChannelSetting
from gradwire.kernels import get_kernels

SPEC = "CDFGNN(tolerance=0.4, adaptive=True)"


def network() -> GCN:
    return GCN(FEATURES, CLASSES, width=16, layers=2)


def expected(tolerance: float, losses: list[float]) -> list[float]:
    """Return the tolerance before each loss and after the last, from the formula."""
    known = [loss for loss in losses if abs(loss) < math.inf]
    counts = [sum(abs(loss) < math.inf for loss in losses[:t]) for t in range(len(losses) + 1)]
    share = [max(0.0, min(known[:n])) / known[0] if n and known[0] > 0 else 1.0 for n in counts]
    return [tolerance * part for part in share]


def followed(method: gw.CDFGNN, losses: list[float]) -> tuple[list[float], Memory]:
    memory = Memory()
    found = [method.tolerance_of(memory)]
    for loss in losses:
        method.follow(memory, loss)
        memory.commit()
        found.append(method.tolerance_of(memory))
    return found, memory


@pytest.mark.parametrize(
    "losses",
    [
        [4.0, 3.0, 3.5, 1.0, 2.0, 0.5],
        [2.0, 5.0, 9.0],
        [3.0, math.nan, 1.5, math.inf, -math.inf, 1.0],
        [math.nan, 2.0, 1.0],
        [1.0, 0.0, 0.5],
        [1.0, -3.0, 0.5],
        [0.0, 0.0, 1.0],
        [-1.0, -2.0],
        [0.3, 0.1, 0.07],
    ],
)
def test_the_tolerance_is_the_formula_s(losses: list[float]) -> None:
    found, _ = followed(gw.CDFGNN(tolerance=0.4, adaptive=True), losses)
    assert found == expected(0.4, losses)
    assert all(0 <= later <= sooner <= 0.4 for sooner, later in itertools.pairwise(found))


def test_a_fixed_tolerance_heeds_no_loss() -> None:
    method = gw.CDFGNN(tolerance=0.4)
    assert not method.follows_loss
    assert followed(method, [4.0, 1.0])[0] == [0.4] * 3


def test_rows_are_sent_by_the_tolerance_of_the_step() -> None:
    """Rows that have moved by a tenth are sent when the loss has fallen to an eighth, and were not before."""
    method = gw.CDFGNN(tolerance=0.4, adaptive=True)
    setting = ChannelSetting(name="a", boundary="b", rows=4, width=8, seed=0, steps=None, kernels=get_kernels("auto"))
    channel, memory, rows = method.channel(setting), Memory(), torch.ones(4, 8)
    sizes = []
    for loss, moved in ((8.0, 1.0), (2.0, 1.1), (1.0, 1.1), (1.0, 1.1)):
        sizes.append(len(channel.encode(Context(0, 2, len(sizes), memory=memory), moved * rows)))
        memory.commit()
        method.follow(memory, loss)
        memory.commit()
    # Tolerances 0.4, 0.4, 0.1 and 0.05, and a move by 0.1 / 1.1 = 0.09.
    assert sizes == [1 + 4 * 32, 1, 1, 1 + 4 * 32]


def test_workers_share_the_losses_of_the_training() -> None:
    parts = parts_of(random_graph(), 4)
    link = link_of(parts, SPEC)
    run = Run(network, parts, link, lr=1.0).train(6)
    kept = [worker.state()["global"]["losses"] for worker in link.workers]
    assert all(torch.equal(own, kept[0]) for own in kept)
    first, least = kept[0].tolist()
    # Losses of workers, float32 of about 10, are added up here in float64 and there in float32.
    assert (first, least) == pytest.approx((run.losses[0], min(run.losses)), rel=1e-6)
    assert least < first


def test_the_loss_costs_a_payload_to_each_other_worker() -> None:
    parts = parts_of(random_graph(), 4)
    links = [link_of(parts, spec) for spec in (SPEC, "CDFGNN(tolerance=0.4)")]
    for link in links:
        Run(network, parts, link, lr=0.0).train(1)
    more = [a.sent_bytes - b.sent_bytes for a, b in zip(links[0].traffic(), links[1].traffic())]
    # A length of 8 bytes, a header of 32 and 8 bytes of a float64.
    assert more == [3 * (8 + 32 + 8)] * 4


def test_one_worker_alone_sends_nothing() -> None:
    parts = parts_of(random_graph(), 1)
    link = link_of(parts, SPEC)
    run = Run(network, parts, link).train(2)
    assert link.traffic()[0].sent_bytes == 0
    assert link.state_dict()["global"]["losses"].tolist() == [run.losses[0], min(run.losses)]


def test_falling_tolerances_refresh_more_rows_and_end_nearer_to_full_communication() -> None:
    parts = parts_of(random_graph(), 4)
    full, fixed, adaptive = (
        Run(network, parts, link_of(parts, spec), lr=3.0).train(80) for spec in ("fp32", "CDFGNN(tolerance=0.4)", SPEC)
    )
    sent = [sum(t.sent_bytes for t in run.exchange.traffic()) for run in (full, adaptive, fixed)]  # type: ignore[union-attr]
    assert sent[0] > sent[1] > sent[2]
    assert abs(adaptive.losses[-1] - full.losses[-1]) < abs(fixed.losses[-1] - full.losses[-1])


def test_a_state_continues_with_the_tolerance_that_it_had() -> None:
    parts = parts_of(random_graph(), 3)
    through = Run(network, parts, link_of(parts, SPEC), lr=1.0).train(10)
    half = Run(network, parts, link_of(parts, SPEC), lr=1.0).train(5)
    state = half.exchange.state_dict()  # type: ignore[union-attr]
    forgetful = {**state, "global": {k: v for k, v in state["global"].items() if k != "losses"}}
    ends = []
    for kept in (state, forgetful):
        run = Run(network, parts, link_of(parts, SPEC), lr=1.0)
        run.model.load_state_dict(half.weights())
        run.exchange.load_state_dict(kept)  # type: ignore[union-attr]
        ends.append(run.train(5).weights())
    assert all(torch.equal(value, ends[0][key]) for key, value in through.weights().items())
    assert any(not torch.equal(value, ends[1][key]) for key, value in through.weights().items())


@pytest.mark.parametrize("losses", [None, [None] * 3])
def test_a_missing_loss_is_asked_for(losses: object) -> None:
    link = link_of(parts_of(random_graph(), 3), SPEC)
    with pytest.raises(gw.IncompatibleError, match="give this worker's loss"):
        link.next_round(losses)  # type: ignore[arg-type]
    with pytest.raises(gw.IncompatibleError, match="3 workers have as many losses, not 2"):
        link.next_round([1.0, 2.0])
    assert link.round == 0


@pytest.mark.parametrize("adaptive", [1, None, "yes"])
def test_adaptive_is_a_flag(adaptive: object) -> None:
    with pytest.raises(gw.HyperparameterError, match="True or False"):
        gw.CDFGNN(adaptive=adaptive)  # type: ignore[arg-type]
