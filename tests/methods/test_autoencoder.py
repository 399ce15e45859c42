"""LGC's autoencoder, by number of the property in docs/properties.md."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from gradwire.exchange.protocols import Context, Memory
from gradwire.methods.learned.autoencoder import (
    INPUT_BITS,
    REMEMBERED,
    WEIGHT_BITS,
    Autoencoder,
    ElementScales,
    Training,
    _integers,
    latent_length,
)

PLAIN, GUIDED = Autoencoder(), Autoencoder(innovation=True)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def training(autoencoder: Autoencoder = PLAIN, **fields: object) -> Training:
    options = {"optimizer": "adam", "learning_rate": 1e-3, "similarity": 0.5, "mean": autoencoder is PLAIN}
    return Training(autoencoder, **(options | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 30, 31, 32, 33, 46, 47, 63, 64, 100, 1000, 1023, 1024])
def test_a_code_has_a_quarter_of_the_numbers_and_decodes_to_as_many(length: int) -> None:
    """1: lengths follow L -> floor((L - 3) / 2) + 1, four times, of 31 or more."""
    expected = max(length, 31)
    for _ in range(4):
        expected = (expected - 3) // 2 + 1
    for autoencoder, innovation in ((PLAIN, None), (GUIDED, torch.zeros(length))):
        weights = autoencoder.initial(0)
        code = autoencoder.encode(weights, gaussian(length))
        assert code.shape == (4 * expected,) == (latent_length(length),)
        assert autoencoder.decode(weights, code, length, innovation).shape == (length,)


def test_weights_are_those_of_the_layers() -> None:
    """1: an encoder of 172 996, a decoder of 43 682 with an innovation beside, one less without, all of the seed."""
    assert (PLAIN.encoder_numel, PLAIN.numel, GUIDED.numel) == (172_996, 172_996 + 43_681, 172_996 + 43_682)
    weights = PLAIN.initial(3)
    assert len(weights) == PLAIN.numel
    assert torch.equal(weights, PLAIN.initial(3))
    assert not torch.equal(weights, PLAIN.initial(4))
    for weight, bias in PLAIN.layers(weights):
        bound = 1 / math.sqrt(weight[0].numel() if weight.shape[0] == len(bias) else weight.shape[1] * weight.shape[2])
        assert float(weight.abs().max()) <= bound
        assert float(weight.abs().max()) > 0.5 * bound


def test_exact_arithmetic_is_the_convolutions() -> None:
    """2: against float64 convolutions, within what rounding to 2^-22 and 2^-20 of the largest may make of five layers.

    A sum of n <= 768 products errs by at most n (2^-22 + 2^-20) of the largest product, and by the root of n of that
    for errors of either sign; layers keep the size of their input about.
    """
    weights, x = GUIDED.initial(1), gaussian(500)
    code = GUIDED.encode(weights, x)
    wanted = GUIDED.codes(weights.double(), x.double()[None]).reshape(-1)
    scale = float(wanted.abs().max())
    assert float((code - wanted).abs().max()) < 5 * math.sqrt(768) * 2.0**-19 * scale
    innovation = gaussian(500, seed=2)
    found = GUIDED.decode(weights, code, 500, innovation)
    wanted = GUIDED.reconstruct(weights.double(), code.double().view(1, 4, -1), 500, innovation.double()[None])[0]
    assert float((found - wanted).abs().max()) < 5 * math.sqrt(768) * 2.0**-19 * float(wanted.abs().max())


def test_no_order_of_addition_changes_a_bit() -> None:
    """2: products of inputs and weights are integers whose sums are exact, in float64 as in Python's integers."""
    inputs, _ = _integers(gaussian(768).double(), INPUT_BITS)
    weights, _ = _integers(gaussian(64, 768, seed=1).double(), WEIGHT_BITS)
    exact = torch.tensor([sum(int(a) * int(b) for a, b in zip(row, inputs)) for row in weights[:4]])
    for order in (torch.arange(768), torch.arange(767, -1, -1), torch.randperm(768)):
        assert torch.equal((weights[:4, order] @ inputs[order]).long(), exact)
    largest = 768 * 2**INPUT_BITS * 2**WEIGHT_BITS
    assert largest <= 2**53
    assert float(_integers(torch.tensor([1.0 - 2**-53], dtype=torch.float64), INPUT_BITS)[0]) == 2**INPUT_BITS


def test_bits_do_not_depend_on_threads() -> None:
    """2."""
    weights, x, before = PLAIN.initial(0), gaussian(4000), torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        code = PLAIN.encode(weights, x)
        found.append(torch.cat([code, PLAIN.decode(weights, code, 4000)]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_equal_vectors_have_equal_codes_and_any_of_them_stands_for_all() -> None:
    """3: then the part of the loss that makes codes alike is zero."""
    weights, vectors = GUIDED.initial(0), gaussian(200).expand(4, 200)
    codes = GUIDED.codes(weights, vectors)
    # A batch may be added up in another order than a vector alone.
    assert torch.allclose(codes, codes[:1].expand_as(codes), rtol=1e-4, atol=1e-6)
    innovation = torch.zeros_like(vectors)
    apart = [float(training(GUIDED, similarity=s).loss(weights, vectors, innovation, 0)) for s in (0.0, 0.5)]
    assert apart[1] == pytest.approx(apart[0] / 2, rel=1e-5)
    losses = [float(training(GUIDED).loss(weights, vectors, innovation, common)) for common in range(4)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    unlike = gaussian(4, 200)
    more = [float(training(GUIDED, similarity=s).loss(weights, unlike, innovation, 0)) for s in (0.0, 0.5)]
    assert more[1] > 1.0001 * more[0] / 2


@pytest.mark.parametrize("autoencoder", [PLAIN, GUIDED], ids=["mean", "common"])
def test_it_learns_vectors_that_stay_as_they_are(autoencoder: Autoencoder) -> None:
    """4: of smooth vectors less than a tenth of the loss is left after 150 steps; it falls from fifty to fifty."""
    vectors = torch.sort(gaussian(4, 96), descending=True).values
    innovation = torch.zeros_like(vectors) if autoencoder is GUIDED else None
    memory, losses = Memory(), []
    for round in range(150):
        losses.append(training(autoencoder).step(Context(0, 4, round, memory=memory), 0, vectors, innovation))
        memory.commit()
    thirds = [sum(losses[i : i + 50]) for i in (0, 50, 100)]
    assert thirds[0] > thirds[1] > thirds[2]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_step_is_torchs(optimizer: str) -> None:
    """4: three steps against torch.optim, whose fused products may differ in the last bits."""
    vectors = gaussian(2, 64)
    weights = torch.nn.Parameter(PLAIN.initial(0))
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    theirs, memory = kind([weights], lr=1e-2), Memory()
    method = training(optimizer=optimizer, learning_rate=1e-2)
    for round in range(3):
        theirs.zero_grad()
        method.loss(weights, vectors, None, 0).backward()
        theirs.step()
        method.step(Context(0, 2, round, memory=memory), 0, vectors)
        memory.commit()
    held = memory.value("autoencoder")
    assert held is not None
    # Adam divides small gradients by their own size, so that their last bits count as much as the first.
    assert float((held - weights.detach()).abs().mean()) < 1e-6
    assert set(memory.state()["global"]) <= set(REMEMBERED)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    memory = Memory()
    training(learning_rate=1e30, optimizer="sgd").step(Context(0, 2, 0, memory=memory), 0, 1e30 * gaussian(2, 64))
    memory.commit()
    assert memory.state()["global"] == {}


def test_scales_are_root_mean_squares_and_infinite_where_a_value_is_not_finite() -> None:
    """5: also of magnitudes whose squares float32 does not hold."""
    scales = ElementScales([3, 2, 2])
    values = torch.tensor([1.0, 2.0, 2.0, 3e38, -3e38, 0.0, 0.0])
    found = scales.of(values)
    assert found.tolist() == pytest.approx([math.sqrt(3), 3e38, 0.0])
    assert scales.normal(values, found).tolist() == pytest.approx(
        [1 / math.sqrt(3), *[2 / math.sqrt(3)] * 2, 1, -1, 0, 0]
    )
    values[1] = math.nan
    spoilt = scales.of(values)
    assert spoilt[0] == math.inf
    assert scales.normal(values, spoilt)[:3].tolist() == [0.0] * 3


def test_the_convolutions_of_training_are_torchs_own_layers() -> None:
    """1: the layers as modules, with the same weights."""
    (w, b), *_ = PLAIN.layers(PLAIN.initial(0))
    module = torch.nn.Conv1d(1, 64, 3, stride=2)
    module.weight.data, module.bias.data = w, b  # type: ignore[union-attr]
    x = gaussian(1, 1, 100)
    assert torch.equal(module(x), functional.conv1d(x, w, b, stride=2))
