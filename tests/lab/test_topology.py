"""What an emulated cluster may look like, as text and back, and every sentence that refuses one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import HyperparameterError
from gradwire.tools.lab import Topology, format_rate, parse_rate
from gradwire.tools.lab.topology import parse_delay

LIMITED = st.floats(min_value=8000, max_value=6e11)
RATES = st.none() | LIMITED


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    groups = draw(st.integers(1, 5))
    hosts = groups * draw(st.integers(1, 8))
    return Topology(
        hosts=hosts,
        bandwidth=draw(RATES),
        asymmetric=draw(RATES),
        overrides=draw(st.dictionaries(st.integers(0, hosts - 1), st.tuples(RATES, RATES), max_size=3)),
        groups=groups,
        between=draw(RATES) if groups > 1 else None,
        delay_s=draw(st.just(0.0) | st.floats(min_value=1e-6, max_value=10)),
    )


@given(RATES)
def test_a_rate_reads_back_as_it_was_written(rate: float | None) -> None:
    assert parse_rate(format_rate(rate)) == rate


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
    ],
)
def test_what_makes_no_cluster_is_refused(text: str, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message.replace("(", r"\(")):
        Topology.parse(text)


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="must not be negative"):
        Topology(delay_s=-1.0)


def test_hosts_have_the_rates_and_groups_that_were_asked_for() -> None:
    t = Topology.parse("hosts=6,bandwidth=100mbit,asymmetric=10mbit,groups=3,between=1gbit,host5=1mbit:2mbit,delay=5ms")
    assert [t.group(h) for h in range(6)] == [0, 0, 1, 1, 2, 2]
    assert (t.send_rate(0), t.receive_rate(0)) == (1e7, 1e8)
    assert (t.send_rate(5), t.receive_rate(5)) == (1e6, 2e6)
    assert t.delay_s == 0.005
    faster = t.with_bandwidth(2e8)
    assert (faster.receive_rate(0), faster.receive_rate(5)) == (2e8, 2e6)
    assert Topology.parse("host1=5mbit").overrides == {1: (5e6, 5e6)}
    assert Topology.parse("hosts=4") == Topology()
