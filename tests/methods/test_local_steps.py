"""Local SGD, DiLoCo and elastic averaging, by number of the property in the papers' summary (docs/properties.md)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Draw
from gradwire.exchange.planning import FragmentPieces, Options, dense_names
from gradwire.exchange.segments import flat_view
from gradwire.methods.registry import METHODS
from gradwire.methods.sparse.sparse_values import BinnedValues

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SIZES = {"a": (12, 7), "b": (40,)}
LARGE = {"a": (60, 40), "b": (100,), "c": (3, 1500), "d": (1100,)}
"""Some of them are cut into pieces."""


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


class Quadratics:
    """Workers that minimise |A_i (x - c_i)|^2 / 2, each from the same start with an optimizer of its own."""

    def __init__(
        self,
        count: int,
        optimizer: Optimizer = sgd,
        *,
        alike: bool = False,
        sizes: Mapping[str, tuple[int, ...]] = SIZES,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        start = {name: torch.randn(shape, generator=generator) for name, shape in sizes.items()}
        self.workers = [{name: torch.nn.Parameter(x.clone()) for name, x in start.items()} for _ in range(count)]
        self.optimizers = [optimizer(list(worker.values())) for worker in self.workers]
        self.targets = [
            {name: (torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) + 0.5)
             for name, shape in sizes.items()}
            for _ in range(count)
        ]  # fmt: skip
        if alike:
            self.targets = [self.targets[0]] * count

    def gradients(self, worker: int) -> dict[str, torch.Tensor]:
        pairs = self.targets[worker]
        return {name: pairs[name][1] * (x.detach() - pairs[name][0]) for name, x in self.workers[worker].items()}

    def step(self) -> None:
        for worker, optimizer in enumerate(self.optimizers):
            for name, g in self.gradients(worker).items():
                self.workers[worker][name].grad = g
            optimizer.step()

    def train(self, method: gw.Method | str, steps: int) -> gw.SimulatedLocalSteps:
        found = gw.SimulatedLocalSteps([worker.items() for worker in self.workers], method, min_numel=0)
        for _ in range(steps):
            self.step()
            found.after_step()
        return found

    def flat(self, worker: int = 0) -> torch.Tensor:
        return torch.cat([x.detach().reshape(-1) for x in self.workers[worker].values()])


def test_a_step_each_by_plain_sgd_is_synchronous_sgd() -> None:
    """1: the mean of steps is the step of the mean, up to rounding."""

    def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    ours, whole = Quadratics(3, plain), Quadratics(3, plain)
    ours.train(gw.LocalSGD(every=1), 20)
    for _ in range(20):
        means = [whole.gradients(worker) for worker in range(3)]
        for worker in range(3):
            for name in SIZES:
                whole.workers[worker][name].grad = torch.stack([g[name] for g in means]).mean(0)
            whole.optimizers[worker].step()
    # Twenty steps with a few roundings each of numbers up to 3.
    assert torch.allclose(ours.flat(), whole.flat(), rtol=0, atol=20 * 4 * 3 * 2**-24)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("count", [2, 4])
def test_on_equal_data_workers_do_as_one(count: int, optimizer: Optimizer) -> None:
    """2: bit for bit, since parameters are averaged, and not differences, which would round once more."""
    ours, one = Quadratics(count, optimizer, alike=True), Quadratics(1, optimizer)
    one.targets = ours.targets[:1]
    ours.train(gw.LocalSGD(every=4), 13)
    for _ in range(13):
        one.step()
    assert all(torch.equal(ours.flat(worker), one.flat()) for worker in range(count))


INNER = [gw.FP32(), gw.EDEN(bits=4), gw.ErrorFeedback(), gw.GTopK(density=0.1), gw.Coded(compressor=gw.TernGrad())]


@pytest.mark.parametrize("inner", INNER, ids=repr)
@pytest.mark.parametrize("kind", [gw.LocalSGD, gw.DiLoCo])
def test_workers_agree_after_an_exchange_and_differ_before(kind: type[gw.LocalSGD], inner: gw.Method) -> None:
    """3."""
    ours = Quadratics(3)
    found = ours.train(kind(every=5, inner=inner), 10)
    assert all(torch.equal(ours.flat(0), ours.flat(worker)) for worker in (1, 2))
    assert torch.equal(ours.flat(0), torch.cat(list(found.global_parameters.values())))
    ours.step()
    found.after_step()
    assert not torch.equal(ours.flat(0), ours.flat(1))
    assert found.link.round == 2


@pytest.mark.parametrize("kind", [gw.LocalSGD, gw.EASGD])
def test_a_mean_is_as_unbiased_as_the_method_inside(kind: type[gw.LocalSGD]) -> None:
    for inner, unbiased in ((gw.FP32(), True), (gw.QSGDinf(), True), (gw.TopK(), False), (gw.TernGrad(), False)):
        traits = kind(inner=inner).traits
        assert traits.unbiased == unbiased
        assert traits.unbiased_note == ("the mean of parameters" if unbiased else inner.traits.unbiased_note)


def test_an_outer_step_of_one_without_momentum_is_an_average() -> None:
    """4: x - (x - mean) for the mean, in float32."""
    ours, other = Quadratics(3), Quadratics(3)
    ours.train(gw.DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0), 12)
    other.train(gw.LocalSGD(every=3), 12)
    assert torch.allclose(ours.flat(), other.flat(), rtol=0, atol=4 * 3 * 2**-23)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_that_of_torchs_sgd(nesterov: bool) -> None:
    """The global parameters step as by ``torch.optim.SGD`` with the mean difference for the gradient, bit for bit."""
    ours = Quadratics(2)
    found = gw.SimulatedLocalSteps(
        [w.items() for w in ours.workers], gw.DiLoCo(every=4, nesterov=nesterov), min_numel=0
    )
    outer = [torch.nn.Parameter(x.clone()) for x in found.global_parameters.values()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=nesterov)
    for step in range(1, 17):
        ours.step()
        if step % 4 == 0:
            for held, name in zip(outer, SIZES):
                mean = torch.stack([w[name].detach() for w in ours.workers]).mul(0.5).sum(0)
                held.grad = held.detach() - mean.reshape(-1)
            optimizer.step()
        found.after_step()
        assert all(torch.equal(a, b) for a, b in zip(outer, found.global_parameters.values()))


@pytest.mark.parametrize("inner", [gw.FP32(), gw.EDEN(bits=4), gw.ErrorFeedback()], ids=repr)
def test_one_fragment_without_delay_or_mixing_is_diloco(inner: gw.Method) -> None:
    """5: bit for bit."""
    ours, other = Quadratics(3), Quadratics(3)
    streaming = gw.StreamingDiLoCo(every=4, fragments=1, delay=0, mixing=0.0, outer_lr=0.7, inner=inner)
    ours.train(streaming, 14)
    other.train(gw.DiLoCo(every=4, inner=inner), 14)
    assert all(torch.equal(ours.flat(worker), other.flat(worker)) for worker in range(3))


def by_the_papers_algorithm(ours: Quadratics, method: gw.StreamingDiLoCo, steps: int) -> list[list[torch.Tensor]]:
    """Algorithm 2 in float64, fragments given as sets of places: the workers' parameters after every step."""
    pieces = FragmentPieces(ours.workers[0], method.fragments, method.order)
    numbers, at = {}, 0
    for name, p in ours.workers[0].items():
        numbers[name] = torch.arange(at, at + p.numel()).view(p.shape)
        at += p.numel()
    counted = FragmentPieces(numbers, method.fragments, method.order)
    places = [torch.cat([counted[name].reshape(-1) for name in names]) for names in pieces.fragments]
    held = ours.flat().double()
    velocity, rows = torch.zeros_like(held), []
    flying: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take_effect(own: torch.Tensor, where: torch.Tensor, difference: torch.Tensor) -> None:
        velocity[where] = method.outer_momentum * velocity[where] + difference
        held[where] -= method.outer_lr * (difference + method.outer_momentum * velocity[where])
        own[:, where] = method.mixing * own[:, where] + (1 - method.mixing) * held[where]

    for step in range(1, steps + 1):
        ours.step()
        own = torch.stack([ours.flat(worker).double() for worker in range(len(ours.workers))])
        if step in flying:
            take_effect(own, *flying.pop(step))
        for fragment, where in enumerate(places):
            if step % method.every == (fragment + 1) * method.every // method.fragments % method.every:
                flying[step + method.delay] = where, (held[where] - own[:, where]).mean(0)
        if step in flying:
            take_effect(own, *flying.pop(step))
        for worker, parameters in enumerate(ours.workers):
            for p, part in zip(parameters.values(), own[worker].split([x.numel() for x in parameters.values()])):
                with torch.no_grad():
                    p.copy_(part.view(p.shape))
        rows.append(list(own))
    return rows


@pytest.mark.parametrize(("fragments", "delay", "mixing"), [(2, 0, 0.0), (3, 2, 0.5), (4, 1, 0.25), (2, 4, 0.0)])
@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_fragments_are_exchanged_as_the_paper_says(fragments: int, delay: int, mixing: float, order: str) -> None:
    """Schedule, delay and mixing, against the paper's algorithm in float64."""
    method = gw.StreamingDiLoCo(every=8, fragments=fragments, delay=delay, mixing=mixing, order=order)
    ours, other = Quadratics(3, sizes=LARGE), Quadratics(3, sizes=LARGE)
    expected = by_the_papers_algorithm(other, method, 20)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], method, min_numel=0)
    for step in range(20):
        ours.step()
        found.after_step()
        for worker in range(3):
            # A few roundings a step of numbers below 8, carried on by momentum.
            assert torch.allclose(ours.flat(worker).double(), expected[step][worker], rtol=0, atol=2e-5)


@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_fragments_are_views_of_all_of_the_model(order: str) -> None:
    ours = Quadratics(1, sizes=LARGE)
    for count in (1, 2, 4, 7):
        pieces = FragmentPieces(ours.workers[0], count, order)
        assert sorted(name for names in pieces.fragments for name in names) == sorted(pieces)
        marked = dict(ours.workers[0])
        with torch.no_grad():
            for number, piece in enumerate(pieces.values()):
                piece.fill_(number)
        joined = torch.cat([pieces[name].reshape(-1) for name in pieces.of(list(marked))])
        assert torch.equal(joined, torch.cat([p.detach().reshape(-1) for p in marked.values()]))


def test_a_large_model_is_cut_evenly_and_what_is_dense_stays_so() -> None:
    """5: at most 1 / F of the elements in one exchange, but for half a row at each end of a run and what is not cut."""
    parameters = {
        "e": torch.empty(5000, 64),
        "w": torch.empty(64, 300).t(),
        "n": torch.empty(64),
        "o": torch.empty(2000, 64),
    }
    for order, runs in (("strided", 4), ("sequential", 1)):
        pieces = FragmentPieces(parameters, 4, order)
        sizes = [sum(pieces[name].numel() for name in names) for names in pieces.fragments]
        assert sum(sizes) == sum(p.numel() for p in parameters.values())
        assert max(sizes) <= sum(sizes) / 4 + runs * 64 + 64
        # FragmentPieces are views in one stretch of memory, also of a parameter that lies transposed.
        assert all(flat_view(x).data_ptr() == x.data_ptr() for x in pieces.values())
    its = pieces.options(Options(exclude=("o",), min_numel=100), gw.FP32())
    dense = dense_names({name: x.numel() for name, x in pieces.items()}, its, gw.FP32())
    assert dense == {name for name in pieces if name[0] in "on"}
    with pytest.raises(gw.HyperparameterError, match="matches no parameter"):
        pieces.options(Options(exclude=("x",)), gw.FP32())


def test_synchronise_ends_what_is_in_flight_and_leaves_the_global_parameters() -> None:
    ours = Quadratics(3, sizes=LARGE)
    method = gw.StreamingDiLoCo(every=8, fragments=2, delay=3, inner=gw.EDEN(bits=4))
    found = ours.train(method, 13)
    rounds = found.link.round
    found.synchronise()
    # One was in flight, and the last one is of all pieces.
    assert (rounds, found.link.round) == (3, 4)
    pieces = FragmentPieces(ours.workers[0], 2, "strided")
    for worker in range(3):
        own = FragmentPieces(ours.workers[worker], 2, "strided")
        assert all(torch.equal(own[name].reshape(-1), found.global_parameters[name]) for name in pieces)


TURNS = (
    "ACPSGD()",
    "CLTk()",
    "GRandK()",
    "ErrorFeedback(GRandK())",
    "Scheduled(CLTk(density=0.01), start=0.1, rounds=8)",
    "Hierarchical(ACPSGD(), node_size=2)",
    "ALQ(blocks='parameter', overlap=True)",
    "AMQ(blocks='parameter', overlap=True)",
)
"""Methods that go by the number of the round."""


@pytest.mark.parametrize("inner", TURNS)
def test_methods_that_go_by_the_number_of_the_round_are_not_used_with_fragments(inner: str) -> None:
    """A fragment would see the same part, side or leader again and again, however many fragments there are."""
    for fragments in (2, 3, 4):
        with pytest.raises(gw.HyperparameterError, match=f"one of {fragments} fragments: use fragments=1"):
            gw.method(f"StreamingDiLoCo(every=8, fragments={fragments}, delay=0, inner={inner})")
    for whole in (f"StreamingDiLoCo(fragments=1, inner={inner})", f"DiLoCo(inner={inner})"):
        assert gw.method(whole).traits.needs_every_round


def test_a_method_without_random_numbers_does_the_same_in_every_round_or_needs_them_all() -> None:
    """From the same state: so no fragment gets less of it than another, in whichever rounds it is exchanged."""
    gradients = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    changing = set()
    for kind in METHODS:
        method = kind()
        traits = method.traits
        apart = traits.local_steps or traits.outcomes_differ or traits.whole_step or not traits.collectives
        if apart or kind.properties.stream != "none":
            continue
        first, *later = (gw.simulate(gradients, method, round=round).mean for round in range(4))
        if not all(torch.equal(first, mean) for mean in later):
            changing.add(method.name)
            assert traits.needs_every_round, method.name
    assert changing == {"clt_k"}


def test_a_schedule_counts_the_exchanges_of_all_fragments() -> None:
    """As docs/methods/local-steps.md says: of twice as many fragments, half as many exchanges are in a stage."""
    sent = {}
    for fragments in (2, 4):
        inner = gw.Scheduled(gw.TopK(density=0.01), start=(0.5,), schedule="step", rounds=4)
        method = gw.StreamingDiLoCo(every=8, fragments=fragments, delay=0, inner=inner)
        ours = Quadratics(2, sizes=LARGE)
        found, totals = ours.train(method, 0), [0]
        for _ in range(3):
            for _ in range(8):
                ours.step()
                found.after_step()
            totals.append(found.link.traffic().sent_bytes)
        sent[fragments] = [after - before for before, after in itertools.pairwise(totals)]
    # Of 50 % and of 1 % of the elements, beside headers.
    assert min(sent[2][:2]) > 5 * sent[2][2]
    assert sent[4][0] > 5 * max(sent[4][1:])


def test_global_parameters_are_lent_and_given_back() -> None:
    ours = Quadratics(3)
    link = ours.train("DiLoCo(every=4)", 6)
    own, held = ours.flat().clone(), torch.cat(list(link.global_parameters.values()))
    assert not torch.equal(own, held)
    with link.swapped():
        assert torch.equal(ours.flat(), held)
    assert torch.equal(ours.flat(), own)


def test_a_fragment_may_be_empty() -> None:
    """Two parameters in four fragments: nothing is exchanged in the turn of some, and a state is taken in any."""
    method = gw.StreamingDiLoCo(every=8, fragments=4, delay=2, mixing=0.0)
    whole = Quadratics(3)
    pieces = FragmentPieces(whole.workers[0], 4, "strided")
    assert [] in pieces.fragments
    found = whole.train(method, 16)
    assert found.link.round == 2 * sum(map(bool, pieces.fragments))
    for cut in range(8, 16):
        first, second = Quadratics(3), Quadratics(3)
        state = first.train(method, cut).state_dict()
        link = gw.SimulatedLocalSteps([worker.items() for worker in second.workers], method, min_numel=0)
        link.load_state_dict(state)
        for mine, theirs, optimizer, other in zip(second.workers, first.workers, second.optimizers, first.optimizers):
            optimizer.load_state_dict(other.state_dict())
            for name, p in mine.items():
                p.data.copy_(theirs[name])
        for _ in range(cut, 16):
            second.step()
            link.after_step()
        assert all(torch.equal(second.flat(worker), whole.flat(worker)) for worker in range(3)), cut


@pytest.mark.parametrize("kind", ["a type of their own", "gaps", "transposed"])
@pytest.mark.parametrize(
    "spec", ["LocalSGD(every=2)", "DiLoCo(every=2)", "EASGD(every=2, alpha=0.2)", "DPSGD(every=2)"]
)
def test_parameters_of_any_layout_and_type_are_written(spec: str, kind: str) -> None:
    """As those that lie in one piece are, in float32, but for what their own type rounds."""

    def laid_out(x: torch.Tensor) -> torch.nn.Parameter:
        if kind == "a type of their own":
            return torch.nn.Parameter(x.bfloat16())
        room = torch.zeros(4, 9)
        room[:, :6] = x
        return torch.nn.Parameter(room[:, :6] if kind == "gaps" else x.T.contiguous().T)

    # Multiples of 1/8 below 16, which bfloat16 holds as they are, and half of the sums of three of them.
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(-8, 8, (4, 6), generator=draw) / 8
    plain = [torch.nn.Parameter(start.clone()) for _ in range(3)]
    other = [laid_out(start) for _ in range(3)]
    links = [gw.SimulatedLocalSteps([[("w", p)] for p in some], spec, min_numel=0) for some in (plain, other)]
    for step in range(2):
        for mine, theirs in zip(plain, other):
            with torch.no_grad():
                change = torch.randint(-8, 8, (4, 6), generator=draw) / 8
                mine.add_(change), theirs.add_(change)
        for link in links:
            link.after_step()
        for mine, theirs in zip(plain, other):
            expected = mine.detach().to(theirs.dtype)
            assert torch.equal(theirs.detach(), expected), step
    if not gw.method(spec).traits.outcomes_differ:
        assert not any(torch.equal(p, start) for p in plain)
        with links[1].swapped():
            held = links[1].global_parameters["w"]
            whole = other[0].detach().T if kind == "transposed" else other[0].detach()
            assert torch.equal(whole.reshape(-1).float(), held.to(other[0].dtype).float())


@pytest.mark.parametrize(("given", "alpha"), [(0.1, 0.1), (None, 0.9 / 4)])
def test_elastic_averaging_is_the_papers_update(given: float | None, alpha: float) -> None:
    """6: x_i <- x_i - alpha (x_i - x), x <- x + alpha sum_i (x_i - x), with the values of before on the right.

    By default alpha is the paper's beta of 0.9 over the workers.
    """
    ours = Quadratics(4)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], gw.EASGD(every=2, alpha=given), min_numel=0)
    centre = torch.cat(list(found.global_parameters.values())).double()
    for step in range(1, 9):
        ours.step()
        own = [ours.flat(worker).double() for worker in range(4)]
        found.after_step()
        if step % 2 == 0:
            expected = [x - alpha * (x - centre) for x in own]
            centre = centre + alpha * sum(x - centre for x in own)
            for worker, x in enumerate(expected):
                assert torch.allclose(ours.flat(worker).double(), x, rtol=0, atol=1e-6)
        held = torch.cat(list(found.global_parameters.values())).double()
        assert torch.allclose(held, centre, rtol=0, atol=2e-6)
    with pytest.raises(gw.IncompatibleError, match=r"alpha=0\.3 .* at most 0\.25"):
        Quadratics(4).train(gw.EASGD(alpha=0.3), 1)


def test_mass_with_a_decayed_residual() -> None:
    """7: residual + sent = decay times the old residual + difference, on each worker."""
    ours, n = Quadratics(3), sum(torch.Size(s).numel() for s in SIZES.values())
    inner = gw.ErrorFeedback(compressor=gw.TopK(density=0.05), decay=0.9)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], gw.LocalSGD(every=3, inner=inner), min_numel=0)

    def residuals() -> torch.Tensor:
        state = found.link.state_dict()
        rows = [state[f"rank {r}"] for r in range(3)]
        return torch.stack([torch.cat([row.get(f"residual/{x}", torch.zeros(1)) for x in SIZES]) for row in rows])

    before = torch.zeros(3, n)
    for step in range(1, 16):
        ours.step()
        held = torch.cat(list(found.global_parameters.values()))
        differences = torch.stack([held - ours.flat(worker) for worker in range(3)])
        found.after_step()
        if step % 3 == 0:
            sent = held - torch.cat(list(found.global_parameters.values()))
            after = residuals()
            total = (0.9 * before + differences).mean(0)
            assert torch.allclose(after.mean(0) + sent, total, rtol=0, atol=2e-6)
            before = after


def test_the_bias_on_unlike_data_is_the_closed_forms() -> None:
    """8: with steps x <- x - lr a (x - c), a worker is after H steps at c + q (x - c), q = (1 - lr a)^H.

    The fixed point of the average is sum (1 - q_i) c_i / sum (1 - q_i); the minimum is sum a_i c_i / sum a_i.
    """

    def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    biases = []
    for every in (1, 4, 16):
        ours = Quadratics(3, plain)
        ours.train(gw.LocalSGD(every=every), 60 * 16)
        a = torch.stack([torch.cat([t[n][1].reshape(-1) for n in SIZES]) for t in ours.targets]).double()
        c = torch.stack([torch.cat([t[n][0].reshape(-1) for n in SIZES]) for t in ours.targets]).double()
        share = 1 - (1 - 0.1 * a) ** every
        fixed = (share * c).sum(0) / share.sum(0)
        assert torch.allclose(ours.flat().double(), fixed, rtol=0, atol=1e-5)
        biases.append(float((fixed - (a * c).sum(0) / a.sum(0)).norm()))
    assert biases[0] < 1e-6 < 0.05 < biases[1] < biases[2]


def test_a_value_that_is_not_finite_takes_all_back() -> None:
    ours = Quadratics(2)
    found = ours.train(gw.DiLoCo(every=2, inner=gw.ErrorFeedback()), 4)
    held = {name: x.clone() for name, x in found.global_parameters.items()}
    before = found.link.state_dict()["rank 0"]
    ours.step()
    with torch.no_grad():
        ours.workers[1]["b"][3] = torch.nan
    found.after_step()
    found.synchronise()
    assert all(torch.equal(x, held[name]) for name, x in found.global_parameters.items())
    assert torch.equal(ours.flat(0), torch.cat(list(held.values())))
    assert torch.equal(ours.flat(1), ours.flat(0))
    after = found.link.state_dict()["rank 0"]
    assert all(torch.equal(after[key], x) for key, x in before.items())


def bins_of(values: torch.Tensor, count: int) -> torch.Tensor:
    """The values' bins by the authors' rule: six deviations about the mean in equal parts, the outer ones open."""
    deviation = values.std()
    edges = values.mean() + deviation * (6.0 / count) * (torch.arange(1, count) - count / 2 - 0.5)
    return (values[:, None] > edges).sum(1)


def test_each_parameter_has_bins_of_its_own() -> None:
    kept, counts = BinnedValues(2, 6.0), (8, 4)
    values = torch.cat([torch.arange(8.0), 100 + torch.arange(4.0)])
    out = torch.empty(kept.bytes(counts), dtype=torch.uint8)
    kept.write(values, counts, Draw(0, 0), out)
    found = kept.read(out, counts)
    for a, b in ((0, 8), (8, 12)):
        assert found[a:b].mean() == pytest.approx(float(values[a:b].mean()))
    assert found[:8].max() < 8
    assert found[8:].min() >= 100


@pytest.mark.parametrize("bits", [2, 3])
def test_sparse_loco_sends_the_means_of_bins(bits: int) -> None:
    """SparseLoCo's published behaviour: 64 of 4096, and the mean of each of a few bins of a parameter's values."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3 * 4096 + 100, generator=generator) ** 3
    method = gw.SparseLoCo(bits=bits)
    found = gw.simulate(x, method.inner)
    blocks = [*x[0].split(4096)]
    kept = torch.cat([b.abs() >= b.abs().topk(max(1, len(b) // 64)).values[-1] for b in blocks])
    assert torch.equal(found.mean != 0, kept)
    values = x[0][kept].double()
    bins = bins_of(values, 2**bits)
    means = torch.stack([values[bins == b].mean() for b in range(2**bits)])
    assert torch.allclose(found.mean[kept].double(), means[bins], rtol=1e-6)
    # A head of 16 bytes and one of the payload, the means, and of each value its bin and some 7.4 bits of its place.
    assert found.traffic.sent_bytes == 0
    sent = gw.simulate(x.expand(2, -1).clone(), method.inner).traffic.sent_bytes
    assert sent < 16 * 6 + 4 * 2**bits + len(values) * (bits + 8.2) / 8


def test_sparse_loco_keeps_a_decayed_residual_and_steps_by_the_mean() -> None:
    """m <- decay m + delta; m <- m - sent; x <- x - outer_lr mean(sent); and a residual that does not grow."""
    ours, method = Quadratics(2, sizes=LARGE), gw.SparseLoCo(every=2, density=0.02, block_size=512, outer_lr=0.5)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], method, min_numel=0)
    residual = torch.zeros(2, ours.flat().numel(), dtype=torch.float64)
    for step in range(1, 13):
        ours.step()
        held = torch.cat(list(found.global_parameters.values())).double()
        total = 0.95 * residual + torch.stack([held - ours.flat(worker).double() for worker in range(2)])
        found.after_step()
        if step % 2 == 0:
            state = found.link.state_dict()
            residual = torch.stack([
                torch.cat([state[f"rank {r}"][f"residual/{name}"] for name in LARGE]).double() for r in range(2)
            ])  # fmt: skip
            moved = held - torch.cat(list(found.global_parameters.values())).double()
            assert torch.allclose(moved, 0.5 * (total - residual).mean(0), rtol=0, atol=2e-6)
            assert bool((residual.norm(dim=1) <= total.norm(dim=1) * (1 + 1e-6)).all())
    for bad in ({"bits": 1}, {"decay": 1.5}, {"density": 0.0}, {"outer_lr": 0.0}, {"block_size": 0}):
        with pytest.raises(gw.HyperparameterError):
            gw.SparseLoCo(**bad)
    with pytest.raises(gw.HyperparameterError, match="of a residual that is kept whole"):
        gw.SparseLoCo(decay=1.0)


@pytest.mark.parametrize("values", [[5.0], [3.0, 3.0, 3.0], [1.0, -1.0], [1e-40, -2e-40], [2.0, 0.0, -2.0, 9.0, -9.0]])
def test_values_without_deviation_are_their_mean(values: list[float]) -> None:
    x = torch.tensor([values])
    found = gw.simulate(x, gw.SparseLoCo(density=1.0).inner).mean
    bins = bins_of(x[0].double(), 4) if len(set(values)) > 1 else torch.zeros(len(values), dtype=torch.int64)
    expected = torch.stack([x[0][bins == b].double().mean() for b in bins])
    # The smallest float32 numbers are multiples of 1.4e-45.
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1.5e-45)


def test_sparse_local_steps_reach_the_minimum_with_few_bytes() -> None:
    """SparseLoCo: chunks of 64 neighbours with the largest in levels, decayed error feedback, averages."""
    kept = gw.TopK(density=0.1, block_size=64, values=gw.QSGDinf(levels=3, block_size=16))
    inner = gw.ErrorFeedback(compressor=kept, decay=0.95)
    # What is sent late comes with the differences of the rounds in between: steps must be short against that delay.
    ours = Quadratics(2, lambda parameters: torch.optim.SGD(parameters, lr=0.002), alike=True)
    found = ours.train(gw.LocalSGD(every=10, inner=inner), 6000)
    target = torch.cat([ours.targets[0][name][0].reshape(-1) for name in SIZES])
    assert float((ours.flat() - target).norm() / target.norm()) < 0.02
    # Of each ten steps a payload of eleven values and their places, with headers of as many bytes again.
    assert found.link.traffic().sent_bytes < 6000 * 4 * len(target) / 20


def test_fields_and_uses_that_make_no_sense_are_refused() -> None:
    for spec, told in (
        ("LocalSGD(every=0)", "every is at least 1"),
        ("LocalSGD(inner=SignSGD())", "whose outcome is a mean"),
        ("LocalSGD(inner=DiLoCo())", "whose outcome is a mean"),
        ("DiLoCo(outer_lr=0.0)", "outer_lr is above 0"),
        ("DiLoCo(outer_momentum=1.0)", "outer_momentum is a number from 0 to below 1"),
        ("EASGD(alpha=1.0)", "alpha is above 0 and below 1"),
        ("ErrorFeedback(decay=0.0)", "decay is above 0"),
        ("SparseLoCo(decay=1.0)", "decay is above 0 and below 1"),
        ("SparseLoCo(bits=1)", "bits is a number from 2 to 8"),
        ("StreamingDiLoCo(every=3)", "fragments is a number from 1 to every=3"),
        ("StreamingDiLoCo(every=30, delay=8)", "delay is a number of steps from 0 to every // fragments = 7"),
        ("StreamingDiLoCo(mixing=1.0)", "mixing is at least 0 and below 1"),
        ("StreamingDiLoCo(order='random')", "order is one of strided, sequential"),
        ("StreamingDiLoCo(inner=GTopK())", "compares elements of the whole model"),
    ):
        with pytest.raises(gw.HyperparameterError, match=told):
            gw.method(spec)
    with pytest.raises(gw.IncompatibleError, match="exchanges gradients at every step"):
        Quadratics(2).train("terngrad", 1)
    ours = Quadratics(2)
    with torch.no_grad():
        ours.workers[1]["a"].add_(1)
    with pytest.raises(gw.IncompatibleError, match="worker 1 begins with other parameters"):
        ours.train(gw.LocalSGD(), 1)


@pytest.mark.parametrize("method", ["LocalSGD()", "ChocoSGD()"])
def test_workers_whose_elements_lie_in_another_order_are_refused(method: str) -> None:
    """Values are exchanged in memory order: others would be averaged than those of the same place in the shape."""
    weight = torch.zeros(2, 3, 2, 2)
    for other in (
        [("w", weight.to(memory_format=torch.channels_last))],
        [("w", weight.double())],
        [("w", weight[:1])],
        [("w", weight), ("more", torch.zeros(1))],
    ):
        workers = [[(n, p.clone().requires_grad_()) for n, p in pairs] for pairs in ([("w", weight)], other)]
        with pytest.raises(gw.IncompatibleError, match="worker 1's parameters have other names, shapes, strides"):
            gw.SimulatedLocalSteps(workers, method)


@pytest.mark.parametrize("method", ["LocalSGD(every=2)", "StreamingDiLoCo(every=8, delay=1)", "dpsgd"])
def test_a_warm_up_exchanges_gradients_and_is_refused(method: str) -> None:
    workers = Quadratics(2, alike=True).workers
    with pytest.raises(gw.IncompatibleError, match="use warmup_steps=0, or real workers"):
        gw.SimulatedLocalSteps([worker.items() for worker in workers], method, warmup_steps=1)


@pytest.mark.parametrize(
    "inner",
    [
        "EF21(compressor=ScaledSign(block_size=64))",
        "DGC(density=1.0)",
        "ErrorFeedback(QSGDinf(block_size=256), momentum=0.9)",
        "ErrorFeedback(QSGDinf(block_size=256))",
    ],
)
def test_warm_up_leaves_nothing_that_differences_would_be_sent_with(inner: str) -> None:
    """Gradients are a thousand times as large: estimates and momenta of them would outweigh all differences."""
    found = []
    for warmup_steps in (0, 3):
        method = f"LocalSGD(inner={inner})"
        link = gw.SimulatedLink([("w", torch.empty(256))], method, 2, min_numel=0, warmup_steps=warmup_steps)
        for _ in range(warmup_steps):
            assert torch.equal(link.reduce_(torch.ones(2, 256)), torch.ones(256))
        assert not any("/" in name for part in link.state_dict().values() for name in part)
        found.append(link.reduce_(torch.full((2, 256), 1e-3)))
    assert torch.equal(*found)


@pytest.mark.parametrize("spec", ["LocalSGD(every=2)", "DiLoCo(every=2)", "EASGD(every=2)", "SparseLoCo(every=2)"])
def test_synchronise_does_nothing_where_no_step_has_followed(spec: str) -> None:
    """Otherwise an outer momentum, or an elastic one, would go on without a step of any worker."""
    ours = Quadratics(2)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], spec, min_numel=0)
    for steps in (2, 3):
        for _ in range(steps):
            ours.step()
            found.after_step()
        found.synchronise()
        before, round = ours.flat(0).clone(), found.link.round
        held = {name: x.clone() for name, x in found.global_parameters.items()}
        found.synchronise()
        assert found.link.round == round == steps - 1 + (steps == 3)
        assert torch.equal(ours.flat(0), before)
        assert all(torch.equal(found.global_parameters[name], x) for name, x in held.items())


def test_synchronise_after_a_stream_exchanges_what_followed_each_fragment() -> None:
    ours = Quadratics(2, sizes=LARGE)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], "StreamingDiLoCo(every=4, fragments=2, delay=1)")
    for _ in range(4):
        ours.step()
        found.after_step()
    rounds = found.link.round
    for more in (1, 0):
        found.synchronise()
        assert found.link.round == (rounds := rounds + more)
        assert torch.equal(ours.flat(0), ours.flat(1))


@pytest.mark.parametrize("spec", ["LocalSGD(every=2)", "DiLoCo(every=2)", "EASGD(every=2)"])
def test_synchronise_exchanges_what_changed_after_the_step_of_an_exchange(spec: str) -> None:
    """A second optimizer steps then, weights are clipped, or those of another model are loaded."""
    ours = Quadratics(2)
    found = gw.SimulatedLocalSteps([w.items() for w in ours.workers], spec, min_numel=0)
    for _ in range(2):
        ours.step()
        found.after_step()
    with torch.no_grad():
        ours.workers[1]["b"].add_(1.0)
    for _ in range(2):
        found.synchronise()
        assert found.link.round == 2
    assert spec.startswith("EASGD") or torch.equal(ours.flat(0), ours.flat(1))


@pytest.mark.parametrize(("spec", "fewer"), [("LocalSGD(every={})", 4), ("EASGD(every={})", 8)])
def test_synchronise_exchanges_the_steps_of_a_state_of_more_local_steps(spec: str, fewer: int) -> None:
    ours = Quadratics(2)
    before = gw.SimulatedLocalSteps([w.items() for w in ours.workers], spec.format(32), min_numel=0)
    after = gw.SimulatedLocalSteps([w.items() for w in ours.workers], spec.format(fewer), min_numel=0)
    for _ in range(8):
        ours.step()
        before.after_step()
    after.load_state_dict(before.state_dict())
    for _ in range(2):
        after.synchronise()
        assert after.link.round == 1
    assert spec.startswith("EASGD") or torch.equal(ours.flat(0), ours.flat(1))


STREAM = "StreamingDiLoCo(every=4, fragments=2, delay={})"


@pytest.mark.parametrize("spec", [STREAM.format(0), STREAM.format(1), "EASGD(every=4)"])
def test_a_training_that_was_saved_after_synchronise_goes_on_from_there(spec: str) -> None:
    ours = Quadratics(2, sizes=LARGE)
    found, again = (gw.SimulatedLocalSteps([w.items() for w in ours.workers], spec) for _ in range(2))
    for _ in range(5):
        ours.step()
        found.after_step()
    found.synchronise()
    before = ours.flat(0).clone()
    again.load_state_dict(found.state_dict())
    again.synchronise()
    assert again.link.round == found.link.round
    assert torch.equal(ours.flat(0), before)


@pytest.mark.parametrize("spec", ["LocalSGD(every={})", "DPSGD(every={})"])
def test_a_state_of_more_local_steps_is_followed(spec: str) -> None:
    """Six steps of eight are two of four: the next exchange comes after two more."""
    ours = Quadratics(2, alike=True)
    before, after = (
        gw.SimulatedLocalSteps([w.items() for w in ours.workers], spec.format(n), min_numel=0) for n in (8, 4)
    )
    for _ in range(6):
        before.after_step()
    after.load_state_dict(before.state_dict())
    rounds = []
    for _ in range(6):
        after.after_step()
        rounds.append(after.link.round)
    assert rounds == [0, 1, 1, 1, 1, 2]


def test_an_exchange_in_flight_for_longer_than_the_delay_is_refused() -> None:
    ours = Quadratics(2, sizes=LARGE, alike=True)
    before, after = (
        gw.SimulatedLocalSteps([w.items() for w in ours.workers], f"StreamingDiLoCo(every=8, fragments=2, delay={n})")
        for n in (4, 1)
    )
    for _ in range(5):
        before.after_step()
    with pytest.raises(gw.IncompatibleError, match=r"takes effect after 3 steps more, and with .* after 1 at most"):
        after.load_state_dict(before.state_dict())


def test_an_exchange_in_flight_that_the_next_one_would_overtake_is_refused() -> None:
    """After step 4 of 8 an exchange takes effect three steps later; with six steps the next begins after step 6."""
    ours = Quadratics(2, sizes=LARGE, alike=True)
    before, after, later = (
        gw.SimulatedLocalSteps([w.items() for w in ours.workers], f"StreamingDiLoCo(every={n}, fragments=2, delay=3)")
        for n in (8, 6, 10)
    )
    for _ in range(5):
        before.after_step()
    with pytest.raises(gw.IncompatibleError, match=r"after 2 steps more, and with .* the next one begins before"):
        after.load_state_dict(before.state_dict())
    later.load_state_dict(before.state_dict())
    before.after_step()
    # Where it ends as the next one begins, both have their place.
    after.load_state_dict(before.state_dict())
    later.after_step()


def test_the_plan_of_each_fragment_is_made_once() -> None:
    found = Quadratics(2, sizes=LARGE).train("StreamingDiLoCo(every=4, fragments=4, delay=1, inner=QSGDinf())", 13)
    assert found.link.round == 13
    assert sum(found.link.record()["collectives"].values()) == 4
    found.synchronise()
    # An exchange of all of them has a plan of its own.
    assert sum(found.link.record()["collectives"].values()) == 5
