"""What a pickle holds, as plain data: nothing that it names is imported, called or built.

``pickletools`` of the standard library takes the stream apart into its instructions; those that build containers and
name classes are followed here, the others are refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import PayloadError


@dataclass(eq=False)
class Named:
    """A class or function that a pickle names."""

    name: str


@dataclass(eq=False)
class Built:
    """An object that a pickle describes.

    Attributes:
        kind: What would build it.
        arguments: Arguments of that.
        state: What would be set afterwards.
    """

    kind: Any
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the class, without its module; "" if it is none."""
        return self.kind.name.rpartition(".")[2] if isinstance(self.kind, Named) else ""

    def get(self, key: str) -> Any:
        """Return an attribute that would be set; None if there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


_MARK = object()
_VALUES = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINSTRING", "BINSTRING",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def read_pickle(data: bytes) -> Any:
    """Return what a pickle holds: containers, numbers, strings, and :class:`Built` objects.

    Raises:
        PayloadError: it is no pickle, or has instructions that data does not need.
    """
    stack, memo = list[Any](), dict[int, Any]()

    def above_mark() -> list[Any]:
        at = max(i for i, item in enumerate(stack) if item is _MARK)
        found = stack[at + 1 :]
        del stack[at:]
        return found

    try:
        for instruction, argument, _ in pickletools.genops(data):
            _follow(instruction.name, argument, stack, memo, above_mark)
            if instruction.name == "STOP":
                return stack.pop()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise PayloadError(f"it is not a pickle of data: {error}") from error
    raise PayloadError("the pickle ends early")


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any], above_mark: Any) -> None:
    if name in _VALUES:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("PROTO", "FRAME", "STOP"):
        pass
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[int(argument)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[int(argument)])
    elif name == "GLOBAL":
        stack.append(Named(".".join(str(argument).split(" ", 1))))
    elif name == "STACK_GLOBAL":
        attribute, module = stack.pop(), stack.pop()
        stack.append(Named(f"{module}.{attribute}"))
    elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
        stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list}[name]())
    elif name in ("TUPLE", "LIST", "FROZENSET"):
        stack.append(tuple(above_mark()) if name == "TUPLE" else above_mark())
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        found = tuple(stack[-count:])
        if len(found) != count:
            raise ValueError("too few items")
        stack[-count:] = [found]
    else:
        _build(name, stack, above_mark)


def _build(name: str, stack: list[Any], above_mark: Any) -> None:
    if name in ("APPEND", "APPENDS", "ADDITEMS"):
        items = [stack.pop()] if name == "APPEND" else above_mark()
        target = stack[-1]
        (target.items if isinstance(target, Built) else target).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else above_mark()
        pairs = list(zip(items[::2], items[1::2]))
        if isinstance(stack[-1], Built):
            stack[-1].items.extend(pairs)
        else:
            stack[-1].update(pairs)
    elif name in ("REDUCE", "NEWOBJ"):
        arguments, kind = stack.pop(), stack.pop()
        stack.append(Built(kind, arguments))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    elif name == "POP":
        stack.pop()
    else:
        raise ValueError(f"the instruction {name}")
