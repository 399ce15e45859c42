"""``fallback=``: all ranks return to a plain method in the same round, once any of them strays too far."""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.planning import Options, Planner
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.link.diagnostics import EARLY, Diagnostics
from gradwire.link.selection.autotune import FixedSelection
from gradwire.link.selection.fallback import Fallback
from log_texts import LogTexts
from ranks import Ranks

NUMEL = 4096
CONSTANT = torch.ones(NUMEL)
"""With one level, its norm of 64, a value is sent with probability 1/64: |sent - g|^2 is 63 |g|^2 on average."""
ONE_HOT = torch.nn.functional.one_hot(torch.tensor(7), NUMEL).float()
"""Sent as it is."""

ONE_LEVEL = "QSGD(levels=1, block_size=None)"
CODED = f"Coded({ONE_LEVEL})"


def measured(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], round: int = 0) -> Diagnostics:
    """Diagnostics of one round, from gradients and what was sent, parameter by parameter."""
    found = Diagnostics()
    parameters = [Parameter.of(str(i), g) for i, (g, _) in enumerate(pairs)]
    flats = [torch.cat(parts) for parts in zip(*pairs)]
    found.measure(flats[0], flats[1], lay_out(parameters), round)
    return found


def test_squares_are_taken_over_all_parameters() -> None:
    g, h = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    found = measured([(g, g + 1), (h, h - 2)])
    assert found.squares(0) == pytest.approx((2 * 1 + 3 * 4, 25))
    assert found.squares(100) == (0, 0), "nothing was measured in that round"
    found.forget()
    assert found.squares(0) == (0, 0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_and_something_sent_that_is_not(value: float) -> None:
    g, bad = torch.ones(2), torch.tensor([1.0, value])
    assert not math.isfinite(measured([(bad, g), (g, g)]).squares(0)[1])
    assert measured([(g, bad), (g, g)]).squares(0) == (math.inf, pytest.approx(4))


def test_what_is_sent_beside_zero_gradients() -> None:
    g, zero = torch.ones(2), torch.zeros(2)
    assert measured([(zero, zero)]).squares(0) == (0, 0)
    assert measured([(zero, g), (g, g)]).squares(0) == pytest.approx((2, 2))


class Told:
    """What another rank tells, and how often it was asked."""

    ranks = (0, 1)

    def __init__(self, off: float, gradient: float = 1.0) -> None:
        self.theirs, self.asked = [off, gradient], 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        raise AssertionError("a fallback never waits for ranks that may not be there yet")

    def gathering(self, values: Sequence[float], about: str) -> Callable[[], list[list[float]]]:
        self.asked += 1
        return lambda: [list(values), self.theirs]

    def probe(self, most_bytes: int) -> Any:
        raise AssertionError("a fallback measures no link")


class Measured(Diagnostics):
    """Errors of this rank that are the same in every measured round."""

    def __init__(self, off: float, gradient: float) -> None:
        super().__init__()
        self.mine = (off, gradient)

    def squares(self, round: int) -> tuple[float, float]:
        return self.mine


def fallback(mine: tuple[float, float], limit: float) -> Fallback:
    parameters = {"0": torch.zeros(2)}
    normal, plain = (Planner(gw.method(spec), parameters, 2, Options()) for spec in ("terngrad", "bf16"))
    return Fallback(FixedSelection(normal), plain, limit, Measured(*mine))


@pytest.mark.parametrize(
    ("mine", "theirs", "falls"),
    [
        ((0.0, 1.0), (3.9, 1.0), False),
        ((0.0, 1.0), (4.0, 1.0), False),
        ((0.0, 1.0), (4.1, 1.0), True),
        # A rank without a gradient: what it sends is held against what gradients are on average.
        ((0.0, 2.0), (3.9, 0.0), False),
        ((0.0, 2.0), (4.1, 0.0), True),
        ((0.0, 0.0), (4.1, 0.0), False),
        ((0.0, 1.0), (math.inf, 1.0), True),
        # An overflow somewhere tells nothing.
        ((0.0, 1.0), (math.inf, math.inf), False),
        ((0.0, math.nan), (9.0, 1.0), False),
    ],
)
def test_any_ranks_error_above_the_limit_counts(
    mine: tuple[float, float], theirs: tuple[float, float], falls: bool
) -> None:
    selection, network = fallback(mine, 2.0), Told(*theirs)
    said: list[str | None] = []
    for round, asked in ((0, 0), (1, 1), (2, 1)):
        assert repr(selection.planner.method) == repr(gw.TernGrad())
        said.append(selection.begin(round, network))
        assert network.asked == asked
    assert repr(selection.planner.method) == repr(gw.method("bf16") if falls else gw.TernGrad())
    assert said[:2] == [None, None]
    assert (said[2] is not None) == falls
    told = said[2].reason if said[2] else None
    assert not told or ("rank 1 sent in round 0" in told and "fallback_limit=2" in told)
    returned = selection.returned()
    assert (returned is not None) == falls
    for round in range(3, 101):
        selection.begin(round, network)
    assert network.asked == (1 if falls else 1 + len(EARLY)), "nobody is asked but in the round after a measurement"
    selection.begin(101, network)
    assert network.asked == (1 if falls else 2 + len(EARLY)), "nor after the return"


def test_a_return_outlives_a_checkpoint() -> None:
    first, second = (fallback((0.0, 1.0), 2.0) for _ in range(2))
    assert "fallback" not in first.state()
    first.begin(1, Told(25.0))
    first.begin(2, Told(25.0))
    second.load(first.state())
    assert second.returned() == first.returned() == {
        "method": repr(gw.method("bf16")),
        "since_round": 2,
        "relative_error": 5.0,
        "rank": 1,
    }  # fmt: skip
    second.load({})
    assert second.returned() is None


@pytest.mark.parametrize("saved_after", [0, 1, 2])
def test_what_is_on_its_way_to_a_return_outlives_a_checkpoint(saved_after: int) -> None:
    """Measured in round 0, told in round 1, judged in round 2: whichever was last before the checkpoint."""
    changes: list[str | None] = []
    selection, network = fallback((0.0, 1.0), 2.0), Told(25.0)
    for round in range(4):
        changes.append(selection.begin(round, network))
        if round == saved_after:
            state = selection.state()
            # Another process, which has measured nothing itself.
            selection = fallback((0.0, 0.0), 2.0)
            selection.load(state)
            assert {k: v.tolist() for k, v in selection.state().items()} == {k: v.tolist() for k, v in state.items()}
    assert selection.returned() == {
        "method": repr(gw.method("bf16")),
        "since_round": 2,
        "relative_error": 5.0,
        "rank": 1,
    }  # fmt: skip
    assert len([change for change in changes if change]) == 1


def test_fewer_ranks_judge_what_more_ranks_told_before_a_checkpoint() -> None:
    told = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [25.0, 1.0]], dtype=torch.float64)
    selection = fallback((0.0, 1.0), 2.0)
    selection.load({"fallback_told": told})
    assert selection.begin(2, Told(0.0)) is not None
    returned = selection.returned()
    assert returned is not None
    assert (returned["since_round"], returned["relative_error"], returned["rank"]) == (2, 5.0, 3)


def test_a_rank_that_is_gone_does_not_keep_a_checkpoint_from_being_saved() -> None:
    class Gone(Told):
        def gathering(self, values: Sequence[float], about: str) -> Callable[[], list[list[float]]]:
            def answer() -> list[list[float]]:
                raise gw.ExchangeError("rank 1 is gone")

            return answer

    selection = fallback((0.0, 1.0), 2.0)
    for round in range(2):
        selection.begin(round, Gone(25.0))
    assert "fallback_told" not in selection.state()


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("signsgd", {"fallback": "bf16", "fallback_limit": 2.0}, "gives a direction"),
        ("signum", {"fallback": "bf16", "fallback_limit": 2.0}, "gives a direction"),
        ("DIANA(momentum=0.9)", {"fallback": "bf16", "fallback_limit": 2.0}, "brings a momentum"),
        ("terngrad", {"fallback": "bf16"}, "relative error above 0"),
        ("terngrad", {"fallback": "bf16", "fallback_limit": 0}, "relative error above 0"),
        ("terngrad", {"fallback": "bf16", "fallback_limit": math.nan}, "relative error above 0"),
        ("terngrad", {"fallback_limit": 2.0}, "without fallback="),
        ("terngrad", {"fallback": "qsgd", "fallback_limit": 2.0}, "one of bf16, fp32"),
    ],
)
@pytest.mark.ranks
def test_what_cannot_be_is_refused(three_ranks: Ranks, method: str, options: dict[str, Any], told: str) -> None:
    assert all(told in sentence for sentence in three_ranks(refused, method, options))


def refused(method: str, options: dict[str, Any]) -> str:
    try:
        gw.Link({"w": torch.nn.Parameter(torch.zeros(NUMEL))}.items(), method, **options)
    except gw.GradwireError as error:
        return str(error)
    return "not refused"


def test_a_simulation_refuses_it() -> None:
    with pytest.raises(gw.IncompatibleError, match="leave fallback= to"):
        gw.SimulatedLink({"w": torch.ones(NUMEL)}, "terngrad", world_size=2, fallback="bf16", fallback_limit=2.0)


@pytest.mark.parametrize("method", [ONE_LEVEL, f"Auto(candidates=({ONE_LEVEL!r}, {CODED!r}))"])
@pytest.mark.ranks
def test_all_ranks_return_two_rounds_after_the_measurement_and_stay(three_ranks: Ranks, method: str) -> None:
    """Rank 1's gradient turns bad in round 50, is measured in round 100, told in 101, and left in round 102."""
    found = three_ranks(train, method, 50, 105)
    assert [rank["exact"] for rank in found] == [[*range(50), 102, 103, 104]] * 3
    first = found[0]["record"]
    assert all(rank["record"] == first for rank in found)
    assert (first["method"], first["since_round"], first["rank"]) == (repr(gw.method("bf16")), 102, 1)
    # Of the squares of gradients, 4096 on rank 1 and 1 on the others, a third.
    assert first["relative_error"] == pytest.approx(math.sqrt(63 * 3), rel=0.2)
    assert [len(rank["warnings"]) for rank in found] == [1, 0, 0]
    assert "relative error of" in found[0]["warnings"][0]
    assert all(rank["reloaded"] == first for rank in found)


@pytest.mark.ranks
def test_a_run_from_any_checkpoint_returns_when_one_that_never_stopped_does(three_ranks: Ranks) -> None:
    for ends in three_ranks(restart_everywhere, 97, 105):
        assert len(ends) == 1 + 105 - 97
        assert ends[0][0]["since_round"] == 102
        assert all(end == ends[0] for end in ends)


def restart_everywhere(first: int, rounds: int) -> list[tuple[dict[str, Any], list[float]]]:
    """Exchange to the end without a stop, then from a checkpoint after each round from ``first`` on."""
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))

    def link() -> gw.Link:
        return gw.Link({"w": parameter}.items(), ONE_LEVEL, fallback="bf16", fallback_limit=2.0)

    def exchange(used: gw.Link, until: int) -> None:
        while used.round < until:
            bad = used.round >= 50 and used.rank == 1
            parameter.grad = (CONSTANT if bad else ONE_HOT) * (1 + used.round)
            used.reduce_()

    def end(used: gw.Link) -> tuple[dict[str, Any], list[float]]:
        exchange(used, rounds)
        used.close()
        return used.record()["fallback"], parameter.grad.tolist()

    ends, states, whole = [], [], link()
    for round in range(first, rounds):
        exchange(whole, round)
        states.append(copy.deepcopy(whole.state_dict()))
    ends.append(end(whole))
    for state in states:
        fresh = link()
        fresh.load_state_dict(state)
        ends.append(end(fresh))
    return ends


@pytest.mark.ranks
def test_below_the_limit_nothing_changes(three_ranks: Ranks) -> None:
    for rank in three_ranks(train, ONE_LEVEL, 1 << 30, 104):
        assert (rank["exact"], rank["record"], rank["warnings"]) == (list(range(104)), None, [])


def train(method: str, bad_from: int, rounds: int) -> dict[str, Any]:
    """Exchange one-hot gradients, which are sent as they are, and on rank 1 a constant from a round on."""
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    said = LogTexts()
    logging.getLogger("gradwire").addHandler(said)

    def link() -> gw.Link:
        return gw.Link({"w": parameter}.items(), method, fallback="bf16", fallback_limit=2.0)

    used, exact = link(), []
    for round in range(rounds):
        bad = round >= bad_from
        parameter.grad = CONSTANT.clone() if bad and used.rank == 1 else ONE_HOT.clone()
        used.reduce_()
        mean = (2 * ONE_HOT + CONSTANT) / 3 if bad else ONE_HOT
        # What bf16 rounds off is 2^-9 of a value; what one level of the norm leaves is 64 or nothing.
        if torch.allclose(parameter.grad, mean, rtol=2**-6, atol=0):
            exact.append(round)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        gw.save(used, shared[0])
        fresh = link()
        gw.load(fresh, shared[0])
        torch.distributed.barrier()
    logging.getLogger("gradwire").removeHandler(said)
    found = {
        "exact": exact,
        "record": used.record()["fallback"],
        "reloaded": fresh.record()["fallback"],
        "warnings": [text for text in said.texts if "fallback" in text],
    }
    used.close()
    fresh.close()
    return found


@pytest.mark.ranks
def test_a_module_goes_on_by_the_fallback(three_ranks: Ranks) -> None:
    found = three_ranks(train_module, 4)
    assert [(r["since_round"], same) for r, same in found] == [(2, [False, False, True, True])] * 3


def train_module(rounds: int) -> tuple[dict[str, Any], list[bool]]:
    """Return what the link records, and in which steps the module's gradients were the mean that DDP alone gives."""
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    plain, module = DistributedDataParallel(copy.deepcopy(inner)), DistributedDataParallel(inner, bucket_cap_mb=0.01)
    link = gw.attach(module, "terngrad", fallback="fp32", fallback_limit=0.1)
    rank, same = link.rank, []
    for round in range(rounds):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * round + rank))
        for each in (plain, module):
            each.zero_grad()
            each(inputs).square().mean().backward()
        pairs = zip(plain.parameters(), module.parameters())
        same.append(all(torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-7) for p, q in pairs))
    record = link.record()["fallback"]
    link.close()
    return record, same


@pytest.mark.ranks
def test_what_a_method_remembered_is_dropped_with_it(three_ranks: Ranks) -> None:
    for before, after in three_ranks(remembers, 4):
        assert before == [("residual/w", True)]
        assert after == []


def remembers(rounds: int) -> tuple[list[tuple[str, bool]], list[str]]:
    """The state before and after a return, of a method that keeps a residual and strays further than the limit."""
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    link = gw.Link({"w": parameter}.items(), "ef_signsgd", fallback="fp32", fallback_limit=0.5)
    states = []
    for _ in range(rounds):
        parameter.grad = torch.arange(NUMEL, dtype=torch.float32)
        link.reduce_()
        own = link.state_dict()["rank"]
        states.append({key: value for key, value in own.items() if key != "fallback_measured"})
    link.close()
    return [(name, bool(value.any())) for name, value in states[0].items()], list(states[-1])


@pytest.mark.parametrize("method", ["terngrad", "fp16", "qsgd"])
@pytest.mark.ranks
def test_an_overflow_is_no_reason_to_return(three_ranks: Ranks, method: str) -> None:
    """The first round is measured, and the one in which a scaler starts with too large a scale."""
    for record, skipped in three_ranks(overflow, method):
        assert record is None
        assert skipped == (method != "fp16")


def overflow(method: str) -> tuple[dict[str, Any] | None, int]:
    module = torch.nn.Linear(64, 64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    parameters = module.named_parameters()
    link = gw.Link(parameters, method, grad_scaler=scaler, fallback="bf16", fallback_limit=50.0)
    for round in range(4):
        module.zero_grad()
        # Rank 1's first gradient overflows float32, and every one of fp16's sums does.
        factor = torch.inf if round == 0 and link.rank == 1 and method != "fp16" else 100.0
        scaler.scale(module(torch.ones(8, 64)).sum() * factor).backward()
        link.reduce_()
    found = link.record()["fallback"], link.skipped_rounds
    link.close()
    return found


@pytest.mark.parametrize("method", ["ef_signsgd", "diana"])
@pytest.mark.ranks
def test_a_rank_without_a_gradient_is_no_reason_to_return(three_ranks: Ranks, method: str) -> None:
    """It sends its residual, or its shift: nothing against nothing, but not much against the others' gradients."""
    assert three_ranks(left_alone, method) == [None] * 3


def left_alone(method: str) -> dict[str, Any] | None:
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    link = gw.Link([("w", parameter)], method, fallback="bf16", fallback_limit=5.0)
    for round in range(103):
        generator = torch.Generator().manual_seed(3 * round + link.rank)
        there = link.rank != 1 or round < 90
        parameter.grad = 100 * torch.randn(NUMEL, generator=generator) if there else torch.zeros(NUMEL)
        link.reduce_()
    found: dict[str, Any] | None = link.record()["fallback"]
    link.close()
    return found


@pytest.mark.ranks
def test_ranks_that_reach_the_exchange_at_different_places_of_backward_do_not_wait_for_each_other(
    three_ranks: Ranks,
) -> None:
    """Rank 0 brings its first bucket before a collective in backward, the others behind it."""
    assert three_ranks(uneven) == ["trained"] * 3


class Synchronised(torch.autograd.Function):
    """A step of backward in which all ranks meet."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(torch.zeros(1))
        return gradient


class Branches(torch.nn.Module):
    """Layers of which rank 0 alone uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = Synchronised.apply(self.first(x))
        return self.last(x) if both else x


def uneven() -> str:
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.01)
    link = gw.attach(ddp, "terngrad", fallback="bf16", fallback_limit=1e6)
    for _ in range(4):
        ddp(torch.ones(4, 64), rank == 0).sum().backward()
    link.close()
    return "trained"


@pytest.mark.ranks
def test_a_link_without_a_fallback_says_that_it_takes_up_a_method_again(three_ranks: Ranks) -> None:
    (sentence,), *others = three_ranks(taken_up_again)
    assert "left its method in round 2" in sentence
    assert others == [[], []]


def taken_up_again() -> list[str]:
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    said = LogTexts()
    fallen = gw.Link([("w", parameter)], "terngrad", fallback="fp32", fallback_limit=0.1)
    for _ in range(3):
        parameter.grad = torch.randn(NUMEL)
        fallen.reduce_()
    plain = gw.Link([("w", parameter)], "terngrad")
    logging.getLogger("gradwire").addHandler(said)
    plain.load_state_dict(fallen.state_dict())
    logging.getLogger("gradwire").removeHandler(said)
    fallen.close()
    plain.close()
    return said.texts


@pytest.mark.ranks
def test_diagnostics_tell_the_norm_of_the_residual(three_ranks: Ranks) -> None:
    for told, held, plain in three_ranks(residual_norms):
        assert told == pytest.approx(held)
        assert held > 0
        assert "residual_norm" not in plain


def residual_norms() -> tuple[float, float, dict[str, float]]:
    rows = []
    for method in ("ef_signsgd", "terngrad"):
        parameter = torch.nn.Parameter(torch.zeros(NUMEL))
        link = gw.Link({"w": parameter}.items(), method)
        parameter.grad = torch.arange(NUMEL, dtype=torch.float32) + link.rank
        link.reduce_()
        rows.append((link.diagnostics()["parameters"]["w"], link.state_dict()["rank"]))
        link.close()
    (row, state), (plain, _) = rows
    return row["residual_norm"], float(state["residual/w"].norm()), plain
