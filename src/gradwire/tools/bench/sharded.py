"""Steps of modules that FSDP2 shards, for the step benchmark: real ones, and ones that sleep.

Each layer of the longest list of layers is a unit, and the module with the rest is the root. Every unit prefetches the
parameters of the next two units, in forward and in backward.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.model.profile import Timeline
from gradwire.tools.bench.models import Batch, BenchModel
from gradwire.tools.experiments.errors import RunError, UsageError

WEIGHTS = "fsdp+weights"
SHARDED = ("fsdp", WEIGHTS, "hsdp")
"""Kinds of variants: all ranks hold shards, the same with compressed gathers of weights, and two replicas of shards."""

NATIVE = "native"
"""Spec of FSDP2's own exchange."""

REPLICAS = 2
PREFETCH = 2
"""Units whose parameters are gathered ahead: while one is on its way, the next does not wait for the slowest rank."""

PROFILED = 8
"""Steps whose passes are measured; the first two are not counted."""


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers that are units of their own."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers = max(lists, key=len) if lists else module.children()
    return [layer for layer in layers if next(layer.parameters(), None) is not None]


def shard(kind: str, module: nn.Module) -> None:
    """Shard a module over all ranks, or over each half of them.

    Raises:
        UsageError: the ranks cannot be two replicas of at least two shards.
    """
    ranks = dist.get_world_size()
    if kind == "hsdp" and (ranks % REPLICAS or ranks < 2 * REPLICAS):
        raise UsageError(f"hsdp on {ranks} hosts: {REPLICAS} replicas of two or more shards need 4 hosts, 6, 8, ...")
    shape, names = ((REPLICAS, ranks // REPLICAS), ("replicate", "shard")) if kind == "hsdp" else ((ranks,), ("shard",))
    mesh, units = init_device_mesh("cpu", shape, mesh_dim_names=names), units_of(module)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    root: Any = fully_shard(module, mesh=mesh)
    for number, part in enumerate([root, *units]):
        part.set_modules_to_forward_prefetch(units[number : number + PREFETCH])
    for number, part in enumerate([*units, root]):
        part.set_modules_to_backward_prefetch(units[max(0, number - PREFETCH) : number][::-1])


class ShardedCompute:
    """The sharded model's passes and a step of SGD.

    Args:
        module: The sharded module.
        model: Computes the loss.
        batch: This rank's batch.
    """

    def __init__(self, module: nn.Module, model: BenchModel, batch: Batch) -> None:
        self.wrapped: Any = module
        self._model, self._batch = model, batch
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss."""
        self._optimizer.zero_grad()
        return self._model.loss(self.wrapped, self._batch)

    def update(self) -> None:
        """Take the optimizer's step."""
        self._optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of a step's passes, in order: before the first unit, in each unit, and after the last one.

    In backward the last pass is the first, and the root's parameters have their gradients after ``backward_s[0]``.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float

    def scaled(self, timeline: Timeline) -> Passes:
        """Return the passes, stretched so that forward, backward and the optimizer take as long as in a timeline."""
        forward, backward = timeline.forward_s / sum(self.forward_s), timeline.backward_s / sum(self.backward_s)
        return Passes(
            forward_s=tuple(forward * s for s in self.forward_s),
            backward_s=tuple(backward * s for s in self.backward_s),
            update_s=timeline.after_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the passes as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Passes:
        """Build passes from the values of :meth:`to_json`."""
        forward_s, backward_s = tuple(record["forward_s"]), tuple(record["backward_s"])
        return cls(forward_s=forward_s, backward_s=backward_s, update_s=record["update_s"])


def measure_passes(model: BenchModel, batch: Batch) -> Passes:
    """Measure the passes of a model on this rank alone, by medians over steps."""
    module, clock = model.make(), time.perf_counter
    units, marks = units_of(module), dict[str, float]()

    def mark(name: str, *_: Any) -> None:
        marks.setdefault(name, clock())

    for i, unit in enumerate(units):
        unit.register_forward_pre_hook(partial(mark, f"forward {i}"))
        unit.register_full_backward_pre_hook(partial(mark, f"backward {i}"))
    units[-1].register_forward_hook(partial(mark, "forward end"))
    units[0].register_full_backward_hook(partial(mark, "backward end"))
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.01), list[tuple[list[float], list[float], float]]()
    for _ in range(PROFILED):
        marks.clear()
        optimizer.zero_grad()
        began_s = clock()
        loss = model.loss(module, batch)
        turned_s = clock()
        loss.backward()
        ended_s = clock()
        optimizer.step()
        after_s = clock() - ended_s
        ahead = [began_s, *(marks[f"forward {i}"] for i in range(len(units))), marks["forward end"], turned_s]
        # The hook is not called if the first unit's input needs no gradient.
        first_s = marks.get("backward end", ended_s)
        back = [turned_s, *(marks[f"backward {i}"] for i in reversed(range(len(units)))), first_s, ended_s]
        found.append((_lengths(ahead), _lengths(back)[::-1], after_s))
    counted = found[2:]
    columns = [list(zip(*(step[side] for step in counted))) for side in (0, 1)]
    forward_s, backward_s = (tuple(statistics.median(column) for column in side) for side in columns)
    return Passes(forward_s=forward_s, backward_s=backward_s, update_s=statistics.median(step[2] for step in counted))


def _lengths(marks: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


class SleepingShards:
    """Sleeps in place of a sharded model's passes; gradients are those of the model's first step.

    FSDP2 gathers and reduces units around the sleeps as it does around the passes.

    Args:
        module: The sharded module; the ``forward`` of it and of its units is replaced.
        gradients: Gradient of every parameter, by name.
        passes: The passes to sleep through.
        sleep: Waits for so many seconds.

    Raises:
        RunError: the passes are of a model with another number of units.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: Mapping[str, Tensor],
        passes: Passes,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.wrapped: Any = module
        self.passes, self.sleep, self._units = passes, sleep, units_of(module)
        if len(passes.forward_s) != len(self._units) + 2:
            raise RunError("the passes are of a model with another number of units: measure this model's own")
        of_units = {id(unit): prefix for prefix, unit in module.named_modules()}
        # The parameters that FSDP2 puts in place for a pass are found by name; pass 0 has the root's.
        self._names = [[f"{of_units[id(unit)]}.{name}" for name, _ in unit.named_parameters()] for unit in self._units]
        inside = {name for names in self._names for name in names}
        self._names.insert(0, [name for name, _ in module.named_parameters() if name not in inside])
        self.gradients = [[gradients[name] for name in names] for names in self._names]
        for number, unit in enumerate(self._units, 1):
            unit.forward = partial(self._pass, number)
        module.forward = self._forward

    def forward(self) -> Tensor:
        """Sleep through the forward pass and return a token whose backward pass sleeps through the model's."""
        for parameter in self.wrapped.parameters():
            parameter.grad = None
        token: Tensor = self.wrapped(torch.zeros(()))
        return token

    def update(self) -> None:
        """Sleep through the optimizer's step."""
        self.sleep(self.passes.update_s)

    def _forward(self, token: Tensor) -> Tensor:
        token = self._pass(0, token)
        for unit in self._units:
            token = unit(token)
        self.sleep(self.passes.forward_s[-1])
        ended: Tensor = _Slept.apply(token, self, len(self._units) + 1)  # type: ignore[no-untyped-call]
        return ended

    def _pass(self, number: int, token: Tensor) -> Tensor:
        self.sleep(self.passes.forward_s[number])
        parameters = [self.wrapped.get_parameter(name) for name in self._names[number]]
        passed: Tensor = _Slept.apply(token, self, number, *parameters)  # type: ignore[no-untyped-call]
        return passed


class _Slept(torch.autograd.Function):
    """The node of a pass: its backward pass sleeps, and gives the parameters their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, compute: SleepingShards, number: int, *parameters: Tensor) -> Tensor:
        ctx.compute, ctx.number = compute, number
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        compute, number = ctx.compute, ctx.number
        compute.sleep(compute.passes.backward_s[number])
        own = compute.gradients[number] if number < len(compute.gradients) else []
        return gradients[0], None, None, *own


def make_sharded(
    kind: str, model: BenchModel, batch: Batch, timeline: Timeline | None, passes: Passes | None = None
) -> ShardedCompute | SleepingShards:
    """Build the computing part of a sharded variant (collective); all begin with the same weights on every rank.

    Args:
        kind: One of :data:`SHARDED`.
        model: The model to build.
        batch: This rank's batch.
        timeline: How long forward, backward and the optimizer sleep; None: compute for real.
        passes: How these are divided among the units; None: measured on rank 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = model.make()
    if timeline is None:
        shard(kind, module)
        return ShardedCompute(module, model, batch)
    found = torch.autograd.grad(model.loss(module, batch), list(module.parameters()))
    gradients = dict(zip(dict(module.named_parameters()), found))
    passes = (passes or _of_rank_0(model, batch)).scaled(timeline)
    shard(kind, module)
    return SleepingShards(module, gradients, passes)


def _of_rank_0(model: BenchModel, batch: Batch) -> Passes:
    """Return the passes that rank 0 measures while the others wait."""
    mine = measure_passes(model, batch) if dist.get_rank() == 0 else None
    count = len(units_of(model.make())) + 2
    told = torch.zeros(2 * count + 1, dtype=torch.float64)
    if mine is not None:
        told.copy_(torch.tensor([*mine.forward_s, *mine.backward_s, mine.update_s]))
    dist.broadcast(told, 0)
    *seconds, update_s = told.tolist()
    return Passes(forward_s=tuple(seconds[:count]), backward_s=tuple(seconds[count:]), update_s=update_s)
