"""Every number of every link's ``traffic()``, against bytes counted by hand from ``docs/wire-format.md``.

Numbers of ranks, elements, steps and rounds differ wherever they can, so that none stands in for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.graphs import Boundary
from gradwire.link.diagnostics import Diagnostics
from gradwire.link.link_runtime import LinkRuntime
from ranks import Ranks

HEADER, CHECKSUM, LENGTH = 32, 8, 8

ROWS, COLUMNS = 96, 20
ELEMENTS = ROWS * COLUMNS
"""Of a matrix of 24 groups of 80 elements, and with rows that two, three and four ranks divide."""

FLOATS = 4 * ELEMENTS


def ring(numbytes: int, ranks: int) -> int:
    """Return what a rank sends of that many bytes in a ring all-reduce."""
    return 2 * numbytes * (ranks - 1) // ranks


def scalar(ranks: int) -> int:
    """Return what a rank sends for the maximum of one float32."""
    return (ranks - 1) * (4 + CHECKSUM)


def alike(sent: int, steps: int, rounds: int, ranks: int, passes: int = 2, **others: Any) -> list[gw.Traffic]:
    """Return the traffic of ranks that send and receive as much, against a ring of float32 in every step."""
    dense = steps * ring(FLOATS, ranks) * passes // 2
    return [gw.Traffic(sent, sent, dense, steps * ELEMENTS, rounds, **others)] * ranks


NODE, BETWEEN = 2 * (HEADER + FLOATS // 2) + 12, ring(FLOATS // 4, 2)
"""Of a rank of two nodes of two: its half there and back with a flag, and its half in float16."""

EXPECTED: dict[str, tuple[str, int, list[gw.Traffic]]] = {
    "three chunks, on more than one lane": (
        "QSGDinf(levels=7, block_size=80)",
        3,
        alike(3 * 3 * 2 * (HEADER + 8 * 4 + 320), 3, 3, 3),
    ),
    "a cast": ("FP16()", 2, alike(2 * ring(FLOATS // 2, 3), 2, 2, 3)),
    "trits": ("TernGrad()", 2, alike(2 * (2 * (HEADER + 24 * 16) + scalar(3)), 2, 2, 3)),
    "levels": ("QSGDinf(levels=7, block_size=80)", 4, alike(4 * 2 * (HEADER + 24 * 4 + ELEMENTS // 2), 4, 4, 3)),
    "local steps": ("DiLoCo(every=2)", 5, alike(2 * ring(FLOATS, 3), 5, 2, 3)),
    "a half of the parameters in each of three exchanges": (
        "StreamingDiLoCo(every=4, fragments=2, delay=1)",
        7,
        alike(3 * ring(FLOATS // 2, 3), 7, 3, 3),
    ),
    "gossip": (
        "DPSGD(every=2)",
        5,
        [
            replace(found, sent_to=dict.fromkeys([(rank + 1) % 4, (rank - 1) % 4], 2 * (HEADER + FLOATS)))
            for rank, found in enumerate(alike(2 * 2 * (HEADER + FLOATS), 5, 2, 4))
        ],
    ),
    "two levels": (
        "Hierarchical(FP16(), node_size=2)",
        2,
        alike(2 * (NODE + BETWEEN), 2, 2, 4, sent_within={"node": 2 * NODE, "between nodes": 2 * BETWEEN}),
    ),
}


OPTIONS: dict[str, dict[str, Any]] = {"three chunks, on more than one lane": {"chunk_numel": 640}}


def matrix() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.ones(ROWS, COLUMNS))}


def set_gradient(parameters: dict[str, nn.Parameter], rank: int, step: int) -> None:
    for p in parameters.values():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + step))


def simulated(spec: str, workers: int, steps: int, **options: Any) -> list[gw.Traffic]:
    if gw.method(spec).traits.local_steps:
        models = [matrix() for _ in range(workers)]
        link = gw.SimulatedLocalSteps([model.items() for model in models], spec, min_numel=0, **options)
        for _ in range(steps):
            link.after_step()
        return [link.traffic(worker) for worker in range(workers)]
    whole = gw.SimulatedLink(matrix().items(), spec, workers, min_numel=0, **options)
    for step in range(steps):
        whole.reduce_(torch.randn(workers, ELEMENTS, generator=torch.Generator().manual_seed(step)))
    return [whole.traffic(worker) for worker in range(workers)]


@pytest.mark.parametrize("case", EXPECTED)
def test_simulated_workers_count_what_the_wire_format_says(case: str) -> None:
    spec, steps, expected = EXPECTED[case]
    assert simulated(spec, len(expected), steps, **OPTIONS.get(case, {})) == expected
    # The factor, and bits on the scale of a float32 all-reduce.
    for found in expected:
        assert found.compression_factor == found.dense_bytes / found.sent_bytes
        assert found.bits_per_element == pytest.approx(32 * found.sent_bytes / found.dense_bytes)


def exchanged(cases: Sequence[tuple[str, int, dict[str, Any]]]) -> list[gw.Traffic]:
    """Exchange on this rank, by one link after the other, in all steps of each."""
    found = []
    for spec, steps, options in cases:
        parameters = matrix()
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        link = gw.Link(parameters.items(), spec, min_numel=0, optimizer=optimizer, **options)
        for step in range(steps):
            set_gradient(parameters, link.rank, step)
            link.reduce_()
            optimizer.step()
        found.append(link.traffic())
        link.close()
    return found


def of_ranks(count: int) -> list[str]:
    return [case for case, (_, _, expected) in EXPECTED.items() if len(expected) == count]


@pytest.mark.ranks
@pytest.mark.parametrize("count", [3, 4])
def test_real_ranks_count_what_the_wire_format_says(count: int, three_ranks: Ranks, four_ranks: Ranks) -> None:
    cases = of_ranks(count)
    answers = {3: three_ranks, 4: four_ranks}[count](
        exchanged, [(*EXPECTED[case][:2], OPTIONS.get(case, {})) for case in cases]
    )
    for rank, answer in enumerate(answers):
        assert dict(zip(cases, answer)) == {case: EXPECTED[case][2][rank] for case in cases}


def broadcast(steps: int) -> gw.Traffic:
    return exchanged([("CLTk(density=0.1)", steps, {})])[0]


@pytest.mark.ranks
def test_a_rank_that_leads_sends_more_than_it_receives(three_ranks: Ranks) -> None:
    """What is chosen goes from the leader to both others, who send nothing of the kind."""
    found = three_ranks(broadcast, 1)
    assert found == simulated("CLTk(density=0.1)", 3, 1)
    beyond = [traffic.sent_bytes - traffic.received_bytes for traffic in found]
    assert beyond[0] > 0
    assert beyond == [beyond[0], -beyond[0] // 2, -beyond[0] // 2]


def test_a_simulation_counts_its_own_rounds_alone() -> None:
    """As a real link does: those before a checkpoint sent nothing here."""
    before = gw.SimulatedLink(matrix().items(), "QSGDinf(levels=7, block_size=80)", 3, min_numel=0)
    for step in range(4):
        before.reduce_(torch.randn(3, ELEMENTS, generator=torch.Generator().manual_seed(step)))
    after = gw.SimulatedLink(matrix().items(), "QSGDinf(levels=7, block_size=80)", 3, min_numel=0)
    after.load_state_dict(before.state_dict())
    assert after.traffic() == gw.Traffic()
    after.reduce_(torch.randn(3, ELEMENTS))
    expected = replace(
        before.traffic(),
        **{
            name: getattr(before.traffic(), name) // 4
            for name in ("sent_bytes", "received_bytes", "dense_bytes", "elements", "rounds")
        },
    )
    assert (after.round, after.traffic()) == (5, expected)


# ---------------------------------------------------------------------- buffers


def circle(ranks: int) -> Any:
    """Return as much of a circle as a runtime without lanes asks for."""
    return SimpleNamespace(place=0, world_size=ranks, ranks=tuple(range(ranks)), break_by=lambda method: None)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (8, 2, 3)])
def test_rounds_before_a_change_of_members_keep_their_dense_bytes(sizes: Sequence[int]) -> None:
    runtime = LinkRuntime([], circle(sizes[0]), Diagnostics(), grad_scaler=None, check=False)
    for ranks in sizes:
        runtime.connect([], circle(ranks), None)
        runtime.count(ELEMENTS)
    found = runtime.traffic(0)
    assert found.dense_bytes == sum(ring(FLOATS, ranks) for ranks in sizes)
    assert found.elements == len(sizes) * ELEMENTS


class Normed(nn.Module):
    """A layer with buffers of 8 + 8 + 8 bytes: two of two float32, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(ROWS, COLUMNS, bias=False), nn.BatchNorm1d(2, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.first(x)[:, :2])
        return out


def with_buffers() -> gw.Traffic:
    module = DistributedDataParallel(Normed())
    link = gw.attach(module, "fp16", min_numel=0)
    for _ in range(2):
        module(torch.randn(4, ROWS)).square().sum().backward()
    found = link.traffic()
    link.close()
    return found


@pytest.mark.ranks
def test_broadcasts_of_buffers_are_counted_by_themselves(three_ranks: Ranks) -> None:
    """In the tree of three ranks the first sends to both others, in each of two forward passes."""
    expected = [replace(t, buffer_bytes=2 * 24 * copies) for t, copies in zip(EXPECTED["a cast"][2], (2, 0, 0))]
    assert three_ranks(with_buffers) == expected


# ---------------------------------------------------------------------- shards


def sharded_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=False)


def over_shards(replicas: int) -> gw.Traffic:
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    shape = (replicas, 4 // replicas) if replicas > 1 else (4,)
    module = fully_shard(sharded_layer(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    link = gw.attach(module, "fp32" if replicas == 1 else "fp16", min_numel=0)
    for _ in range(3):
        module(torch.randn(4, COLUMNS)).square().sum().backward()
    found = link.traffic()
    link.close()
    return found


@pytest.mark.ranks
def test_over_shards_a_rank_sends_others_their_rows_and_a_flag(four_ranks: Ranks) -> None:
    """Against a ring reduce-scatter, of all elements."""
    sent = 3 * (3 * (HEADER + FLOATS // 4) + scalar(4))
    assert four_ranks(over_shards, 1) == alike(sent, 3, 3, 4, passes=1)


@pytest.mark.ranks
def test_between_replicas_a_rank_sends_its_shard(four_ranks: Ranks) -> None:
    """Against a ring all-reduce among the two ranks that have the same half."""
    expected = gw.Traffic(3 * FLOATS // 4, 3 * FLOATS // 4, 3 * FLOATS // 2, 3 * ELEMENTS // 2, 3)
    assert four_ranks(over_shards, 2) == [expected] * 4


def of_weights() -> list[gw.Traffic]:
    mesh = init_device_mesh("cpu", (4,))
    module = nn.Sequential(sharded_layer(), nn.Linear(ROWS, 8, bias=False))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)
    link = gw.compress_weights(module, "QSGDinf(levels=7, block_size=80)")
    found = [link.traffic()]
    for changes, layer in [(False, 0), (False, 1), (False, 0), (True, 0)]:
        with torch.no_grad():
            module[0].weight.to_local().add_(float(changes))  # type: ignore[operator, union-attr]
        module[layer].unshard()  # type: ignore[operator]
        module[layer].reshard()  # type: ignore[operator]
        found.append(link.traffic())
    link.close()
    return found


@pytest.mark.ranks
def test_a_gather_of_weights_is_whole_then_a_flag_then_what_changed(four_ranks: Ranks) -> None:
    """Against gathers in float32: three of the first layer, of 480 elements a rank, one of the second, of 192."""
    first, second = scalar(4) + 3 * (HEADER + FLOATS // 4), scalar(4) + 3 * (HEADER + 4 * 192)
    # Scales of six blocks and codes of four bits, with the number of bytes before them.
    changed = scalar(4) + 3 * (HEADER + 16 * -(-(LENGTH + 32 + 240) // 16))
    sent = [0, first, first + second, first + second + scalar(4), first + second + scalar(4) + changed]
    elements = [0, 1920, 1920 + 768, 2 * 1920 + 768, 3 * 1920 + 768]
    rounds = [0, 1, 1, 2, 3]
    expected = [gw.Traffic(s, s, 3 * n, n, r) for s, n, r in zip(sent, elements, rounds)]
    assert four_ranks(of_weights) == [expected] * 4


# ---------------------------------------------------------------------- halos

COUNTS = torch.tensor([[0, 2, 1], [3, 0, 0], [1, 5, 0]])
"""Row p, column q: the rows of worker p that worker q needs."""


def boundaries() -> list[Boundary]:
    return [Boundary(p, COUNTS, tuple(torch.arange(int(n)) for n in COUNTS[p])) for p in range(3)]


def halo_traffic(worker: int, steps: int) -> gw.Traffic:
    """Count rows of three values forward, and gradients of rows of seven backward, in each step."""

    def message(values: int) -> int:
        return LENGTH + (HEADER + 16 * -(-4 * values // 16) if values else 0)

    others = [q for q in range(3) if q != worker]
    away, here = ([int(n) for n in table[worker, others]] for table in (COUNTS, COUNTS.T))
    sent = [3 * n for n in away] + [7 * n for n in here]
    received = [3 * n for n in here] + [7 * n for n in away]
    counted = [steps * sum(map(message, way)) for way in (sent, received)]
    return gw.Traffic(*counted, 4 * steps * sum(sent), steps * sum(sent), steps)


def play(halo: Any, workers: Sequence[int], steps: int) -> None:
    for _ in range(steps):
        halo.forward(0, [torch.ones(5, 3) for _ in workers])
        halo.backward(0, [torch.ones(int(COUNTS[:, w].sum()), 7) for w in workers], [5 for _ in workers])
        halo.next_round()


def test_halos_count_their_own_steps_alone() -> None:
    """As links do: those before a checkpoint sent nothing here."""
    before, after = gw.SimulatedHaloLink(boundaries(), "fp32"), gw.SimulatedHaloLink(boundaries(), "fp32")
    play(before, range(3), 4)
    after.load_state_dict(before.state_dict())
    assert after.traffic() == [gw.Traffic()] * 3
    play(after, range(3), 1)
    assert (after.round, after.traffic()) == (5, [halo_traffic(worker, 1) for worker in range(3)])


def halos() -> tuple[gw.Traffic, float]:
    rank = dist.get_rank()
    halo = gw.HaloLink(boundaries()[rank], "fp32")
    play(halo, [rank], 1)
    with halo.evaluation():
        halo.forward(0, [torch.ones(5, 3)])
    play(halo, [rank], 1)
    found = halo.traffic(), halo.gauges()["halo_bytes"]
    halo.close()
    return found


@pytest.mark.ranks
def test_halos_are_the_rows_that_others_need(three_ranks: Ranks) -> None:
    """In training alone: an evaluation between two steps is counted in neither."""
    halo = gw.SimulatedHaloLink(boundaries(), "fp32")
    play(halo, range(3), 2)
    expected = [halo_traffic(worker, 2) for worker in range(3)]
    assert halo.traffic() == expected
    answers = three_ranks(halos)
    assert [found for found, _ in answers] == expected
    # What left a worker in its latest step.
    assert [gauge for _, gauge in answers] == [found.sent_bytes / 2 for found in expected]
