"""The league of local steps: its data, its stacked model and optimizers, bytes, stopped runs, and what is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from benchmarks.lib import league_run
from benchmarks.lib.league_run import SAMPLES, WORKERS, Plan
from benchmarks.lib.pairs import Pairs
from benchmarks.lib.stacked_gpt import Shape, StackedGPT, Text, read_text
from benchmarks.lib.stacked_optimizers import COEFFICIENTS, Muon, clip_each_, optimizers_of, orthogonalised
from benchmarks.pages import league_page
from benchmarks.training import league

pytestmark = pytest.mark.repository

SMALL = Shape(characters=11, context=8, width=32, layers=2, heads=2)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    numbers = torch.randint(SMALL.characters, (12_000,), generator=torch.Generator().manual_seed(5))
    path = tmp_path / "input.txt"
    path.write_bytes(bytes(97 + n for n in numbers.tolist()))
    return read_text(path)


def test_the_text_is_split_once_and_its_characters_are_numbered_in_order(text: Text, tmp_path: Path) -> None:
    data = (tmp_path / "input.txt").read_bytes()
    known = bytes(sorted(set(data)))
    assert (len(text.train), len(text.validation), text.characters) == (10_800, 1200, len(known))
    assert bytes(known[n] for n in [*text.train.tolist(), *text.validation.tolist()]) == data
    (tmp_path / "short.txt").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        read_text(tmp_path / "short.txt")


def test_samples_are_of_the_training_text_and_windows_of_the_validation_text() -> None:
    text = Text(torch.arange(1000), 1000 + torch.arange(100), 1100)
    batches = [text.batch(3, step, 4, 3, 8) for step in range(50)]
    for batch in batches:
        assert torch.equal(batch, batch[..., :1] + torch.arange(9))
        assert int(batch.min()) >= 0
        assert int(batch.max()) < 1000
    assert torch.equal(batches[7], text.batch(3, 7, 4, 3, 8))
    starts = {int(batch[worker, 0, 0]) for batch in batches for worker in range(4)}
    assert len(starts) > 150
    assert not torch.equal(batches[7], text.batch(4, 7, 4, 3, 8))
    windows = text.windows(10, 8)
    assert torch.equal(windows, windows[:, :1] + torch.arange(9))
    assert int(windows.min()) == 1000
    assert 1090 <= int(windows.max()) < 1100


def test_the_model_has_the_size_of_nanogpts_example_and_starts_alike() -> None:
    one, four = StackedGPT(Shape(), 1, 0), StackedGPT(Shape(), 4, 0)
    assert one.numel == four.numel == 804_096
    assert all(torch.equal(x[3], one.stacks[name][0]) for name, x in four.stacks.items())


def test_replicas_are_apart_and_the_mean_of_gradients_is_the_whole_batchs(text: Text) -> None:
    four, one = StackedGPT(SMALL, 4, 0), StackedGPT(SMALL, 1, 0)
    tokens = text.batch(0, 0, 4, 3, SMALL.context)
    losses = four.losses(tokens)
    losses.sum().backward()
    one.losses(tokens.view(1, 12, -1)).sum().backward()
    for worker in range(4):
        alone = StackedGPT(SMALL, 1, 0)
        loss = alone.losses(tokens[worker : worker + 1])
        loss.sum().backward()
        assert loss.item() == pytest.approx(losses[worker].item(), rel=1e-5)
        for name, x in alone.stacks.items():
            assert torch.allclose(x.grad, four.stacks[name].grad[worker : worker + 1], atol=1e-6)
    for name, x in one.stacks.items():
        assert torch.allclose(x.grad[0], four.stacks[name].grad.mean(0), atol=1e-6)


def test_a_character_is_told_from_those_before_it(text: Text) -> None:
    """The loss of a window is the mean over its places, each a function of the text up to there."""
    model = StackedGPT(SMALL, 1, 0)
    windows = text.windows(5, SMALL.context)
    whole = model.loss_of_first(windows)
    sums = [n * model.loss_of_first(windows[:, : n + 1]) for n in range(1, SMALL.context + 1)]
    assert sums[-1] == pytest.approx(SMALL.context * whole, rel=1e-6)
    changed = windows.clone()
    changed[:, -1] = (changed[:, -1] + 1) % SMALL.characters
    assert model.loss_of_first(changed[:, :-1]) == model.loss_of_first(windows[:, :-1])
    assert model.loss_of_first(changed) != whole
    assert model.loss_of_first(windows, at_once=2) == pytest.approx(whole, rel=1e-6)


def test_a_replicas_parameters_are_the_stacks_memory() -> None:
    model = StackedGPT(SMALL, 3, 0)
    with torch.no_grad():
        model.replica(1)["places"].fill_(7.0)
    assert model.stacks["places"][1].eq(7.0).all()
    assert not model.stacks["places"][0].eq(7.0).any()


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 6, 20), (3, 20, 6)])
def test_orthogonalised_acts_on_singular_values(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert torch.allclose(orthogonalised(x), u @ torch.diag_embed(s) @ v, atol=1e-9)


def test_muon_is_torchs_but_for_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    stack = torch.nn.Parameter(torch.randn(2, 24, 40, generator=generator))
    single = [torch.nn.Parameter(x.clone()) for x in stack.data]
    ours = Muon([stack], lr=0.02)
    theirs = torch.optim.Muon(single, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = stack.data.clone()
    for _ in range(3):
        stack.grad = torch.randn(stack.shape, generator=generator)
        for x, g in zip(single, stack.grad):
            x.grad = g.clone()
        ours.step()
        theirs.step()
    moved, wanted = stack.data - start, torch.stack([x.data for x in single]) - start
    assert float((moved - wanted).norm() / wanted.norm()) < 0.02


def test_each_replica_is_clipped_by_itself() -> None:
    generator = torch.Generator().manual_seed(2)
    stacks = [torch.nn.Parameter(torch.zeros(3, 5)), torch.nn.Parameter(torch.zeros(3, 4, 2))]
    for x in stacks:
        x.grad = torch.randn(x.shape, generator=generator) * torch.tensor([0.01, 1.0, 10.0]).view(
            -1, *[1] * (x.dim() - 1)
        )
    alone = [[torch.nn.Parameter(x.data[k].clone()) for x in stacks] for k in range(3)]
    for k, mine in enumerate(alone):
        for p, x in zip(mine, stacks):
            p.grad = x.grad[k].clone()
        torch.nn.utils.clip_grad_norm_(mine, 1.0)
    clip_each_(stacks, 1.0)
    for k, mine in enumerate(alone):
        assert all(torch.allclose(p.grad, x.grad[k], rtol=1e-5) for p, x in zip(mine, stacks))


def test_every_parameter_is_stepped_once_and_vectors_do_not_decay() -> None:
    for kind in ("adamw", "muon"):
        model = StackedGPT(SMALL, 2, 0)
        groups = [group for optimizer in optimizers_of(model, kind, 0.1) for group in optimizer.param_groups]
        taken = [id(x) for group in groups for x in group["params"]]
        assert sorted(taken) == sorted(id(x) for x in model.stacks.values())
        for group in groups:
            assert all((x.dim() == 3) == (group["weight_decay"] > 0) for x in group["params"])


def workers_of(rows: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[row[:4].view(2, 2).clone(), row[4:].clone()] for row in rows]


def flat(workers: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([x.reshape(-1) for x in mine]) for mine in workers])


def test_pairs_meet_and_take_nolocos_outer_step() -> None:
    generator = torch.Generator().manual_seed(3)
    workers = workers_of(torch.randn(4, 7, generator=generator).expand(4, 7))
    pairs = Pairs(workers, every=2, outer_lr=0.7, outer_momentum=0.5, seed=1)
    held, moved, seen = flat(workers).double(), torch.zeros(4, 7, dtype=torch.float64), set()
    for step in range(1, 41):
        for x in itertools.chain(*workers):
            x.add_(torch.randn(x.shape, generator=generator))
        now = flat(workers).double()
        pairs.after_step()
        if step % 2:
            assert torch.equal(flat(workers).double(), now)
            continue
        met = pairs.partners(step // 2)
        assert all(met[met[k]] == k != met[k] for k in range(4))
        seen.add(tuple(met))
        for k in range(4):
            pair = [k, met[k]]
            pull = (now[pair] - held[pair]).mean(0) + held[pair].mean(0) - held[k]
            moved[k] = 0.5 * moved[k] + 0.7 * pull
        held = held + moved
        assert torch.allclose(flat(workers).double(), held, atol=1e-4)
    assert len(seen) == 3
    assert pairs.sent_bytes == 20 * 2 * 4 * 7
    before = flat(workers)
    with pairs.swapped():
        assert torch.allclose(flat(workers), before.mean(0).expand(4, 7), atol=1e-5)
    assert torch.equal(flat(workers), before)
    with pytest.raises(ValueError, match="3 workers"):
        Pairs(workers[:3], every=2, outer_lr=0.7, outer_momentum=0.5, seed=1)


def test_without_momentum_pairs_average() -> None:
    workers = workers_of(torch.randn(2, 7, generator=torch.Generator().manual_seed(4)))
    middle = flat(workers).mean(0)
    pairs = Pairs(workers, every=1, outer_lr=1.0, outer_momentum=0.0, seed=0)
    pairs.after_step()
    assert torch.allclose(flat(workers), middle.expand(2, 7), atol=1e-6)


SPECS = {
    "FP32()": "adamw",
    "DiLoCo(every=4)": "muon",
    "SparseLoCo(every=4)": "adamw",
    "StreamingDiLoCo(every=4, fragments=2, delay=1)": "adamw",
    "EASGD(every=4)": "adamw",
    "Pairs(every=4, outer_lr=0.7, outer_momentum=0.5)": "adamw",
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_that_is_stopped_and_continued_has_the_same_bits(
    spec: str, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(spec, SPECS[spec], 0.01, 13, 2)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = league_run.train(plan, text, tmp_path / "whole", shape=SMALL)
    assert whole is not None
    found, pieces = None, 0
    while found is None:
        # The clock is read once a step.
        ticks = itertools.count()
        monkeypatch.setattr(league_run.time, "monotonic", lambda ticks=ticks: next(ticks))
        assert league_run.finished(plan, tmp_path / "parts") is None
        found = league_run.train(plan, text, tmp_path / "parts", until=4.5, shape=SMALL)
        pieces += 1
    assert pieces == 3
    assert {**found, "cpu_s": 0} == {**whole, "cpu_s": 0} == {**whole, **asdict(plan), "cpu_s": 0}
    assert league_run.finished(plan, tmp_path / "parts") == found
    assert not list((tmp_path / "parts").glob("*.p*t"))


def test_bytes_are_those_of_the_library(text: Text, tmp_path: Path) -> None:
    named = list(StackedGPT(SMALL, 1, 0).replica(0).items())
    link = gw.SimulatedLink(named, "FP32()", WORKERS)
    link.reduce_(torch.randn(WORKERS, link.numel))
    row = league_run.train(Plan("FP32()", "adamw", 0.01, 5, 0), text, tmp_path, shape=SMALL)
    assert row is not None
    assert row["bytes"] == 5 * link.traffic().sent_bytes > 5 * 4 * link.numel
    assert row["losses"][-1][0] == 5
    local = [
        league_run.train(Plan("LocalSGD(every=2)", "adamw", 0.01, steps, 0), text, tmp_path, shape=SMALL)
        for steps in (2, 6, 7)
    ]
    # The third ends between exchanges, and exchanges what is left.
    one, three, four = (row["bytes"] for row in local if row)
    assert (three, four) == (3 * one, 4 * one)
    assert one == pytest.approx(link.traffic().sent_bytes, rel=0.2)


def test_a_run_tells_how_far_it_went_and_how_much_of_it_moved(text: Text, tmp_path: Path) -> None:
    sparse = Plan("SparseLoCo(every=2, density=0.01, block_size=512)", "adamw", 0.01, 2, 0)
    rows = [league_run.train(plan, text, tmp_path, shape=SMALL) for plan in (sparse, replace(sparse, spec="FP32()"))]
    few, all_of_them = (row for row in rows if row)
    # Norms and what is smaller than 1024 elements travel whole; of the rest at least one element of each block.
    sizes = [x.numel() for x in StackedGPT(SMALL, 1, 0).stacks.values()]
    whole = sum(n for n in sizes if n < 1024)
    most = whole + sum(WORKERS * 6 * -(-n // 512) for n in sizes if n >= 1024)
    assert whole / sum(sizes) * 0.9 < few["share_moved"] <= most / sum(sizes)
    assert all_of_them["share_moved"] > 0.9
    assert 0 < few["distance"] < all_of_them["distance"] * 3


def test_rates_rise_then_fall_to_a_tenth() -> None:
    plan = Plan("FP32()", "adamw", 0.5, 200, 0)
    rates = [plan.rate(step) for step in range(200)]
    assert max(rates) == rates[10] == pytest.approx(0.5)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] == pytest.approx(0.05)
    assert rates[-1] == pytest.approx(0.05, rel=0.01)


def test_labels_are_different_for_different_plans() -> None:
    plan = Plan("DiLoCo(every=16, outer_lr=0.7)", "adamw", 0.002, 192, 0)
    others = [
        replace(plan, spec="DiLoCo(every=16, outer_lr=0.4)"),
        replace(plan, optimizer="muon"),
        replace(plan, lr=0.0028),
        replace(plan, steps=1920),
        replace(plan, seed=1),
    ]
    labels = [each.label for each in (plan, *others)]
    assert len(set(labels)) == len(labels)
    assert all(label.replace("-", "").replace(".", "").isalnum() for label in labels)


def table_of(score: Callable[[Plan], float], done: Callable[[Plan], bool] = lambda plan: True) -> league.Found:
    def found(plan: Plan) -> dict[str, Any] | None:
        if not done(plan):
            return None
        loss = score(plan)
        sent = {"bytes": 8, "bits_per_element_and_step": 2.0, "losses": [[1, loss, 8]]}
        return {"loss": loss, "lr": plan.lr, "distance": 3.0, "share_moved": 0.5, **sent}

    return found


def test_every_method_is_tried_as_often_and_the_lowest_loss_is_taken() -> None:
    found = table_of(lambda plan: abs(plan.lr - 0.004) + ("1.0" in plan.spec) * -0.1)
    for entry in league.ENTRIES:
        if entry.like:
            continue
        made = league.tries(entry, found)
        assert len(set(made)) == 4
        best = league.best_short(entry, found)
        assert best in made
        assert min(found(plan)["loss"] for plan in made) == found(best)["loss"]
        assert len(set(league.long_tries(entry, found))) == 3 + (entry.name in league.FOURTH)
        assert {plan.steps for plan in league.long_tries(entry, found)} == {league.LONG}
    settled = league.best_short(league.BY_NAME["DiLoCo, EDEN 4 bits"], found)
    assert settled is not None
    method = gw.method(settled.spec)
    assert (method.outer_lr, method.outer_momentum, method.inner) == (1.0, 0.5, gw.EDEN(bits=4))


def test_processes_train_different_runs_and_wait_for_those_of_others(tmp_path: Path) -> None:
    """A lock is of the open file, so that two in one process keep each other out as two processes do."""
    ended: set[Plan] = set()
    found = table_of(lambda plan: plan.lr, lambda plan: plan in ended)
    first, held = league.next_run(found, tmp_path)
    second, also_held = league.next_run(found, tmp_path)
    assert held is not None
    assert also_held is not None
    assert [first, second] == list(dict.fromkeys(league.wanted(found)))[:2]
    ended.add(second)
    also_held.close()
    third, held_too = league.next_run(found, tmp_path)
    assert third not in (first, second)
    # One that another process has ended is not trained again, and a lock of a process that was killed holds nothing.
    (tmp_path / f"{third.label}.json").write_text("{}")
    held.close()
    held_too.close()
    again, _ = league.next_run(found, tmp_path)
    assert again == first
    ended.add(first)
    fourth, _ = league.next_run(found, tmp_path)
    assert fourth not in (first, second, third)
    ended.update(league.wanted(table_of(lambda plan: plan.lr)))
    assert league.next_run(found, tmp_path) == (None, None)


def test_what_is_not_known_is_not_chosen() -> None:
    nothing = table_of(lambda plan: 1.0, lambda plan: False)
    first = list(league.wanted(nothing))
    assert all(plan.steps == league.SHORT and plan.lr in league.RATES for plan in first)
    assert not league.collect(nothing)["league"]
    begun = set(league.first_tries(league.BY_NAME["DDP"]))
    only_first = table_of(lambda plan: plan.lr, lambda plan: plan in begun)
    assert league.best_short(league.BY_NAME["DDP"], only_first) is None


def test_all_that_is_wanted_can_be_built_and_ends() -> None:
    found = table_of(lambda plan: plan.lr)
    wanted = list(dict.fromkeys(league.wanted(found)))
    assert len({plan.label for plan in wanted}) == len(wanted)
    for spec in {plan.spec for plan in wanted}:
        if not spec.startswith("Pairs("):
            assert gw.method(spec)
    rows = league.collect(found)
    assert {(row["name"], row["steps"]) for row in rows["league"]} == {
        (entry.name, steps) for entry in league.ENTRIES for steps in (league.SHORT, league.LONG)
    }
    assert all(row["seeds"] == 3 and row["loss_std"] == 0.0 for row in rows["league"])
    partly = league.collect(table_of(lambda plan: plan.lr, lambda plan: plan.seed == 0))
    assert all(row["seeds"] == 1 and row["loss_std"] is None for row in partly["league"])


def test_all_workers_take_nanogpts_twelve_samples() -> None:
    assert WORKERS * SAMPLES == 12
    assert league.LONG == 10 * league.SHORT
    assert league.SHORT % league.EVERY == 0


def cell(name: str, mean: float, std: float | None, seeds: int, steps: int = 192) -> dict[str, Any]:
    return {"name": name, "steps": steps, "loss_mean": mean, "loss_std": std, "seeds": seeds}


def test_an_ordering_is_judged_by_the_larger_of_two_spreads() -> None:
    ahead, as_low = (league_page.Ordering("a", "b", "", ahead=ahead) for ahead in (True, False))
    narrow = [cell("a", 2.0, 0.01, 3), cell("b", 2.03, 0.01, 3)]
    verdict = league_page.verdict(ahead, narrow, 192)
    assert verdict is not None
    assert verdict == ("reproduced", pytest.approx(-0.03), pytest.approx(0.01 * (2 / 3) ** 0.5))
    wide = [cell("a", 2.0, 0.05, 3), cell("b", 2.03, 0.01, 3), *(cell(f"{k}", 2.0, 0.001, 3) for k in range(9))]
    verdict = league_page.verdict(ahead, wide, 192)
    assert verdict is not None
    assert verdict[0] == "open"
    assert verdict[2] == pytest.approx((0.05**2 / 3 + 0.01**2 / 3) ** 0.5)
    swapped = [cell("a", 2.03, 0.01, 3), cell("b", 2.0, 0.01, 3)]
    assert [(league_page.verdict(o, swapped, 192) or "")[0] for o in (ahead, as_low)] == ["refuted here", "open"]
    far = [cell("a", 2.06, 0.01, 3), cell("b", 2.0, 0.01, 3)]
    assert (league_page.verdict(as_low, far, 192) or "")[0] == "refuted here"
    equal = [cell("a", 2.0, 0.001, 3), cell("b", 2.0, 0.001, 3)]
    assert [(league_page.verdict(o, equal, 192) or "")[0] for o in (ahead, as_low)] == ["open", "reproduced"]
    assert league_page.verdict(ahead, [cell("a", 2.0, None, 1), cell("b", 2.1, None, 1)], 192) is None
    single = [cell("a", 2.0, None, 1), cell("b", 2.1, None, 1), *(cell(n, 2.0, 0.01, 3, 1920) for n in "ab")]
    verdict = league_page.verdict(ahead, single, 192)
    assert verdict == ("open", pytest.approx(-0.1), pytest.approx(0.01 * 2**0.5))
