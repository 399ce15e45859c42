"""The closed form: hand-computed steps, limits, directions of change, refusals, and the published projection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from benchmarks.claims import paper_projection
from benchmarks.lib.cluster import Cluster, Fabric, Message, Pattern, Workload, dense, step, sweep, ternary
from gradwire.errors import HyperparameterError

pytestmark = pytest.mark.repository

PATTERNS = get_args(Pattern)
INFINITE = Fabric(bandwidth_bytes_per_s=math.inf)
SLOW = Fabric(bandwidth_bytes_per_s=100.0)
FAST = Fabric(bandwidth_bytes_per_s=1000.0)
WORK = Workload(name="net", parameters=1000, batch=8, compute_s=2.0)
BOTH = Message(up_bytes=600.0, down_bytes=300.0)


def cluster(hosts: int, gpus: int = 4, **changed: Any) -> Cluster:
    given: dict[str, Any] = {"inside": FAST, "between": SLOW} | changed
    return Cluster(hosts=hosts, gpus_per_host=gpus, **given)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_infinite_links_leave_the_computation(pattern: Pattern) -> None:
    found = step(WORK, cluster(16, inside=INFINITE, between=INFINITE), BOTH, pattern)
    assert found.step_s == 2.0
    assert found.bottleneck == "compute"
    assert found.images_per_s == 64 * 8 / 2.0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_gpu_exchanges_nothing(pattern: Pattern) -> None:
    assert step(WORK, cluster(1, 1, staging_bytes_per_s=1.0, chunk_bytes=50.0), BOTH, pattern).step_s == 2.0


@pytest.mark.parametrize(
    ("pattern", "hosts", "gpus", "inside_s", "between_s"),
    [
        # 900 bytes both ways; 1000 B/s inside, 100 B/s between.
        ("server", 2, 4, 0.9, 9.0),
        ("server", 9, 4, 0.9, 72.0),
        ("tree", 1, 4, 0.9, 0.0),
        ("tree", 2, 4, 0.9, 9.0),
        ("tree", 3, 4, 0.9, 18.0),
        ("tree", 128, 1, 0.0, 18.0),
        ("ring", 1, 4, 0.675, 0.0),
        ("ring", 2, 4, 0.0, 7.875),
        ("ring", 4, 1, 0.0, 6.75),
        ("sharded", 1, 4, 0.675, 0.0),
        ("sharded", 2, 4, 0.3375, 18.0),
        ("sharded", 4, 1, 0.0, 6.75),
    ],
)
def test_bytes_over_bandwidth_by_hand(
    pattern: Pattern, hosts: int, gpus: int, inside_s: float, between_s: float
) -> None:
    found = step(replace(WORK, compute_s=0.0), cluster(hosts, gpus), BOTH, pattern)
    assert found.inside_s == pytest.approx(inside_s)
    assert found.between_s == pytest.approx(between_s)
    assert found.step_s == pytest.approx(inside_s + between_s)
    assert found.images_per_s == pytest.approx(hosts * gpus * 8 / (inside_s + between_s))


def test_latencies_and_chunks_by_hand() -> None:
    far, near = replace(SLOW, latency_s=0.5), replace(FAST, latency_s=0.01)
    there = cluster(8, between=far, inside=near, chunk_bytes=10.0)
    up = Message(up_bytes=600.0, down_bytes=0.0)
    tree = step(WORK, there, up, "tree")
    assert tree.between_s == pytest.approx(12.0 + 3 * (0.5 + 0.1))
    assert tree.inside_s == pytest.approx(0.6 + 3 * (0.01 + 0.01))
    assert step(WORK, there, up, "server").between_s == pytest.approx(42.0 + 0.6)
    assert step(WORK, there, up, "ring").between_s == pytest.approx(31 / 32 * 6.0 + 31 * 0.5)
    assert step(WORK, there, up, "sharded").between_s == pytest.approx(4 * 28 / 32 * 6.0 + 0.5)


def test_staging_counts_where_there_are_other_hosts() -> None:
    assert step(WORK, cluster(1, staging_bytes_per_s=90.0), BOTH).staging_s == 0.0
    found = step(WORK, cluster(2, staging_bytes_per_s=90.0), BOTH)
    assert found.staging_s == pytest.approx(10.0)
    assert found.bottleneck == "staging"


def test_each_part_can_be_the_bottleneck() -> None:
    assert step(replace(WORK, compute_s=100.0), cluster(2), BOTH).bottleneck == "compute"
    assert step(WORK, cluster(2), BOTH).bottleneck == "between"
    assert step(replace(WORK, compute_s=0.0), cluster(2, between=INFINITE), BOTH).bottleneck == "inside"


def test_overlap_hides_the_exchange_and_never_more() -> None:
    there, idle = cluster(2), step(WORK, cluster(2), BOTH)
    some = step(replace(WORK, overlap_s=1.5), there, BOTH)
    assert some.hidden_s == 1.5
    assert some.step_s == pytest.approx(idle.step_s - 1.5)
    assert step(replace(WORK, overlap_s=2.0), cluster(2, inside=INFINITE, between=INFINITE), BOTH).step_s == 2.0


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("part", ["inside", "between"])
def test_a_faster_link_never_costs(pattern: Pattern, part: str) -> None:
    times = [
        step(WORK, cluster(4, **{part: Fabric(bandwidth_bytes_per_s=10.0**k)}), BOTH, pattern).step_s for k in range(8)
    ]
    assert times == sorted(times, reverse=True)
    if not (pattern == "ring" and part == "inside"):
        assert times[-1] < times[0]


def test_how_throughput_grows_with_hosts() -> None:
    rates = {
        p: [step(WORK, cluster(h), BOTH, p).images_per_s for h in (4, 64, 1024)] for p in ("tree", "server", "ring")
    }
    assert rates["tree"][2] == pytest.approx(256 * rates["tree"][0])
    assert rates["ring"][2] == pytest.approx(256 * rates["ring"][0], rel=0.06)
    # All through one link: at most N * batch / ((H - 1) * bytes / bandwidth), however many come.
    assert rates["server"][2] < 1.05 * 4 * 8 / 9.0


def test_message_sizes() -> None:
    assert dense(1000)(64) == Message(up_bytes=4000.0, down_bytes=4000.0)
    trits = ternary(1000, dense_parameters=200, bits=2.0)
    assert trits(4).up_bytes == trits(512).up_bytes == 800 + 200
    assert trits(4).down_bytes == pytest.approx(800 + 100 * math.log2(9))
    assert trits(512).down_bytes == pytest.approx(800 + 100 * math.log2(1025))


def test_sweep_compares_like_with_like() -> None:
    points = sweep(WORK, cluster(1), ternary(1000), [1, 2, 128])
    assert [(p.hosts, p.ours.world_size) for p in points] == [(1, 4), (2, 8), (128, 512)]
    for p in points:
        assert p.baseline.step_s == step(WORK, cluster(p.hosts), dense(1000)(4 * p.hosts)).step_s
        assert p.speedup == pytest.approx(p.baseline.step_s / p.ours.step_s)
    assert points[0].speedup > 1
    other = sweep(WORK, cluster(1), ternary(1000), [8], pattern="sharded", baseline_pattern="ring")[0]
    assert other.baseline.step_s == step(WORK, cluster(8), dense(1000)(32), "ring").step_s
    assert other.ours.step_s == step(WORK, cluster(8), ternary(1000)(32), "sharded").step_s
    assert sweep(WORK, cluster(4), dense(1000), [4])[0].speedup == 1.0


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Fabric(bandwidth_bytes_per_s=0.0), "bandwidth_bytes_per_s"),
        (lambda: Fabric(bandwidth_bytes_per_s=math.nan), "bandwidth_bytes_per_s"),
        (lambda: Fabric(bandwidth_bytes_per_s=1.0, latency_s=-1.0), "latency_s"),
        (lambda: Fabric(bandwidth_bytes_per_s=1.0, latency_s=math.inf), "latency_s"),
        (lambda: cluster(0), "hosts"),
        (lambda: cluster(2, 1.5), "gpus_per_host"),  # type: ignore[arg-type]
        (lambda: cluster(True), "hosts"),
        (lambda: cluster(2, staging_bytes_per_s=0.0), "staging_bytes_per_s"),
        (lambda: cluster(2, chunk_bytes=-1.0), "chunk_bytes"),
        (lambda: replace(WORK, compute_s=-1.0), "compute_s"),
        (lambda: replace(WORK, batch=0), "batch"),
        (lambda: replace(WORK, overlap_s=3.0), "overlap_s"),
        (lambda: Message(up_bytes=-1.0, down_bytes=0.0), "up_bytes"),
        (lambda: Message(up_bytes=0.0, down_bytes=math.inf), "down_bytes"),
        (lambda: ternary(10, dense_parameters=11), "dense_parameters"),
        (lambda: step(WORK, cluster(2), BOTH, "star"), "star"),  # type: ignore[arg-type]
        (lambda: step(replace(WORK, compute_s=0.0), cluster(1, 1), BOTH), "takes time"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(build: Any, named: str) -> None:
    with pytest.raises(HyperparameterError, match=named):
        build()


def test_the_two_speedups_that_the_paper_states() -> None:
    speedups = {
        (r["network"], r["model"], r["gpus"], r["variant"]): r["speedup"]
        for r in paper_projection.projected()
        if r["variant"] != "both directions"
    }
    assert speedups["infiniband", "VGG-A", 512, "as stated"] == pytest.approx(2.0, rel=0.1)
    # AlexNet's stated 3.04 needs 256 images a GPU; with the 128 that the paper states, ours is a third higher.
    assert speedups["ethernet", "AlexNet", 8, "as read"] == pytest.approx(3.04, rel=0.05)
    assert speedups["ethernet", "AlexNet", 8, "as stated"] > 3.9


def test_the_digitised_figures_are_explained_and_other_readings_are_not() -> None:
    assert all(
        abs(r["speedup_deviation_percent"]) < 8 for r in paper_projection.projected() if r["variant"] == "as read"
    )
    first, *others = paper_projection.study()
    assert first["ethernet_rms_percent"] < 5
    assert first["infiniband_rms_percent"] < 5
    assert first["speedup_rms_percent"] == min(r["speedup_rms_percent"] for r in (first, *others))
