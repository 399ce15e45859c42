"""The computing part of a benchmark step, real or slept through."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.model.profile import Timeline
from gradwire.tools.bench.models import Batch, BenchModel
from gradwire.tools.experiments.errors import RunError

CPU = torch.device("cpu")

COMPUTE_KINDS = ("real", "sleep", "cuda")
"""Values of a row's field ``compute``: ranks compute on this machine's cores, sleep, or compute on its GPUs."""


class Compute(Protocol):
    """The part of a step that is not the exchange.

    Attributes:
        wrapped: The module, in DistributedDataParallel or sharded.
    """

    wrapped: Any

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss."""
        ...

    def update(self) -> None:
        """Finish the step after the backward pass."""
        ...


class RealCompute:
    """The model's forward and backward pass and a step of SGD.

    Args:
        module: The module, not wrapped yet.
        model: Computes the loss.
        batch: This rank's batch.
        bucket_cap_mb: As for DistributedDataParallel.
        device: Where to compute; a step includes waiting for the device.
    """

    def __init__(
        self, module: nn.Module, model: BenchModel, batch: Batch, bucket_cap_mb: float | None, device: torch.device
    ) -> None:
        module.to(device)
        self.model, self.device = model, device
        self.batch = (batch[0].to(device), batch[1].to(device))
        self.wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb, init_sync=False)
        self._optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=0.01)

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss."""
        self._optimizer.zero_grad()
        return self.model.loss(self.wrapped, self.batch)

    def update(self) -> None:
        """Take the optimizer's step."""
        self._optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class SleepingCompute:
    """Sleeps in place of the passes and of the optimizer; the gradients of every step are those given.

    With t_0 the end of the forward sleep, bucket b's last gradient is handed to DDP at t_0 + ``ready_s`` of b, plus
    the time that communication hooks have spent on this thread since t_0: a hook delays the backward pass that called
    it. After the exchange, the rest of the backward pass and the optimizer follow.

    The gradients are copied into DDP's buckets during the forward sleep, since the exchange of the step before has
    overwritten them.

    Args:
        module: The module, not wrapped yet; its ``forward`` is replaced.
        gradients: Gradient of every parameter, by name.
        timeline: The timeline to replay.
        bucket_cap_mb: As for DistributedDataParallel.
        clock: Returns seconds.
        sleep: Waits for so many seconds.

    Raises:
        RunError: the timeline is of a module with other parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: Mapping[str, Tensor],
        timeline: Timeline,
        bucket_cap_mb: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._parameters = dict(module.named_parameters())
        self._gradients = [gradients[name] for name in self._parameters]
        self._timeline, self._clock, self._sleep = timeline, clock, sleep
        arrivals = [
            (name, bucket.ready_s if name == bucket.names[-1] else None)
            for bucket in timeline.buckets
            for name in bucket.names
        ]
        if sorted(name for name, _ in arrivals) != sorted(self._parameters):
            raise RunError("the timeline is of a module with other parameters: measure this model's own")
        self._arrivals = arrivals
        self._backward_began_s = self._hooks_s = 0.0
        module.forward = self._forward
        # With gradients that are views of the buckets, DDP copies neither into nor out of its buckets.
        self.wrapped = DistributedDataParallel(
            module, bucket_cap_mb=bucket_cap_mb, init_sync=False, gradient_as_bucket_view=True
        )
        self._register: Callable[[object, Callable[..., Any]], None] = self.wrapped.register_comm_hook
        self.wrapped.register_comm_hook = self._register_timed  # type: ignore[method-assign]

    def forward(self) -> Tensor:
        """Sleep through the forward pass and return a token whose backward pass sleeps through the model's."""
        token: Tensor = self.wrapped()
        return token

    def update(self) -> None:
        """Sleep through what follows the last bucket: the end of the backward pass, and the optimizer."""
        last_s = max(bucket.ready_s for bucket in self._timeline.buckets)
        rest_s = self._timeline.backward_s - last_s + self._timeline.after_s
        self._sleep_until(self._clock() + rest_s)

    def _forward(self) -> Tensor:
        until = self._clock() + self._timeline.forward_s
        for parameter, gradient in zip(self._parameters.values(), self._gradients):
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        token = torch.zeros((), requires_grad=True)
        # The backward pass visits the nodes in the opposite order.
        for name, ready_s in reversed(self._arrivals):
            token = _Arrival.apply(token, self._parameters[name], self, ready_s)  # type: ignore[no-untyped-call]
        self._sleep_until(until)
        self._backward_began_s, self._hooks_s = self._clock(), 0.0
        return token

    def arrive(self, ready_s: float | None) -> None:
        """Wait until a gradient is due; None: do not wait, since its bucket waits for others."""
        if ready_s is not None:
            self._sleep_until(self._backward_began_s + ready_s + self._hooks_s)

    def _register_timed(self, state: object, hook: Callable[..., Any]) -> None:
        def timed(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
            began_s = self._clock()
            try:
                return hook(state, bucket)
            finally:
                self._hooks_s += self._clock() - began_s

        self._register(state, timed)

    def _sleep_until(self, until: float) -> None:
        while (left_s := until - self._clock()) > 0:
            self._sleep(left_s)


class _Arrival(torch.autograd.Function):
    """The node of one parameter: its backward pass waits, and keeps ``.grad``, a view of DDP's bucket."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, parameter: Tensor, compute: SleepingCompute, ready_s: float | None) -> Tensor:
        ctx.compute, ctx.ready_s = compute, ready_s
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.compute.arrive(ctx.ready_s)
        return gradients[0], None, None, None


def make_compute(
    model: BenchModel,
    batch: Batch,
    timeline: Timeline | None,
    bucket_cap_mb: float | None = None,
    device: torch.device = CPU,
) -> Compute:
    """Build the computing part of one variant; all variants start from the same weights on every rank.

    Args:
        model: The model to build.
        batch: This rank's batch.
        timeline: Timeline to sleep through; None: compute for real.
        bucket_cap_mb: As for DistributedDataParallel.
        device: Where to compute for real.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = model.make()
    if timeline is None:
        return RealCompute(module, model, batch, bucket_cap_mb, device)
    found = torch.autograd.grad(model.loss(module, batch), list(module.parameters()))
    gradients = dict(zip(dict(module.named_parameters()), found))
    return SleepingCompute(module, gradients, timeline, bucket_cap_mb)
