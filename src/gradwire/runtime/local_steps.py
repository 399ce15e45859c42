"""Exchanges of what a link's local steps have changed: when they are due, and how they go through the link."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.errors import IncompatibleError
from gradwire.local_steps import StepsLocally
from gradwire.methods import Method
from gradwire.planning import Options
from gradwire.runtime.global_parameters import GlobalParameters
from gradwire.runtime.link_runtime import LinkRuntime
from gradwire.runtime.parameters import own_buckets
from gradwire.runtime.selection.control_channel import ControlChannel

__all__ = ["LocalSteps", "LocalStepsUser"]

Exchange = Callable[[int, Sequence[str], torch.Tensor, bool], torch.futures.Future[torch.Tensor]]


class LocalStepsUser:
    """What users ask of a link whose method takes local steps."""

    method: Method
    _local: LocalSteps | None = None

    def after_step(self) -> None:
        """Count an optimizer step, and exchange if it is the last of the method's ``every`` (collective).

        A link that was given the optimizer, or the GradScaler, calls it itself.

        Raises:
            IncompatibleError: the method exchanges gradients.
            ExchangeError: the link is broken; the global parameters are what they were.
        """
        self.local.after_step()

    def synchronise(self) -> None:
        """Exchange now what the steps since the last exchange have changed, however many they are (collective).

        For evaluations and checkpoints of what all ranks know. The next exchange is ``every`` steps later.

        Raises:
            IncompatibleError: the method exchanges gradients.
            ExchangeError: the link is broken; the global parameters are what they were.
        """
        self.local.exchange()

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are the global ones, the same on all ranks.

        ::

            with link.global_parameters():
                evaluate(model)

        Raises:
            IncompatibleError: the method exchanges gradients.
        """
        return self.local.parameters.swapped()

    @property
    def local(self) -> LocalSteps:
        """The local steps of the link.

        Raises:
            IncompatibleError: the method exchanges gradients.
        """
        if self._local is None:
            raise IncompatibleError(f"{self.method!r} exchanges gradients at every step: it has no local steps")
        return self._local


class LocalSteps:
    """Counts the steps of a link's optimizer, and exchanges when they are enough.

    Args:
        parameters: The global ones.
        named: The worker's own, by name.
        most: Elements of a bucket at most.
        exchange: A method of the link, which starts the exchange of a bucket; it does not keep the link alive.
        runtime, channel, grad_scaler: The link's.

    Attributes:
        buffers: Floating-point buffers that are averaged at every exchange.
    """

    def __init__(
        self,
        parameters: GlobalParameters,
        named: dict[str, torch.Tensor],
        most: int,
        exchange: Exchange,
        runtime: LinkRuntime,
        channel: ControlChannel,
        grad_scaler: Any,
    ) -> None:
        self._grad_scaler = grad_scaler
        self.parameters, self._named, self._most = parameters, named, most
        self._exchange, self._runtime, self._channel = weakref.WeakMethod(exchange), runtime, channel
        self.buffers: list[torch.Tensor] = []
        self._hooks: list[Callable[[], None]] = []
        self._synchronous = False

    @classmethod
    def of(
        cls,
        method: Method,
        named: dict[str, torch.Tensor],
        options: Options,
        exchange: Exchange,
        runtime: LinkRuntime,
        channel: ControlChannel,
        grad_scaler: Any,
    ) -> LocalSteps | None:
        """Return the local steps of a link, if its method takes any."""
        if not method.local_steps:
            return None
        parameters = GlobalParameters(cast(StepsLocally, method), named, runtime.world_size)
        return cls(parameters, named, 4 * options.chunk_numel, exchange, runtime, channel, grad_scaler)

    def keep(self, flat: torch.Tensor, last: bool, warm_up: bool) -> torch.futures.Future[torch.Tensor] | None:
        """Give a bucket of gradients back as it is; None in rounds of warm-up, in which it is to be exchanged."""
        if warm_up:
            self._synchronous = self._synchronous or last
            return None
        self._runtime.failures.refuse()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future

    def after_step(self) -> None:
        """Count a step, and exchange where it is the last of those between two exchanges."""
        if self._synchronous:
            # Gradients were exchanged: the parameters are still the same on all ranks.
            self._synchronous = False
            self.parameters.take()
            return
        self.parameters.steps += 1
        if self.parameters.steps >= self.parameters.method.every:
            self.exchange()
        else:
            self._runtime.kept(sum(p.numel() for p in self._named.values()))

    def exchange(self) -> None:
        """Exchange what the steps since the last exchange have changed (collective)."""
        self._runtime.failures.refuse()
        buckets = own_buckets(self._named, self._most)
        exchange = self._exchange()
        if exchange is None:
            return
        started = [
            (names, exchange(i, names, self.parameters.outgoing(names), i == len(buckets) - 1))
            for i, names in enumerate(buckets)
        ]
        try:
            means = [(names, future.wait()) for names, future in started]
        except Exception:
            self._runtime.failures.refuse()
            raise
        if not self.parameters.incoming(means):
            self._runtime.warnings.once(
                "local steps",
                f"after the local steps before exchange {self._runtime.round} a parameter was not finite on some rank: "
                "all ranks go on from the global parameters of the exchange before",
            )
        if self.buffers:
            self._average_buffers()

    def _average_buffers(self) -> None:
        """Replace buffers by their mean over ranks; their few values are gathered."""
        sizes = [b.numel() for b in self.buffers]
        own = torch.cat([b.detach().reshape(-1).to(torch.float32) for b in self.buffers])
        mean = torch.tensor(self._channel.gather(own.tolist()), dtype=torch.float64).mean(0)
        with torch.no_grad():
            for buffer, part in zip(self.buffers, mean.split(sizes)):
                buffer.copy_(part.view(buffer.shape))

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Count the steps of an optimizer or a scaler, if there is one; return what ends all counting."""
        if optimizer is not None or self._grad_scaler:
            self._hooks.append(on_steps(optimizer, self._grad_scaler, parameters, self._stepped()))
        hooks = self._hooks

        def unbind() -> None:
            for remove in hooks:
                remove()

        return unbind

    def count_any_optimizer(self) -> None:
        """Count the steps of whichever optimizer holds the parameters, unless one or a scaler is known already."""
        if not self._hooks:
            self._hooks.append(on_steps(None, None, self._named, self._stepped()))

    def _stepped(self) -> Callable[[], None]:
        """Return what counts a step, and does not keep the link alive."""
        local = weakref.ref(self)

        def stepped() -> None:
            found = local()
            if found is not None:
                found.after_step()

        return stepped


def on_steps(
    optimizer: Any, grad_scaler: Any, parameters: Mapping[str, torch.Tensor], stepped: Callable[[], None]
) -> Callable[[], None]:
    """Call ``stepped`` after every step of an optimizer, and return what ends that.

    Args:
        optimizer: Whose steps count; None for any optimizer that holds one of the parameters.
        grad_scaler: Whose calls of ``update()`` count in their place: a scaler skips steps on ranks that overflowed,
            and a step that one rank skips must count there as on the others.
        parameters: That are exchanged.
    """
    if grad_scaler:
        update = grad_scaler.update

        def updated(*arguments: Any, **options: Any) -> None:
            update(*arguments, **options)
            stepped()

        grad_scaler.update = updated

        def unbind() -> None:
            del grad_scaler.update

        return unbind
    if optimizer is not None:
        return optimizer.register_step_post_hook(lambda *_: stepped()).remove  # type: ignore[no-any-return]
    ours = {id(p) for p in parameters.values()}
    first: list[int] = []

    def any_stepped(found: torch.optim.Optimizer, *_: object) -> None:
        if not first and any(id(p) in ours for group in found.param_groups for p in group["params"]):
            first.append(id(found))
        # Of several optimizers the first one's steps count. What others change later travels with the next exchange.
        if first == [id(found)]:
            stepped()

    return register_optimizer_step_post_hook(any_stepped).remove
