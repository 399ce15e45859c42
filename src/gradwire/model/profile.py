"""A user's model as the performance model sees it: parameters and the backward timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.errors import HyperparameterError
from gradwire.model.timeline import Recorder, Timeline

__all__ = ["Profile"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One step of one worker.

    Attributes:
        source: What was profiled.
        parameters: Shape and stride by name.
        timeline: Of one worker alone on its computer.
    """

    source: str
    parameters: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    timeline: Timeline

    @classmethod
    def of(cls, source: str, module: nn.Module, recorder: Recorder) -> Profile:
        """Take what a recorder measured.

        Raises:
            HyperparameterError: no step was measured, or not every parameter got a gradient.
        """
        timeline = recorder.timeline()
        shapes = {n: (tuple(p.shape), p.stride()) for n, p in module.named_parameters() if p.requires_grad}
        if timeline is None:
            raise HyperparameterError(f"{source}: no step was measured; it must take at least two backward passes")
        missing = set(shapes) - {name for bucket in timeline.buckets for name in bucket.names}
        if missing:
            raise HyperparameterError(f"{source}: parameter {min(missing)!r} was in no bucket of the last step")
        return cls(source=source, parameters=shapes, timeline=timeline)

    @property
    def numel(self) -> int:
        """Elements that are exchanged in a step."""
        return self.timeline.numel

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return stand-ins for the parameters: shapes without values."""
        return {
            name: torch.empty_strided(shape, stride, device="meta") for name, (shape, stride) in self.parameters.items()
        }

    def save(self, path: Path) -> None:
        """Write the profile to a file."""
        record = {"source": self.source, "parameters": self.parameters, "timeline": self.timeline.to_json()}
        path.write_text(json.dumps(record) + "\n")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read :meth:`save`'s file.

        Raises:
            HyperparameterError: it does not exist, or holds no profile.
        """
        if not path.is_file():
            raise HyperparameterError(f"profile {path} does not exist")
        try:
            found: Mapping[str, Any] = json.loads(path.read_text())
            shapes = {n: (tuple(shape), tuple(stride)) for n, (shape, stride) in found["parameters"].items()}
            return cls(source=found["source"], parameters=shapes, timeline=Timeline.from_json(found["timeline"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HyperparameterError(f"{path} holds no profile: {type(error).__name__}: {error}") from None
