"""Throughput of synchronous data-parallel SGD on hosts with several GPUs each, in closed form.

Beside :mod:`gradwire.model.schedule`, which follows every bucket of a step that was measured, this asks only for four
kinds of number: what a step computes, how large a gradient's message is in each direction, how fast the two kinds of
link are, and in which pattern messages are added up. So it reaches clusters that nobody has at hand, and systems that
are not ours: ``benchmarks/claims/paper_projection.py`` applies it to a published projection up to 512 GPUs.

A step is ``compute + inside + staging + between``, less what may run during the computation. Links are full duplex,
nothing else uses them, and all hosts are equal. Every class refuses numbers that make no sense with a
:class:`~gradwire.errors.HyperparameterError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gradwire.errors import HyperparameterError

Pattern = Literal["server", "tree", "ring", "sharded"]
"""How messages become their sum; :func:`step` has the formulae."""


def check(owner: object, above: Sequence[str] = (), finite: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
    """Refuse fields that are not above 0 (infinity is fine), not finite and 0 or more, or not integers above 0."""
    for wanted, names in (("above 0", above), ("finite and not negative", finite), ("an integer above 0", whole)):
        for name in names:
            value = getattr(owner, name)
            fits = 0 <= value < math.inf if wanted.startswith("finite") else value > 0
            if not fits or (names is whole and type(value) is not int):
                raise HyperparameterError(f"{type(owner).__name__}: {name} must be {wanted}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A kind of link, full duplex.

    Attributes:
        bandwidth_bytes_per_s: Payload in one direction, protocol overhead already taken off; may be infinite.
        latency_s: Of one message.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check(self, above=("bandwidth_bytes_per_s",), finite=("latency_s",))

    def hop_s(self, chunk_bytes: float) -> float:
        """Return the seconds until a pipeline's first chunk has crossed one link."""
        return self.latency_s + chunk_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal hosts of equal GPUs.

    Attributes:
        inside: From a GPU to its neighbour in the host.
        between: Of one host, shared by its GPUs.
        staging_bytes_per_s: Copies between a GPU and the memory that the network card reads; infinite where it reads
            the GPU's. Hosts without others stage nothing.
        chunk_bytes: Messages are forwarded in pieces of this size; each link on the way adds one piece's time.
    """

    hosts: int
    gpus_per_host: int = 1
    inside: Fabric
    between: Fabric
    staging_bytes_per_s: float = math.inf
    chunk_bytes: float = 0.0

    def __post_init__(self) -> None:
        check(self, ("staging_bytes_per_s",), ("chunk_bytes",), ("hosts", "gpus_per_host"))

    @property
    def world_size(self) -> int:
        """GPUs, each a worker."""
        return self.hosts * self.gpus_per_host


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one GPU does in a step.

    Attributes:
        parameters: Of the model.
        batch: Images (or whatever is counted) per GPU and step.
        compute_s: Forward, backward and update of one GPU, no exchange.
        overlap_s: Of the computation, seconds in which messages may already travel: 0 where all waits for the end.
    """

    name: str
    parameters: int
    batch: int
    compute_s: float
    overlap_s: float = 0.0

    def __post_init__(self) -> None:
        check(self, finite=("compute_s", "overlap_s"), whole=("parameters", "batch"))
        if self.overlap_s > self.compute_s:
            raise HyperparameterError(f"Workload: overlap_s={self.overlap_s!r} is above compute_s={self.compute_s!r}")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A whole model's gradient as it travels.

    Attributes:
        up_bytes: Towards the sum (push, reduce, reduce-scatter).
        down_bytes: Of the sum, back (pull, broadcast, all-gather); 0 leaves that direction out.
    """

    up_bytes: float
    down_bytes: float

    def __post_init__(self) -> None:
        check(self, finite=("up_bytes", "down_bytes"))


Sizes = Callable[[int], Message]
"""A method's message, by the number of workers."""


def dense(parameters: int, bits: float = 32.0) -> Sizes:
    """Return the message of a method that sends ``bits`` per parameter both ways: ``parameters * bits / 8`` bytes."""

    def sizes(world_size: int) -> Message:
        return Message(up_bytes=parameters * bits / 8, down_bytes=parameters * bits / 8)

    return sizes


def ternary(parameters: int, *, dense_parameters: int = 0, bits: float = 1.6) -> Sizes:
    """Return TernGrad's message: ``bits`` up and log2(2N + 1) bits down, N workers.

    Args:
        dense_parameters: Of them, in float32 both ways (the paper's classification layer).
        bits: 2 in the authors' code, 1.6 with five trits to a byte.

    Source: TernGrad (NeurIPS 2017), sec. 3.2: the sum of N trits has 2N + 1 levels.
    """
    if not 0 <= dense_parameters <= parameters:
        raise HyperparameterError(f"dense_parameters={dense_parameters!r} must lie between 0 and {parameters}")

    def sizes(world_size: int) -> Message:
        floats = 4.0 * dense_parameters
        trits = parameters - dense_parameters
        down_bits = math.log2(2 * world_size + 1)
        return Message(up_bytes=floats + trits * bits / 8, down_bytes=floats + trits * down_bits / 8)

    return sizes


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step and its parts; ``hidden_s`` of the exchange runs during the computation.

    Attributes:
        bottleneck: The longest part: ``compute``, ``inside``, ``staging`` or ``between``.
        images_per_s: Of the whole cluster.
    """

    world_size: int
    compute_s: float
    inside_s: float
    staging_s: float
    between_s: float
    hidden_s: float
    step_s: float
    bottleneck: str
    images_per_s: float


def step(workload: Workload, cluster: Cluster, message: Message, pattern: Pattern = "tree") -> Step:
    """Return a step's time on a cluster.

    With H hosts, G GPUs a host, N = H * G, S bytes in one direction, b and a the bandwidth and latency of a link, and
    h = a + chunk / b, each direction that carries bytes takes

    ========= =============================== ===================================================
    pattern   inside                          between hosts
    ========= =============================== ===================================================
    server    S / b + (G - 1) h               (H - 1) S / b + h: one host serves all
    tree      S / b + (G - 1) h               min(2, H - 1) S / b + floor(log2 H) h: binary tree
    ring      (N - 1) / N S / b + (N - 1) a   the same; one ring through all GPUs, so the slower link counts
    sharded   (G - 1) / N S / b + a           G (N - G) / N S / b + a: all to all, each owns 1 / N
    ========= =============================== ===================================================

    Server and tree first add up along a chain in each host, and one GPU speaks for it. Directions follow each other.
    Staging takes (up + down) / staging_bytes_per_s on each GPU that speaks to other hosts.

    Raises:
        HyperparameterError: the pattern is unknown, or the step takes no time at all.
    """
    if pattern not in get_args(Pattern):
        raise HyperparameterError(f"pattern {pattern!r} is none of {', '.join(get_args(Pattern))}")
    inside_s = between_s = 0.0
    for size_bytes in (message.up_bytes, message.down_bytes):
        if size_bytes:
            inside, between = direction(cluster, size_bytes, pattern)
            inside_s += inside
            between_s += between
    both = message.up_bytes + message.down_bytes
    staging_s = both / cluster.staging_bytes_per_s if cluster.hosts > 1 else 0.0
    hidden_s = min(workload.overlap_s, inside_s + staging_s + between_s)
    step_s = workload.compute_s + inside_s + staging_s + between_s - hidden_s
    if step_s <= 0:
        raise HyperparameterError("nothing in this step takes time: give compute_s, or finite links")
    parts = {"compute": workload.compute_s, "inside": inside_s, "staging": staging_s, "between": between_s}
    return Step(
        world_size=cluster.world_size,
        compute_s=workload.compute_s,
        inside_s=inside_s,
        staging_s=staging_s,
        between_s=between_s,
        hidden_s=hidden_s,
        step_s=step_s,
        bottleneck=max(parts, key=parts.__getitem__),
        images_per_s=cluster.world_size * workload.batch / step_s,
    )


def direction(cluster: Cluster, size_bytes: float, pattern: Pattern) -> tuple[float, float]:
    """Return the seconds inside and between hosts for one direction, by :func:`step`'s table."""
    h, g, n = cluster.hosts, cluster.gpus_per_host, cluster.world_size
    near, far = cluster.inside, cluster.between

    def through(fabric: Fabric, share: float, hops: int, hop_s: float) -> float:
        return share * size_bytes / fabric.bandwidth_bytes_per_s + hops * hop_s if hops else 0.0

    if pattern == "ring":
        slow = near if h == 1 else far if g == 1 else max(near, far, key=lambda f: f.hop_s(size_bytes / n))
        ring_s = through(slow, (n - 1) / n, n - 1, slow.latency_s)
        return (0.0, ring_s) if slow is far else (ring_s, 0.0)
    if pattern == "sharded":
        inside_s = through(near, (g - 1) / n, int(g > 1), near.latency_s)
        return inside_s, through(far, g * (n - g) / n, int(h > 1), far.latency_s)
    inside_s = through(near, 1.0, g - 1, near.hop_s(cluster.chunk_bytes))
    hop_s = far.hop_s(cluster.chunk_bytes)
    if pattern == "server":
        return inside_s, through(far, h - 1, int(h > 1), hop_s)
    return inside_s, through(far, min(2, h - 1), h.bit_length() - 1, hop_s)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method and its baseline on one size of a cluster; ``speedup`` is the ratio of their throughputs."""

    hosts: int
    ours: Step
    baseline: Step
    speedup: float


def sweep(
    workload: Workload,
    cluster: Cluster,
    sizes: Sizes,
    hosts: Sequence[int],
    *,
    baseline: Sizes | None = None,
    pattern: Pattern = "tree",
    baseline_pattern: Pattern | None = None,
) -> list[Point]:
    """Extrapolate a method's throughput over the number of hosts.

    Args:
        sizes: The method's message; from a dry run, or :func:`ternary`.
        hosts: Overrides the cluster's own number.
        baseline: By default float32 both ways.
        baseline_pattern: By default the method's.
    """
    against = baseline or dense(workload.parameters)
    points = []
    for count in hosts:
        there = replace(cluster, hosts=count)
        n = there.world_size
        ours = step(workload, there, sizes(n), pattern)
        base = step(workload, there, against(n), baseline_pattern or pattern)
        points.append(Point(hosts=count, ours=ours, baseline=base, speedup=ours.images_per_s / base.images_per_s))
    return points
