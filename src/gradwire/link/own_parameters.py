"""Parameters of workers that each have their own, and their mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.codecs import DenseCodec, NoSummary
from gradwire.exchange.method import Method
from gradwire.exchange.ops import Exchange
from gradwire.exchange.planning import FragmentClock, Pieces
from gradwire.exchange.protocols import Context, Section, two_shot
from gradwire.exchange.protocols.bounded_plan import in_range
from gradwire.exchange.protocols.bucket_plan import DENSE_TAG
from gradwire.exchange.segments import Parameter, flat_view, lay_out
from gradwire.link.global_parameters import STEPS, State
from gradwire.link.parameters import put

__all__ = ["OwnParameters", "mean_over_ranks"]


class OwnParameters:
    """The parameters of one worker, which differ from all others', and the steps since the last exchange.

    The counterpart of :class:`gradwire.link.global_parameters.GlobalParameters` where there are no global ones. It
    exchanges nothing itself: an owner takes :meth:`outgoing`, replaces it by this worker's outcome, and hands that to
    :meth:`incoming`.

    Args:
        method: By which they are exchanged.
        parameters: By name.

    Attributes:
        pieces: What is exchanged: the parameters.
        clock: Counts the optimizer's steps.
    """

    def __init__(self, method: Method, parameters: Mapping[str, torch.Tensor]) -> None:
        self.method, self._parameters = method, dict(parameters)
        self.pieces = Pieces(self._parameters, 1, "sequential")
        self.clock = FragmentClock(method.local_steps, 1, 0)

    def take(self) -> None:
        """Begin anew, which all workers must do with the same parameters."""
        self.clock.reset()

    def is_apart(self) -> bool:
        """Return True: there are no global parameters that the worker's own could be."""
        return True

    def problem(self) -> str | None:
        """Explain why these parameters must not reach another worker; None where they may."""
        for name, p in self._parameters.items():
            if not in_range(p.detach()):
                return (
                    f"parameter {name!r} is not finite here, or beyond 2^40, and by {self.method!r} no other worker "
                    "has it to go back to: load a checkpoint, and use a lower learning rate"
                )
        return None

    @torch.no_grad()
    def outgoing(self, names: Sequence[str]) -> torch.Tensor:
        """Return a bucket of these parameters, float32."""
        return torch.cat([flat_view(self._parameters[name]).to(torch.float32) for name in names])

    def incoming(self, outcomes: Iterable[tuple[Sequence[str], torch.Tensor]], *, replaced: bool = False) -> bool:
        """Take what this worker's parameters are after an exchange, of all buckets; return True."""
        for names, flat in outcomes:
            parameters = [self._parameters[name] for name in names]
            put(parameters, flat.split([p.numel() for p in parameters]))
        return True

    def arrived(self) -> None:
        """Return None: an exchange takes effect when it ends."""

    def add_state(self, state: dict[str, dict[str, torch.Tensor]], flying: object = None) -> None:
        """Add the steps to a link's state."""
        state["global"][STEPS] = torch.tensor(self.clock.steps)

    def check(self, state: State) -> None:
        """Check that a link's state has what :meth:`add_state` adds.

        Raises:
            IncompatibleError: it has not, as that of a method that exchanges gradients.
        """
        if STEPS not in state["global"]:
            raise IncompatibleError(
                f"the state has no {STEPS!r}: it is of a method that exchanges gradients; attach {self.method!r} "
                "without loading it"
            )

    def load(self, state: State) -> dict[str, dict[str, torch.Tensor]]:
        """Take back what :meth:`add_state` added; return the state."""
        self.clock.steps = int(state["global"][STEPS])
        return {scope: dict(part) for scope, part in state.items()}


def mean_over_ranks(context: Context, flat: torch.Tensor) -> Exchange[None]:
    """Replace a float32 vector by its mean over ranks, added in the order of ranks."""
    codec = DenseCodec(lay_out([Parameter("(mean)", (flat.numel(),), (1,))]), context.world_size)
    yield from two_shot(context, DENSE_TAG, [Section(codec, NoSummary())], flat)
