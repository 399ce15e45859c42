"""Topologies of emulated clusters, and their text: ``hosts=4,bandwidth=100mbit,delay=20ms``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from gradwire.errors import HyperparameterError
from gradwire.tools.lab.impairments import UNIMPAIRED, Impairments, Outage
from gradwire.tools.lab.quantities import (
    Rate,
    check_rate,
    format_delay,
    format_rate,
    format_share,
    parse_delay,
    parse_rate,
    parse_rates,
    parse_share,
    plain,
)

MOST_HOSTS = 200
KEYS = ("hosts", "bandwidth", "asymmetric", "groups", "between", "congestion", "outage", "seed")


def _parse_burst(text: str) -> float | None:
    if text == "none":
        return None
    if not re.fullmatch(r"\d+(?:\.\d+)?", text):
        raise HyperparameterError(f"burst {text!r}: a number of frames is needed, such as 8, or none")
    return float(text)


def _format_burst(burst: float | None) -> str:
    return "none" if burst is None else plain(Decimal(repr(float(burst))))


IMPAIRMENTS: Mapping[str, tuple[str, Callable[[str], Any], Callable[[Any], str]]] = {
    "delay": ("delay_s", parse_delay, format_delay),
    "jitter": ("jitter_s", parse_delay, format_delay),
    "loss": ("loss", parse_share, format_share),
    "burst": ("burst", _parse_burst, _format_burst),
    "reorder": ("reorder", parse_share, format_share),
}
"""For each impairment's key, its field, and the functions that read and write its value."""

_KIND = "|".join(IMPAIRMENTS)
_HOST = re.compile(rf"host(\d+)(?:\.({_KIND}))?")
_GROUP = re.compile(r"group\.([a-z][a-z0-9_-]*)")
_BETWEEN = re.compile(rf"between(?:\.(?!(?:{_KIND})$)([a-z0-9_-]+))?(?:\.({_KIND}))?")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """An emulated cluster. A rate is in bits per second, None for no limit, and acts both ways unless it says so.

    Attributes:
        hosts: Number of hosts; each is a network namespace.
        bandwidth: Rate of every host's link.
        asymmetric: Rate at which hosts send, if it differs from the rate at which they receive (``bandwidth``).
        overrides: Rates of single hosts, by number: (send, receive).
        groups: Number of groups. Without ``members``, hosts are spread over them evenly, in order, and a group's name
            is its number; 1: one flat network.
        members: Hosts of each group, by name.
        between: Rate of each group's link to the other groups.
        between_overrides: Rates of single groups' links, by number: (send, receive).
        impairments: What happens to frames that a host sends.
        host_impairments: The same for single hosts, by number; those equal to ``impairments`` are left out.
        between_impairments: What happens to frames that leave a group for another.
        group_impairments: The same for single groups, by number.
        outages: Intervals in which links are silent.
        congestion: TCP's congestion control on the hosts, such as "cubic"; None: this machine's.
        seed: Seed of losses, jitter and reordering.

    Raises:
        HyperparameterError: a number is out of range, or two settings do not go together.
    """

    hosts: int = 4
    bandwidth: Rate = None
    asymmetric: Rate = None
    overrides: dict[int, tuple[Rate, Rate]] = field(default_factory=dict, hash=False)
    groups: int = 1
    members: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    between: Rate = None
    between_overrides: dict[int, tuple[Rate, Rate]] = field(default_factory=dict, hash=False)
    impairments: Impairments = UNIMPAIRED
    host_impairments: dict[int, Impairments] = field(default_factory=dict, hash=False)
    between_impairments: Impairments = UNIMPAIRED
    group_impairments: dict[int, Impairments] = field(default_factory=dict, hash=False)
    outages: tuple[Outage, ...] = ()
    congestion: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise HyperparameterError(f"hosts={self.hosts}: 1 to {MOST_HOSTS} are possible")
        self._check_groups()
        self._check_rates()
        if self.groups == 1 and (self.between is not None or self.between_impairments != UNIMPAIRED):
            raise HyperparameterError("between=... is about the links between groups: give groups=2 or more too")
        for host in (*self.overrides, *self.host_impairments, *self._silenced()):
            if not 0 <= host < self.hosts:
                raise HyperparameterError(f"host{host}: the hosts are 0 to {self.hosts - 1}")
        for group in (*self.between_overrides, *self.group_impairments):
            if not 0 <= group < self.groups or self.groups == 1:
                raise HyperparameterError(f"between.{group}: the groups are 0 to {self.groups - 1}, if there are two")
        for name, usual in (("host_impairments", self.impairments), ("group_impairments", self.between_impairments)):
            own = {number: value for number, value in getattr(self, name).items() if value != usual}
            object.__setattr__(self, name, own)
        if self.congestion is not None and not re.fullmatch(r"[a-z0-9_]+", self.congestion):
            raise HyperparameterError(f"congestion={self.congestion}: a name is needed, such as cubic")

    def _check_groups(self) -> None:
        if self.members:
            listed = sorted(host for hosts in self.members.values() for host in hosts)
            if listed != list(range(self.hosts)):
                raise HyperparameterError(
                    f"group.NAME=...: each of the hosts 0 to {self.hosts - 1} must be in one group; in groups are"
                    f" {', '.join(map(str, listed))}"
                )
            if self.groups not in (1, len(self.members)):
                raise HyperparameterError(f"groups={self.groups}: {len(self.members)} are named; leave groups out")
            object.__setattr__(self, "groups", len(self.members))
        elif self.groups < 1 or self.hosts % self.groups:
            raise HyperparameterError(f"groups={self.groups}: {self.hosts} hosts cannot be spread over them evenly")

    def _check_rates(self) -> None:
        for name in ("bandwidth", "asymmetric", "between"):
            check_rate(name, getattr(self, name))
        for kind, links in (("host", self.overrides), ("between.", self.between_overrides)):
            for number, rates in links.items():
                for rate in rates:
                    check_rate(f"{kind}{number}", rate)

    def _silenced(self) -> list[int]:
        """Return the hosts that outages name."""
        return [host for outage in self.outages for host in (outage.host, outage.peer) if host is not None]

    def send_rate(self, host: int) -> Rate:
        """Return the rate at which a host may send."""
        if host in self.overrides:
            return self.overrides[host][0]
        return self.bandwidth if self.asymmetric is None else self.asymmetric

    def receive_rate(self, host: int) -> Rate:
        """Return the rate at which a host may receive."""
        return self.overrides[host][1] if host in self.overrides else self.bandwidth

    def between_rates(self, group: int) -> tuple[Rate, Rate]:
        """Return the rates at which a group may send to the others and receive from them."""
        return self.between_overrides.get(group, (self.between, self.between))

    def of_host(self, host: int) -> Impairments:
        """Return what happens to frames that a host sends."""
        return self.host_impairments.get(host, self.impairments)

    def of_group(self, group: int) -> Impairments:
        """Return what happens to frames that leave a group for another."""
        return self.group_impairments.get(group, self.between_impairments)

    def links(self) -> list[Impairments]:
        """Return the impairments of every host's link, and of every group's if there are several."""
        groups = range(self.groups) if self.groups > 1 else ()
        return [*map(self.of_host, range(self.hosts)), *map(self.of_group, groups)]

    @property
    def impaired(self) -> bool:
        """Whether links do more than limit a rate."""
        return bool(self.outages) or any(link != UNIMPAIRED for link in self.links())

    def group(self, host: int) -> int:
        """Return the number of a host's group."""
        for number, hosts in enumerate(self.members.values()):
            if host in hosts:
                return number
        return host * self.groups // self.hosts

    def group_names(self) -> list[str]:
        """Return the names of the groups, by number."""
        return list(self.members) or [str(number) for number in range(self.groups)]

    def delay_s(self, source: int, target: int) -> float:
        """Return the seconds that a frame is delayed from one host to another, without jitter."""
        groups = self.group(source), self.group(target)
        crossing = self.of_group(groups[0]).delay_s if groups[0] != groups[1] else 0.0
        return self.of_host(source).delay_s + crossing

    def with_bandwidth(self, rate: Rate) -> Topology:
        """Return the cluster with another bandwidth on every host that has no rate of its own."""
        return replace(self, bandwidth=rate)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read ``hosts=4,bandwidth=100mbit,...``, as ``--lab`` takes it.

        Keys: hosts, bandwidth, asymmetric, groups, between, congestion, seed; the impairments delay and jitter (in ms,
        such as ``delay=5ms``), loss and reorder (``loss=0.1%``) and burst (frames); ``outage=10s@60s``, several joined
        by "+". ``host2=10mbit`` or ``host2=10mbit:100mbit`` (sends:receives) is the rate of a single host, and
        ``host2.delay=50ms`` its impairment. ``group.far=4-7`` names a group of hosts, several ranges joined by "+";
        ``between.delay=20ms``, ``between.far=10mbit`` and ``between.far.loss=1%`` are about the groups' links.

        Raises:
            HyperparameterError: the text is empty, a key is unknown or given twice, or a value is wrong.
        """
        if not text.strip(" ,"):
            raise HyperparameterError("an empty lab: name at least hosts=N, such as hosts=4,bandwidth=100mbit")
        given: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            known = key in KEYS or key in IMPAIRMENTS or any(p.fullmatch(key) for p in (_HOST, _GROUP, _BETWEEN))
            if not equals or not value or not known:
                raise HyperparameterError(
                    f"lab {part!r}: KEY=VALUE is needed, with one of {', '.join((*KEYS, *IMPAIRMENTS))}, host0, host1,"
                    " ..., host0.delay, ..., group.NAME, between.delay, ..., between.NAME"
                )
            name = re.sub(r"^host0*(?=\d)", "host", key)
            if name in given:
                raise HyperparameterError(f"lab {text!r}: {name} is given twice")
            given[name] = value
        return cls(**_fields(given))

    def spec(self) -> str:
        """Return the cluster as text that :meth:`parse` reads back."""
        return ",".join(self._parts())

    def _parts(self) -> Iterator[str]:
        yield f"hosts={self.hosts}"
        yield f"bandwidth={format_rate(self.bandwidth)}"
        if self.asymmetric is not None:
            yield f"asymmetric={format_rate(self.asymmetric)}"
        for host, (send, receive) in sorted(self.overrides.items()):
            yield f"host{host}={format_rate(send)}:{format_rate(receive)}"
        for name, hosts in self.members.items():
            yield f"group.{name}={'+'.join(map(str, hosts))}"
        if self.groups > 1:
            if not self.members:
                yield f"groups={self.groups}"
            yield f"between={format_rate(self.between)}"
        names = self.group_names()
        for group, (send, receive) in sorted(self.between_overrides.items()):
            yield f"between.{names[group]}={format_rate(send)}:{format_rate(receive)}"
        yield from _differences("", self.impairments, UNIMPAIRED)
        yield from _differences("between.", self.between_impairments, UNIMPAIRED)
        for host, own in sorted(self.host_impairments.items()):
            yield from _differences(f"host{host}.", own, self.impairments)
        for group, own in sorted(self.group_impairments.items()):
            yield from _differences(f"between.{names[group]}.", own, self.between_impairments)
        if self.outages:
            yield f"outage={'+'.join(outage.spec() for outage in self.outages)}"
        if self.congestion is not None:
            yield f"congestion={self.congestion}"
        if self.seed:
            yield f"seed={self.seed}"


def _differences(before: str, own: Impairments, usual: Impairments) -> Iterator[str]:
    for key, (name, _, write) in IMPAIRMENTS.items():
        if getattr(own, name) != getattr(usual, name):
            yield f"{before}{key}={write(getattr(own, name))}"


def _fields(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a topology, given the values of keys."""
    fields: dict[str, Any] = {"overrides": {}, "members": {}, "between_overrides": {}}
    own: dict[tuple[str, str | None], dict[str, Any]] = {}
    for key, value in given.items():
        host, group, between = (p.fullmatch(key) for p in (_HOST, _GROUP, _BETWEEN))
        found = host or between
        if found:
            name, flaw = found.groups()
            if flaw:
                where = own.setdefault(("host" if host else "between", name), {})
                where[IMPAIRMENTS[flaw][0]] = IMPAIRMENTS[flaw][1](value)
            elif name is None:
                fields["between"] = parse_rate(value)
            else:
                fields["overrides" if host else "between_overrides"][name] = parse_rates(value)
        elif group:
            fields["members"][group[1]] = _hosts_of(key, value)
        elif key in IMPAIRMENTS:
            own.setdefault(("host", None), {})[IMPAIRMENTS[key][0]] = IMPAIRMENTS[key][1](value)
        elif key in ("hosts", "groups", "seed"):
            fields[key] = _whole(key, value)
        elif key == "outage":
            fields["outages"] = tuple(map(Outage.parse, value.split("+")))
        else:
            fields[key] = value if key == "congestion" else parse_rate(value)
    if "asymmetric" in fields and fields["asymmetric"] is None:
        raise HyperparameterError(
            "asymmetric=unlimited: a rate is needed; give hosts that may send without limit a link of their own,"
            " such as host0=unlimited:100mbit"
        )
    if fields.get("groups", 1) > MOST_HOSTS:
        raise HyperparameterError(f"groups={fields['groups']}: 1 to {MOST_HOSTS} are possible")
    names = list(fields["members"]) or [str(number) for number in range(fields.get("groups", 1))]
    fields["overrides"] = {int(name): rates for name, rates in fields["overrides"].items()}
    fields["between_overrides"] = {_number(name, names): rates for name, rates in fields["between_overrides"].items()}
    for kind, usual, single in (
        ("host", "impairments", "host_impairments"),
        ("between", "between_impairments", "group_impairments"),
    ):
        fields[usual] = Impairments(**own.pop((kind, None), {}))
        fields[single] = {
            int(name) if kind == "host" else _number(name, names): replace(fields[usual], **values)
            for (kind_of, name), values in own.items()
            if kind_of == kind and name is not None
        }
    return fields


def _number(name: str, names: list[str]) -> int:
    if name not in names:
        raise HyperparameterError(f"between.{name}: there is no group {name}; the groups are {', '.join(names)}")
    return names.index(name)


def _hosts_of(key: str, value: str) -> tuple[int, ...]:
    hosts: list[int] = []
    for part in value.split("+"):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not found:
            raise HyperparameterError(f"{key}={value}: numbers of hosts are needed, such as 0-3 or 0-2+5")
        last = int(found[2] or found[1])
        if last >= MOST_HOSTS:
            raise HyperparameterError(f"{key}={value}: the hosts are 0 to {MOST_HOSTS - 1} at most")
        hosts += range(int(found[1]), last + 1)
    return tuple(hosts)


def _whole(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise HyperparameterError(f"{key}={value}: a whole number is needed") from None
