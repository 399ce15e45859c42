"""``Coded(coder="auto")``: one coder for all ranks, by the slowest rank's times, kept in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.planning import Options, Planner, measure_coders, planner
from gradwire.kernels import CODERS
from gradwire.link.selection.link_cost import CoderSelection
from ranks import fresh_ranks

SIZE = 5000
SPEC = repr(gw.Coded())

Times = dict[str, float]


def like() -> dict[str, torch.Tensor]:
    return {"w": torch.empty(SIZE)}


def selection(spec: str = "coded") -> tuple[CoderSelection, Planner]:
    coders = CoderSelection()
    return coders, coders.watch(Planner(gw.method(spec), like(), 3, Options()))


def encoded(text: str | bytes) -> torch.Tensor:
    return torch.tensor(list(text if isinstance(text, bytes) else text.encode()), dtype=torch.uint8)


def simulated(workers: int = 2, spec: str = "coded") -> gw.SimulatedLink:
    return gw.SimulatedLink(like().items(), spec, workers)


def gradients(workers: int = 2) -> torch.Tensor:
    return torch.randn(workers, SIZE, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("by_rank", "chosen"),
    [
        ([{"rans": 1.0, "huffman": 2.0}], "rans"),
        ([{"rans": 2.0, "huffman": 1.0}], "huffman"),
        # Two ranks of three are faster with rANS: all wait for the third.
        ([{"rans": 1.0, "huffman": 2.0}] * 2 + [{"rans": 9.0, "huffman": 2.0}], "huffman"),
        ([{"rans": 3.0, "huffman": 2.0}, {"rans": 1.0, "huffman": 3.0}], "rans"),  # equal: the first that is listed
    ],
)
def test_the_slowest_rank_decides(by_rank: list[Times], chosen: str) -> None:
    coders, one = selection()
    coders.agree([{SPEC: times} for times in by_rank])
    assert one.coder == chosen
    found = coders.record(one)
    assert found is not None
    slowest = {name: max(times[name] for times in by_rank) for name in CODERS}
    assert (found["chosen"], found["encode_decode_s"]) == (chosen, slowest)
    assert list(found["variants"]) == ["check", "encode", "decode"]


def test_coders_are_timed_on_the_digits_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def timed(coders: dict[str, Any], symbols: torch.Tensor, turns: int) -> Times:
        seen[spec] = symbols
        return dict.fromkeys(coders, 1.0)

    monkeypatch.setattr("gradwire.exchange.planning.planner.time_coders", timed)
    phases = ("LGC()", "RankCurve()", "PowerSGD(values=QSGDinf(levels=7, block_size=256))")
    for spec in ("TernGrad()", "QSGD()", "Natural()", "ErrorFeedback()", "ALQ()", "DIANA()", *phases):
        measure_coders.__wrapped__(gw.Coded(compressor=gw.method(spec)), "cpu")  # type: ignore[arg-type]
    numel = 1 << 18
    assert numel / 5 <= len(seen["TernGrad()"]) < numel / 5 + 80
    assert len(seen["QSGD()"]) >= numel / 2
    assert len(seen["Natural()"]) >= numel
    assert int(seen["TernGrad()"].max()) < 243
    assert all(len(symbols.unique()) > 1 for symbols in seen.values())


def test_every_coder_is_really_timed() -> None:
    for backend in ("auto", "cpu-plain", "reference"):
        times = measure_coders(gw.Coded(), backend)
        assert list(times) == list(CODERS)
        assert all(0 < seconds < 10 for seconds in times.values())


@pytest.mark.parametrize(
    "inner", ["PowerSGD(matrix_rank=300, values=QSGDinf(levels=7, block_size=256))", "Threshold(threshold=100.0)"]
)
def test_if_no_digit_of_the_sample_is_coded_all_ranks_take_the_first_coder(inner: str) -> None:
    """Factors of rank 300 have more numbers than a matrix of 512 by 512, and no normal number is above 100."""
    spec = f"Coded({inner})"
    assert measure_coders(gw.method(spec), "auto") == dict.fromkeys(CODERS, 0.0)
    assert simulated(spec=spec).record()["coder"]["chosen"] == CODERS[0]


def test_a_method_that_codes_nothing_at_its_end_is_timed_in_its_first_round() -> None:
    spec = "Coded(Scheduled(Threshold(threshold=100.0), field='threshold', start=1.0))"
    assert all(seconds > 0 for seconds in measure_coders(gw.method(spec), "auto").values())


def test_a_method_with_an_open_coder_stays_what_the_user_wrote() -> None:
    link = simulated()
    assert repr(link.method) == f"Coded(compressor={gw.TernGrad()!r}, coder='auto')"
    assert gw.method(repr(link.method)) == link.method == gw.Coded()
    record = link.record()
    assert record["method"] == repr(link.method)
    assert record["coder"]["chosen"] in CODERS
    assert json.loads(json.dumps(record)) == record
    assert simulated(spec="Coded(coder='huffman')").record()["coder"]["reason"] == "named by the method"
    assert simulated(spec="terngrad").record()["coder"] is None


@pytest.mark.parametrize("inner", ["TernGrad()", "QSGD()", "ALQ()", "ErrorFeedback()", "DIANA()"])
def test_the_outcome_does_not_depend_on_the_coder(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    means, sent = [], set()
    for fast in (*CODERS, None):
        spec = f"Coded(compressor={inner}, coder='auto')" if fast else inner
        if fast:
            monkeypatch.setattr(planner, "measure_coders", lambda *_, fast=fast: {n: float(n != fast) for n in CODERS})
        link = simulated(spec=spec)
        assert not fast or link.record()["coder"]["chosen"] == fast
        means.append([link.reduce_(gradients()).clone() for _ in range(2)])
        sent.add(link.traffic().sent_bytes)
    assert all(torch.equal(a, b) for other in means[1:] for a, b in zip(means[0], other))
    assert len(sent) == 3


def test_sizes_without_data_do_not_depend_on_the_coder() -> None:
    sizes = set()
    for coder in ("auto", *CODERS):
        one = Planner(gw.Coded(coder=coder), like(), 3, Options())
        sizes.add(one.sent_bytes(["w"]))
        one.check()
    assert len(sizes) == 1
    assert one.coder == "huffman"
    undecided = Planner(gw.Coded(), like(), 3, Options())
    undecided.check()
    assert {undecided.sent_bytes(["w"])} == sizes
    assert undecided.coder is None


def test_only_a_coder_that_is_open_can_be_settled() -> None:
    with pytest.raises(HyperparameterError, match="no open coder 'zip'"):
        Planner(gw.Coded(), like(), 2, Options()).settle("zip")
    with pytest.raises(HyperparameterError, match="no open coder 'huffman'"):
        Planner(gw.Coded(coder="rans"), like(), 2, Options()).settle("huffman")


def test_a_checkpoint_keeps_the_coder_at_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"rans": 2.0, "huffman": 1.0}
    monkeypatch.setattr(planner, "measure_coders", lambda *_: slow)
    first = simulated()
    first.reduce_(gradients())
    state = first.state_dict()
    monkeypatch.setattr(planner, "measure_coders", lambda *_: {"rans": 1.0, "huffman": 2.0})
    for workers in (2, 5):
        link = simulated(workers)
        link.reduce_(gradients(workers))
        assert link.record()["coder"]["chosen"] == "rans"
        link.load_state_dict({**state, **{f"rank {r}": {} for r in range(workers)}})
        found = link.record()["coder"]
        assert (found["chosen"], found["reason"]) == ("huffman", "taken from a checkpoint")
        link.round = 0
        before = link.traffic().sent_bytes
        link.reduce_(gradients(workers))
        named = simulated(workers, "Coded(coder='huffman')")
        named.reduce_(gradients(workers))
        assert link.traffic().sent_bytes - before == named.traffic().sent_bytes


def test_states_without_a_coder_and_of_other_methods_are_taken() -> None:
    link = simulated()
    chosen = link.record()["coder"]
    old = link.state_dict()
    del old["global"]["coder"]
    link.load_state_dict(old)
    assert link.record()["coder"] == chosen
    link.load_state_dict(simulated(spec="Coded(QSGD())").state_dict())
    assert link.record()["coder"] == chosen
    plain = simulated(spec="terngrad")
    plain.load_state_dict(link.state_dict())
    assert "coder" not in plain.state_dict()["global"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (encoded(json.dumps({SPEC: "zip"})), "is 'zip': this version has rans, huffman"),
        (encoded(json.dumps({SPEC: 1})), "is no choice of coders"),
        (encoded(json.dumps([SPEC])), "is no choice of coders"),
        (encoded(b"\xff\xfe"), "is no choice of coders"),
        (encoded("{"), "is no choice of coders"),
        (torch.tensor(1), "is no choice of coders"),
        (torch.zeros(3), "is no choice of coders"),
        ("rans", "'coder' in 'global' is a str, not a dense tensor"),
    ],
)
def test_a_choice_that_is_none_is_refused_and_changes_nothing(value: Any, sentence: str) -> None:
    link = simulated()
    before, state = link.record(), link.state_dict()
    state["global"]["coder"] = value
    state["global"]["round"] = torch.tensor(5)
    with pytest.raises(IncompatibleError, match=sentence):
        link.load_state_dict(state)
    assert link.record() == before
    assert link.round == 0


# -------------------------------------------------------------------------------- on real ranks


def times_by_rank(monkeypatch: pytest.MonkeyPatch, rank: int, rans: list[float], huffman: list[float]) -> None:
    monkeypatch.setattr(planner, "measure_coders", lambda *_: {"rans": rans[rank], "huffman": huffman[rank]})


def exchanged(link: gw.Link, parameter: torch.nn.Parameter, rounds: int) -> list[torch.Tensor]:
    found = []
    for _ in range(rounds):
        rows = gradients(link.world_size) * (1 + link.round)
        parameter.grad = rows[link.rank].clone()
        link.reduce_()
        found.append(parameter.grad.clone())
    return found


def agree_on_real_ranks(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Ranks 0 and 1 would take rANS: rank 2 is so much slower with it that all take Huffman.
        times_by_rank(monkeypatch, dist.get_rank(), [1.0, 1.5, 9.0], [2.0, 2.5, 3.0])
        parameter = torch.nn.Parameter(torch.zeros(SIZE))
        link = gw.Link([("w", parameter)], "coded")
        found["first"] = link.record()["coder"]
        found["means"] = exchanged(link, parameter, 2)
        found["sent"] = link.traffic().sent_bytes
        gw.save(link, folder)
        link.close()
        times_by_rank(monkeypatch, dist.get_rank(), [1.0] * 3, [2.0] * 3)
        link = gw.Link([("w", parameter)], "coded")
        found["again"] = link.record()["coder"]["chosen"]
        gw.load(link, folder)
        found["resumed"] = link.record()["coder"]
        found["means"] += exchanged(link, parameter, 1)
        link.close()
    return found


def resume_with_two(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as monkeypatch:
        times_by_rank(monkeypatch, dist.get_rank(), [1.0] * 2, [2.0] * 2)
        parameter = torch.nn.Parameter(torch.zeros(SIZE))
        link = gw.Link([("w", parameter)], "coded")
        gw.load(link, folder)
        found = {"coder": link.record()["coder"], "means": exchanged(link, parameter, 1), "round": link.round}
        link.close()
    return found


@pytest.mark.ranks
def test_ranks_that_disagree_take_one_coder_and_keep_it(three_ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    found = three_ranks(agree_on_real_ranks, folder)
    for mine in found:
        first = mine["first"]
        assert (first["chosen"], first["encode_decode_s"]) == ("huffman", {"rans": 9.0, "huffman": 3.0})
        assert "slowest of 3 ranks" in first["reason"]
        assert mine["again"] == "rans"
        assert (mine["resumed"]["chosen"], mine["resumed"]["reason"]) == ("huffman", "taken from a checkpoint")
    simulation = simulated(3, "Coded(coder='huffman')")
    for round in range(3):
        mean = simulation.reduce_(gradients(3) * (1 + round)).clone()
        assert all(torch.equal(mine["means"][round], mean) for mine in found)
        if round == 1:
            assert found[0]["sent"] == simulation.traffic().sent_bytes
    with fresh_ranks(2) as two_ranks:
        for mine in two_ranks(resume_with_two, folder):
            assert (mine["coder"]["chosen"], mine["round"]) == ("huffman", 3)


def auto_with_coded() -> list[dict[str, Any]]:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    link = gw.Link([("w", parameter)], gw.Auto(candidates=("coded", "terngrad"), turns=1, steps=1))
    records = []
    for _ in range(28):
        exchanged(link, parameter, 1)
        records.append(link.record())
    coder = json.loads(bytes(link.state_dict()["global"]["coder"].tolist()))
    link.close()
    return [{"chosen": r["choice"]["chosen"], "coder": r["coder"], "state": coder} for r in records]


@pytest.mark.ranks
def test_auto_tries_coded_by_the_coder_that_ranks_agreed_on(three_ranks: Any) -> None:
    mine, other, _ = three_ranks(auto_with_coded)
    assert mine[-1]["chosen"] in ("coded", "terngrad")
    for row, theirs in zip(mine, other):
        assert (row["chosen"], row["state"]) == (theirs["chosen"], theirs["state"])
        coded = row["coder"]
        assert (coded and coded["chosen"]) == (theirs["coder"] and theirs["coder"]["chosen"])
        assert list(row["state"]) == [SPEC]
        assert coded is None or coded["chosen"] == row["state"][SPEC]
    assert any(row["coder"] for row in mine) or mine[-1]["chosen"] == "terngrad"
