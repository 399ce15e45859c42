"""A step's buckets as one vector, for methods that need all gradients before they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.drivers import Device
from gradwire.exchange.segments import Parameter

__all__ = ["StepBuffer"]


class StepBuffer:
    """Collects the buckets of one step after the other, and gives them back.

    Args:
        order: All parameters, as they are to lie in the step's vector.
        parameters: By name.
        device: That buckets lie on.
    """

    def __init__(self, order: Sequence[str], parameters: Mapping[str, Parameter], device: Device) -> None:
        self._device = device
        self.order = list(order)
        self._place: dict[str, tuple[int, int]] = {}
        offset = 0
        for name in self.order:
            numel = parameters[name].numel
            self._place[name] = (offset, offset + numel)
            offset += numel
        self._numel = offset
        self._buckets: list[tuple[Sequence[str], torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._vector: torch.Tensor | None = None

    def add(self, names: Sequence[str], flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Note a bucket; its future is done when the step is given back."""
        future = self._device.future()
        self._buckets.append((names, flat, future))
        return future

    def vector(self) -> torch.Tensor:
        """Join the buckets into one float32 vector, which is kept from step to step.

        Raises:
            IncompatibleError: the step left a parameter out.
        """
        missing = set(self.order) - {name for names, _, _ in self._buckets for name in names}
        if missing:
            raise IncompatibleError(
                f"this step has no gradient for {sorted(missing)[0]!r}, and the method needs the whole step: use a "
                "method that goes bucket by bucket, or freeze the parameter before attaching"
            )
        if self._vector is None:
            self._vector = torch.empty(self._numel, device=self._device.name)
        for flat, part in self._parts(self._vector):
            part.copy_(flat)
        return self._vector

    def give_back(self, ended: torch.futures.Future[torch.Tensor]) -> None:
        """Hand the mean, or the failure, to every bucket's future, and begin anew."""
        buckets = self._buckets
        try:
            vector = ended.value()
            for flat, part in self._parts(vector):
                flat.copy_(part)
        except Exception as error:
            self._buckets = []
            for _, _, future in buckets:
                future.set_exception(error)  # type: ignore[arg-type]
            return
        self._buckets = []
        for _, flat, future in buckets:
            future.set_result(flat)

    def _parts(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for names, flat, _ in self._buckets:
            at = 0
            for name in names:
                begin, end = self._place[name]
                pairs.append((flat[at : at + end - begin], vector[begin:end]))
                at += end - begin
        return pairs
