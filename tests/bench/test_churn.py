"""The driver of trials whose replicas come and go, ``benchmarks/trials/churn.py``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import Connection

import pytest

from benchmarks.lib.results import ROOT
from benchmarks.pages import trials_page
from benchmarks.trials import churn, membership, membership_peers
from benchmarks.trials.churn import KINDS, Fault, Phase, Program, Round, Seat, Told, Trial, follow, network, tell

pytestmark = pytest.mark.repository


def test_a_seed_and_a_trace_give_every_program_the_same_faults() -> None:
    ours = churn.schedule("terngrad", 0, 5.5, 30.0, 8)
    assert ours == churn.schedule("terngrad", 0, 5.5, 30.0, 8)
    assert [fault.at_s for fault in ours] == [30.0 * (i + 1) for i in range(11)]
    assert [fault.kind for fault in ours] == [KINDS[i % 5] for i in range(11)]
    assert all(0 <= fault.place < 8 for fault in ours)
    assert ours != churn.schedule("terngrad", 1, 5.5, 30.0, 8)
    assert ours != churn.schedule("PowerSGD(matrix_rank=2)", 0, 5.5, 30.0, 8)
    assert churn.schedule("terngrad", 0, 30.0, 30.0, 8)[:11] == ours, "longer trials go on where shorter ones end"


def test_each_way_of_a_peer_has_the_faults_of_a_method_of_ours() -> None:
    for peer in membership_peers.PEERS.values():
        assert {way.trace for way in peer.ways.values()} <= set(membership.METHODS)
        assert set(peer.program.kinds) <= set(KINDS)


def test_a_rate_is_counted_from_round_to_round() -> None:
    rounds = [Round(float(at), 8.0 if at < 10 else 4.0) for at in range(20)]
    assert churn.rate(rounds, 4.5, 19.5) == (1.0, pytest.approx((5 * 8 + 10 * 4) / 15))
    assert churn.rate(rounds, 4.5, 9.5) == (1.0, 8.0), "what comes later does not count"
    assert churn.rate(rounds[:5], 1.0, 4.0) == (1.0, 8.0)
    assert churn.rate([], 0.0, 10.0) == (0.0, 0.0)
    halted = churn.rate(rounds, 9.0, 19.0 + 2 * churn.HANG_S)
    assert halted[0] == pytest.approx(10 / (10 + 2 * churn.HANG_S)), "a halt at the end counts"


def imagined(rounds: dict[int, Round], **more: object) -> types.SimpleNamespace:
    """Return what :func:`churn.judged` reads of a trial."""
    usual = {"rejoined": [1.0, 3.0], "away_s": 16.0, "ended_by_itself": 0, "compared": 3, "spread": 0.0}
    usual["fell_back"] = 0
    digests = {(0, 1): {1}, (0, 2): {1, 2}, (0, 25): {5}, (0, 60): {1, 2}}
    return types.SimpleNamespace(
        counted=rounds, digests=digests, met={1: 0.5, 2: 1.5, 3: 0.7}, losses=[(0.0, 2.0), (1.0, 4.0)], **usual | more
    )


def test_figures_of_a_trial() -> None:
    given = argparse.Namespace(replicas=8, every_s=10.0)
    # A round a second of 8 replicas; one is lost at 20 s, which costs 4 s, and is in again at 40 s.
    at = [*range(21), *range(25, 101), 110, 190]
    rounds = {i: Round(float(s), 7.0 if 20 < s < 40 else 8.0) for i, s in enumerate(at)}
    phase = Phase([(1.1, 9.0), (0.9, 7.0)], 0.0, 100.0, [(20.0, "kill"), (50.0, "cut")])
    row = churn.judged(imagined(rounds), phase, given)
    assert row["faults"] == 2
    assert (row["faults_kill"], row["faults_cut"], row["faults_stop"]) == (1, 1, 0)
    assert row["rounds_kept"] == 0.96
    assert row["undisturbed_phases"] == [1.1, 0.9]
    assert row["met_s_median"] == 0.7
    assert row["throughput_kept"] == pytest.approx((96 * 8 - 15) / 800, abs=1e-4)
    assert row["away"] == 0.02
    assert row["kept_of_present"] == pytest.approx(row["throughput_kept"] / 0.98, abs=1e-4)
    assert (row["longest_pause_s"], row["lost_s_kill"], row["lost_s_cut"], row["lost_s_most"]) == (5.0, 4.0, 0.0, 4.0)
    assert (row["rejoin_s_median"], row["rejoin_s_longest"]) == (2.0, 3.0)
    assert (row["digests_compared"], row["rounds_with_differing_digests"]) == (3, 2)
    assert row["differing_after"] == {"": 1, "cut": 1}
    assert (row["hangs"], row["loss_first"]) == (0, 3.0)


def test_a_halt_is_a_hang_and_lowers_the_throughput() -> None:
    given = argparse.Namespace(replicas=8, every_s=10.0)
    rounds = {i: Round(float(i), 8.0) for i in range(31)}
    trial = imagined(rounds)
    del trial.digests[0, 60]
    row = churn.judged(trial, Phase([(1.0, 8.0)], 0.0, 120.0), given)
    assert (row["hangs"], row["throughput_kept"], row["longest_pause_s"]) == (1, 0.25, 90.0)


CUTTING = """
import os, socket
from benchmarks.trials.churn import cut_off

six = socket.has_dualstack_ipv6()
family = socket.AF_INET6 if six else socket.AF_INET
with socket.create_server(("::" if six else "127.0.0.1", 0), family=family, dualstack_ipv6=six) as server:
    place = ("127.0.0.1", server.getsockname()[1])
    inner = socket.create_connection(place), server.accept()[0]
    if not os.fork():
        end = socket.create_connection(place)
        for kept in (server, *inner):
            kept.close()
        os._exit(end.recv(1) != b"")
    other = server.accept()[0]
    cut_off()
    inner[0].sendall(b"x")
    assert inner[1].recv(1) == b"x"
    assert other.recv(1) == b""
    assert os.wait()[1] == 0
"""


def test_cutting_off_breaks_connections_with_other_processes_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CUTTING], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_shows_peers_beside_ours_and_names_what_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(replicas=8, every_s=10.0)
    rounds = {i: Round(float(i), 8.0) for i in range(101)}
    figures = churn.judged(imagined(rounds), Phase([(1.0, 8.0)], 0.0, 100.0), given)
    row = {"method": "terngrad", "lab": "", "silence_s": 2.0, "pace": 0.9, "steps": 8, **figures}
    machine = {"cpu": "a", "cores": 2, "versions": {"gradwire": "9"}, "date_utc": "2026-01-01T"}
    ours = {**machine, "rows": [row, {**row, "method": "elsewhere", "lab": "delay=20ms"}, {**row, "silence_s": 1.0}]}
    theirs = {
        **machine,
        "rows": [{**row, "method": "DDP", "system": "torchft 1", "settings": {"manager_timeout_s": 2}}],
    }
    found = {"trials/trials_membership": ours, "trials/trials_membership_peers": theirs}
    monkeypatch.setattr(trials_page, "result", found.get)
    lines = trials_page._peers()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert len({len(cells) for cells in table}) == 1
    assert [cells[:2] for cells in table[1:3]] == [["gradwire 9", "`terngrad`"], ["torchft 1", "`DDP`"]]
    assert table[1][4] == "100.0"
    assert len(table) == 4
    assert "as published" in table[3][0]
    del found["trials/trials_membership_peers"]
    assert trials_page._peers() == []


@pytest.mark.parametrize(
    ("dated", "said"),
    [
        ((), "Not all trials ran with the same version."),
        ((0,), "Those without a date are older"),
        ((0, 1), "Each trial ran with the version of its *date*.\n"),
    ],
)
def test_the_page_says_when_each_trial_ran_and_which_have_no_emulated_network(
    dated: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = trials_page.result("trials/trials_membership")
    assert known is not None
    rows = [{k: v for k, v in row.items() if k != "date_utc"} for row in known["rows"][:2]]
    rows[0] |= {"method": "fp32", "lab": ""}
    rows[1] |= {"method": "terngrad", "lab": "delay=20ms"}
    for which in dated:
        rows[which]["date_utc"] = "2026-11-27T10:00:00+00:00"
    monkeypatch.setattr(trials_page, "result", {"trials/trials_membership": {**known, "rows": rows}}.get)
    text, *rest = trials_page._members()
    assert said in text
    assert "no trial with an emulated network of `fp32`." in text
    table = [line.strip("| ").split(" | ") for line in rest if line.startswith("| ")]
    assert len({len(cells) for cells in table}) == 1
    assert [cells[-1] == "2026-11-27" for cells in table[1:]] == [which in dated for which in (0, 1)]


def test_a_training_that_begins_anew_is_not_compared_with_the_one_before() -> None:
    trial = object.__new__(Trial)
    trial.counted, trial.digests, trial._sketches, trial.told, trial.losses = {}, {}, {}, {}, []
    trial.started, trial.compared, trial.spread, trial.fell_back = {}, 0, 0.0, 0
    trial._begun = trial._latest = 0
    trial._resumed = {"replica-1"}
    for turn, most in enumerate((30, 40)):
        for number in range(1, most + 1):
            for _ in range(2):
                trial._hear("replica-0", Told(number, 100 * turn + number, (1.0,), 2, 1.0, {}))
    assert trial.compared == 70
    assert all(len(found) == 1 for found in trial.digests.values())
    assert len(trial.counted) == 40, "a round whose number has been is not counted again"
    assert trial.fell_back == 29
    trial._hear("replica-1", Told(5, 0, (1.0,), 2, 1.0, {}))
    assert (trial.fell_back, trial._latest) == (29, 40), "it tells what it had when it was stopped"


def serve_nothing(namespace: str | None, listen: str, pipe: Connection) -> None:
    pipe.send(listen)
    threading.Event().wait()


def count_rounds(seat: Seat, pipe: Connection, orders: Connection) -> None:
    """Take rounds without anybody: the number of a round is the time."""
    left, other = threading.Event(), threading.Event()
    follow(orders, {"leave": left.set, "corrupt": other.set})
    module = network(4)
    for p in module.parameters():
        p.data.fill_(1.0)
    while not left.is_set():
        time.sleep(0.05)
        if other.is_set():
            module[0].weight.data.fill_(2.0)
        tell(pipe, int(time.monotonic() * 10), module, 2, 1.0, {"place": seat.place})


def test_what_ends_is_started_anew_and_what_differs_is_noticed() -> None:
    given = argparse.Namespace(replicas=2, width=4)
    trial = Trial(Program(serve_nothing, count_rounds, ("kill", "stop", "leave", "corrupt")), "nothing", given)
    try:
        while trial.started:
            trial.read(0.1)
        assert not any(len(found) > 1 for found in trial.digests.values())
        assert not trial.fault(Fault(0.0, "cut", 0), 0.0), "its program cannot be cut off"
        for kind in ("kill", "leave"):
            before = len(trial.rejoined)
            assert trial.fault(Fault(0.0, kind, 1), 0.0)
            while len(trial.rejoined) == before:
                trial.read(0.1)
        assert trial.ended_by_itself == 0
        assert trial.away_s > 0
        assert trial.fault(Fault(0.0, "stop", 0), 0.5)
        assert trial.fault(Fault(0.0, "corrupt", 0), 0.0), "the next that takes part has the fault"
        while len(trial.rejoined) < 5 or not any(len(found) > 1 for found in trial.digests.values()):
            trial.read(0.1)
        assert trial.spread > 0
    finally:
        trial.close()
