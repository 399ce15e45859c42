"""Patches that round differences by a method: what readers hold, and that errors do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weight_cases import copies, manifest, octets, same, zeros

import gradwire as gw

SIZE = 1 << 15
METHODS = ["EDEN(bits=4)", "TopK(density=0.05)", "qsgdinf", "natural"]


def start() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(SIZE, generator=generator),
        "half": torch.randn(100, 70, generator=generator).bfloat16(),
        "count": torch.tensor([3, 4]),
    }


def walk(trained: dict[str, torch.Tensor], step: int) -> None:
    """A step of a training."""
    generator = torch.Generator().manual_seed(step + 1)
    trained["w"] += 1e-3 * torch.randn(SIZE, generator=generator)
    trained["half"].add_((1e-2 * torch.randn(100, 70, generator=generator)).bfloat16())
    trained["count"] += 1


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("strips", [None, {"*": (0, 4)}], ids=["whole", "strips"])
def test_readers_hold_what_the_publisher_knows_and_anchors_are_exact(
    spec: str, strips: dict[str, tuple[int, int]] | None, tmp_path: Path
) -> None:
    trained, served = start(), zeros(start())
    publisher = gw.WeightPublisher(trained, tmp_path, anchor_every=4, lossy=spec, strips=strips)
    subscriber = gw.WeightSubscriber(served, tmp_path, lossy=True)
    sizes = []
    for step in range(9):
        publication = publisher.publish(step)
        assert subscriber.update() == step
        assert step == 0 or [file.name.split()[0] for file in subscriber.applied] == ["patch"]
        assert torch.equal(served["count"], trained["count"])
        exact = same(served, trained)
        assert exact == (step % 4 == 0)
        if not exact:
            sizes.append(publication.patch_bytes)
        late = zeros(trained)
        assert gw.WeightSubscriber(late, tmp_path, lossy=True).update() == step
        assert same(late, served)
        walk(trained, step)
    assert max(sizes) < 0.6 * sum(tensor.nbytes for tensor in trained.values())
    assert manifest(tmp_path).lossy == repr(gw.method(spec))


@pytest.mark.parametrize("spec", ["EDEN(bits=4)", "TopK(density=0.1)"])
def test_errors_do_not_add_up(spec: str, tmp_path: Path) -> None:
    """The trainer stops: each further patch contracts what is left, so that readers come to its weights."""
    trained, served = start(), zeros(start())
    publisher = gw.WeightPublisher(trained, tmp_path, anchor_every=1000, lossy=spec)
    subscriber, errors = gw.WeightSubscriber(served, tmp_path, lossy=True), []
    for step in range(30):
        publisher.publish(step)
        subscriber.update()
        errors.append(float((served["w"] - trained["w"]).norm()))
        if step < 10:
            walk(trained, step)
    assert errors[0] == 0 < errors[1]
    # Ten steps of the walk have the norm sqrt(10) * 1e-3 * sqrt(SIZE) = 0.57.
    assert errors[11] < 0.57
    assert errors[29] < errors[11] / 4


def published_twice(folder: Path, spec: str) -> tuple[dict[str, torch.Tensor], list[bytes]]:
    """Return a reader's weights that have received nothing yet, and an anchor and a patch for them."""
    trained = start()
    publisher = gw.WeightPublisher(trained, folder, lossy=spec)
    publisher.publish(0)
    walk(trained, 0)
    publisher.publish(1)
    return zeros(trained), [(folder / file.name).read_bytes() for file in manifest(folder).files]


def test_readers_ask_for_it(tmp_path: Path) -> None:
    served, files = published_twice(tmp_path, "EDEN(bits=4)")
    with pytest.raises(gw.IncompatibleError, match=r"rounds differences by EDEN\(bits=4.*lossy=True"):
        gw.WeightSubscriber(served, tmp_path).update()
    exact = gw.WeightSubscriber(served, tmp_path / "elsewhere")
    exact.apply(files[0])
    with pytest.raises(gw.IncompatibleError, match="patch from step 0 to step 1 rounds differences"):
        exact.apply(files[1])
    gw.WeightSubscriber(served, tmp_path / "elsewhere", lossy=True).apply(files[1])


def test_what_is_not_finite_is_sent_exactly(tmp_path: Path) -> None:
    trained, served = start(), zeros(start())
    publisher = gw.WeightPublisher(trained, tmp_path, lossy="EDEN(bits=4)")
    subscriber = gw.WeightSubscriber(served, tmp_path, lossy=True)
    publisher.publish(0)
    trained["w"][7] = float("nan")
    trained["w"][8] = float("-inf")
    publisher.publish(1)
    subscriber.update()
    assert torch.equal(octets(served["w"]), octets(trained["w"]))
    trained["w"][7:9] = 0
    publisher.publish(2)
    subscriber.update()
    assert bool(torch.isfinite(served["w"]).all())


def test_damaged_patches_are_refused(tmp_path: Path) -> None:
    served, files = published_twice(tmp_path, "TopK(density=0.05)")
    subscriber = gw.WeightSubscriber(served, tmp_path / "elsewhere", lossy=True)
    subscriber.apply(files[0])
    before = copies(served)
    for at in range(200, len(files[1]), 397):
        data = bytearray(files[1])
        data[at] ^= 16
        with pytest.raises(gw.PayloadError):
            subscriber.apply(data)
        assert same(served, before)
    assert subscriber.apply(files[1]) == 1


def test_methods_that_need_other_workers_are_refused(tmp_path: Path) -> None:
    for spec in ("terngrad", "diana", "signsgd", "fp32"):
        if spec == "fp32":
            gw.WeightPublisher(start(), tmp_path, lossy=spec)
            continue
        with pytest.raises(gw.IncompatibleError):
            gw.WeightPublisher(start(), tmp_path, lossy=spec)
    with pytest.raises(gw.HyperparameterError, match="sums"):
        gw.WeightPublisher(start(), tmp_path, lossy="EDEN(bits=4)", base="sums")
