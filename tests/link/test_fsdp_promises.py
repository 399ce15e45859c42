"""What ``docs/fsdp.md`` promises: by section, the test of each sentence; and those that no other file has.

Between replicas
    equal parameters, compared by checksums: ``test_fsdp.py``, ``test_what_does_not_fit_is_refused_by_name``.
    the same bits on replicas, on a mesh of two dimensions and of one: ``test_fsdp.py``,
    ``test_replicas_hold_the_simulated_mean_the_same_bits``.
    only the mean over replicas crosses, PyTorch's own all-reduce sends nothing:
    ``test_natives_all_reduce_is_that_of_a_rank_alone``, bytes in
    ``link/test_traffic_of_links.py``.
    micro-steps, on two dimensions: ``test_fsdp.py``, ``test_replicas_exchange_once_for_several_micro_steps``; on one:
    ``test_on_a_mesh_of_one_dimension_each_micro_step_is_exchanged``.
    a shard is a parameter of its own: ``test_small_is_the_shard_and_not_the_parameter``; it draws by itself:
    ``test_fsdp.py``, ``test_shards_draw_independently``.
    refused methods: ``test_fsdp.py``, and ``test_what_else_does_not_fit_is_refused_by_name``.
Over shards
    bits, blocks on the boundary: ``test_fsdp.py``, ``exchange/test_reduce_scatter.py``.
    smaller blocks send less, a choice among all elements as much as a gather:
    ``exchange/test_reduce_scatter.py``, ``test_what_is_saved_depends_on_what_is_encoded_together``.
    the table: methods ``exchange/test_reduce_scatter.py``; padding
    ``test_padding_is_never_read_and_is_zeros_afterwards``; shapes, divisors, reduce dtype, gradient sync, one rank
    ``test_fsdp.py``.
The parameters' all-gather
    ``test_fsdp_weights.py``; exact weights and ``begin_anew`` here.
Both
    wrapped apart or together, a round of each pass: ``test_fsdp.py``; a unit that reduces twice:
    ``test_a_unit_that_reduces_twice_in_one_pass_begins_a_round``.
    without a gradient: refused in ``test_fsdp.py``; ``test_what_has_no_gradient_counts_as_zeros``.
    tensor parallelism, several meshes, a reduce-scatter of one's own:
    ``test_what_else_does_not_fit_is_refused_by_name``.
    ``traffic()``: ``link/test_traffic_of_links.py``.
Residuals and checkpoints
    whose a residual is: ``test_a_residual_is_of_the_whole_parameter_or_of_the_shard``.
    resuming, other numbers of shards: ``test_fsdp.py``; of replicas: ``link/test_other_world_size.py``.
    overflows: ``test_fsdp.py``, and ``test_an_overflow_in_one_shard_leaves_the_others_their_residuals``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.methods.registry import METHODS
from ranks import Ranks
from sharded import VOCABULARY, WIDTH, loss_of, meshes, plain, refusal, sharded, shards_of

pytestmark = pytest.mark.ranks


def rows(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return whole.chunk(ranks)[rank]


class Heads(nn.Module):
    """Two heads that are sharded as one unit, which runs for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 32), nn.Linear(40, 16)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        out: torch.Tensor = self.get_submodule(which)(x)
        return out


class TwoTasks(nn.Module):
    """A body with a head for each half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(12, 40), Heads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.relu(self.body(x)).chunk(2)
        return torch.stack([self.heads(part, which).square().mean() for part, which in zip(parts, "ab")]).sum()


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(rank))


# ---------------------------------------------------------------------- rounds

SPEC = "ErrorFeedback(compressor=QSGDinf(levels=3, block_size=16))"


def reduced_twice(kind: str) -> tuple[int, list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run one backward pass, in which the unit of both heads reduces for each of them."""
    rank, (flat, mesh) = dist.get_rank(), meshes()
    model = TwoTasks()
    for part in (model.heads, model):
        fully_shard(part, mesh=flat if kind == "shards" else mesh)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    link = gw.attach(model, SPEC, min_numel=40)
    reduced, exchange = list[str](), link.exchange

    def noted(index: int, names: Sequence[str], flat: torch.Tensor, last: bool) -> Any:
        reduced.append(f"round {link.round}, bucket {index}: {names[0]}")
        return exchange(index, names, flat, last)

    link.exchange = noted  # type: ignore[method-assign]
    model(inputs(rank)).backward()
    rounds, found, kept = link.round, shards_of(model), link.state_dict()["rank"]
    link.close()
    return rounds, reduced, found, kept


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_a_unit_that_reduces_twice_in_one_pass_begins_a_round(four_ranks: Ranks, kind: str) -> None:
    """The second round brings what the first one left over, and has all that comes after it in the pass."""
    answers = four_ranks(reduced_twice, kind)
    order = ["round 0, bucket 0: heads.a.weight", "round 1, bucket 0: heads.a.weight", "round 1, bucket 1: body.weight"]
    assert [(rounds, reduced) for rounds, reduced, _, _ in answers] == [(2, order)] * 4
    if kind == "replicas":
        for first, second in ((0, 2), (1, 3)):
            assert all(torch.equal(grad, answers[second][2][name]) for name, grad in answers[first][2].items())
        return
    workers = []
    for rank in range(4):
        model = TwoTasks()
        model(inputs(rank)).backward()
        workers.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    like = dict(TwoTasks().named_parameters())
    heads = [name for name in like if name.startswith("heads")]
    link = gw.SimulatedLink(like.items(), SPEC, 4, min_numel=40, collective="all_gather")
    total = {name: torch.zeros(p.shape) for name, p in like.items()}
    # Backward begins with the head that ran last, and gradients of the other are zeros.
    for names, zeros in ((heads, "heads.a"), (list(like), "heads.b")):
        given = [{n: torch.zeros_like(w[n]) if n.startswith(zeros) else w[n] for n in names} for w in workers]
        mean = link.reduce_(torch.stack([torch.cat([g.reshape(-1) for g in one.values()]) for one in given]), names)
        for name, part in zip(names, mean.split([like[n].numel() for n in names])):
            total[name] += part.view(like[name].shape)
    for rank, (_, _, found, kept) in enumerate(answers):
        assert [name for name, grad in found.items() if not torch.equal(grad, rows(total[name], rank, 4))] == []
        expected = link.state_dict()[f"rank {rank}"]
        assert kept.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in kept.items())


def micro_steps() -> tuple[list[int], float]:
    rank, (_, mesh) = dist.get_rank(), meshes()
    model, rounds = sharded(mesh["shard"]), []
    link = gw.attach(model, "fp32", process_group=mesh["replicate"].get_group())
    for last in (False, True):
        model.set_requires_all_reduce(last)
        loss_of(model, rank, int(last)).backward()
        rounds.append(link.round)
    link.close()
    return rounds, float(shards_of(model)["head.weight"].norm())


def test_on_a_mesh_of_one_dimension_each_micro_step_is_exchanged(four_ranks: Ranks) -> None:
    for rounds, _ in four_ranks(micro_steps):
        assert rounds == [1, 2]


# ---------------------------------------------------------------------- shards as parameters


def small_shards() -> list[str]:
    _, mesh = meshes()
    module = nn.Sequential(nn.Linear(10, 24, bias=False), nn.Linear(24, 12, bias=False))
    link = gw.attach(fully_shard(module, mesh=mesh), "qsgd", min_numel=130)
    found = link.record()["dense_parameters"]
    link.close()
    return found  # type: ignore[no-any-return]


def test_small_is_the_shard_and_not_the_parameter(four_ranks: Ranks) -> None:
    """Halves of 120 elements travel in float32, halves of 144 do not."""
    assert four_ranks(small_shards) == [["0.weight"]] * 4


def residuals(kind: str) -> dict[str, tuple[int, int]]:
    flat, mesh = meshes()
    model = sharded(flat if kind == "shards" else mesh)
    link = gw.attach(model, "errorfeedback", min_numel=256)
    loss_of(model, dist.get_rank(), 0).backward()
    shards = shards_of(model)
    found = {
        name: (value.numel(), shards[name].numel())
        for key, value in link.state_dict()["rank"].items()
        for name in [key.partition("/")[2]]
    }
    link.close()
    return found


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_a_residual_is_of_the_whole_parameter_or_of_the_shard(four_ranks: Ranks, kind: str) -> None:
    whole = {name: p.numel() for name, p in plain().named_parameters()}
    for found in four_ranks(residuals, kind):
        assert "blocks.0.up.weight" in found
        for name, (kept, shard) in found.items():
            assert kept == (whole[name] if kind == "shards" else shard)


def overflow_in_one_shard() -> tuple[int, bool, bool]:
    """Make row 0 of the gradients infinite on one rank: it is in the first of two shards."""
    rank, (_, mesh) = dist.get_rank(), meshes()
    model = nn.Linear(20, 40, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.1)
    link = gw.attach(fully_shard(model, mesh=mesh), "errorfeedback", min_numel=0)
    kept = []
    for factor in (1.0, float("inf") if rank == 2 else 1.0):
        model.zero_grad()
        out = model(torch.randn(4, 20, generator=torch.Generator().manual_seed(rank)))
        (out[:, 0].sum() * factor + out[:, 1:].square().sum()).backward()
        kept.append(link.state_dict()["rank"]["residual/weight"].clone())
    skipped = link.skipped_rounds
    finite = bool(torch.isfinite(model.weight.grad.to_local()).all())  # type: ignore[union-attr]
    link.close()
    return skipped, torch.equal(*kept), finite


def test_an_overflow_in_one_shard_leaves_the_others_their_residuals(four_ranks: Ranks) -> None:
    """Ranks 0 and 2 hold the first shard."""
    assert four_ranks(overflow_in_one_shard) == [(1, True, False), (0, False, True)] * 2


def without_gradients(kind: str) -> dict[str, tuple[float, float]]:
    """Return the largest gradient of each parameter, and its distance from the mean over ranks."""
    rank, (flat, mesh) = dist.get_rank(), meshes()
    model = sharded(flat if kind == "shards" else mesh)
    model.set_reduce_scatter_unused_params(True)
    model.forward = lambda x: model.head(model.tokens(x).square()).square().mean()
    link = gw.attach(model, "fp32")
    draw = torch.Generator().manual_seed(rank)
    model(torch.randint(0, 31, (4, 6), generator=draw)).backward()
    link.close()
    whole = []
    for r in range(4):
        copy = plain()
        tokens = torch.randint(0, 31, (4, 6), generator=torch.Generator().manual_seed(r))
        copy.head(copy.tokens(tokens).square()).square().mean().backward()
        whole.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in copy.named_parameters()})
    found = {}
    count, place = (4, rank) if kind == "shards" else (2, rank % 2)
    for name, grad in shards_of(model).items():
        mean = sum(w[name] for w in whole) / 4
        part = mean.chunk(count)[place] if place < len(mean.chunk(count)) else mean[:0]  # type: ignore[union-attr]
        found[name] = (float(grad.abs().sum()), float((grad - part).norm()))
    return found


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_what_has_no_gradient_counts_as_zeros(four_ranks: Ranks, kind: str) -> None:
    """In the same unit, beside parameters with gradients, whose mean it leaves alone."""
    for found in four_ranks(without_gradients, kind):
        assert {"tokens.weight", "head.weight", "places.weight"} <= found.keys()
        assert found["places.weight"][0] == found["norm.weight"][0] == 0.0
        assert found["head.weight"][0] > 0.0
        # Four products of float32, of numbers below one.
        assert max(off for _, off in found.values()) < 1e-6


def padded() -> list[float]:
    """Reduce into a buffer that is full of something else; 31 rows of 2 are four shards of 8, the last one short."""
    flat, _ = meshes()
    model = nn.Linear(2, 31, bias=False)
    link = gw.attach(fully_shard(model, mesh=flat), "fp32")
    scatter: Any = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm  # type: ignore[operator]
    rooms = []

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        rooms.append(torch.full(tuple(size), float("nan"), dtype=dtype, device=device))
        return rooms[-1]

    scatter.allocate = allocate
    model(torch.full((1, 2), 1.0 + link.rank)).sum().backward()
    link.close()
    given, found = rooms
    assert (given.numel(), found.numel()) == (64, 16)
    return found.tolist()  # type: ignore[no-any-return]


def test_padding_is_never_read_and_is_zeros_afterwards(four_ranks: Ranks) -> None:
    """So that it may be summed up into a norm."""
    whole, short = [2.5] * 16, [2.5] * 14 + [0.0] * 2
    assert four_ranks(padded) == [whole, whole, whole, short]


# ---------------------------------------------------------------------- what is FSDP2's own


def natives() -> tuple[list[list[int]], list[int], int]:
    """Return the ranks of FSDP2's own all-reduce before and while links are there, and how many each link has."""
    _, mesh = meshes()
    model, groups, sizes = sharded(mesh), list[list[int]](), list[int]()
    count = list[int]()

    def note() -> None:
        infos = [part._get_fsdp_state()._fsdp_param_group.mesh_info for part in (model, *model.blocks)]
        (found,) = {tuple(dist.get_process_group_ranks(info.replicate_process_group)) for info in infos}
        groups.append(list(found))

    note()
    for _ in range(2):
        link = gw.attach(model, "qsgd")
        sizes.append(link.world_size)
        note()
        link.close()
        count.append(len(dist.distributed_c10d._world.pg_map))
    return groups, sizes, count[1] - count[0]


def test_natives_all_reduce_is_that_of_a_rank_alone(four_ranks: Ranks) -> None:
    """And replicas are found again where a module is attached to once more."""
    for rank, (groups, sizes, more) in enumerate(four_ranks(natives)):
        assert groups == [[rank % 2, rank % 2 + 2], [rank], [rank]]
        assert sizes == [2, 2]
        assert more == 0, "links share the group of this rank"


def other_refusals() -> dict[str, str]:
    flat, mesh = meshes()
    found = {}
    for spec in ("DIANA(prox=L1(strength=0.1))", "cat", "sketched_sgd", "easgd"):
        found[spec] = refusal(lambda spec=spec: gw.attach(sharded(mesh), spec))
    for spec in ("ef21", "acp_sgd", "signum", "dgc"):
        found[spec] = refusal(lambda spec=spec: gw.attach(sharded(flat), spec))
    found["check"] = refusal(lambda: gw.attach(sharded(flat), "qsgd", check=True))
    model = sharded(flat)

    class Own:
        def allocate(self, *sizes: int, **options: Any) -> torch.Tensor:
            return torch.empty(*sizes, **options)

    model.set_custom_reduce_scatter(Own())
    found["own reduce-scatter"] = refusal(lambda: gw.attach(model, "qsgd"))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    parallelize_module(layers, two["tensor"], {"0": ColwiseParallel()})
    found["tensor parallelism"] = refusal(lambda: gw.attach(fully_shard(layers, mesh=two["shard"]), "qsgd"))
    apart = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    fully_shard(apart[0], mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    fully_shard(apart, mesh=two["shard"])
    found["several meshes"] = refusal(lambda: gw.attach(apart, "qsgd"))
    return found


def test_what_else_does_not_fit_is_refused_by_name(four_ranks: Ranks) -> None:
    expected = {
        "DIANA(prox=L1(strength=0.1))": "acts on the optimizer's steps",
        "cat": "needs the gradients of a whole step",
        "sketched_sgd": "needs the gradients of a whole step",
        "easgd": "takes local steps",
        "ef21": "cannot travel by a reduce-scatter",
        "acp_sgd": "cannot travel by a reduce-scatter",
        "signum": "cannot travel by a reduce-scatter",
        "dgc": "cannot travel by a reduce-scatter",
        "check": "check=True",
        "own reduce-scatter": "has an exchange of its own (Own)",
        "tensor parallelism": "tensor parallelism is not supported",
        "several meshes": "all parts of a module need one mesh",
    }
    for found in four_ranks(other_refusals):
        assert found.keys() == expected.keys()
        for case, sentence in expected.items():
            assert sentence in found[case], (case, found[case])


def following_advice() -> dict[str, str]:
    """Attach every method to sharded modules, and where one is refused do what the refusal says; return what fails."""
    (flat, mesh), found = meshes(), {}
    for spec in [kind.name for kind in METHODS if kind is not gw.Hierarchical] + ["hierarchical(node_size=1)"]:
        told = refusal(lambda spec=spec: gw.attach(sharded(flat, blocks=0), spec).close())
        if "a mesh of two dimensions" in told:
            found[spec] = refusal(lambda spec=spec: gw.attach(sharded(mesh, blocks=0), spec).close())
        elif "use DistributedDataParallel" in told:
            module = DistributedDataParallel(plain(blocks=0))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            given = module, spec
            found[spec] = refusal(lambda given=given, sgd=optimizer: gw.attach(*given, optimizer=sgd).close())
        else:
            found[spec] = told
    for spec in ("EDEN(bits=4)", "errorfeedback"):
        found[spec] = refusal(lambda spec=spec: gw.attach(sharded(flat, blocks=0), spec).close())
    columns = sharded(mesh, blocks=0, shard_placement_fn=lambda p: Shard(1) if p.shape == (VOCABULARY, WIDTH) else None)
    found["columns"] = refusal(lambda: gw.attach(columns, "qsgd").close())
    return {case: told for case, told in found.items() if told != "accepted"}


def test_what_a_refusal_advises_is_not_refused_next(four_ranks: Ranks) -> None:
    assert four_ranks(following_advice) == [{}] * 4


# ---------------------------------------------------------------------- weights


def stepped() -> tuple[bool, list[bool]]:
    """Tell whether weights are stepped as they are, and whether what is gathered equals them, gather by gather."""
    rank, (flat, _) = dist.get_rank(), meshes()
    model = sharded(flat)
    link = gw.compress_weights(model, "QSGDinf(levels=7, block_size=64)")
    alike, exact = [], True

    def gather() -> None:
        model.unshard()
        whole = {n: p.detach().clone() for n, p in model.named_parameters(recurse=False)}
        whole |= {"head.weight": model.head.weight.detach().clone()}
        model.reshard()
        alike.append(all(torch.equal(p, model.get_parameter(n).full_tensor()) for n, p in whole.items()))

    gather()
    for step in range(2):
        before = [p.detach().to_local().clone() for p in model.parameters()]
        model.zero_grad()
        loss_of(model, rank, step).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        for p, old in zip(model.parameters(), before):
            exact = exact and torch.equal(p.detach().to_local(), old.add(p.grad.to_local(), alpha=-0.05))  # type: ignore[union-attr]
        gather()
    link.begin_anew()
    gather()
    link.close()
    return exact, alike


def test_weights_are_stepped_exactly_and_gathered_so_when_begun_anew(four_ranks: Ranks) -> None:
    assert four_ranks(stepped) == [(True, [True, False, False, True])] * 4
