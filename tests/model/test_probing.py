"""A probe's two times become the link that the model turns into the same two times."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.exchange.drivers import Stage
from gradwire.model.exchange_profile import BucketJobs, ExchangeProfile
from gradwire.model.machine import DEFAULT, LinkModel, Machine
from gradwire.model.probing import Probed
from gradwire.model.profile import ReadyBucket, Timeline
from gradwire.model.schedule import Load, step_time

SMALL, LARGE = 256, 1 << 22
# CPU goes on beside the wire and is no part of the two equations; a link that is slow against it is what is probed.
COSTS = dataclasses.replace(DEFAULT, call_s=0.0, message_s=0.0, byte_s=0.0, bucket_s=0.0)


def seconds(kind: str, row: int, n: int, machine: Machine, link: LinkModel, load: Load) -> float:
    """Let the model take one operation alone."""
    timeline = Timeline(
        forward_s=0.0, buckets=(ReadyBucket(names=("p",), numel=1, ready_s=0.0),), backward_s=0.0, after_s=0.0
    )
    stage = Stage(0.0, kind, row * (n - 1), n - 1 if kind == "pairs" else 1, n - 1, delays=2)
    exchange = ExchangeProfile("probe", n, (BucketJobs((), ((stage,),), False),))
    return step_time(timeline, exchange, machine=machine, link=link, load=load).step_s


def probed(n: int, here: int, machine: Machine, link: LinkModel, load: Load) -> Probed:
    """Probe the model itself."""
    return Probed(
        world_size=n,
        ranks_per_host=here,
        small_bytes=SMALL,
        small_s=seconds("all_to_all", SMALL, n, machine, link, load),
        large_bytes=LARGE,
        large_s=seconds("pairs", LARGE, n, machine, link, load),
    )


@given(
    hosts=st.integers(2, 8),
    here=st.integers(1, 8),
    bandwidth=st.floats(1e5, 1e9),
    latency_s=st.floats(0, 0.01),
    round_s=st.floats(1e-6, 1e-3),
    efficiency=st.floats(0.4, 1.0),
    cores=st.integers(1, 16),
)
def test_the_models_own_link_is_found_again(
    hosts: int, here: int, bandwidth: float, latency_s: float, round_s: float, efficiency: float, cores: int
) -> None:
    machine = dataclasses.replace(COSTS, round_s=round_s, efficiency=efficiency)
    link = LinkModel(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, ranks_per_host=here)
    load = Load(ranks=here, cores=cores)
    measured = probed(hosts * here, here, machine, link, load)
    found = measured.link(machine, load)
    assert found.ranks_per_host == here
    if found.bandwidth_bytes_per_s is None:
        assert measured._wire_s(round_s * load.stretch) <= 0.02 * measured.large_s
        return
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    # The fluid model ends an operation at a millionth of a byte, and a time at a picosecond.
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-7)


def test_ranks_of_one_host_have_no_link() -> None:
    load = Load(ranks=3, cores=6)
    measured = Probed(world_size=3, ranks_per_host=3, small_bytes=256, small_s=2e-3, large_bytes=LARGE, large_s=0.1)
    found = measured.link(DEFAULT, load)
    assert measured.one_host
    assert found == LinkModel(latency_s=(2e-3 - DEFAULT.round_s) / 2, ranks_per_host=3)


def test_bytes_that_take_no_time_tell_no_bandwidth_and_latency_is_never_negative() -> None:
    measured = Probed(world_size=2, ranks_per_host=1, small_bytes=256, small_s=1e-4, large_bytes=LARGE, large_s=9e-5)
    assert measured.host_bytes_per_s is None
    assert measured.link(DEFAULT, Load()) == LinkModel()
