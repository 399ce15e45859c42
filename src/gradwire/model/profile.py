"""Timelines of steps without an exchange, and profiles of modules: when each bucket of gradients becomes ready."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from gradwire.errors import HyperparameterError
from gradwire.model.gradients import GradientValues, values_of


@dataclass(frozen=True, kw_only=True)
class ReadyBucket:
    """A bucket, and the seconds from the start of backward until DDP hands it over."""

    names: tuple[str, ...]
    numel: int
    ready_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step without an exchange.

    Attributes:
        forward_s: Seconds from the start of the step to that of backward.
        buckets: Buckets in the order in which DDP hands them over.
        backward_s: Seconds of backward.
        after_s: Seconds from the end of backward to the end of the step: the optimizer.
    """

    forward_s: float
    buckets: tuple[ReadyBucket, ...]
    backward_s: float
    after_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of the step without an exchange."""
        return self.forward_s + self.backward_s + self.after_s

    @property
    def numel(self) -> int:
        """Elements that are exchanged in a step."""
        return sum(b.numel for b in self.buckets)

    def scaled(self, compute_s: float) -> Timeline:
        """Return the timeline, stretched to another duration of the whole step.

        Raises:
            HyperparameterError: the step takes no time.
        """
        if not self.compute_s > 0:
            raise HyperparameterError(
                f"a step of {self.compute_s:g} s cannot be stretched: profile one that takes time"
            )
        k = compute_s / self.compute_s
        buckets = tuple(ReadyBucket(names=b.names, numel=b.numel, ready_s=b.ready_s * k) for b in self.buckets)
        return Timeline(
            forward_s=self.forward_s * k, buckets=buckets, backward_s=self.backward_s * k, after_s=self.after_s * k
        )

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Timeline:
        """Build a timeline from the values of :meth:`to_json`."""
        buckets = tuple(ReadyBucket(**{**b, "names": tuple(b["names"])}) for b in record["buckets"])
        return cls(**{**record, "buckets": buckets})


LOOKS = 4
"""Most steps in which the values of a gradient are looked at: in the first ones they may be zero, where a layer begins
with weights of zeros, or not be finite, until a scale of the loss has been found."""


class Recorder:
    """Measures steps of a DDP module without its exchange.

    The recorder takes the place of the module's only communication hook, so measure on a separate module.

    Args:
        module: A DistributedDataParallel module without a hook.
        automatic: Mark times by the module's own forward calls and buckets, for a training loop that is left unchanged:
            a step then ends when the next forward begins after a synchronised backward. What comes before that
            backward, such as micro-batches under ``no_sync``, counts as forward; forwards without gradients belong to
            no step.

    Attributes:
        reduced: Names of the parameters that the module reduces.
        gradients: Values of their gradients, by name, in the first step in which these are finite and not all zero; if
            there is none among the first :data:`LOOKS` steps, in the last of them.
    """

    def __init__(self, module: Any, automatic: bool = False) -> None:
        inner: nn.Module = module.module
        self._names = {id(p): name for name, p in inner.named_parameters()}
        # By identity: DDP goes on to reduce those parameters of the root module itself that it was told to ignore.
        self.reduced = frozenset(self._names[id(p)] for p in module._build_params_for_reducer()[0])
        self.gradients: dict[str, GradientValues] = {}
        self._looks = Counter[str]()
        self._marks: list[float] = []
        self._buckets: list[tuple[float, tuple[str, ...], int]] = []
        self._steps: list[tuple[list[float], list[tuple[float, tuple[str, ...], int]]]] = []
        module.register_comm_hook(None, self._hook)
        self._automatic = automatic
        if automatic:
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    @property
    def steps(self) -> int:
        """Steps measured so far."""
        return len(self._steps)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if len(self._marks) == 3:
            self.end()
            self._marks = []
        # Further forwards before the buckets come are of the same step: its gradients are accumulated.
        if not self._marks and torch.is_grad_enabled():
            self.begin()

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._marks and torch.is_grad_enabled():
            self.forward_ended()

    def _hook(self, state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
        names = tuple(self._names[id(p)] for p in bucket.parameters())
        self._buckets.append((time.perf_counter(), names, bucket.buffer().numel()))
        for name, gradient in zip(names, bucket.gradients()):
            # As few times as it can be, since it takes longer than some steps.
            if self._looks[name] < LOOKS and not (name in self.gradients and any(self.gradients[name].quantiles)):
                self._looks[name] += 1
                self.gradients[name] = values_of(gradient)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        if self._automatic and bucket.is_last():
            self.backward_ended()
        return future

    def begin(self) -> None:
        """Mark the start of a step."""
        self._marks, self._buckets = [time.perf_counter()], []

    def forward_ended(self) -> None:
        """Mark the start of backward; the last such mark of a step counts."""
        self._marks[1:] = [time.perf_counter()]

    def backward_ended(self) -> None:
        """Mark the start of the optimizer."""
        self._marks.append(time.perf_counter())

    def end(self) -> None:
        """Mark the end of the step."""
        self._marks.append(time.perf_counter())
        self._steps.append((self._marks, self._buckets))

    def reset(self) -> None:
        """Discard the steps so far."""
        self._steps.clear()

    def timeline(self) -> Timeline | None:
        """Return a step as long as the median of the steps with the latest layout of buckets; None before the first.

        Its parts are in proportion to their own medians. These sum up to less than a step where processes share cores:
        each part is now and then interrupted, and in most steps one of them is.
        """
        if not self._steps:
            return None
        layout = [(names, numel) for _, names, numel in self._steps[-1][1]]
        steps = [(m, b) for m, b in self._steps if [(names, numel) for _, names, numel in b] == layout]
        spans = [[b - a for a, b in pairwise(marks)] for marks, _ in steps]
        forward_s, backward_s, after_s = (_middle(column) for column in zip(*spans))
        ready = [_middle([b[i][0] - marks[1] for marks, b in steps]) for i in range(len(layout))]
        buckets = tuple(ReadyBucket(names=names, numel=numel, ready_s=at) for (names, numel), at in zip(layout, ready))
        parts = Timeline(forward_s=forward_s, buckets=buckets, backward_s=backward_s, after_s=after_s)
        whole_s = _middle([marks[-1] - marks[0] for marks, _ in steps])
        return parts.scaled(whole_s) if parts.compute_s > 0 else parts


FLOATS = {str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""Dtypes of gradients, by the names that files of profiles have."""


def _middle(values: Sequence[float]) -> float:
    return float(median(values))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A step of one worker.

    Attributes:
        source: Name of the profiled task, model or script.
        parameters: Shape and stride of each parameter, by name.
        timeline: Timeline of a worker that is alone on its computer.
        dtypes: Dtype of each parameter that is not in float32, by name.
        gradients: Values of each parameter's gradient (:func:`gradwire.model.gradients.values_of`), by name; empty if
            they are not known.
    """

    source: str
    parameters: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    timeline: Timeline
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    gradients: dict[str, GradientValues] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str, module: nn.Module, recorder: Recorder) -> Profile:
        """Build the profile of a module from a recorder's steps.

        Raises:
            HyperparameterError: no step was measured, or not every parameter got a gradient.
        """
        timeline = recorder.timeline()
        exchanged = {n: p for n, p in module.named_parameters() if n in recorder.reduced}
        shapes = {n: (tuple(p.shape), p.stride()) for n, p in exchanged.items()}
        dtypes = {n: p.dtype for n, p in exchanged.items() if p.dtype != torch.float32}
        if timeline is None:
            raise HyperparameterError(f"{source}: no step was measured; it must take at least two backward passes")
        missing = set(shapes) - {name for bucket in timeline.buckets for name in bucket.names}
        if missing:
            raise HyperparameterError(f"{source}: parameter {min(missing)!r} was in no bucket of the last step")
        known = {name: recorder.gradients[name] for name in shapes}
        return cls(source=source, parameters=shapes, timeline=timeline, dtypes=dtypes, gradients=known)

    @property
    def numel(self) -> int:
        """Elements that are exchanged in a step."""
        return self.timeline.numel

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return ``meta`` tensors with the shapes, strides and dtypes of the parameters."""
        return {
            name: torch.empty_strided(shape, stride, dtype=self.dtypes.get(name, torch.float32), device="meta")
            for name, (shape, stride) in self.parameters.items()
        }

    def save(self, path: Path) -> None:
        """Write the profile to a file."""
        record = {
            "source": self.source,
            "parameters": self.parameters,
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()},
            "timeline": self.timeline.to_json(),
            "gradients": {name: values.to_json() for name, values in self.gradients.items()},
        }
        path.write_text(json.dumps(record) + "\n")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read the file that :meth:`save` wrote.

        Raises:
            HyperparameterError: the file does not exist, or holds no profile.
        """
        if not path.is_file():
            raise HyperparameterError(f"profile {path} does not exist")
        try:
            found: Mapping[str, Any] = json.loads(path.read_text())
            shapes = {n: (tuple(shape), tuple(stride)) for n, (shape, stride) in found["parameters"].items()}
            timeline = Timeline.from_json(found["timeline"])
            # Profiles of earlier versions have none.
            dtypes = {name: FLOATS[told] for name, told in found.get("dtypes", {}).items()}
            known = {
                name: GradientValues.from_json(told, math.prod(shapes[name][0]))
                for name, told in found.get("gradients", {}).items()
            }
            if not timeline.compute_s > 0:
                raise ValueError("its step takes no time")
            return cls(source=found["source"], parameters=shapes, timeline=timeline, dtypes=dtypes, gradients=known)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HyperparameterError(f"{path} holds no profile: {type(error).__name__}: {error}") from None
