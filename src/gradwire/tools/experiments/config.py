"""Settings of a training run, and of its link."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import gradwire as gw
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.tasks import Task, build
from gradwire.tools.lab import Topology


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """The method, and the options of its link.

    Every other field is an option of ``gradwire.attach``, under its name.

    Attributes:
        method: Spec of the method.
        check_every: None: never, and in a training run as :class:`RunConfig` says.
    """

    method: str = "fp32"
    exclude: tuple[str, ...] = ()
    min_numel: int | None = None
    warmup_steps: int = 0
    collective: str = "auto"
    fallback: str | None = None
    fallback_limit: float | None = None
    check_every: int | None = None
    seed: int = 0

    def link_options(self) -> dict[str, Any]:
        """Return the options of ``gradwire.attach``."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(LinkSettings)}
        del options["method"]
        return {**options, "check_every": self.check_every or 0}


DEFAULT_WORKERS = 4

CHECK_EVERY = 100
"""Rounds between comparisons of all workers' parameters. One costs a CRC-32 of each, and 8 bytes to each other
worker."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(LinkSettings):
    """Settings of a training run.

    Attributes:
        task: The task and its settings.
        workers: World size; ``task.batch`` is divided by it.
        simulate: Play all workers in one process.
        seed: Seed of the method's random numbers, the initial weights, the data order and augmentation.
        min_numel: None: the task's own.
        check_every: None: every 100 rounds, if workers are real and their parameters are meant to be equal.
        threads: Torch threads of each process.
        checkpoint_every: Steps between checkpoints; 0: only by time, and at the end.
        checkpoint_minutes: Minutes between checkpoints, which are written with the next row of metrics; 0: not by time.
        log_every: Steps between training rows; a row holds the mean loss and the median step time since the last.
        lab: Emulated cluster that the workers are spread over in blocks of ranks, as ``Topology.parse`` reads it;
            stored as ``Topology.spec`` writes it. None: this machine as it is.
    """

    task: Task
    workers: int = DEFAULT_WORKERS
    simulate: bool = False
    threads: int = 1
    checkpoint_every: int = 0
    checkpoint_minutes: float = 10.0
    log_every: int = 10
    lab: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot be trained; raises UsageError."""
        for field in ("workers", "threads", "log_every"):
            if getattr(self, field) < 1:
                raise UsageError(f"{field} = {getattr(self, field)}: must be at least 1")
        for field in ("seed", "checkpoint_every", "min_numel", "warmup_steps", "check_every"):
            if (getattr(self, field) or 0) < 0:
                raise UsageError(f"{field} = {getattr(self, field)}: must not be negative")
        if not 0 <= self.checkpoint_minutes < math.inf:
            raise UsageError(f"checkpoint_minutes = {self.checkpoint_minutes}: must be a number, and not negative")
        if self.workers == 1 and not self.simulate:
            raise UsageError("1 worker exchanges nothing: use at least 2 workers, or add --simulate")
        if self.simulate and self.fallback is not None:
            raise UsageError("simulated workers measure no errors: leave --simulate or --fallback out")
        if self.simulate and self.check_every:
            raise UsageError("simulated workers have parameters in common: leave --simulate or --check-every out")
        if self.simulate and self.warmup_steps and gw.method(self.method).traits.local_steps:
            raise UsageError(
                "in rounds of warm-up gradients are exchanged, which a simulation of local steps does not see: "
                "leave --simulate or --warmup-steps out"
            )
        if self.task.batch % self.workers:
            raise UsageError(
                f"total batch {self.task.batch} cannot be shared evenly by {self.workers} workers: "
                f"use --batch {self.task.batch // self.workers * self.workers + self.workers} "
                "or another number of workers"
            )
        if self.lab is not None:
            object.__setattr__(self, "lab", self._checked_lab(Topology.parse(self.lab)))

    def _checked_lab(self, lab: Topology) -> str:
        if self.simulate:
            raise UsageError("simulated workers send nothing over a network: leave --simulate or --lab out")
        if lab.hosts == 1:
            raise UsageError("on a lab of 1 host nothing passes a link: use at least hosts=2")
        if self.workers % lab.hosts:
            more = -(-self.workers // lab.hosts) * lab.hosts
            raise UsageError(
                f"{self.workers} workers cannot be spread evenly over {lab.hosts} hosts: use --workers {more}, or a lab"
                f" with another number of hosts"
            )
        return lab.spec()

    def topology(self) -> Topology | None:
        """Return the emulated cluster, if there is one."""
        return None if self.lab is None else Topology.parse(self.lab)

    def link_options(self) -> dict[str, Any]:
        """Return the options of ``gradwire.attach``, and of ``gradwire.SimulatedLink``."""
        options = super().link_options()
        if self.min_numel is None:
            options["min_numel"] = self.task.min_numel
        if self.check_every is None and not self.simulate and not gw.method(self.method).traits.outcomes_differ:
            options["check_every"] = CHECK_EVERY
        return options

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **record,
            "task": self.task.name,
            "settings": self.task.settings(),
            "exclude": list(self.exclude),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RunConfig:
        """Read :meth:`to_json`'s record back; raises UsageError or TypeError for any other."""
        fields = dict(record)
        task = build(fields.pop("task"), **fields.pop("settings"))
        return cls(task=task, **{**fields, "exclude": tuple(fields["exclude"])})
