"""Patches that round differences by a method: what readers hold, and that errors do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from weight_cases import copies, manifest, octets, same, zeros

import gradwire as gw
from gradwire.publish.lossy import lossy_spec

SIZE = 1 << 15
METHODS = ["EDEN(bits=4)", "TopK(density=0.05)", "qsgdinf", "natural"]
FOLLOWED = ["terngrad", "diana", "ef21", "powersgd", "coded"]
"""Methods whose workers share a scale, or remember what the rounds before have brought."""


def start() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(256, SIZE // 256, generator=generator),
        "half": torch.randn(100, 70, generator=generator).bfloat16(),
        "count": torch.tensor([3, 4]),
    }


def walk(trained: dict[str, torch.Tensor], step: int) -> None:
    """A step of a training."""
    generator = torch.Generator().manual_seed(step + 1)
    trained["w"] += 1e-3 * torch.randn(256, SIZE // 256, generator=generator)
    trained["half"].add_((1e-2 * torch.randn(100, 70, generator=generator)).bfloat16())
    trained["count"] += 1


@pytest.mark.parametrize("spec", METHODS + FOLLOWED)
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
    assert manifest(tmp_path).lossy == lossy_spec(spec)


@pytest.mark.parametrize("spec", ["EDEN(bits=4)", "TopK(density=0.1)", "diana", "p_quantisation"])
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
    assert errors[29] < errors[11] / (4 if spec in ("EDEN(bits=4)", "TopK(density=0.1)") else 1.5)


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
    trained["w"][0, 7] = float("nan")
    trained["w"][0, 8] = float("-inf")
    publisher.publish(1)
    subscriber.update()
    assert torch.equal(octets(served["w"]), octets(trained["w"]))
    trained["w"][0, 7:9] = 0
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


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("signsgd", "its outcome is a direction"),
        ("dgc", "its outcome holds vectors of earlier rounds"),
        ("alq", "it joins all tensors to one vector"),
        ("diloco", "after steps of its own"),
        ("dpsgd", "an outcome of its own"),
        ("spectral_atomo", "machines may differ"),
    ],
)
def test_methods_that_nobody_can_follow_are_refused_by_their_trait(spec: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(gw.IncompatibleError, match=f"cannot have one sender and readers who follow it: .*{reason}"):
        gw.WeightPublisher(start(), tmp_path, lossy=spec)


def test_sums_have_nothing_to_compare_with(tmp_path: Path) -> None:
    gw.WeightPublisher(start(), tmp_path, lossy="fp32")
    with pytest.raises(gw.HyperparameterError, match="sums"):
        gw.WeightPublisher(start(), tmp_path, lossy="EDEN(bits=4)", base="sums")


def test_a_reader_that_is_restarted_lacks_the_methods_state_and_begins_with_an_anchor(tmp_path: Path) -> None:
    trained, served = start(), zeros(start())
    publisher = gw.WeightPublisher(trained, tmp_path, anchor_every=4, lossy="diana")
    subscriber = gw.WeightSubscriber(served, tmp_path, lossy=True)
    for step in range(3):
        publisher.publish(step)
        subscriber.update()
        walk(trained, step)
    restarted = gw.WeightSubscriber(served, tmp_path, lossy=True)
    # The digest of its tensors says that they are those of step 2.
    assert restarted.update() == 2
    assert restarted.applied == ()
    publisher.publish(3)
    assert restarted.update() == 3
    assert [file.name.split()[0] for file in restarted.applied] == ["anchor", "patch", "patch", "patch"]
    walk(trained, 3)
    for step in (4, 5):
        publisher.publish(step)
        assert restarted.update() == step
        assert [file.name.split()[0] for file in restarted.applied] == ["patch"]
        walk(trained, step)


def test_a_patch_whose_rounds_a_reader_has_not_followed_is_refused(tmp_path: Path) -> None:
    trained, served = start(), zeros(start())
    publisher = gw.WeightPublisher(trained, tmp_path, lossy="diana")
    subscriber = gw.WeightSubscriber(served, tmp_path, lossy=True)
    for step in range(2):
        publisher.publish(step)
        subscriber.update()
        walk(trained, step)
    publisher.publish(2)
    restarted, before = gw.WeightSubscriber(served, tmp_path / "elsewhere", lossy=True), copies(served)
    patch = (tmp_path / manifest(tmp_path).files[-1].name).read_bytes()
    with pytest.raises(gw.PayloadError, match="1 rounds since step 1, which these weights have not followed"):
        restarted.apply(patch)
    assert same(served, before)
    assert subscriber.apply(patch) == 2


def test_a_staging_copy_follows_the_state(tmp_path: Path) -> None:
    trained, served = start(), zeros(start())
    publisher = gw.WeightPublisher(trained, tmp_path, anchor_every=100, lossy="diana")
    subscriber = gw.WeightSubscriber(served, tmp_path, lossy=True)
    follower = zeros(start())
    other = gw.WeightSubscriber(follower, tmp_path, lossy=True)
    for step in range(4):
        publisher.publish(step)
        assert subscriber.update(into="staging") == other.update() == step
        assert len(subscriber.applied) == 1
        subscriber.swap()
        assert same(served, follower)
        walk(trained, step)
    # The tensors have not seen the patches themselves.
    publisher.publish(4)
    assert subscriber.update() == other.update() == 4
    assert same(served, follower)


def test_rounds_begin_anew_after_each_patch_without_rounded_differences(tmp_path: Path) -> None:
    """A step that is not finite is sent exactly; a relay cannot tell it from any other exact step."""
    trained = {"w": torch.randn(3000, generator=torch.Generator().manual_seed(0))}
    publisher = gw.WeightPublisher(trained, tmp_path / "a", lossy="diana")
    relay = gw.WeightSubscriber(served := zeros(trained), tmp_path / "a", relay=tmp_path / "b", lossy=True)
    for step in range(8):
        if step in (4, 5):
            trained["w"][7] = torch.inf if step == 4 else 0
        publisher.publish(step)
        assert relay.update() == step
        assert gw.WeightSubscriber(late := zeros(trained), tmp_path / "b", lossy=True).update() == step
        assert same(late, served)
        trained["w"] += torch.randn(3000, generator=torch.Generator().manual_seed(step))
    assert [stage.step for stage in manifest(tmp_path / "b").stages if stage.kind == "anchor"] == [0, 4]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_rounds_whose_patch_changes_nothing_are_followed_once(every: int, tmp_path: Path) -> None:
    """The trainer waits: a low rank spreads what is left over all elements, too little to move one of them."""
    generator = torch.Generator().manual_seed(0)
    trained = {"w": (1 + 0.9 * torch.rand(256, 256, generator=generator)).bfloat16()}
    publisher = gw.WeightPublisher(trained, tmp_path, lossy="powersgd")
    subscriber = gw.WeightSubscriber(served := zeros(trained), tmp_path, lossy=True)
    for step in range(16):
        if step in (1, 8):
            rows, columns = torch.randint(256, (2, 20), generator=generator)
            trained["w"].view(torch.int16)[rows, columns] += 1
        publisher.publish(step)
        if step % every == 0:
            assert subscriber.update() == step
            assert [file.step for file in subscriber.applied] == list(range(max(0, step - every + 1), step + 1))
            assert gw.WeightSubscriber(late := zeros(trained), tmp_path, lossy=True).update() == step
            assert same(late, served)
    stages = manifest(tmp_path).stages
    assert {stage.states == stage.base_states for stage in stages if stage.kind == "patch"} == {False, True}
