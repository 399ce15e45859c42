"""What happens where a loss is scaled, also where nobody said so."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from cases import ALL
from gradwire.exchange.protocols import Context
from gradwire.link.found_optimizers import _scaling, on_updates
from oracle import layers, square_loss
from ranks import Ranks
from remembering import REMEMBERING

WORKERS = 3


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_methods_that_add_up_rounds_say_so(method: gw.Method) -> None:
    """Who keeps vectors, gives a direction or has a field in the gradient's unit needs the scale; nobody else does.

    But for local steps, which need the scaler to count by.
    """
    if isinstance(method, gw.Auto) or method.traits.needs_optimizer or method.traits.local_steps:
        return
    # A matrix, since methods of low rank send vectors as they are.
    gradients = torch.randn(WORKERS, 64, 64, generator=torch.Generator().manual_seed(0))
    state = gw.simulate(gradients, method).state
    vectors = [key for part, values in state.items() if part != "global" for key in values]
    in_its_unit = isinstance(method, gw.Threshold) or (isinstance(method, gw.TernGrad) and method.ahead)
    assert method.traits.needs_loss_scale == (bool(vectors) or method.traits.direction or in_its_unit)


class Scaled(gw.SimulatedLink):
    """A simulation whose gradients are those of a scaled loss."""

    scale = 1.0

    def _context(self, rank: int, chunk: int) -> Context:
        return replace(super()._context(rank, chunk), loss_scale=self.scale)


@pytest.mark.parametrize("method", [m for m in REMEMBERING if not m.traits.local_steps], ids=repr)
def test_changes_of_the_loss_scale_change_no_bit_of_what_follows(method: gw.Method) -> None:
    """Also of factors, which are kept in the unit of their round: only their directions matter."""
    parameters = [("w", torch.empty(24, 20)), ("v", torch.empty(17, 6, 3)), ("b", torch.empty(65))]
    numel, random = sum(p.numel() for _, p in parameters), torch.Generator().manual_seed(0)
    rounds = [torch.randn(4, numel, generator=random) for _ in range(5)]
    plain, scaled = (kind(parameters, method, 4, min_numel=100) for kind in (gw.SimulatedLink, Scaled))
    for rows, power in zip(rounds, (4, 16, -3, 20, 0)):
        scaled.scale = 2.0**power
        found = rows * scaled.scale
        plain.exchange_(rows)
        scaled.exchange_(found)
        assert torch.equal(found[0] / scaled.scale, rows[0])
        scaled.load_state_dict(scaled.state_dict())
    before, after = plain.state_dict(), scaled.state_dict()
    factors = ("factor/", "left_factor/", "right_factor/")
    for scope, part in before.items():
        assert part.keys() == after[scope].keys()
        for key, value in part.items():
            assert key.startswith(factors) or torch.equal(value, after[scope][key]), key


@pytest.mark.parametrize("inner", ["errorfeedback", "diana", "DIANA(momentum=0.9)", "EF21(momentum=0.5)", "terngrad"])
def test_a_coder_changes_nothing_of_that(inner: str) -> None:
    plain, coded = gw.method(inner), gw.method(f"Coded({inner})")
    assert coded.traits.needs_loss_scale == plain.traits.needs_loss_scale == (inner != "terngrad")
    assert coded.traits.owns_momentum == plain.traits.owns_momentum == ("momentum" in inner)


def train(method: str, kind: str, told: Any) -> str:
    """Take two steps beside a scaler of a kind; give the refusal, as the link and as backward tell it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind != "disabled")
    if kind == "dropped":
        scaler.scale(torch.ones(()))
        # A ring of references: nobody holds it, and only a collection frees it.
        scaler.ring = scaler  # type: ignore[attr-defined]
        del scaler
    rank, module = torch.distributed.get_rank(), layers(2)
    ddp = DistributedDataParallel(module)
    given = {"handed over": scaler if kind == "used" else None, "none": None, "another's": False}[told]
    link = gw.attach(ddp, method, grad_scaler=given)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    try:
        for step in range(2):
            loss = square_loss(ddp, rank, step)
            if kind == "used":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    except gw.GradwireError as error:
        return f"{link.error} / {error}"
    finally:
        link.close()
    return "trained"


@pytest.mark.parametrize("method", ["errorfeedback", "diana", "ef21", "signsgd"])
@pytest.mark.ranks
def test_a_scaler_that_was_not_handed_over_is_refused_in_the_first_step(three_ranks: Ranks, method: str) -> None:
    for sentence in three_ranks(train, method, "used", "none"):
        assert sentence.count("hand it over, grad_scaler=scaler") == 2
        assert sentence.count("has unscaled them before") == 2


@pytest.mark.parametrize(
    ("method", "kind", "told"),
    [
        ("errorfeedback", "used", "handed over"),
        ("errorfeedback", "used", "another's"),
        ("errorfeedback", "unused", "none"),
        ("errorfeedback", "disabled", "none"),
        ("errorfeedback", "dropped", "none"),
        ("terngrad", "used", "none"),
        ("alq", "used", "none"),
    ],
)
@pytest.mark.ranks
def test_all_else_trains(three_ranks: Ranks, method: str, kind: str, told: str) -> None:
    assert three_ranks(train, method, kind, told) == ["trained"] * 3


def test_the_search_for_a_scaler_leaves_alone_what_other_threads_build() -> None:
    """CPython cannot resize a tuple to which somebody else refers, such as a list of all objects."""
    errors: list[Exception] = []
    ended = threading.Event()
    living = [[number] for number in range(300_000)]

    def build() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(2000))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert not _scaling()
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(living) == 300_000


def test_the_search_finds_a_scaler_and_one_of_a_derived_class() -> None:
    class Derived(torch.amp.GradScaler):
        pass

    for kind in (torch.amp.GradScaler, Derived):
        scaler = kind("cpu", init_scale=2.0)
        assert not _scaling()
        scaler.scale(torch.ones(1))
        assert _scaling()
        del scaler
        gc.collect()


def test_a_copy_of_a_scaler_whose_updates_are_counted_has_its_own_update() -> None:
    scaler, counted = torch.amp.GradScaler("cpu"), list[int]()
    end = on_updates(scaler, lambda: counted.append(1))
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        other.scale(torch.ones(1))
        other.update(4.0)
        assert other.get_scale() == 4.0
    assert not counted
    scaler.scale(torch.ones(1))
    scaler.update(8.0)
    assert (scaler.get_scale(), other.get_scale(), len(counted)) == (8.0, 4.0, 1)
    end()
