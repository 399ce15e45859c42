"""GRandK, property 7: every element once in a cycle, replicas alike; and error feedback around it, over cycles."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError
from gradwire.kernels.philox import philox
from gradwire.methods.sparse.random_places import LARGE, TILE, FeistelPermutation
from gradwire.seeds import SHARED, parameter_key

INNER = [gw.QSGDMaxNorm(), gw.MultiScale(), gw.QSGDinf(levels=7, block_size=64)]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one(numel: int, method: gw.Method, world_size: int, **options: object) -> gw.SimulatedLink:
    return gw.SimulatedLink([("w", torch.empty(numel))], method, world_size, min_numel=0, **options)


# ---------------------------------------------------------------- the permutation


@pytest.mark.parametrize("parts", [1, 2, 7, 64])
@pytest.mark.parametrize("numel", [1, 2, 3, 63, 64, 65, 1000, 4097, 70_001])
def test_parts_are_a_permutation_of_nearly_equal_sizes(numel: int, parts: int) -> None:
    shuffle, found = FeistelPermutation([3, numel], [(5, 6), (7, 8)], parts), []
    before = shuffle.slots[0]
    for part in range(parts):
        elements, full = shuffle.part(9, part)
        assert len(elements) == sum(shuffle.slots)
        mine = elements[before:] if full is None else elements[full[full >= before]]
        assert len(mine) in (numel // parts, -(-numel // parts))
        found += mine.tolist()
    assert sorted(found) == list(range(numel))


def test_a_parameter_is_cut_alike_wherever_it_lies_and_anew_in_every_cycle() -> None:
    key = [parameter_key(0, name, "choice") for name in "ab"]
    both, alone = FeistelPermutation([500, 2000], key, 4), FeistelPermutation([2000], key[1:], 4)
    for cycle in (0, 1, 2**32):
        assert both.part(cycle, 2)[0][125:].tolist() == alone.part(cycle, 2)[0].tolist()
    parts = [set(alone.part(cycle, 0)[0].tolist()) for cycle in (0, 1, 2**32)]
    parts.append(set(FeistelPermutation([2000], [parameter_key(1, "b", "choice")], 4).part(0, 0)[0].tolist()))
    for i, p in enumerate(parts):
        # A quarter of 500 by chance, hypergeometric with a deviation of 8.4: six of them.
        assert all(abs(len(p & q) - 125) < 50 for q in parts[:i])


def element_at(place: int, numel: int, words: list[list[int]]) -> int:
    """The formula of the permutation, one place of one parameter after another; ``words``: k and m of each turn."""
    a = math.isqrt(numel - 1) + 1
    b = -(-numel // a)
    while True:
        left, right = divmod(place, b)
        for turn, (k, m) in enumerate(words):
            h = ((k | 1) * (left if turn % 2 else right) + m) % 2**32
            h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
            h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
            h ^= h >> 16
            if turn % 2:
                right = (right + (h * b >> 32)) % b
            else:
                left = (left + (h * a >> 32)) % a
        place = left * b + right
        if place < numel:
            return place


@pytest.mark.parametrize("parts", [1, 5, 64])
def test_parameters_permuted_together_are_so_by_the_formula_of_each(parts: int) -> None:
    """Bit for bit, on small ones that share a tile, ones that are large, and more than a tile holds."""
    numel = [1, 2, 3, 700, 64, 1, LARGE - 1, LARGE, 5, *[997] * 70, TILE + 9, 2]
    key = [parameter_key(3, str(i), "choice") for i in range(len(numel))]
    shuffle, cycle, stride = FeistelPermutation(numel, key, parts), 2**32 + 5, 23
    key_words = torch.tensor(key)[:, :, None].unbind(1)
    counter = (torch.arange(3)[None], *(torch.tensor(c) for c in (cycle % 2**32, cycle >> 32, SHARED)))
    words = torch.stack(philox(counter, key_words), 2).reshape(len(numel), 6, 2).tolist()
    for part in {0, parts - 1}:
        elements, full = shuffle.part(cycle, part)
        filled, slot = set(range(len(elements)) if full is None else full.tolist()), 0
        for n, k, slots in zip(numel, words, shuffle.slots):
            begin, end = part * n // parts, (part + 1) * n // parts
            assert {i - slot for i in filled if slot <= i < slot + slots} == set(range(end - begin))
            for i in [*range(0, end - begin, stride if n > 100 else 1)]:
                assert elements[slot + i] == element_at(begin + i, n, k)
            slot += slots


def test_a_part_takes_memory_of_its_own_size() -> None:
    """Not of all elements: a part in 64 of 400 tensors."""
    numel = [10_000] * 400
    shuffle = FeistelPermutation(numel, [(i, i) for i in range(400)], 64)
    shuffle.part(0, 0)
    tracemalloc.start()
    try:
        shuffle.part(0, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Int64 of elements and of slots, and in a tile's work: place, owner, twelve words, and a dozen more in between.
    assert peak <= 8 * sum(shuffle.slots) * (2 + 30)
    assert 8 * sum(shuffle.slots) * (2 + 30) < 8 * sum(numel)


def test_parts_are_as_random_as_chance() -> None:
    """Over 1200 cycles: where an element is, and whether two that are related by their index share a part."""
    numel, parts, cycles = 256, 8, 1200
    shuffle = FeistelPermutation([numel], [(1, 2)], parts)
    where = torch.empty(cycles, numel, dtype=torch.int64)
    for cycle in range(cycles):
        for part in range(parts):
            where[cycle, torch.from_numpy(shuffle.part(cycle, part)[0])] = part
    counts = torch.stack([(where == part).sum(0) for part in range(parts)]).double()
    chi = ((counts - cycles / parts) ** 2 / (cycles / parts)).sum(0)
    # 256 chi-squares of 7 degrees of freedom: above 35 with probability 1e-5; their mean has a deviation of 0.24.
    assert float(chi.max()) < 35
    assert float(chi.mean()) == pytest.approx(7, abs=5 * 0.24)
    chance = (numel / parts - 1) / (numel - 1)
    for lag in (1, 2, 15, 16, 17, 128):
        same = (where[:, lag:] == where[:, :-lag]).double()
        # Pairs of one cycle are nearly independent; twice the deviation of independent ones allows for the rest.
        assert float(same.mean()) == pytest.approx(chance, abs=10 * math.sqrt(chance / same.numel()))
    # What one cycle says of the next: nothing.
    again = (where[1:] == where[:-1]).double()
    assert float(again.mean()) == pytest.approx(1 / parts, abs=5 * math.sqrt(1 / parts / again.numel()))


# ---------------------------------------------------------------- property 7


@pytest.mark.parametrize("inner", INNER, ids=repr)
@pytest.mark.parametrize(("numel", "cycle"), [(1000, 8), (1003, 8), (5, 8), (640, 1)])
def test_every_element_is_sent_once_in_a_cycle(inner: gw.Method, numel: int, cycle: int) -> None:
    """What is sent of ones is one, and zero elsewhere, on workers that agree; the parts of a cycle add up to all."""
    link = one(numel, gw.GRandK(compressor=inner, cycle=cycle), 3)
    for _ in range(3):
        rounds = [link.reduce_(torch.ones(3, numel)).clone() for _ in range(cycle)]
        sent = torch.stack(rounds) != 0
        assert bool((sent.sum(0) == 1).all())
        assert bool((sent.sum(1) >= numel // cycle).all() & (sent.sum(1) <= -(-numel // cycle)).all())
        assert torch.allclose(torch.stack(rounds).sum(0), torch.ones(numel), rtol=1e-6)


@pytest.mark.parametrize("rescale", [False, True])
def test_over_a_cycle_the_sent_parts_of_a_constant_gradient_are_the_gradient(rescale: bool) -> None:
    """Exactly where Q is: values on the levels. All C gradients of the cycle with ``rescale``, else one."""
    numel, cycle = 999, 6
    g = torch.randint(-15, 16, (4, numel), generator=torch.Generator().manual_seed(1)).float()
    g[:, ::2].clamp_(-3, 3)
    # Every part has the magnitude 15 on some worker, so that levels are whole numbers.
    link = one(numel, gw.GRandK(cycle=cycle, rescale=rescale), 4)
    total = torch.zeros(numel)
    for _ in range(cycle):
        total += link.reduce_(g.clone())
    assert torch.allclose(total, g.mean(0) * (cycle if rescale else 1), rtol=1e-6)


def test_the_mean_is_that_of_all_workers_where_it_is_not_zero() -> None:
    """Not one worker's own gradient over N: the error of an element is that of Q."""
    g = gaussian(3, 4000)
    for inner in INNER[:2]:
        link = one(4000, gw.GRandK(compressor=inner, cycle=5), 3)
        step = float(g.abs().max()) / 15
        for _ in range(5):
            mean = link.reduce_(g.clone())
            sent = mean != 0
            assert float((mean - g.mean(0))[sent].abs().max()) <= step * (1 + 1e-5)
            assert 0.6 * 800 < int(sent.sum()) <= 800


def train() -> list[float]:
    """Two steps of workers with different gradients, from weights that differ in nothing."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    module = torch.nn.Linear(64, 64)
    torch.nn.init.ones_(module.weight)
    ddp = DistributedDataParallel(module)
    link = gw.attach(ddp, gw.GRandK(cycle=8), check=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        ddp(gaussian(4, 64, seed=100 * dist.get_rank() + step)).square().mean().backward()
        optimizer.step()
    link.close()
    return [float(x) for x in module.weight.detach().reshape(-1)]


@pytest.mark.ranks
def test_replicas_stay_alike(three_ranks: object) -> None:
    """Where the published program lets each worker follow its own gradient."""
    found = three_ranks(train)  # type: ignore[operator]
    assert found[0] == found[1] == found[2]
    assert sum(w != 1 for w in found[0]) > 3000


# ---------------------------------------------------------------- what is not finite


@pytest.mark.parametrize(
    "inner", [*INNER, gw.Natural(), gw.QSGD(block_size=16), gw.Lattice(), gw.TernGrad(clip=None)], ids=repr
)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_sent_is_seen(inner: gw.Method, value: float) -> None:
    """In every round of a cycle, whichever part holds it, and in no other parameter."""
    link = gw.SimulatedLink(
        [("a", torch.empty(300)), ("b", torch.empty(77))], gw.GRandK(compressor=inner, cycle=5), 3, min_numel=0
    )
    for round in range(5):
        g = gaussian(3, 377, seed=round)
        g[1, 123] = value
        mean = link.reduce_(g)
        assert bool((mean[:300] == torch.inf).all())
        assert bool(torch.isfinite(mean[300:]).all())


def test_a_part_without_elements_shows_an_infinity_too() -> None:
    link = one(3, gw.GRandK(cycle=64), 2)
    for _ in range(64):
        assert bool(torch.isinf(link.reduce_(torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.inf, 3.0]]))).all())


# ---------------------------------------------------------------- error feedback


def residual(link: gw.SimulatedLink, rank: int) -> torch.Tensor:
    return link.state_dict()[f"rank {rank}"]["residual/w"]


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_nothing_is_lost(inner: gw.Method) -> None:
    """Averaged over workers: outcome + new residual = gradient + old residual, in every round."""
    link = one(1001, gw.ErrorFeedback(compressor=gw.GRandK(compressor=inner, cycle=4)), 3)
    before = torch.zeros(1001)
    for round in range(9):
        g = gaussian(3, 1001, seed=round)
        mean = link.reduce_(g.clone())
        after = torch.stack([residual(link, r) for r in range(3)]).mean(0)
        # Sums of three values up to about fifty: a dozen roundings of 2^-24 of that.
        assert torch.allclose(mean + after, g.mean(0) + before, atol=4e-5)
        before = after


@pytest.mark.parametrize("levels", [2, 15])
def test_residuals_stay_below_the_bound(levels: int) -> None:
    """(2 C - 1) B / (1 - c), with gradients that always push the same way and are very unlike from worker to worker."""
    cycle, c = 8, 1 / levels
    link = one(640, gw.ErrorFeedback(compressor=gw.GRandK(compressor=gw.QSGDMaxNorm(levels=levels), cycle=cycle)), 2)
    g = torch.stack([torch.ones(640), 1e-3 * torch.ones(640)])
    g[1, 0], largest = -1.0, 0.0
    for _ in range(40 * cycle):
        link.reduce_(g.clone())
        largest = max(largest, *(float(residual(link, r).abs().max()) for r in range(2)))
    # At least what an element waits for; the bound's rounding is that of a few additions in float32.
    assert cycle < largest <= (2 * cycle - 1) / (1 - c) * (1 + 1e-5)


def test_with_a_memory_descent_arrives_and_without_it_is_late() -> None:
    """Workers whose optima differ: x <- x - eta mean(x - t_i); the memory's step is that of C gradients at once."""
    targets, cycle, ends = gaussian(4, 512), 8, []
    for method in (gw.GRandK(cycle=cycle), gw.ErrorFeedback(compressor=gw.GRandK(cycle=cycle))):
        link, x = one(512, method, 4), torch.zeros(512)
        for _ in range(60):
            x = x - 0.05 * link.reduce_(x - targets)
        ends.append(float((x - targets.mean(0)).norm() / targets.mean(0).norm()))
    # Alone about 0.95^(60 / 8) of the way is left, with it about 0.95^60 and the noise of levels.
    assert ends[0] > 0.5
    assert ends[1] < 0.2


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("GRandK(cycle=0)", "number of rounds"),
        ("GRandK(cycle=2.0)", "number of rounds"),
        ("GRandK(cycle=True)", "number of rounds"),
        ("GRandK(rescale=1)", "True or False"),
        ("GRandK(compressor=fp16)", "unbiased operator"),
        ("GRandK(compressor=ScaledSign())", "unbiased operator"),
        ("GRandK(compressor=DIANA())", "unbiased operator"),
        ("GRandK(compressor=GRandK())", "unbiased operator"),
        ("ErrorFeedback(compressor=GRandK(rescale=True))", "over its cycle"),
        ("ErrorFeedback(compressor=GRandK(compressor=QSGDMaxNorm(levels=1)))", "over its cycle"),
        ("ErrorFeedback(compressor=GRandK(compressor=QSGD(levels=1)))", "over its cycle"),
    ],
)
def test_fields_out_of_range_are_refused(spec: str, part: str) -> None:
    with pytest.raises(HyperparameterError, match=part):
        gw.method(spec)


@pytest.mark.parametrize(
    "method", [gw.QSGDMaxNorm(levels=2), gw.QSGDinf(levels=3), gw.MultiScale(levels=(2, 9))], ids=repr
)
def test_no_element_errs_by_more_than_is_declared(method: gw.Method) -> None:
    """What the bound rests on: a worker's own contribution, against the largest magnitude of all."""
    g = gaussian(3, 2000) * torch.tensor([[1.0], [0.01], [3.0]])
    bound = method.traits.worst_step * float(g.abs().max())
    for rank in range(3):
        own = g.clone()
        own[[r for r in range(3) if r != rank]] = 0
        own[(rank + 1) % 3, 0] = g.abs().max()
        found = 3 * gw.simulate(own, method).mean
        error = (found - own.sum(0))[1:].abs().max()
        assert 0 < float(error) <= bound * (1 + 1e-5)
