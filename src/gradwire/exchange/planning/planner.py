"""Where the payloads of a link are made: on the device of its parameters, or in main memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from gradwire.errors import BackendError, IncompatibleError
from gradwire.exchange.drivers import Meter, dry_run, simulate_ranks
from gradwire.exchange.method import Method, require
from gradwire.exchange.planning.options import Options, dense_names
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import BoundedPlan, BucketPlan, PlanSetting
from gradwire.exchange.segments import Parameter, Segment, join_compressed, lay_out
from gradwire.kernels import CODERS, TRITON_FAMILIES, Kernels, checksum, chosen, get_kernels, time_coders
from gradwire.seeds import LinkNumber, link_seed

HOST_BACKENDS = ("cpu", "cpu-plain", "reference")


@dataclass(frozen=True)
class Placement:
    """Who computes, and where.

    Attributes:
        backend: Of the kernels.
        on_device: Whether payloads are made on the device; otherwise gradients are copied to main memory, exchanged
            there, and their mean is copied back.
        reason: Why, in words for a run's record.
    """

    backend: str
    on_device: bool
    reason: str


def place_kernels(methods: Sequence[Method], asked: str, device: torch.device) -> Placement:
    """Choose the backend of the kernels for parameters on a device.

    Args:
        methods: That the link may use, in any of its rounds.
        asked: A backend by name. "auto" stands for Triton's kernels where all methods can do with them, else for those
            of the CPU.

    Raises:
        BackendError: Triton's kernels are asked for on a device, and a method cannot do with them.
        IncompatibleError: outcomes differ by rank, which is served in main memory alone.
    """
    if device.type == "cpu":
        return Placement(asked, False, "the parameters are in main memory")
    for method in methods:
        if method.traits.outcomes_differ:
            raise IncompatibleError(
                f"{method!r} keeps parameters of its own on each rank, which is served for parameters in main memory "
                f"alone, and these are on {device}: move the model to the CPU, or use another method"
            )
    if asked in HOST_BACKENDS:
        return Placement(asked, False, f"backend={asked!r} was asked for")
    obstacle = next((found for found in map(_obstacle, methods) if found), None)
    if obstacle is None:
        return Placement("triton", True, "all that the method computes has kernels for the device")
    if asked == "triton":
        raise BackendError(
            f"backend='triton' cannot serve parameters on {device}: {obstacle}. Use backend='auto' or 'cpu', which "
            "copies gradients to main memory and exchanges them there"
        )
    return Placement(asked, False, obstacle)


def _obstacle(method: Method) -> str | None:
    """Explain what keeps a method from computing on a device; None where nothing does."""
    lacking = [family for family in method.traits.kernels if family not in TRITON_FAMILIES]
    if lacking:
        return f"{method.name} needs {', '.join(map(repr, lacking))}, of which Triton has no kernels here"
    return None if method.traits.on_device else f"{method.name} computes in main memory between its kernels"


def own_buckets(parameters: dict[str, torch.Tensor], most: int) -> list[list[str]]:
    """Lay parameters out in buckets of one type and so many elements, the last one first, as backward brings them."""
    buckets: dict[tuple[torch.dtype, int], list[str]] = {}
    filled: dict[torch.dtype, list[int]] = {}
    for name, p in reversed(parameters.items()):
        at = filled.setdefault(p.dtype, [0, 0])
        if at[1] and at[1] + p.numel() > most:
            at[0], at[1] = at[0] + 1, 0
        at[1] += p.numel()
        buckets.setdefault((p.dtype, at[0]), []).append(name)
    return list(buckets.values())


SAMPLE_NUMEL = 1 << 18
"""Elements whose digits are coded for a time: fewer than a bucket's, so that a payload stays in the caches as there."""

REFERENCE_NUMEL = 1 << 13
"""As many for the reference, which is there to be read."""


@cache
def measure_coders(method: Method, backend: str) -> dict[str, float]:
    """Return the seconds that each of a method's open coders takes to encode and decode one payload.

    The payload holds the digits that the method makes of ``2^18`` standard normal numbers. Coders take turns; the
    least time of several turns counts. Measured once a process: some milliseconds, beside what is compiled first.

    Args:
        method: With ``open_coders``.
        backend: Of the kernels, by name.
    """
    kernels = get_kernels(backend)
    payload = _payload(method, kernels)
    repeats = 1 if kernels.name == "reference" else 9
    return time_coders({name: kernels.coder(name) for name in method.traits.open_coders}, payload, repeats)


class _Copying:
    """A coder that leaves bytes as they are, and keeps those that it saw."""

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


def _payload(method: Method, kernels: Kernels) -> torch.Tensor:
    """Return the bytes that a coder would be given first in a round of one worker alone."""
    numel = REFERENCE_NUMEL if kernels.name == "reference" else SAMPLE_NUMEL
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    coder = _Copying()
    segments = lay_out([Parameter("sample", (numel,), (1,))])
    plan = method.plan(PlanSetting(segments, kernels, 1, method.traits.collectives[0], 0, numel, coder))
    simulate_ranks([plan.whole(Context(0, 1, 0), flat)], [Meter()])
    return coder.seen[0]


class Planner:
    """Makes the plan of any bucket of known parameters, and remembers it.

    Args:
        method: How they are exchanged.
        parameters: All of them, by name.
        world_size: Ranks that take part.
        options: Checked here against the method and the names.
        number: Of the link, on which its random numbers depend; 0 if None. A change takes effect with the next plan.

    Attributes:
        open_coders: Entropy coders of which one is to be settled; see :meth:`settle`.
        coder: The one that serves; None where there is none, or none yet.

    Raises:
        HyperparameterError: the method is one that chooses among others, or a pattern matches no name.
        IncompatibleError: the method cannot travel as the options ask.
    """

    def __init__(
        self,
        method: Method,
        parameters: Mapping[str, torch.Tensor],
        world_size: int,
        options: Options,
        number: LinkNumber | None = None,
    ) -> None:
        self._number = number or LinkNumber()
        self.method, self.options, self.world_size = method, options, world_size
        self.open_coders = method.traits.open_coders
        self.coder = (
            next((name for name in method.traits.kernels if name in CODERS), None) if not self.open_coders else None
        )
        self.parameters = {name: Parameter.of(name, tensor) for name, tensor in parameters.items()}
        self.dense = dense_names({n: p.numel for n, p in self.parameters.items()}, options, method)
        self._kernels: Kernels | None = None
        self.chosen: dict[str, int] = {}
        self._collectives = options.collectives(method)
        usual = method.usual_collective(world_size)
        if usual in self._collectives:
            # A choice by bytes would let the layout of buckets decide the outcome.
            self._collectives = (usual,)
        require(bool(self._collectives), method.name, "it chooses among methods and has no plan of its own: name one")
        self._plans: dict[tuple[tuple[str, ...], bool, int], BucketPlan] = {}
        self._last_used: dict[tuple[tuple[str, ...], bool, int], int] = {}
        self._laid_out: dict[tuple[str, ...], list[Segment]] = {}

    @property
    def kernels(self) -> Kernels:
        """The backend."""
        if self._kernels is None:
            require(self.options.backend != "meta", "backend", "'meta' computes nothing: it is for dry runs")
            self._kernels = get_kernels(self.options.backend)
        return self._kernels

    def compile(self) -> float:
        """Compile what the method will call, or load it; return the seconds in which something was compiled.

        Raises:
            HyperparameterError: there is no such backend.
            BackendError: the backend is not installed.
        """
        compiled_s = self.kernels.warm_up(self.method.traits.kernels) if self.method.traits.kernels else 0.0
        return compiled_s + (checksum.warm_up() if self.method.traits.kernels or self.dense else 0.0)

    def measure_coders(self) -> dict[str, float]:
        """Return the seconds that each open coder takes here; see :func:`gradwire.exchange.planning.measure_coders`."""
        if not self.open_coders or self.dense == self.parameters.keys():
            return dict.fromkeys(self.open_coders, 0.0)
        return measure_coders(self.method, self.kernels.name)

    def settle(self, coder: str) -> None:
        """Use that one of the method's open coders from the next plan on; without a call, the fastest in this process.

        Raises:
            HyperparameterError: the method leaves no such coder open.
        """
        require(coder in self.open_coders, self.method.name, f"no open coder {coder!r} in {self.open_coders}")
        if coder != self.coder:
            self.coder = coder
            self._plans.clear()
            self._last_used.clear()

    def check(self) -> None:
        """Plan all parameters once, without data or kernels, so that what has no plan is refused before a step.

        Raises:
            IncompatibleError: the method cannot work with so many workers, or a method around it with its payload.
        """
        names = tuple(self.step_order())
        for collective in self._collectives:
            self._build(names, False, collective, get_kernels("meta"))
        self._laid_out.pop(names, None)

    @property
    def backend(self) -> str:
        """The backend that runs; "none" where the method needs no kernels."""
        return self.kernels.name if self.method.traits.kernels else "none"

    @property
    def chosen_kernels(self) -> dict[str, dict[str, Any]]:
        """What the backend "auto" chose for the families of kernels that the method calls, and the times it took."""
        ours = self.method.traits.kernels if self.options.backend == "auto" else ()
        return {family: row for family, row in chosen().items() if family in ours}

    def is_warm_up(self, round: int) -> bool:
        """Return whether that round travels in float32."""
        return round < self.options.warmup_steps

    def plan(self, names: Sequence[str], round: int) -> BucketPlan:
        """Return the plan of a bucket that holds these whole parameters, in this order."""
        key = (tuple(names), self.is_warm_up(round), self._number.value)
        if key not in self._plans:
            # DDP lays its buckets out anew after the first step, and warm-up ends: what no round uses any more goes.
            for old in [k for k, last in self._last_used.items() if last < round]:
                del self._plans[old], self._last_used[old]
                self._laid_out.pop(old[0], None)
            self._plans[key] = self._make(*key[:2])
        self._last_used[key] = round
        return self._plans[key]

    def segments(self, names: Sequence[str]) -> list[Segment]:
        """Lay whole parameters one after the other."""
        key = tuple(names)
        if key not in self._laid_out:
            laid = lay_out(self.parameters[name] for name in names)
            self._laid_out[key] = [replace(s, dense=s.parameter.name in self.dense) for s in laid]
        return self._laid_out[key]

    def step_order(self) -> list[str]:
        """Name all parameters in the order in which a whole step lies: compressed ones first, then the others."""
        return sorted(self.parameters, key=lambda name: name in self.dense)

    def sent_bytes(self, names: Sequence[str]) -> int:
        """Count the bytes that one rank sends for a bucket, without data or kernels."""
        return self.counted(names).sent_bytes

    def counted(self, names: Sequence[str]) -> Meter:
        """Count what one rank sends for a bucket, without data or kernels."""
        order = tuple(self.step_order()) if self.method.traits.whole_step else tuple(names)
        return min(self._costs(order, warm_up=False).values(), key=lambda meter: meter.sent_bytes)

    def _make(self, names: tuple[str, ...], warm_up: bool) -> BucketPlan:
        best = self._collectives[0]
        if len(self._collectives) > 1:
            costs = self._costs(names, warm_up)
            best = min(costs, key=lambda c: costs[c].sent_bytes)
        self.chosen[best] = self.chosen.get(best, 0) + 1
        if self.open_coders and self.coder is None:
            times = self.measure_coders()
            self.settle(min(times, key=lambda name: times[name]))
        return self._build(names, warm_up, best, self.kernels if self.method.traits.kernels else get_kernels("meta"))

    def _costs(self, names: tuple[str, ...], warm_up: bool) -> dict[str, Meter]:
        numel, meta = sum(self.parameters[name].numel for name in names), get_kernels("meta")
        plans = {c: self._build(names, warm_up, c, meta) for c in self._collectives}
        return {c: dry_run(plan, numel, self.world_size) for c, plan in plans.items()}

    def _build(self, names: tuple[str, ...], warm_up: bool, collective: str, kernels: Kernels) -> BucketPlan:
        segments, method = self.segments(names), self.method
        if self.open_coders:
            # All coders have the same bounds, which are all that a dry run counts.
            method = method.with_coder(self.coder or self.open_coders[0])
        setting = PlanSetting(
            join_compressed(segments) if self.method.traits.joined else segments,
            kernels,
            self.world_size,
            collective,
            link_seed(self.options.seed, self._number.value),
            self.options.chunk_numel,
            parts=[s for s in segments if not s.dense] if self.method.traits.joined else (),
        )
        plan = method.dense_plan(setting) if warm_up else method.plan(setting)
        # Levels that are shares of a scale are remembered, too, and a spike does them no harm.
        adds_up = method.traits.needs_loss_scale and bool(method.traits.remembers or method.traits.local_steps)
        return BoundedPlan(plan, segments, type(method).__name__) if adds_up else plan
