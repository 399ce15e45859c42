"""The planner of buckets, with the measurement of coders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, cast

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import LANES, Meter, count_step_delays, dry_run, simulate_ranks
from gradwire.exchange.drivers.dry_run import LATE_ROUND
from gradwire.exchange.method import Method, require
from gradwire.exchange.network_cost import Delays
from gradwire.exchange.planning.declared_kernels import check_families, no_kernels
from gradwire.exchange.planning.options import Options, dense_names
from gradwire.exchange.protocols import REDUCE_SCATTER, Context
from gradwire.exchange.protocols.bucket_plan import BoundedPlan, BucketPlan, PlanSetting
from gradwire.exchange.segments import Parameter, Segment, join_compressed, lay_out
from gradwire.exchange.steps_locally import StepsLocally
from gradwire.kernels import CODERS, Kernels, checksum, chosen, get_kernels, time_coders
from gradwire.seeds import LinkNumber, link_seed

JOINED_NUMEL = 1 << 20
"""The buckets of a model with up to this many elements are exchanged as one: its messages cost more than is saved where
the first bucket leaves while the last is computed."""


def own_buckets(parameters: dict[str, torch.Tensor], most: int) -> list[list[str]]:
    """Divide parameters into buckets of one dtype and ``most`` elements, in reverse order as in backward."""
    buckets: dict[tuple[torch.dtype, int], list[str]] = {}
    filled: dict[torch.dtype, list[int]] = {}
    for name, p in reversed(parameters.items()):
        at = filled.setdefault(p.dtype, [0, 0])
        if at[1] and at[1] + p.numel() > most:
            at[0], at[1] = at[0] + 1, 0
        at[1] += p.numel()
        buckets.setdefault((p.dtype, at[0]), []).append(name)
    return list(buckets.values())


def one_way_bytes(method: Method, parameters: Mapping[str, torch.Tensor], options: Options | None = None) -> int:
    """Return the bytes of one worker's payload on its way to a single other one, by a dry run of two.

    It is a bound if the length of payloads depends on values.

    Args:
        method: A method that exchanges gradients.
        parameters: Parameters by name; their values are not read, so ``meta`` tensors suffice.
        options: Options of the link; None: the defaults.
    """
    planner = Planner(method, parameters, 2, options or Options())
    return planner.sent_bytes(planner.step_order())


SAMPLE_SHAPE = (512, 512)
"""Shape of the matrix whose payload is coded in a measurement: few enough elements that payloads stay in the caches."""

REFERENCE_SHAPE = (64, 128)
"""The same for the reference backend, which is slow."""


@cache
def measure_coders(method: Method, backend: str) -> dict[str, float]:
    """Return the seconds that each of a method's open coders takes to encode and decode one payload.

    The payload is that of a matrix of :data:`SAMPLE_SHAPE` standard normal numbers. Coders run in turn, and the least
    time of nine runs is returned; zeros if the method codes nothing of the matrix. The reference backend, which is
    slow, codes one of :data:`REFERENCE_SHAPE` once. Times are measured once per process, which takes some milliseconds
    besides compilation.

    Args:
        method: A method with ``open_coders``.
        backend: Name of the kernel backend.
    """
    kernels = get_kernels(backend)
    payload = _payload(method, kernels)
    if payload is None:
        return dict.fromkeys(method.traits.open_coders, 0.0)
    repeats = 1 if kernels.name == "reference" else 9
    return time_coders({name: kernels.coder(name) for name in method.traits.open_coders}, payload, repeats)


class _Copying:
    """A coder that copies bytes and keeps them."""

    name = backend = "none"
    variants = None

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def bound(self, symbols: int) -> int:
        return symbols

    def encode(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        self.seen.append(symbols.clone())
        out[: len(symbols)] = symbols
        return len(symbols)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data)

    def warm_up(self) -> float:
        return 0.0


def _payload(method: Method, kernels: Kernels) -> torch.Tensor | None:
    """Return the first bytes that a coder receives from one worker in a late round, or else in the first, or None."""
    rows, columns = REFERENCE_SHAPE if kernels.name == "reference" else SAMPLE_SHAPE
    segments = lay_out([Parameter("sample", (rows, columns), (columns, 1))])
    coder, numel = _Copying(), rows * columns
    plan = method.plan(PlanSetting(segments, kernels, 1, method.traits.collectives[0], 0, numel, coder))
    for round in (LATE_ROUND, 0):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        simulate_ranks([plan.whole(Context(0, 1, round), flat)], [Meter()])
        if coder.seen:
            return coder.seen[0]
    return None


class Planner:
    """Makes and caches the exchange plan of any bucket of known parameters.

    Args:
        method: The method of the exchange.
        parameters: All parameters, by name.
        world_size: Number of ranks.
        options: Options of the link, which are checked against the method and the names.
        number: Number of the link, on which random numbers depend; 0 if None. A change takes effect with the next plan.

    Attributes:
        open_coders: Entropy coders to choose from; see :meth:`settle`.
        coder: The coder in use; None if there is none or it is not chosen yet.

    Raises:
        HyperparameterError: the method is one that chooses among others, or a pattern matches no name.
        IncompatibleError: the method does not support the options.
    """

    def __init__(
        self,
        method: Method,
        parameters: Mapping[str, torch.Tensor],
        world_size: int,
        options: Options,
        number: LinkNumber | None = None,
    ) -> None:
        check_families(method)
        self._number = number or LinkNumber()
        self.method, self.options, self.world_size = method, options, world_size
        self.open_coders = method.traits.open_coders
        self.coder = (
            next((name for name in method.traits.kernels if name in CODERS), None) if not self.open_coders else None
        )
        self.parameters = {name: Parameter.of(name, tensor) for name, tensor in parameters.items()}
        if method.traits.local_steps:
            # What is exchanged, differences or parameters, is computed in float32.
            self.parameters = {n: replace(p, dtype=torch.float32) for n, p in self.parameters.items()}
        self.dense = dense_names({n: p.numel for n, p in self.parameters.items()}, options, method)
        self._kernels: Kernels | None = None
        self.chosen: dict[str, int] = {}
        self._collectives = options.collectives(method)
        usual = method.usual_collective(world_size)
        if usual in self._collectives:
            # With a choice by bytes the outcome would depend on the layout of buckets.
            self._collectives = (usual,)
        require(bool(self._collectives), method.name, "it chooses among methods and has no plan of its own: name one")
        self._plans: dict[tuple[tuple[str, ...], bool, int], BucketPlan] = {}
        self._last_used: dict[tuple[tuple[str, ...], bool, int], int] = {}
        self._laid_out: dict[tuple[str, ...], list[Segment]] = {}
        # Fragments of a model are exchanged in turn, a round for each.
        in_turn = method.traits.local_steps and not method.traits.outcomes_differ
        self._turns = cast(StepsLocally, method).fragments if in_turn else 1

    @property
    def kernels(self) -> Kernels:
        """The kernel backend."""
        if self._kernels is None:
            require(self.options.backend != "meta", "backend", "'meta' computes nothing: it is for dry runs")
            self._kernels = get_kernels(self.options.backend)
        return self._kernels

    def compile(self) -> float:
        """Compile the kernels of the method, or load them; return the seconds of compilation.

        Raises:
            HyperparameterError: the backend is unknown.
            BackendError: the backend is not installed.
        """
        compiled_s = self.kernels.warm_up(self.method.traits.kernels) if self.method.traits.kernels else 0.0
        return compiled_s + (checksum.warm_up() if self._seals() else 0.0)

    def _seals(self) -> bool:
        """Return whether messages of this exchange, or of its link between two rounds, have checksums."""
        told = self.options.check_every or self.options.fallback is not None or self.method.traits.local_steps
        return bool(self.method.traits.kernels or self.dense or told)

    def measure_coders(self) -> dict[str, float]:
        """Return the seconds of each open coder; see :func:`gradwire.exchange.planning.measure_coders`."""
        if not self.open_coders or self.dense == self.parameters.keys():
            return dict.fromkeys(self.open_coders, 0.0)
        return measure_coders(self.method, self.kernels.name)

    def settle(self, coder: str) -> None:
        """Use one of the method's open coders from the next plan on; the default is the fastest in this process.

        Raises:
            HyperparameterError: it is not one of the open coders.
        """
        require(coder in self.open_coders, self.method.name, f"no open coder {coder!r} in {self.open_coders}")
        if coder != self.coder:
            self.coder = coder
            self._plans.clear()
            self._last_used.clear()

    def check(self) -> None:
        """Plan all parameters once, without data or kernels, so that errors are raised before the first step.

        Raises:
            IncompatibleError: the method does not support this number of workers, or a wrapper its payload.
        """
        names, numel = tuple(self.step_order()), sum(p.numel for p in self.parameters.values())
        for collective in self._collectives:
            plan = self._build(names, False, collective, get_kernels("meta"))
            if self.open_coders or self.coder:
                try:
                    # Some plans give the coder to an operator only when they run.
                    dry_run(plan, numel, self.world_size)
                except IncompatibleError as error:
                    raise IncompatibleError(f"{self.method!r}: {error}") from None
        self._laid_out.pop(names, None)

    @property
    def backend(self) -> str:
        """Name of the backend in use; "none" if the method needs no kernels."""
        return self.kernels.name if self.method.traits.kernels else "none"

    @property
    def chosen_kernels(self) -> dict[str, dict[str, Any]]:
        """The choices of the backend "auto" for the families of kernels that the method calls, with measured times."""
        ours = self.method.traits.kernels if self.options.backend == "auto" else ()
        return {family: row for family, row in chosen().items() if family in ours}

    def is_warm_up(self, round: int) -> bool:
        """Return whether everything is sent in float32 in a round."""
        return round < self.options.warmup_steps

    def plan(self, names: Sequence[str], round: int) -> BucketPlan:
        """Return the plan of a bucket with these whole parameters, in this order."""
        key = (tuple(names), self.is_warm_up(round), self._number.value)
        if key not in self._plans:
            # DDP changes its buckets after the first step, and warm-up ends: drop plans that no round uses any more.
            for old in [k for k, last in self._last_used.items() if last <= round - self._turns]:
                del self._plans[old], self._last_used[old]
                self._laid_out.pop(old[0], None)
            self._plans[key] = self._make(*key[:2])
        self._last_used[key] = round
        return self._plans[key]

    def segments(self, names: Sequence[str]) -> list[Segment]:
        """Return segments of whole parameters, one after the other."""
        key = tuple(names)
        if key not in self._laid_out:
            laid = lay_out(self.parameters[name] for name in names)
            self._laid_out[key] = [replace(s, dense=s.parameter.name in self.dense) for s in laid]
        return self._laid_out[key]

    @cached_property
    def joins_buckets(self) -> bool:
        """Whether the buckets of a step are exchanged as one: the method needs the whole step, or the model is small.

        A small model's are joined only if the result does not depend on it.
        """
        method = self.method
        return method.traits.whole_step or (
            method.properties.bit_stable
            and method.cast_dtype is None
            and not (method.traits.local_steps or method.traits.outcomes_differ)
            and self.options.collective != REDUCE_SCATTER
            and sum(p.numel for p in self.parameters.values()) <= JOINED_NUMEL
        )

    def step_order(self) -> list[str]:
        """Return the names of all parameters in the order of a whole step's vector: compressed ones first."""
        return sorted(self.parameters, key=lambda name: name in self.dense)

    def sent_bytes(self, names: Sequence[str]) -> int:
        """Return the number of bytes that one rank sends for a bucket, by a dry run."""
        return self.counted(names).sent_bytes

    def counted(self, names: Sequence[str]) -> Meter:
        """Return the counts of one rank for a bucket, by a dry run."""
        order = tuple(self.step_order()) if self.method.traits.whole_step else tuple(names)
        return min(self._costs(order, warm_up=False).values(), key=lambda meter: meter.sent_bytes)

    def delays(self, buckets: Sequence[Sequence[str]], lanes: int = LANES) -> Delays:
        """Return the critical path of a step in one-way delays, by a dry run.

        Args:
            buckets: Names of the parameters of each bucket, in the order in which buckets become ready.
            lanes: Number of lanes.
        """
        listed = [self.step_order()] if self.joins_buckets else buckets
        meta, found = get_kernels("meta"), []
        for names in map(tuple, listed):
            plan = self._build(names, False, self._best(names, warm_up=False), meta)
            found.append((plan, sum(self.parameters[name].numel for name in names)))
        return count_step_delays(found, self.world_size, lanes=lanes)

    def _best(self, names: tuple[str, ...], warm_up: bool) -> str:
        """Return the protocol that sends the fewest bytes."""
        if len(self._collectives) == 1:
            return self._collectives[0]
        costs = self._costs(names, warm_up)
        return min(costs, key=lambda c: costs[c].sent_bytes)

    def _make(self, names: tuple[str, ...], warm_up: bool) -> BucketPlan:
        best = self._best(names, warm_up)
        self.chosen[best] = self.chosen.get(best, 0) + 1
        if self.open_coders and self.coder is None:
            times = self.measure_coders()
            self.settle(min(times, key=lambda name: times[name]))
        kernels = self.kernels if self.method.traits.kernels else no_kernels(type(self.method).__name__)
        return self._build(names, warm_up, best, kernels)

    def _costs(self, names: tuple[str, ...], warm_up: bool) -> dict[str, Meter]:
        numel, meta = sum(self.parameters[name].numel for name in names), get_kernels("meta")
        plans = {c: self._build(names, warm_up, c, meta) for c in self._collectives}
        return {c: dry_run(plan, numel, self.world_size, period=self.method.traits.period) for c, plan in plans.items()}

    def _build(self, names: tuple[str, ...], warm_up: bool, collective: str, kernels: Kernels) -> BucketPlan:
        segments, method = self.segments(names), self.method
        if self.open_coders:
            # All coders have the same bounds, and a dry run counts nothing else.
            method = method.with_coder(self.coder or self.open_coders[0])
        setting = PlanSetting(
            join_compressed(segments) if self.method.traits.joined else segments,
            kernels,
            self.world_size,
            collective,
            link_seed(self.options.seed, self._number.value),
            self.options.chunk_numel,
        )
        plan = method.dense_plan(setting) if warm_up else method.plan(setting)
        # Some methods keep levels as fractions of a scale, which a spike does not harm: these need no bound.
        adds_up = method.traits.needs_loss_scale and bool(method.traits.remembers or method.traits.local_steps)
        return BoundedPlan(plan, segments, type(method).__name__) if adds_up else plan
