"""The whole of TernGrad's CIFAR-10 experiment: its exchange, its step and its images, on a processor."""

from __future__ import annotations

import pytest
import torch

from benchmarks.claims import terngrad_whole
from benchmarks.claims.terngrad_whole import AVERAGE, CROP, DECAY, Batches, Steps, Training, side_by_side, table
from gradwire.tools.experiments.tasks.cifar10 import DEVIATION, MEAN
from gradwire.tools.experiments.tasks.images import Images

pytestmark = pytest.mark.repository

CPU = torch.device("cpu")


def images(number: int = 40) -> Images:
    """Images whose pixels tell their number, row and column."""
    draw = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (number, 3, 32, 32), generator=draw, dtype=torch.uint8)
    pixels[:, 0] = torch.arange(number, dtype=torch.uint8)[:, None, None]
    pixels[:, 1] = torch.arange(32, dtype=torch.uint8)[:, None]
    pixels[:, 2] = torch.arange(32, dtype=torch.uint8)
    labels = torch.arange(number) % 10
    return Images(pixels, labels, pixels[:10], labels[:10], 1.0 / (255.0 * DEVIATION), MEAN / DEVIATION, crop=CROP)


def batches(batch: int = 8) -> Batches:
    made = Batches(images(), batch, CPU)
    torch.manual_seed(0)
    made.begin_epoch()
    return made


def test_an_epoch_has_each_image_once_in_crops_that_are_flipped_or_not() -> None:
    data, seen, corners = batches(), [], set()
    for _ in range(data.steps):
        data.draw()
        pixels = ((data.images + (MEAN / DEVIATION)[:, None, None]) * 255 * DEVIATION[:, None, None]).round().int()
        number, rows, columns = pixels.unbind(1)
        seen += number[:, 0, 0].tolist()
        assert torch.equal(data.targets, number[:, 0, 0].long() % 10)
        assert (rows.diff(dim=1) == 1).all()
        step = columns.diff(dim=2)
        assert (step == step[:, :1, :1]).all()
        assert step.abs().unique().tolist() == [1]
        corners |= {(int(r[0, 0]), int(c.min()), int(s[0, 0])) for r, c, s in zip(rows, columns, step)}
    assert sorted(seen) == list(range(40))
    assert {corner[2] for corner in corners} == {-1, 1}
    assert len({corner[0] for corner in corners}) > 5
    assert max(corner[1] for corner in corners) <= 32 - CROP


@pytest.mark.parametrize("workers", [2, 4])
def test_the_exchange_is_that_of_a_simulated_link(workers: int) -> None:
    steps = Steps([Training(workers, 0, batches())])
    (one,) = steps.trainings
    for round in range(3):
        steps.take(round)
        assert not one.differs(one.rows, round)
    # With the random numbers of another round it is another mean.
    assert one.differs(one.rows, 7)
    with pytest.raises(SystemExit, match="round 7"):
        steps.check(7)


def test_float32_takes_the_steps_of_a_plain_loop() -> None:
    data = batches()
    one, plain = Training(0, 1, data), Training(0, 1, data)
    steps = Steps([one])
    optimizer = torch.optim.Adam([p.detach().clone() for p in plain.parameters], lr=terngrad_whole.RATE)
    weights = optimizer.param_groups[0]["params"]
    for round in range(3):
        steps.take(round)
        with torch.no_grad():
            for p, value in zip(plain.parameters, weights):
                p.copy_(value)
        loss = torch.nn.functional.cross_entropy(plain.model(data.images), data.targets)
        decayed = {id(p) for p in plain.model.decayed()}
        for p, value, gradient in zip(plain.parameters, weights, torch.autograd.grad(loss, plain.parameters)):
            value.grad = gradient + (DECAY * value if id(p) in decayed else 0.0)
        optimizer.step()
    torch.testing.assert_close(one.flat, torch.cat([flat(w) for w in weights]), rtol=1e-4, atol=1e-7)


def flat(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in the order of its memory."""
    return value.as_strided((value.numel(),), (1,))


def test_the_average_moves_as_that_of_tensorflow_and_a_reset_begins_anew() -> None:
    one = Training(2, 0, batches())
    steps, wanted, first = Steps([one]), one.flat.clone(), one.flat.clone()
    for round in range(3):
        steps.take(round)
        share = min(AVERAGE, (2 + round) / (11 + round))
        wanted = share * wanted + (1 - share) * one.flat
    torch.testing.assert_close(one.average, wanted)
    assert one.evaluated(one.average) != one.evaluated(one.flat)
    one.reset()
    assert torch.equal(one.flat, first)
    assert torch.equal(one.average, first)
    assert one.evaluated(first) == one.evaluated(one.flat)


def test_jobs_without_streams_run_in_their_order() -> None:
    found: list[int] = []
    side_by_side([lambda n=n: found.append(n) for n in range(3)], ())  # type: ignore[misc]
    assert found == [0, 1, 2]


def test_a_line_compares_the_last_accuracies_of_each_seed() -> None:
    def row(method: str, seed: int, *accuracies: float) -> dict[str, object]:
        found = [{"accuracy": one} for one in accuracies]
        return {"method": method, "workers": 2, "seed": seed, "steps": 300_000, "evaluations": found}

    (line,) = table(
        [row("fp32", 0, 0.1, 0.8), row("terngrad", 0, 0.2, 0.75), row("fp32", 1, 0.5), row("terngrad", 1, 0.6)]
    )
    assert line["difference_points"] == pytest.approx([-5.0, 10.0])
    assert line["paper_percent"] == [86.56, 85.64]
