"""Tasks: names, settings, data, models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gradwire.experiments.config import RunConfig
from gradwire.experiments.errors import DataError, UsageError
from gradwire.experiments.tasks import ALL, build
from gradwire.experiments.tasks.cifar10 import Cifar10
from gradwire.experiments.tasks.images import Images, crop_and_flip
from gradwire.experiments.tasks.logreg import Logreg
from gradwire.experiments.tasks.text import LENGTH, standard_library


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="did you mean digits"):
        build("digts")
    with pytest.raises(UsageError, match="did you mean batch"):
        build("digits", bach=3)
    with pytest.raises(UsageError, match="did you mean adam"):
        build("digits", optimizer="adams")


def test_a_setting_of_another_task_is_refused_only_where_it_is_set() -> None:
    assert build("digits", l1=None) == build("digits")
    with pytest.raises(UsageError, match="digits has no setting 'l1'"):
        build("digits", l1=0.0)


@pytest.mark.parametrize(
    "settings",
    [{"steps": 0}, {"batch": -1}, {"lr": 0.0}, {"lr": math.nan}, {"ema": 1.0}, {"momentum": 1.0}, {"schedule": "x"}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        build("digits", **settings)


def test_plans_that_cannot_run_are_refused() -> None:
    with pytest.raises(UsageError, match="use at least 2 workers"):
        RunConfig(task=build("digits"), workers=1)
    with pytest.raises(UsageError, match="--batch 66"):
        RunConfig(task=build("digits"), workers=6)
    RunConfig(task=build("digits"), workers=1, simulate=True)


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
    with pytest.raises(UsageError, match="unknown model 'transfomer' of the task text: did you mean transformer"):
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
    found = crop_and_flip(images, 2, top, left, flip)
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
