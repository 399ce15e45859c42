"""Checks of a state before a link loads it, and the part of it that the method loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import Method
from gradwire.exchange.protocols.memory import OWN_VALUE, WORKERS, Memory, base_kind
from gradwire.exchange.segments import Parameter
from gradwire.link.global_parameters import CLOCK
from gradwire.link.selection.autotune import OWN_STATE, STATE
from gradwire.link.selection.link_cost import CODER_STATE, LINK_COST_STATE, read_cost

State: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]

LINK_STATE = "link"
"""Key of the link's number."""

MOST_ROUNDS = 1 << 48
"""Upper limit of a round's number: at a microsecond a round it is reached after nine years."""

MOST_LINKS, MOST_RANKS = 1 << 16, 1 << 31

JOINED_PARAMETER = "(model)"
"""Name under which earlier versions saved the state of all compressed parameters joined to one vector."""

RANK_STATE = "rank"
"""Key, in what a rank keeps of its own, of the rank's number; see :func:`with_rank`."""

OWN_VALUES = ("round", LINK_STATE, CODER_STATE, LINK_COST_STATE, *CLOCK, *STATE, *OWN_STATE, RANK_STATE)
"""Keys of the values that belong to the link, not to its method."""


def check_state(state: State, parameters: Mapping[str, torch.Tensor], method: Method, *, rank: int | None) -> None:
    """Raise if a state is not one of a link of these parameters, or lacks parts of ranks that the link loads.

    The type and range of every value are checked before any is loaded. The part of each rank is required: if it were
    missing, vectors that all ranks share would be loaded beside a rank's own ones that are zero, and would never agree
    with them again.

    Args:
        rank: Rank of the link that loads it; None: a simulation of all ranks.

    Raises:
        IncompatibleError: a part is missing, a value is invalid, or a rank's own part is another rank's; the message
            names it.
    """
    try:
        rounds, ranks = state["global"]["round"], set(state) - {"global", "replicated"}
    except (KeyError, TypeError):
        raise IncompatibleError("this is not the state of a link: it has no global round") from None
    _check_number("round", rounds, MOST_ROUNDS)
    if LINK_STATE not in state["global"]:
        raise IncompatibleError(
            "this state does not say which of its process's links it is of: it was saved by an earlier version, whose "
            "random numbers were others"
        )
    _check_number(LINK_STATE, state["global"][LINK_STATE], MOST_LINKS)
    for key in CLOCK:
        if key in state["global"]:
            _check_number(key, state["global"][key], MOST_ROUNDS)
    if LINK_COST_STATE in state["global"]:
        read_cost(state["global"][LINK_COST_STATE])
    if "replicated" not in state:
        raise IncompatibleError("this state has no part 'replicated': pass all of what state_dict() gave")
    if rank is None:
        if ranks != {f"rank {r}" for r in range(max(len(ranks), 1))}:
            raise IncompatibleError(
                "a simulation's state has a part for every worker, 'rank 0', 'rank 1' and so on, and this one has "
                f"{_listed(ranks)}: of the states of a Link's ranks, put what is under 'rank' on rank 1 under 'rank 1'"
            )
    elif ranks != {"rank"}:
        raise IncompatibleError(
            f"a link's state has one part 'rank', this rank's own, and this one has {_listed(ranks)}: of a "
            "simulation's state, pass 'global', 'replicated', and under 'rank' what is under 'rank 1' on rank 1"
        )

    known = kept_names(parameters, method)
    for scope, part in state.items():
        _check_part(scope, part, known, method)
        if scope not in ("global", "replicated"):
            _check_rank(part, int(scope.partition(" ")[2]) if rank is None else rank, method)


def with_rank(own: dict[str, torch.Tensor], rank: int, method: Method) -> dict[str, torch.Tensor]:
    """Add the rank's number to what a rank keeps of its own, if a part of that suits no other rank."""
    if not set(method.traits.own).isdisjoint(method.traits.of_ranks):
        own[RANK_STATE] = torch.tensor(rank, device="cpu")
    return own


def _check_rank(part: Mapping[str, torch.Tensor], rank: int, method: Method) -> None:
    """Check that what suits one rank alone is loaded by that rank.

    What all ranks hold, such as the mean of their shifts, would otherwise never agree with their own parts again.
    """
    if RANK_STATE not in part:
        return  # an earlier version saved it
    _check_number(RANK_STATE, part[RANK_STATE], MOST_RANKS)
    wrong = {kind_of(key) for key in part} & set(method.traits.of_ranks)
    if wrong and int(part[RANK_STATE]) != rank:
        raise IncompatibleError(
            f"this is the state of rank {int(part[RANK_STATE])}, and this is rank {rank}, for which its "
            f"{_listed(wrong)} would be wrong: load on each rank the state that it saved, or use gradwire.save and "
            "gradwire.load"
        )


def kept_names(parameters: Mapping[str, torch.Tensor], method: Method) -> dict[str, Parameter]:
    """Return the parameters, or parts of parameters, by name, for which a method may keep state."""
    whole = (Parameter.of(name, p) for name, p in parameters.items())
    return {kept.name: kept for parameter in whole for kept in method.kept_as(parameter)}


def of_other_ranks(memory: Memory) -> None:
    """Let a method reset what depends on who its ranks are, as after loading a state of another world size."""
    if memory.value(WORKERS) is not None:
        memory.set_value(WORKERS, torch.tensor(0, device="cpu"))


def of_another_size(
    state: State, method: Method, before: int, now: int, warn: Callable[[str, str], None]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state without what is right only for the ranks that saved it, on every rank alike; say what is dropped.

    It must not wait for the next exchange, before which the state may be saved again, by ranks of which some have
    nothing of it.

    Args:
        before: Number of ranks that saved the state.
        now: Number of ranks that load it, another one.
    """
    wrong, dropped = set(method.traits.of_ranks), set[str]()
    if now < before and method.traits.subtracts_mean:
        wrong.add(method.traits.waiting)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for scope, part in state.items():
        found[scope] = {key: value for key, value in part.items() if kind_of(key) not in wrong}
        dropped.update(kind_of(key) for key in part.keys() - found[scope].keys())
    if dropped:
        warn(
            "other ranks",
            f"the state was saved by {before} ranks, and there are {now} now: {_listed(dropped)} of {method!r}, which "
            "are right for those ranks only, begin anew",
        )
    return found


def kind_of(key: str) -> str:
    """Return the kind of a vector, or the name of a value, by which a method declares what has a key in a state.

    Example:
        >>> kind_of("left@3/layer.weight"), kind_of("value/workers"), kind_of("workers")
        ('left', 'workers', 'workers')
    """
    kind, _, name = key.partition("/")
    return name.partition("/")[0] if kind == OWN_VALUE else base_kind(kind)


def of_another_first(memory: Memory, method: Method) -> None:
    """Let what only a former rank 0 held begin anew on all, unless it had sent it to them."""
    traits = method.traits
    if memory.value(traits.sent_by_first) is None:
        memory.drop_values(traits.of_first)


def _check_number(name: str, value: object, most: int) -> None:
    """Check that a value is a whole number, at least 0 and below ``most``, in an integer tensor."""
    whole = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 0
    if not whole or not 0 <= int(value) < most:  # type: ignore[call-overload]
        shown = f"{value.tolist()!r} ({value.dtype})" if isinstance(value, torch.Tensor) else repr(value)
        raise IncompatibleError(
            f"the state's {name!r} is {shown}: a whole number from 0 to {most - 1} is needed, as an int64 tensor "
            "without dimensions"
        )


def _check_part(scope: str, part: object, parameters: Mapping[str, Parameter], method: Method) -> None:
    """Check one part of a state: tensors by name; vectors of known parameters, with their length and finite floats."""
    if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
        raise IncompatibleError(f"the state's part {scope!r} is not a dict of tensors by name")
    for key, value in part.items():
        what = f"the state's {key!r} in {scope!r}"
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
            raise IncompatibleError(f"{what} is a {type(value).__name__}, not a dense tensor")
        if key in OWN_VALUES:
            continue
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise IncompatibleError(f"{what} holds a NaN or inf, which no link remembers")
        if scope == "global":
            continue
        kind, slash, name = key.partition("/")
        if kind == OWN_VALUE and name.partition("/")[0] in method.traits.remembers:
            continue
        if slash and method.traits.sharded and _is_of_other_shards(name, parameters):
            continue
        if not slash or (name not in parameters and name != JOINED_PARAMETER):
            raise IncompatibleError(
                f"{what} belongs to no parameter of this link: load the state of a link of the same parameters"
            )
        most = parameters[name].numel if name in parameters else sum(p.numel for p in parameters.values())
        # State of another method is dropped, whatever its size.
        kind = base_kind(kind)
        exact = name in parameters and kind in method.traits.remembers
        needed = method.remembered_numel(kind, parameters[name]) if exact else most
        fits = value.numel() == needed if exact else value.numel() <= needed
        if not fits or not value.is_floating_point():
            told = f"{needed}" if exact else f"at most {needed}"
            raise IncompatibleError(f"{what} is {value.dtype} {list(value.shape)}: {told} floats are needed")


def _is_of_other_shards(name: str, kept: Mapping[str, Parameter]) -> bool:
    """Return whether a name is that of a part of a parameter that is divided into other parts here."""
    whole = {part.partition("[")[0] for part in kept}
    return name not in kept and "[" in name and name.partition("[")[0] in whole


def remembered(
    state: State, parameters: Mapping[str, torch.Tensor], method: Method, warn: Callable[[str, str], None]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the part of a state that belongs to a method; drop the link's own values, and the rest with a warning."""
    kept = kept_names(parameters, method) if method.traits.sharded else {}
    # A method that does not declare the kinds of its state loads all.
    known = method.traits.remembers if method.traits.remembers or method.properties.state == "none" else None
    found: dict[str, dict[str, torch.Tensor]] = {}
    dropped, joined = set[str](), set[str]()
    for scope, part in state.items():
        found[scope] = {}
        for key, value in part.items():
            kind, name = kind_of(key), key.partition("/")[2]
            if key in OWN_VALUES:
                continue
            if name == JOINED_PARAMETER:
                joined.add(kind)
            elif method.traits.sharded and _is_of_other_shards(name, kept):
                dropped.add(f"{kind} of other shards")
            elif known is None or kind in known:
                found[scope][key] = value
            else:
                dropped.add(kind)
    if dropped:
        warn(
            "dropped",
            f"the state is another method's: {_listed(dropped)} dropped, which mean nothing to {method!r}",
        )
    if joined:
        warn(
            "joined",
            f"the state is an earlier version's, which kept {_listed(joined)} of all parameters as one vector: that is "
            "lost, and begins anew by parameter",
        )
    return found


def _listed(ranks: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(ranks)) or "none"
