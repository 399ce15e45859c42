"""Specs of methods: call expressions over known names, parsed and never evaluated."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from gradwire.errors import HyperparameterError, did_you_mean, shortened, unknown
from gradwire.exchange.fields import check_fields, operand, signature
from gradwire.exchange.method import MOST_BITS, Method, require
from gradwire.methods.declarations import check_class, is_defined_again
from gradwire.methods.registry import METHODS
from gradwire.optim import KINDS

K = TypeVar("K", bound=type[Method])

_KINDS: list[type[Method]] = list(METHODS)


def _key(name: str) -> str:
    """Return a name in lower case, without "_" and "-"."""
    return name.lower().replace("_", "").replace("-", "")


_BY_NAME: dict[str, type[Method]] = {_key(name): kind for kind in _KINDS for name in (kind.name, kind.__name__)}
"""Classes of methods, by the keys of their names; :func:`register` adds to both."""

_OPERATORS: dict[str, type[Any]] = {_key(name): kind for name, kind in KINDS.items()}

MOST_CHARACTERS = 1 << 16
"""Largest length of a spec in characters."""

_WORD = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d[\d.]*(?:[eE][+-]?\d+)?|[^\W\d]\w*(?:-\w+)*""")
"""A quoted string, a number, or a name, which may have hyphens."""


def register(kind: K) -> K:
    """Decorate a class of methods to add its names to those that specs may use.

    A class that is defined again, as where a cell of a notebook runs once more, replaces the one before.

    Raises:
        HyperparameterError: another class has one of its names or its tag already, or a declaration is missing or
            wrong.
    """
    check_class(kind, _KINDS)
    keys = {_key(name): name for name in (kind.name, kind.__name__)}
    for key, name in keys.items():
        known = _BY_NAME.get(key, kind)
        require(is_defined_again(kind, known), kind.__name__, f"the name {name!r} belongs to {known.__name__} already")
    before = {_BY_NAME[key] for key in keys if key in _BY_NAME}
    _KINDS[:] = [each for each in _KINDS if each not in before]
    _KINDS.append(kind)
    _BY_NAME.update(dict.fromkeys(keys, kind))
    return kind


def method(spec: str | Method) -> Method:
    """Read a method's spec.

    A spec is a method object, a name (``"terngrad"``: the defaults) or a call expression over known names
    with literal arguments (``"TernGrad(clip=2.5)"``), nested for wrapped methods. The field name of a wrapped method
    may be omitted (``"DQGD(QSGD(levels=1))"``), in Python too. A spec is parsed, never evaluated.

    Case, "_" and "-" in names of methods are ignored: ``"EF-SignSGD"`` is ``"ef_signsgd"``, the name in output.

    Raises:
        HyperparameterError: the spec has an unknown name or field (the message has the nearest known one) or a value
            that the method refuses, or is malformed.

    Example:
        >>> method("terngrad")
        TernGrad(clip=2.5, clip_by='rms', share_scaler=True, ahead=False)
        >>> method(repr(method("TernGrad(clip=None)"))) == method("TernGrad(clip=None)")
        True
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise HyperparameterError(f"a method is a spec such as 'terngrad' or a method object, not {spec!r}")
    built = parse(spec)
    if not isinstance(built, Method):
        raise _malformed(spec)
    return built


def parse(spec: str, kinds: Iterable[type[Any]] = ()) -> object:
    """Read a spec that may use other classes than methods, and return its object.

    Args:
        spec: Spec, see :func:`method`.
        kinds: Frozen dataclasses with an attribute ``name``, which is their lower-case name in specs.

    Raises:
        HyperparameterError: as :func:`method` does.
    """
    also = {_key(word): kind for kind in kinds for word in (kind.name, kind.__name__)}
    if len(spec) > MOST_CHARACTERS:
        raise HyperparameterError(
            f"a spec has at most {MOST_CHARACTERS} characters, not {len(spec)}: {shortened(spec, 60)!r}"
        )
    try:
        tree = ast.parse(_WORD.sub(_without_hyphens, spec.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _malformed(spec) from None
    numbers = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int))
    if any(number.bit_length() > MOST_BITS for number in numbers):
        raise HyperparameterError(f"a number has more than {MOST_BITS} bits in the spec {shortened(spec)!r}")
    return _build(tree, spec, also)


def _without_hyphens(word: re.Match[str]) -> str:
    """Replace hyphens in a name by underscores; do not change quoted strings and numbers."""
    return word[0] if word[0][0] in "'\"0123456789" else word[0].replace("-", "_")


def _malformed(spec: str) -> HyperparameterError:
    return HyperparameterError(
        f"{shortened(spec)!r} is not a method spec; write a name, such as 'terngrad', or a call with named literal "
        "values, such as 'TernGrad(clip=2.5)'"
    )


def _build(node: ast.expr, spec: str, also: Mapping[str, type[Any]]) -> object:
    if isinstance(node, ast.Name):
        return _make(_kind(node.id, also), {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _kind(node.func.id, also)
        words = [(str(word.arg), word.value) for word in node.keywords]
        check_fields(kind, len(node.args), [name for name, _ in words])
        values = {str(operand(kind)): _build(value, spec, also) for value in node.args}
        for name, value in words:
            if name in values:
                raise HyperparameterError(f"field {name!r} of {kind.__name__} is given twice: leave one out")
            values[name] = _value(name, value, spec, also)
        return _make(kind, values)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _malformed(spec) from None


def _value(field: str, node: ast.expr, spec: str, also: Mapping[str, type[Any]]) -> object:
    """Build the value of a field."""
    word, sign = (
        (node.operand, -1.0) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else (node, 1.0)
    )
    if isinstance(word, ast.Name) and word.id == "inf":
        # As written by repr, which is not a literal.
        return sign * math.inf
    if isinstance(node, ast.Name) and field != "compressor" and _key(node.id) not in (*_BY_NAME, *_OPERATORS, *also):
        near = [word for word in ("None", "True", "False") if did_you_mean(node.id, [word], cutoff=0.7)]
        hint = f"; did you mean {near[0]}?" if near else ": a text has quotes"
        raise HyperparameterError(f"{field}={shortened(node.id)} is no value{hint}")
    return _build(node, spec, also)


def _make(kind: type[Any], values: dict[str, object]) -> object:
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    require(not missing, kind.__name__, f"{', '.join(missing)} must be given: {signature(kind)}")
    try:
        return kind(**values)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise HyperparameterError(
            f"{kind.__name__}({shortened(given)}): a value is of the wrong type ({error})"
        ) from None


def _kind(name: str, also: Mapping[str, type[Any]]) -> type[Any]:
    found = also.get(_key(name)) or _BY_NAME.get(_key(name)) or _OPERATORS.get(_key(name))
    if found is not None:
        return found
    known = dict.fromkeys(kind.name for kind in (*also.values(), *_KINDS))
    raise HyperparameterError(unknown("method", name, known))
