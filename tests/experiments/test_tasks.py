"""Tasks: names, settings, data, models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.errors import DataError, UsageError
from gradwire.tools.experiments.simulate import SimulatedEngine
from gradwire.tools.experiments.tasks import ALL, build
from gradwire.tools.experiments.tasks.cifar10 import Cifar10, ConvNet, ResponseNorm
from gradwire.tools.experiments.tasks.graph import GraphTask
from gradwire.tools.experiments.tasks.images import Images, crop_and_flip
from gradwire.tools.experiments.tasks.logreg import Logreg
from gradwire.tools.experiments.tasks.text import LENGTH, standard_library


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'digits"):
        build("digts")
    with pytest.raises(UsageError, match="did you mean 'batch"):
        build("digits", bach=3)
    with pytest.raises(UsageError, match="did you mean 'adam"):
        build("digits", optimizer="adams")


def test_a_setting_of_another_task_is_refused_only_where_it_is_set() -> None:
    assert build("digits", l1=None) == build("digits")
    with pytest.raises(UsageError, match="unknown setting 'l1' of the task digits"):
        build("digits", l1=0.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"batch": -1},
        {"lr": 0.0},
        {"lr": math.nan},
        {"ema": 1.0},
        {"momentum": 1.0},
        {"schedule": "x"},
        {"weight_decay": -1e-3},
        {"weight_decay": math.inf},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        build("digits", **settings)


@pytest.mark.parametrize("name", ["digits", "graph"])
def test_data_for_a_task_that_brings_its_own_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"task {name} brings its own data: leave --data here out"):
        build(name, data="here")


def test_plans_that_cannot_run_are_refused() -> None:
    with pytest.raises(UsageError, match="use at least 2 workers"):
        RunConfig(task=build("digits"), workers=1)
    with pytest.raises(UsageError, match="--batch 66"):
        RunConfig(task=build("digits"), workers=6)
    RunConfig(task=build("digits"), workers=1, simulate=True)
    for method in ("LocalSGD(every=4)", "dpsgd"):
        local = RunConfig(task=build("digits"), method=method, warmup_steps=3)
        with pytest.raises(UsageError, match="leave --simulate or --warmup-steps out"):
            replace(local, simulate=True)
    RunConfig(task=build("digits"), method="terngrad", warmup_steps=3, simulate=True)


def test_a_plan_survives_json() -> None:
    plan = RunConfig(task=build("text", steps=7, lr=0.1), method="bf16", workers=2, exclude=("a.*",), seed=5)
    assert RunConfig.from_json(plan.to_json()) == plan


def test_schedules() -> None:
    poly = build("digits", schedule="polynomial", steps=100, lr=0.01)
    assert poly.learning_rate(0) == 0.01
    assert poly.learning_rate(75) == pytest.approx(0.005)
    cosine = build("digits", schedule="cosine", steps=100, lr=0.2)
    assert cosine.learning_rate(50) == pytest.approx(0.1)


def test_every_model_matches_its_loss_and_weights_are_as_published(small_libsvm: Path) -> None:
    samples = {
        "digits": torch.zeros(2, 1, 8, 8),
        "text": torch.zeros(2, 5, dtype=torch.int64),
        "mnist": torch.zeros(2, 1, 28, 28),
        "cifar10": torch.zeros(2, 3, 32, 32),
        "logreg": torch.zeros(2, 12),
    }
    for kind in ALL:
        if kind is GraphTask:
            continue  # its networks take a part of a graph beside the samples: test_graph.py
        task = kind(data=str(small_libsvm) if kind is Logreg else None)
        output = task.build_model()(samples[task.name])
        target = torch.zeros(output.shape[:-1], dtype=torch.int64)
        assert math.isfinite(task.loss(output, target).item())
    lenet = build("mnist").build_model()
    assert sum(p.numel() for p in lenet.parameters()) == 431_080
    assert float(lenet[5].weight.detach().abs().max()) <= math.sqrt(3 / 800)


def test_digits_split_is_fixed_and_disjoint() -> None:
    source = build("digits").load()
    assert isinstance(source, Images)
    assert source.samples + len(source.eval_labels) == 1797
    again = build("digits").load()
    assert isinstance(again, Images)
    assert torch.equal(source.inputs, again.inputs)
    assert set(source.eval_labels.tolist()) == set(range(10))


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_shares_are_disjoint_and_complete(world_size: int) -> None:
    for task in (build("digits"), build("text")):
        source = task.load()
        whole = [target.numel() for _, target in source.evaluation(0, 1)]
        parts = [t.numel() for rank in range(world_size) for _, t in source.evaluation(rank, world_size)]
        assert sum(parts) == sum(whole)
        assert sorted(parts) == sorted(whole)


def test_default_text_is_the_same_each_time_and_predicts_the_next_byte() -> None:
    data = standard_library()
    assert data == standard_library()
    assert 1_000_000 < len(data) <= 2_000_000
    inputs, targets = build("text").load().batch(torch.tensor([5, 9]), slice(1, 2), seed=0, step=0)
    assert bytes(inputs[0].tolist()) == data[9 : 9 + LENGTH]
    assert bytes(targets[0].tolist()) == data[10 : 10 + LENGTH]


def test_the_text_has_two_models_and_the_transformer_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    model = build("text", model="transformer").build_model()
    text = torch.randint(0, 256, (2, LENGTH))
    later = text.clone()
    later[:, 40:] = 7
    before, after = model(text), model(later)
    assert before.shape == (2, LENGTH, 256)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])
    assert type(build("text").build_model()).__name__ == "Gru"
    with pytest.raises(UsageError, match="unknown model 'transfomer' of the task text; did you mean 'transformer"):
        build("text", model="transfomer")


def test_text_files_are_joined_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b" * 700)
    (tmp_path / "a.txt").write_text("a" * 700)
    inputs, _ = build("text", data=str(tmp_path)).load().batch(torch.tensor([0]), slice(0, 1), seed=0, step=0)
    assert bytes(inputs[0].tolist()) == b"a" * LENGTH
    (tmp_path / "b.txt").unlink()
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="found 5"):
        build("text", data=str(tmp_path)).load()


def test_crops_and_flips_are_those_of_the_definition() -> None:
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4)
    top, left, flip = torch.tensor([0, 3]), torch.tensor([2, 1]), torch.tensor([0, 1])
    found = crop_and_flip(images, 2, top, left, flip, (4, 4))
    for i in range(2):
        frame = torch.zeros(3, 8, 8)
        frame[:, 2:6, 2:6] = images[i]
        crop = frame[:, top[i] : top[i] + 4, left[i] : left[i] + 4]
        assert torch.equal(found[i], crop.flip(2) if flip[i] else crop)


def test_augmentation_does_not_depend_on_the_number_of_workers() -> None:
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    labels = torch.zeros(12, dtype=torch.int64)
    scale = torch.ones(3)
    source = Images(images, labels, images, labels, scale=scale, shift=scale, pad=2)
    indices = torch.randperm(12)
    whole, _ = source.batch(indices, slice(0, 12), seed=1, step=4)
    parts = [source.batch(indices, slice(i, i + 3), seed=1, step=4)[0] for i in range(0, 12, 3)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, source.batch(indices, slice(0, 12), seed=1, step=5)[0])


def test_cifar10_says_what_it_is_evaluated_on() -> None:
    assert "data_batch_5" in Cifar10.evaluated_on


@pytest.mark.parametrize("settings", [{"model": "convnett"}, {"crop": 22}, {"crop": 4}, {"crop": 36}, {"crop": -8}])
def test_cifar10_refuses_models_and_crops_that_it_has_not(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        build("cifar10", **settings)


@pytest.mark.parametrize("crop", [0, 8, 24])
@pytest.mark.parametrize("model", ["resnet8", "convnet"])
def test_cifar10s_models_take_what_the_crop_leaves(model: str, crop: int) -> None:
    size = crop or 32
    network = build("cifar10", model=model, crop=crop).build_model()
    assert network(torch.zeros(2, 3, size, size)).shape == (2, 10)


def test_the_convnet_is_the_tutorials() -> None:
    """Shapes, filling, padding at the end, and weight decay on the two hidden linear layers alone."""
    torch.manual_seed(0)
    task = build("cifar10", model="convnet", crop=24)
    model = task.build_model()
    assert isinstance(model, ConvNet)
    shapes = [tuple(p.shape) for p in model.parameters() if p.dim() > 1]
    assert shapes == [(64, 3, 5, 5), (64, 64, 5, 5), (384, 2304), (192, 384), (10, 192)]
    weights = [p.detach() for p in model.parameters() if p.dim() > 1]
    for weight, std in zip(weights, (0.05, 0.05, 0.04, 0.04, 1 / 192)):
        assert float(weight.abs().max()) <= 2 * std
        # A normal distribution cut at two deviations keeps 0.88 of its deviation. Of 1920 draws or more, the
        # deviation's standard error is below 2 %.
        assert float(weight.std()) == pytest.approx(0.88 * std, rel=0.1)
    biases = [float(p.detach().unique()) for p in model.parameters() if p.dim() == 1]
    assert biases == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.0])
    assert [id(p) for p in task.decayed(model)] == [id(model[9].weight), id(model[11].weight)]
    # The first pooled row holds rows 0 to 2 of its input, the last one rows 22 and 23.
    ramp = torch.arange(24.0).expand(1, 1, 24, 24)
    assert model[2](ramp)[0, 0, 0].tolist() == [2.0 * i + 2 for i in range(11)] + [23.0]


def test_response_norm_is_torchs() -> None:
    x = torch.randn(2, 64, 3, 3, generator=torch.Generator().manual_seed(0)) * 20
    expected = torch.nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)(x)
    # Nine roundings in the sum, of which the power takes three quarters, and those of both powers and products.
    torch.testing.assert_close(ResponseNorm(64)(x), expected, rtol=2e-6, atol=0)


def test_weight_decay_of_the_convnet_acts_on_hidden_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(4, dtype=torch.int64)
    scale = torch.ones(3)
    source = Images(pixels, labels, pixels, labels, scale=scale, shift=scale, crop=8)
    monkeypatch.setattr(Cifar10, "load", lambda self: source)
    gradients = []
    for decay in (0.5, 0.0):
        task = build("cifar10", model="convnet", crop=8, batch=4, weight_decay=decay)
        engine = SimulatedEngine(RunConfig(task=task, method="fp32", workers=2, simulate=True))
        engine.backward(0)
        gradients.append([p.grad for p in engine.model.parameters()])
        weights = list(engine.model.parameters())
    for i, (weight, with_decay, without) in enumerate(zip(weights, *gradients)):
        # One rounding of each worker's sum and of the mean.
        torch.testing.assert_close(with_decay, without + (0.5 * weight if i in (4, 6) else 0.0), rtol=1e-6, atol=1e-7)


def test_crops_are_random_in_training_and_central_in_evaluation() -> None:
    """Image i holds its row, its column and i, so that a crop says where it was cut."""
    place = torch.arange(16, dtype=torch.uint8)
    images = torch.stack([place[:, None].expand(16, 16), place[None].expand(16, 16)]).expand(64, 2, 16, 16).contiguous()
    labels = torch.zeros(64, dtype=torch.int64)
    one, zero = torch.ones(2), torch.zeros(2)
    source = Images(images, labels, images, labels, scale=one, shift=zero, crop=10)
    found, _ = source.batch(torch.arange(64), slice(0, 64), seed=0, step=0)
    assert found.shape == (64, 2, 10, 10)
    flipped = found[:, 1, 0, 0] > found[:, 1, 0, -1]
    left = torch.where(flipped, found[:, 1, 0, -1], found[:, 1, 0, 0])
    # Each of seven places and either side is missed by 64 images with a chance below 7 (6/7)^64 < 4e-4; the seed is
    # fixed.
    assert set(found[:, 0, 0, 0].tolist()) == set(left.tolist()) == set(range(7))
    assert 0 < int(flipped.sum()) < 64
    assert bool((found[:, 0] == found[:, 0, :1, :1] + torch.arange(10.0)[:, None]).all())
    (central, _), *_ = source.evaluation(0, 1)
    assert torch.equal(central[0, 0], torch.arange(3.0, 13.0)[:, None].expand(10, 10))
    assert torch.equal(central[0, 1], torch.arange(3.0, 13.0).expand(10, 10))
