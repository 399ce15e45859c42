"""The rows of the step benchmark, from ranks that say what they are told to: every number by its definition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

import gradwire as gw
from gradwire.tools.bench.network_row import bytes_agree
from gradwire.tools.bench.rank import Rank
from gradwire.tools.bench.ranks import backend_of
from gradwire.tools.bench.step import Cell, StepGrid, describe
from gradwire.tools.bench.variants import follows_the_link
from gradwire.tools.lab import Impairments, Topology

NUMEL, HOSTS, NCCL = 1000, 3, "cpu:gloo,cuda:nccl"
TIMES_S = {"compute": [0.010, 0.020, 0.030], "ddp fp32": [0.080, 0.100, 0.120], "gradwire terngrad": [0.02, 0.04, 0.06]}
"""Of each rank's steps: three ranks, as different as can be."""


@dataclass
class FakeNetwork:
    """Hosts' interfaces; each step of an exchange adds what :class:`FakeRanks` says was moved."""

    moved: int = 0
    topology: Topology = field(default_factory=Topology)

    def describe(self) -> dict[str, str]:
        return {"emulator": "veth", "tcp_congestion_control": "cubic"}

    def retransmitted(self) -> list[int]:
        # In each step of an exchange every host sends one segment again.
        return [self.moved // 1000] * HOSTS

    def report(self) -> None:
        return None

    def group_counters(self) -> list[FakeCounter]:
        return []

    def counters(self) -> list[FakeCounter]:
        # The second host moves twice as much, the third three times.
        return [FakeCounter(self.moved * (host + 1)) for host in range(HOSTS)]


@dataclass
class FakeCounter:
    sent_payload_bytes: int

    def since(self, earlier: FakeCounter) -> FakeCounter:
        return FakeCounter(self.sent_payload_bytes - earlier.sent_payload_bytes)


class FakeRanks:
    """Answers as three ranks would; every rank's steps take :data:`TIMES_S`."""

    def __init__(self, network: FakeNetwork | None) -> None:
        self.network = network
        self.asked: list[tuple[str, str]] = []

    def ask(self, do: str, *, variant: str, count: int = 0, **_: Any) -> list[dict[str, Any]]:
        self.asked.append((do, variant))
        if do == "steps":
            if self.network and variant != "compute":
                self.network.moved += 1000 * count
            return [self._steps(variant, rank, count) for rank in range(HOSTS)]
        if do == "timeline":
            return [{"timeline": {"forward_s": 1.0}}] * HOSTS
        if do == "record":
            return [{"record": {"method": variant}}] * HOSTS
        return [{}] * HOSTS

    def _steps(self, variant: str, rank: int, count: int) -> dict[str, Any]:
        times = [TIMES_S[variant][rank]] * count
        # A rank of ours sends 2000, 2400 and 2800 bytes a step.
        counted = {
            "sent_bytes": (2000 + 400 * rank) * count,
            "encode_s": 0.001 * (rank + 1) * count,
            "wire_s": 0.002 * (rank + 1) * count,
            "decode_s": 0.003 * (rank + 1) * count,
        }
        ours = variant.startswith("gradwire")
        return {"times_s": times, "cpu_s": 0.5 * count, "counted": counted if ours else {}}


def measured(topology: Topology, network: FakeNetwork | None, compute: str = "real") -> dict[str, dict[str, Any]]:
    grid = StepGrid(models=["lenet"], topologies=[topology], variants=list(TIMES_S), budget_s=1.0, compute=compute)
    cell = Cell(grid, "lenet", topology, FakeRanks(network), network, NUMEL)  # type: ignore[arg-type]
    return {row["variant"]: row for row in cell.measure(list(TIMES_S))}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return measured(Topology(hosts=HOSTS, bandwidth=8e5), FakeNetwork())


def test_a_step_lasts_as_long_as_its_slowest_rank_alone_and_as_the_mean_where_ranks_wait(rows: Any) -> None:
    assert rows["compute"]["step_time_s"] == pytest.approx(0.030)
    assert rows["ddp fp32"]["step_time_s"] == pytest.approx(0.100)
    assert rows["gradwire terngrad"]["step_time_s"] == pytest.approx(0.040)
    assert all(row["compute_s"] == pytest.approx(0.030) for row in rows.values())


def test_a_speed_up_is_ddps_time_over_the_exchanges(rows: Any) -> None:
    assert rows["gradwire terngrad"]["speedup_over_ddp_fp32"] == pytest.approx(0.100 / 0.040)
    assert rows["ddp fp32"]["speedup_over_ddp_fp32"] == pytest.approx(1.0)
    assert rows["compute"]["speedup_over_ddp_fp32"] == pytest.approx(0.100 / 0.030)


def test_bytes_are_those_of_one_rank_in_one_step(rows: Any) -> None:
    # A ring all-reduce of 1000 floats among three ranks.
    assert rows["ddp fp32"]["sent_bytes_per_step"] == round(2 * 4000 * 2 / 3)
    assert rows["gradwire terngrad"]["sent_bytes_per_step"] == pytest.approx(2400)
    assert rows["compute"]["sent_bytes_per_step"] == 0
    assert rows["gradwire terngrad"]["interface_bytes_per_step"] == pytest.approx(2000)


def test_interface_and_library_are_compared(rows: Any) -> None:
    row = rows["gradwire terngrad"]
    assert row["interface_over_library"] == pytest.approx(2000 / 2400 - 1)
    assert row["bytes_agree"] is False


def test_segments_that_were_sent_again_may_be_counted_by_the_interface_alone() -> None:
    """Interfaces count 2000 bytes a host and step, of which at most 1448 are of a segment sent again."""
    assert bytes_agree(0.05, 1900.0, 0.0, 0)
    assert not bytes_agree(0.06, 1900.0, 0.0, 0)
    assert bytes_agree(0.05 + 1448 / 1900, 1900.0, 1.0, 0)
    assert not bytes_agree(0.06 + 1448 / 1900, 1900.0, 1.0, 0)
    # Gloo's own headers: at most a kilobyte for each other host, whatever a step sends.
    assert bytes_agree(0.05 + 3 * 1024 / 7655, 7655.0, 0.0, 3)
    assert not bytes_agree(0.06 + 3 * 1024 / 7655, 7655.0, 0.0, 3)
    assert not bytes_agree(0.06, 1e7, 0.0, 3)
    assert not bytes_agree(-0.06, 1900.0, 1.0, 3)


def test_a_row_says_what_its_network_is(rows: Any) -> None:
    assert all((row["emulator"], row["tcp_congestion_control"]) == ("veth", "cubic") for row in rows.values())
    assert "segments_again_per_step" not in rows["ddp fp32"]
    lossy = Topology(hosts=HOSTS, bandwidth=8e5, impairments=Impairments(loss=0.01))
    found = measured(lossy, FakeNetwork(topology=lossy))
    assert found["ddp fp32"]["segments_again_per_step"] == pytest.approx(1.0)
    assert found["compute"]["segments_again_per_step"] == 0
    assert found["ddp fp32"]["lab"] == "hosts=3,bandwidth=800kbit,loss=1%"


def test_the_floor_is_the_longer_of_computing_and_bits_over_bits_a_second(rows: Any) -> None:
    """At 800 kbit/s, 2400 bytes take 24 ms and 5333 bytes 53 ms; computing takes 30."""
    assert rows["compute"]["floor_s"] == pytest.approx(0.030)
    assert rows["gradwire terngrad"]["floor_s"] == pytest.approx(0.030)
    assert rows["ddp fp32"]["floor_s"] == pytest.approx(8 * 5333 / 8e5)
    assert rows["ddp fp32"]["ratio_to_floor"] == pytest.approx(0.100 / (8 * 5333 / 8e5))


def test_without_a_limit_the_floor_is_computing() -> None:
    found = measured(Topology(hosts=HOSTS), None)
    assert all(row["floor_s"] == pytest.approx(0.030) for row in found.values())
    assert found["ddp fp32"]["interface_bytes_per_step"] is None
    assert found["ddp fp32"]["bytes_agree"] is None


def test_work_is_told_for_one_step(rows: Any) -> None:
    row = rows["gradwire terngrad"]
    assert row["cpu_s_per_step"] == pytest.approx(1.5), "of all ranks together"
    # Stages are means over ranks.
    stages = [row[f"{stage}_s_per_step"] for stage in ("encode", "wire", "decode")]
    assert stages == pytest.approx([0.002, 0.004, 0.006])


def test_a_timeline_and_a_record_stand_where_they_belong(rows: Any) -> None:
    assert rows["compute"]["timeline"] == {"forward_s": 1.0}
    assert "timeline" not in rows["ddp fp32"]
    assert rows["gradwire terngrad"]["record"] == {"method": "gradwire terngrad"}


def test_a_rank_counts_from_before_the_steps_to_after_them() -> None:
    class Counting:
        def __init__(self) -> None:
            self.total = 500

        def counts(self) -> dict[str, int]:
            return {"sent_bytes": self.total}

        def steps(self, count: int) -> list[float]:
            self.total += 10 * count
            return [0.1] * count

    rank = Rank.__new__(Rank)
    rank.variants = {"x": Counting()}  # type: ignore[dict-item]
    answer = rank.steps("x", 3)
    assert answer["counted"] == {"sent_bytes": 30}
    assert answer["times_s"] == [0.1] * 3


def test_rows_of_gpus_name_them_and_hold_no_timeline_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    found = measured(Topology(hosts=HOSTS), None, "cuda")
    assert {(row["device"], row["compute"]) for row in found.values()} == {("a GPU", "cuda")}
    assert found["compute"]["timeline"] is None
    assert all("  on GPUs  " in describe(row) for row in found.values())


@pytest.mark.parametrize(("gpus", "network", "expected"), [(3, None, NCCL), (2, None, "gloo"), (3, object(), "gloo")])
def test_nccl_serves_where_each_rank_has_a_gpu_and_no_link_is_emulated(
    monkeypatch: pytest.MonkeyPatch, gpus: int, network: Any, expected: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert backend_of("cuda", 3, network) == expected


def test_gpus_are_refused_where_there_are_none() -> None:
    with pytest.raises(gw.BackendError, match=r"--compute cuda: PyTorch .* finds no CUDA device"):
        StepGrid(models=["lenet"], topologies=[Topology(hosts=2)], compute="cuda")


def test_on_links_with_a_delay_a_turn_begins_with_steps_that_are_not_counted() -> None:
    def cell(topology: Topology) -> tuple[Cell, FakeRanks]:
        grid = StepGrid(models=["lenet"], topologies=[topology], variants=list(TIMES_S), budget_s=1.0)
        ranks = FakeRanks(None)
        return Cell(grid, "lenet", topology, ranks, None, NUMEL), ranks  # type: ignore[arg-type]

    (near, asked_near), (far, asked_far) = (
        cell(Topology(hosts=HOSTS, impairments=Impairments(delay_s=delay_s))) for delay_s in (0.0, 0.02)
    )
    rows = [one.measure(list(TIMES_S)) for one in (near, far)]
    steps = [sum(do == "steps" for do, _ in ranks.asked) for ranks in (asked_near, asked_far)]
    # Five turns of three variants.
    assert steps[1] - steps[0] == 15
    assert [row["samples"] for row in rows[0]] == [row["samples"] for row in rows[1]]


def test_where_frames_are_lost_steps_are_taken_until_windows_have_settled() -> None:
    def asked(loss: float, congestion: str) -> list[str]:
        impairments = Impairments(delay_s=0.02, loss=loss)
        topology = Topology(hosts=HOSTS, impairments=impairments, congestion=congestion)
        grid = StepGrid(models=["lenet"], topologies=[topology], variants=list(TIMES_S), cell_budget_s=10.0)
        ranks = FakeRanks(FakeNetwork())

        def clock() -> float:
            """Return as many seconds as steps were taken."""
            return float(sum(do == "steps" for do, _ in ranks.asked))

        Cell(grid, "lenet", topology, ranks, ranks.network, NUMEL, clock=clock).measure(list(TIMES_S))  # type: ignore[arg-type]
        return [variant for do, variant in ranks.asked if do == "steps"]

    usual = Counter(asked(0.0, "cubic"))
    assert Counter(asked(0.001, "bbr")) == usual
    # Of 10.3 seconds each takes a whole number; the budget of the cell is for what comes after them.
    more = {"ddp fp32": 11, "gradwire terngrad": 11}
    assert Counter(asked(0.001, "cubic")) == usual + Counter(more)


def test_what_measures_the_network_when_it_is_built_is_built_in_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "gradwire CAT(fixed_bytes=None)"
    monkeypatch.setitem(TIMES_S, spec, TIMES_S["gradwire terngrad"])
    topology = Topology(hosts=HOSTS)
    grid = StepGrid(models=["lenet"], topologies=[topology], variants=list(TIMES_S), budget_s=1.0)
    ranks = FakeRanks(None)
    Cell(grid, "lenet", topology, ranks, None, NUMEL).measure(list(TIMES_S))  # type: ignore[arg-type]
    assert [variant for do, variant in ranks.asked if do == "build"] == [spec]
    assert [follows_the_link(f"gradwire {name}") for name in ("terngrad", "Auto()")] == [(False, False), (True, False)]
