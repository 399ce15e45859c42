"""What an emulated cluster may look like, as text and back, and every sentence that refuses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import HyperparameterError
from gradwire.tools.lab import Impairments, Outage, Topology, format_rate, parse_delay, parse_rate, parse_share
from gradwire.tools.lab.quantities import format_share

LIMITED = st.floats(min_value=8000, max_value=6e11)
RATES = st.none() | LIMITED
SHARES = st.just(0.0) | st.floats(min_value=1e-6, max_value=0.5)


@st.composite
def impairments(draw: st.DrawFn) -> Impairments:
    delay_s = draw(st.just(0.0) | st.floats(min_value=1e-6, max_value=10))
    loss = draw(SHARES)
    return Impairments(
        delay_s=delay_s,
        jitter_s=draw(st.just(0.0) | st.floats(min_value=0, max_value=delay_s)),
        loss=loss,
        burst=draw(st.none() | st.floats(min_value=1, max_value=100)) if loss else None,
        reorder=draw(SHARES) if delay_s else 0.0,
    )


@st.composite
def outages(draw: st.DrawFn, hosts: int) -> Outage:
    host = draw(st.none() | st.integers(0, hosts - 1))
    others = [other for other in range(hosts) if host not in (None, other)]
    return Outage(
        lasts_s=draw(st.floats(min_value=1e-3, max_value=1e4)),
        from_s=draw(st.floats(min_value=0, max_value=1e4)),
        host=host,
        peer=draw(st.none() | st.sampled_from(others)) if others else None,
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    groups = draw(st.integers(1, 5))
    hosts = groups * draw(st.integers(1, 8))
    shuffled = draw(st.permutations(range(hosts)))
    named = groups > 1 and draw(st.booleans())
    size = hosts // groups
    own = st.dictionaries(st.integers(0, hosts - 1), impairments(), max_size=3)
    of_groups = st.dictionaries(st.integers(0, groups - 1), impairments(), max_size=2)
    return Topology(
        hosts=hosts,
        bandwidth=draw(RATES),
        asymmetric=draw(RATES),
        overrides=draw(st.dictionaries(st.integers(0, hosts - 1), st.tuples(RATES, RATES), max_size=3)),
        groups=groups,
        members={f"g{n}": tuple(shuffled[n * size : (n + 1) * size]) for n in range(groups)} if named else {},
        between=draw(RATES) if groups > 1 else None,
        between_overrides=draw(st.dictionaries(st.integers(0, groups - 1), st.tuples(RATES, RATES), max_size=2))
        if groups > 1
        else {},
        impairments=draw(impairments()),
        host_impairments=draw(own),
        between_impairments=draw(impairments()) if groups > 1 else Impairments(),
        group_impairments=draw(of_groups) if groups > 1 else {},
        outages=tuple(draw(st.lists(outages(hosts), max_size=2))),
        congestion=draw(st.none() | st.sampled_from(["cubic", "reno"])),
        seed=draw(st.integers(0, 100)),
    )


@given(RATES)
def test_a_rate_reads_back_as_it_was_written(rate: float | None) -> None:
    assert parse_rate(format_rate(rate)) == rate


@given(SHARES | st.just(1.0))
def test_a_share_reads_back_as_it_was_written(share: float) -> None:
    assert parse_share(format_share(share)) == share


@given(topologies())
def test_a_cluster_reads_back_as_it_was_written(topology: Topology) -> None:
    assert Topology.parse(topology.spec()) == topology


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("8kbit", 8e3), ("9000bit", 9e3), (" 1MBIT ", 1e6), ("unlimited", None)],
)
def test_rates_are_read_as_iproute2_writes_them(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate


def test_rates_are_written_for_people() -> None:
    texts = [format_rate(rate) for rate in (1e8, 2.5e9, 12_345_678.0, 1e12, None)]
    assert texts == ["100mbit", "2.5gbit", "12.345678mbit", "1000gbit", "unlimited"]


@pytest.mark.parametrize(
    "text", ["", "100", "fast", "-1mbit", "1e3mbit", "7kbit", "10mbps", "0gbit", "601gbit", "99999gbit"]
)
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HyperparameterError, match=r"bandwidth .*such as 100mbit .*or unlimited"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["5", "5s", "-5ms", "ms"])
def test_what_is_no_delay_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HyperparameterError, match=r"milliseconds are needed, such as 5ms"):
        parse_delay(text)


@pytest.mark.parametrize("text", ["1", "0.01", "-1%", "101%", "%"])
def test_what_is_no_share_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HyperparameterError, match=r"per cent are needed, such as 0.1%"):
        parse_share(text)


@pytest.mark.parametrize("text", ["10s", "10@60", "10s@60ms", "-1s@0s", "10s@60s:2", "10s@60s:host", "10s@60s:host2-3"])
def test_what_is_no_outage_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HyperparameterError, match=r"such as 10s@60s, or 10s@60s:host2"):
        Outage.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty lab"),
        (" , ", "an empty lab"),
        ("hosts=2,hosts=3", "hosts is given twice"),
        ("host1=5mbit,host1=6mbit", "host1 is given twice"),
        ("host1=5mbit,host01=6mbit", "host1 is given twice"),
        ("hosts=0", "1 to 200 are possible"),
        ("hosts=201", "1 to 200 are possible"),
        ("hosts=four", "hosts=four: a whole number is needed"),
        ("groups=2.5", "groups=2.5: a whole number is needed"),
        ("hosts=4,groups=3", "4 hosts cannot be spread over them evenly"),
        ("hosts=4,groups=1000000000000", "groups=1000000000000: 1 to 200 are possible"),
        ("hosts=4,group.a=0-1000000000000", "the hosts are 0 to 199 at most"),
        ("groups=0", "cannot be spread over them evenly"),
        ("between=1mbit", "give groups=2 or more too"),
        ("hosts=2,host2=1mbit", "host2: the hosts are 0 to 1"),
        ("bandwith=1mbit", "'bandwith=1mbit': KEY=VALUE is needed, with one of hosts, bandwidth"),
        ("4", "KEY=VALUE is needed"),
        ("hosts=", "KEY=VALUE is needed"),
        ("bandwidth=1", "such as 100mbit"),
        ("host0=1mbit:fast", "bandwidth 'fast'"),
        ("delay=5", "such as 5ms"),
        ("asymmetric=unlimited", "host0=unlimited:100mbit"),
        ("delay=5ms,jitter=6ms", "at most delay=5ms is possible"),
        ("loss=100%", "from 0% to below 100%"),
        ("burst=8", "give loss=... too"),
        ("loss=1%,burst=0.5", "at least 1 frame"),
        ("loss=90%,burst=8", "at least 9 frames in a row"),
        ("loss=1%,burst=many", "such as 8, or none"),
        ("reorder=1%", "give delay=... too"),
        ("outage=0s@5s", "a length above 0 s"),
        ("hosts=2,outage=1s@5s:host2", "host2: the hosts are 0 to 1"),
        ("hosts=2,outage=1s@5s:host1-host2", "host2: the hosts are 0 to 1"),
        ("outage=1s@5s:host1-host1", "two different hosts are needed"),
        ("hosts=2,host2.delay=5ms", "host2: the hosts are 0 to 1"),
        ("host1.delay=5ms,host01.delay=6ms", "host1.delay is given twice"),
        ("host1.rate=5mbit", "KEY=VALUE is needed"),
        ("between.delay=5ms", "give groups=2 or more too"),
        ("groups=2,between.far=5mbit", "there is no group far; the groups are 0, 1"),
        ("hosts=4,group.near=0-1,group.far=1-3", "in groups are 0, 1, 1, 2, 3"),
        ("hosts=4,group.near=0-1,group.far=3", "each of the hosts 0 to 3 must be in one group"),
        ("hosts=2,group.near=0,group.far=one", "numbers of hosts are needed, such as 0-3"),
        ("hosts=2,group.a=0,group.b=1,groups=3", "2 are named; leave groups out"),
        ("congestion=Cubic!", "a name is needed, such as cubic"),
        ("seed=x", "a whole number is needed"),
    ],
)
def test_what_makes_no_cluster_is_refused(text: str, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message.replace("(", r"\(")):
        Topology.parse(text)


@pytest.mark.parametrize("rate", [0.0, -1e6, 7999.0, 6.1e11, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bandwidth", lambda rate: {"bandwidth": rate}),
        ("asymmetric", lambda rate: {"asymmetric": rate}),
        ("host1", lambda rate: {"overrides": {1: (1e6, rate)}}),
        ("host1", lambda rate: {"overrides": {1: (rate, None)}}),
        ("between", lambda rate: {"groups": 2, "between": rate}),
        ("between.1", lambda rate: {"groups": 2, "between_overrides": {1: (None, rate)}}),
    ],
)
def test_a_rate_that_no_text_could_give_is_refused(name: str, fields: Callable[[float], Any], rate: float) -> None:
    """The relay reads the cluster as text: it would end, and every frame with it."""
    with pytest.raises(HyperparameterError, match=rf"^{name}=.*: bits per second from 8000 \(8kbit\)"):
        Topology(**fields(rate))


def test_a_bandwidth_out_of_range_leaves_the_cluster_as_it_is() -> None:
    topology = Topology(bandwidth=1e6)
    with pytest.raises(HyperparameterError, match="bandwidth=5:"):
        topology.with_bandwidth(5.0)
    assert topology.bandwidth == 1e6


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="must not be negative"):
        Impairments(delay_s=-1.0)


def test_hosts_have_the_rates_and_groups_that_were_asked_for() -> None:
    t = Topology.parse("hosts=6,bandwidth=100mbit,asymmetric=10mbit,groups=3,between=1gbit,host5=1mbit:2mbit,delay=5ms")
    assert [t.group(h) for h in range(6)] == [0, 0, 1, 1, 2, 2]
    assert (t.send_rate(0), t.receive_rate(0)) == (1e7, 1e8)
    assert (t.send_rate(5), t.receive_rate(5)) == (1e6, 2e6)
    assert t.delay_s(0, 5) == 0.005
    faster = t.with_bandwidth(2e8)
    assert (faster.receive_rate(0), faster.receive_rate(5)) == (2e8, 2e6)
    assert Topology.parse("host1=5mbit").overrides == {1: (5e6, 5e6)}
    assert Topology.parse("hosts=4") == Topology()


def test_a_host_and_a_group_may_have_impairments_of_their_own() -> None:
    text = "hosts=6,delay=20ms,loss=1%,host2.delay=50ms,group.near=0-3,group.far=4+5,between.delay=30ms"
    t = Topology.parse(f"{text},between.far.delay=5ms,between.far=1mbit:2mbit,between=10mbit")
    assert t.of_host(0) == Impairments(delay_s=0.02, loss=0.01)
    assert t.of_host(2) == Impairments(delay_s=0.05, loss=0.01)
    assert [t.group(h) for h in range(6)] == [0, 0, 0, 0, 1, 1]
    assert (t.groups, t.group_names()) == (2, ["near", "far"])
    assert (t.between_rates(0), t.between_rates(1)) == ((1e7, 1e7), (1e6, 2e6))
    # From near to far, back, and within near from the slow host.
    assert [t.delay_s(*pair) for pair in ((0, 4), (4, 0), (2, 0))] == pytest.approx([0.05, 0.025, 0.05])


@pytest.mark.parametrize(
    ("text", "impaired"),
    [
        ("hosts=4,bandwidth=10mbit,host2=5mbit,groups=2,between=1mbit,congestion=cubic,seed=4", False),
        ("delay=1ms", True),
        ("host3.loss=1%", True),
        ("groups=2,between.1.delay=3ms", True),
        ("outage=1s@1s", True),
    ],
)
def test_links_that_only_limit_rates_are_known(text: str, impaired: bool) -> None:
    assert Topology.parse(text).impaired == impaired


@given(st.floats(min_value=1e-6, max_value=0.9), st.none() | st.floats(min_value=9, max_value=100))
def test_the_chain_of_losses_has_the_share_and_the_length_that_were_asked_for(loss: float, burst: float | None) -> None:
    """The stationary share of a chain with these transitions is p / (p + r), a stay in it 1 / r long."""
    link = Impairments(loss=loss, burst=burst)
    assert link.begins / (link.begins + link.ends) == pytest.approx(loss)
    assert 1 / link.ends == pytest.approx(burst if burst is not None else 1 / (1 - loss))
    if burst is None:
        assert link.begins == pytest.approx(1 - link.ends, abs=1e-12)
