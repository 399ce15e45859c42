"""The order in which the elements of parameters lie in memory, as a link's state names it.

A state holds vectors by parameter in memory order, which is not the order of the shape for parameters in
``channels_last`` and other transposed ones. So that a model with another memory format loads each element at its own
place, the state has a version in ``global``, and one entry for each parameter in another order than that of its shape.
States of earlier versions have neither; they are taken to lie as the parameters that load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.protocols.memory import OWN_VALUE, base_kind
from gradwire.exchange.segments import Parameter, flat_view, local_shard
from gradwire.exchange.steps_locally import GLOBAL, VELOCITY
from gradwire.link.global_parameters import ARRIVED

State = Mapping[str, Mapping[str, torch.Tensor]]
"""The state of a link."""

MEMORY_ORDER = "memory_order"
"""Key, in ``global``, of the version; with "/" and a parameter's name, of its dimensions in memory order."""

VERSION = 1

PROBE = Parameter("p", (1 << 20, 1 << 20), (1 << 20, 1))
"""A parameter with more elements than its factors have."""


@dataclass(frozen=True)
class MemoryOrder:
    """The shape of a parameter, and its dimensions with more than one element, outermost in memory first."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MemoryOrder:
        """Return the order in which :func:`gradwire.exchange.segments.flat_view` views a tensor."""
        dims = [d for d, size in enumerate(tensor.shape) if size > 1]
        if flat_view(tensor).data_ptr() == tensor.data_ptr():
            dims.sort(key=tensor.stride, reverse=True)
        return cls(tuple(tensor.shape), tuple(dims))

    @property
    def is_natural(self) -> bool:
        """Whether it is the order of the shape."""
        return list(self.dims) == sorted(self.dims)

    def rearranged(self, vector: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        """Return a vector, one value an element, whose dimensions lie in another order now, in this one."""
        axes = vector.reshape([self.shape[d] for d in dims])
        return axes.permute([dims.index(d) for d in self.dims]).reshape(-1)


def memory_orders(parameters: Mapping[str, torch.Tensor]) -> dict[str, MemoryOrder]:
    """Return the memory order of each parameter, or of this rank's shard of it."""
    return {name: MemoryOrder.of(local_shard(p.detach())) for name, p in parameters.items()}


def add_orders(state: dict[str, dict[str, torch.Tensor]], orders: Mapping[str, MemoryOrder]) -> None:
    """Add to a link's state the order in which the vectors of its parameters lie."""
    state["global"][MEMORY_ORDER] = torch.tensor(VERSION, device="cpu")
    for name, order in orders.items():
        if not order.is_natural:
            state["global"][f"{MEMORY_ORDER}/{name}"] = torch.tensor(order.dims, device="cpu")


def in_memory_order(
    state: State, orders: Mapping[str, MemoryOrder], method: Method
) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state, after :func:`check_orders`, whose vectors lie as the parameters do, without what names orders."""
    found = {
        scope: {key: x for key, x in part.items() if scope != "global" or key.partition("/")[0] != MEMORY_ORDER}
        for scope, part in state.items()
    }
    for scope, key, name, dims in _others(state, orders, method):
        vector = state[scope][key]
        if vector.numel() == torch.Size(orders[name].shape).numel():
            found[scope][key] = orders[name].rearranged(vector, dims)
    return found


def check_orders(state: State, orders: Mapping[str, MemoryOrder], method: Method) -> None:
    """Raise if a state names no orders of these parameters, or a vector cannot be put into that of its parameter.

    Raises:
        IncompatibleError: an entry is invalid; or a vector that lies in another order is of a piece of a parameter, or
            has not one value an element, like a factor. The message names the parameter.
    """
    version = state["global"].get(MEMORY_ORDER)
    if version is not None and not (
        isinstance(version, torch.Tensor) and version.numel() == 1 and int(version) == VERSION
    ):
        raise IncompatibleError(
            f"the state's {MEMORY_ORDER!r} is {version!r}: this version of gradwire reads {VERSION}; load the state "
            "with the version that saved it"
        )
    for _, key, name, dims in _others(state, orders, method):
        order, kind = orders[name], base_kind(key.partition("/")[0])
        if sorted(dims) != sorted(order.dims):
            raise IncompatibleError(
                f"in the state, the dimensions of parameter {name!r} lie in memory in the order {list(dims)}, and here "
                f"it has the shape {list(order.shape)}: load the state of a link of the same parameters"
            )
        if key.partition("/")[2] != name or method.remembered_numel(kind, PROBE) != PROBE.numel:
            now, then = _format(order.dims), _format(dims)
            raise IncompatibleError(
                f"parameter {name!r} is {now} here, and was {then} when this state was saved, whose {key!r} cannot be "
                "put into another order in memory: give the parameter the memory format that it had, by model.to("
                f"memory_format=...), before the link of {method!r} is made"
            )


def _others(
    state: State, orders: Mapping[str, MemoryOrder], method: Method
) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yield the scope and key of each vector that may lie in another order, its parameter and the order it lies in."""
    if MEMORY_ORDER not in state["global"]:
        return  # an earlier version saved it
    # State of another method is dropped, in whatever order it lies; one that declares no kinds loads all.
    local = (GLOBAL, VELOCITY, ARRIVED) if method.traits.local_steps else ()
    declares = bool(method.traits.remembers) or method.properties.state == "none"
    known = {*method.traits.remembers, *local} if declares else None
    before: dict[str, tuple[int, ...]] = {}
    for name, order in orders.items():
        entry = state["global"].get(f"{MEMORY_ORDER}/{name}")
        dims = tuple(sorted(order.dims)) if entry is None else tuple(entry.reshape(-1).tolist())
        if dims != order.dims:
            before[name] = dims
    if not before:
        return
    for scope in state.keys() - {"global"}:
        for key in state[scope]:
            kind, slash, name = key.partition("/")
            if not slash or kind == OWN_VALUE or (known is not None and base_kind(kind) not in known):
                continue
            whole = name if name in orders else name.rpartition("[")[0]
            if whole in before:
                yield scope, key, whole, before[whole]


def _format(dims: tuple[int, ...]) -> str:
    """Return the name of a memory format, or the dimensions in their order."""
    return {(0, 2, 3, 1): "channels_last", (0, 2, 3, 4, 1): "channels_last_3d"}.get(
        dims, "contiguous" if list(dims) == sorted(dims) else f"of dimensions in the order {list(dims)}"
    )
