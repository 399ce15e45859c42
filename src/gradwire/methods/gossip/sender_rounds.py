"""Rounds of a method with one sender: any number of receivers follow its outcomes, and what it remembers of them.

The sender runs the method in a world of one rank and keeps the replies of all collectives. A receiver runs the same
method on zeros, and takes the sender's replies in the place of its own. What a rank applies, and what all ranks
remember alike, is a function of replies alone: that is how replicas stay equal. So a receiver has the sender's outcome
to the last bit, without the state that is the sender's own, for every method that keeps this rule.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.method import Method
from gradwire.exchange.ops import AllGather, AllToAll, Broadcast, Exchange, Op, Reduce, SendRecv
from gradwire.exchange.protocols.bucket_plan import BucketPlan, PlanSetting
from gradwire.exchange.protocols.context import Context
from gradwire.exchange.protocols.memory import Memory
from gradwire.exchange.segments import Parameter, Segment
from gradwire.exchange.wire import HEADER_BYTES
from gradwire.exchange.wire.header import read_length

if TYPE_CHECKING:
    from gradwire.kernels import Kernels

_LENGTH = struct.Struct("<I")

_REFUSALS: Mapping[str, str] = {
    "direction": "its outcome is a direction, and not the vector",
    "owns_momentum": "its outcome holds vectors of earlier rounds, which the next difference would have again",
    "outcomes_differ": "each rank has an outcome of its own, which no other can follow",
    "local_steps": "it exchanges parameters after steps of its own",
    "at_own_pace": "its workers push to a server at their own pace",
    "needs_optimizer": "it acts on the steps of an optimizer",
    "needs_learning_rates": "it needs learning rates",
    "needs_link_cost": "it needs to know what a message costs",
    "joined": "it joins all tensors to one vector, and runs of blocks are encoded each by itself",
    "whole_step": "it needs all tensors at once, and runs of blocks are encoded each by itself",
}
"""Why a method with a trait cannot have one sender, by the name of the trait."""


def check_single_sender(owner: str, method: object) -> None:
    """Check that receivers can follow a method of one sender.

    Raises:
        IncompatibleError: they cannot, by one of its traits; the message names it.
    """
    if not isinstance(method, Method):
        raise IncompatibleError(f"{owner}: a method is needed, such as EDEN(bits=4) or DIANA(), not {method!r}")
    traits = method.traits
    reason = next((text for name, text in _REFUSALS.items() if getattr(traits, name)), None)
    if not traits.collectives:
        reason = reason or "it exchanges nothing itself"
    if not method.properties.bit_stable:
        reason = reason or "machines may differ in the last bits of its outcome"
    if reason is not None:
        raise IncompatibleError(f"{owner}: {method!r} cannot have one sender and readers who follow it: {reason}")


def follows_state(method: Method) -> bool:
    """Return whether a receiver's outcome of a round depends on the rounds before it."""
    return bool(set(method.traits.remembers) - set(method.traits.own))


class SenderRounds:
    """One vector's rounds of a method, of the sender or of a receiver.

    The part that a method has not sent is not kept: the sender is given the difference to what receivers hold, which
    has it already.

    Args:
        method: Method that :func:`check_single_sender` accepted.
        kernels: Kernels of a backend that has compiled the families of the method.
        name: Name on which random numbers depend.
        shape: Shape of the vector: methods of low rank take matrices.
        seed: Seed of random numbers.

    Attributes:
        count: Rounds that were committed.
    """

    def __init__(self, method: Method, kernels: Kernels, name: str, shape: tuple[int, ...], seed: int) -> None:
        self._method, self._memory, self.count = method, Memory(), 0
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        parameter = Parameter(name, shape, tuple(strides))
        known, self._numel = method.traits.collectives, parameter.numel
        # One message has all that a receiver needs.
        collective = "all_gather" if "all_gather" in known else known[0]
        segments = [Segment(parameter, 0, 0, self._numel)]
        self._plan: BucketPlan = method.plan(PlanSetting(segments, kernels, 1, collective, seed, max(1, self._numel)))

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode a vector; the state changes with :meth:`commit`.

        Args:
            values: The vector, float32 ``[numel]``; not changed.

        Returns:
            The bytes of the round (uint8), and its outcome (float32 ``[numel]``), which receivers have, too.
        """
        flat, replies = values.clone(), list[torch.Tensor]()
        exchange, reply = self._round(flat), None
        while (op := _next(exchange, reply)) is not None:
            reply = _own_reply(op)
            replies.append(_sent(op, reply))
        lengths = [torch.frombuffer(bytearray(_LENGTH.pack(len(part))), dtype=torch.uint8) for part in replies]
        pieces = [piece for pair in zip(lengths, replies) for piece in pair]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device="cpu"), flat

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """Return the outcome of the sender's round (float32 ``[numel]``); the state changes with :meth:`commit`.

        Raises:
            PayloadError: the bytes are not those of a round of such a vector.
        """
        flat, at, reply = torch.zeros(self._numel, dtype=torch.float32, device="cpu"), 0, None
        self._memory.sits_out = True
        exchange = self._round(flat)
        while (op := _next(exchange, reply)) is not None:
            end = at + _LENGTH.size
            if end > len(data):
                raise PayloadError("the round ends before its collectives do")
            size = _LENGTH.unpack(data[at:end].numpy().tobytes())[0]
            if size > len(data) - end:
                raise PayloadError(f"a reply of {size} bytes does not fit in the {len(data) - end} that are left")
            reply, at = _told(op, data[end : end + size]), end + size
        if at != len(data):
            raise PayloadError(f"the round has {len(data) - at} bytes behind its last reply")
        return flat

    def commit(self) -> None:
        """Make the state after the latest round the one that the next begins with."""
        self._memory.commit()
        self._memory.forget(self._method.traits.waiting)
        self.count += 1

    def discard(self) -> None:
        """Drop the state after the latest round."""
        self._memory.discard()

    def _round(self, flat: torch.Tensor) -> Exchange[None]:
        context = Context(0, 1, self.count, memory=self._memory)
        yield from self._plan.whole(context, flat)
        if self._plan.finishes:
            yield from self._plan.finish(context)


def _next(exchange: Exchange[None], reply: torch.Tensor | None) -> Op | None:
    """Return the next collective of a round; None at its end."""
    try:
        return next(exchange) if reply is None else exchange.send(reply)
    except StopIteration:
        return None


def _own_reply(op: Op) -> torch.Tensor:
    """Return the reply to a collective in a world of one rank."""
    if isinstance(op, AllToAll):
        return op.recv.copy_(op.send)
    if isinstance(op, AllGather):
        op.recv[0].copy_(op.send)
        return op.recv
    return op.recv if isinstance(op, SendRecv) else op.value


def _sent(op: Op, reply: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a reply that a receiver needs: of a payload of varying length, no more than its length."""
    octets = reply.detach().contiguous().reshape(-1).view(torch.uint8)
    if isinstance(op, AllToAll | AllGather) and op.lengths is not None:
        octets = octets[: HEADER_BYTES + read_length(octets)]
    elif isinstance(op, Broadcast) and op.length is not None:
        octets = octets[: int(op.length) * reply.element_size()]
    return octets.clone()


def _told(op: Op, octets: torch.Tensor) -> torch.Tensor:
    """Return the reply that a sender's bytes stand for, in the memory of the collective.

    Raises:
        PayloadError: they are more than it has, or fewer, or no whole elements.
    """
    target = op.value if isinstance(op, Reduce | Broadcast) else op.recv
    room = target.view(-1).view(torch.uint8)
    varies = not isinstance(op, Reduce) and (op.length if isinstance(op, Broadcast) else op.lengths) is not None
    if len(octets) > len(room) or (len(octets) != len(room) and not varies) or len(octets) % target.element_size():
        raise PayloadError(f"a reply has {len(octets)} bytes where a {type(op).__name__} has {len(room)}")
    room.zero_()
    room[: len(octets)] = octets
    if isinstance(op, Broadcast) and op.length is not None:
        op.length.fill_(len(octets) // target.element_size())
    return target
