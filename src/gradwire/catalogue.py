"""All methods, by name, and the reading of specs."""

from __future__ import annotations

import ast
import difflib
import math
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from gradwire.algorithms.adaptive_levels import ALQ, ALQN, AMQ, AMQN
from gradwire.algorithms.around import Wrapper
from gradwire.algorithms.coded import Coded
from gradwire.algorithms.diana import DIANA, DQGD
from gradwire.algorithms.ef_signsgd import EFSignSGD
from gradwire.algorithms.error_feedback import ErrorFeedback
from gradwire.algorithms.grandk import GRandK
from gradwire.algorithms.majority import SignSGD, Signum
from gradwire.algorithms.multi_scale import MultiScale
from gradwire.algorithms.onebit import OneBit
from gradwire.compressors.cast import BF16, FP16, FP32
from gradwire.compressors.lattice import Lattice
from gradwire.compressors.natural import Natural
from gradwire.compressors.natural_dithering import NaturalDithering
from gradwire.compressors.nuqsgd import NUQSGD
from gradwire.compressors.p_quantisation import PQuantisation
from gradwire.compressors.qsgd import QSGD, QSGDinf
from gradwire.compressors.qsgd_max_norm import QSGDMaxNorm
from gradwire.compressors.scaledsign import ScaledSign
from gradwire.compressors.terngrad import TernGrad
from gradwire.errors import HyperparameterError
from gradwire.methods import Method, Properties, require
from gradwire.optim import KINDS

__all__ = [
    "ALQ",
    "ALQN",
    "AMQ",
    "AMQN",
    "BF16",
    "DIANA",
    "DQGD",
    "FP16",
    "FP32",
    "NUQSGD",
    "QSGD",
    "Auto",
    "Coded",
    "EFSignSGD",
    "ErrorFeedback",
    "GRandK",
    "Lattice",
    "MethodInfo",
    "MultiScale",
    "Natural",
    "NaturalDithering",
    "OneBit",
    "PQuantisation",
    "QSGDMaxNorm",
    "QSGDinf",
    "ScaledSign",
    "SignSGD",
    "Signum",
    "TernGrad",
    "method",
    "methods",
]

METHODS: tuple[type[Method], ...] = (
    FP32,
    FP16,
    BF16,
    TernGrad,
    QSGD,
    QSGDinf,
    NUQSGD,
    ALQ,
    ALQN,
    AMQ,
    AMQN,
    ErrorFeedback,
    DQGD,
    DIANA,
    Coded,
    QSGDMaxNorm,
    MultiScale,
    Natural,
    NaturalDithering,
    Lattice,
    ScaledSign,
    EFSignSGD,
    SignSGD,
    Signum,
    OneBit,
    PQuantisation,
    GRandK,
)
"""Every method of the package; adding one adds a line here."""


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Tries methods in the first steps of a real training, and keeps the fastest.

    Every step of the trial is an ordinary step of training under one of the candidates. Candidates that the link
    alone would make slower than another's whole step are not tried. ``coded`` is TernGrad behind an entropy coder, the
    same bits out: it is taken where the bytes that it saves are worth its time on this machine and this link.

    Attributes:
        candidates: Specs, the ones to prefer at equal speed first.
        turns: In which the candidates alternate.
        steps: Of each candidate in a turn.

    Raises:
        HyperparameterError: fewer than two candidates, one named twice, one that keeps state, gives a direction or
            leaves out a part of the gradient, or no turns or steps.
    """

    name: ClassVar[str] = "auto"
    properties: ClassVar[Properties] = Properties(
        summary="The fastest of a list, by trial in the first steps",
        paper="none",
        unbiased=False,
        bit_stable=False,
        bits_per_element=32.0,
    )
    collectives: ClassVar[tuple[str, ...]] = ()

    candidates: tuple[str, ...] = ("fp32", "bf16", "terngrad", "coded")
    turns: int = 4
    steps: int = 3

    def __post_init__(self) -> None:
        listed = isinstance(self.candidates, (tuple, list)) and all(isinstance(c, str) for c in self.candidates)
        require(listed, "Auto(candidates=...)", f"a tuple of specs is needed, not {self.candidates!r}")
        chosen = [method(c) for c in self.candidates]
        require(len(chosen) > 1, "Auto(candidates=...)", "at least two are needed to choose from")
        require(len(set(chosen)) == len(chosen), "Auto(candidates=...)", "a method is named twice")
        for one in chosen:
            fixed = not isinstance(one, Auto) and one.properties.state == "none"
            require(fixed, "Auto(candidates=...)", f"{one!r} remembers something between steps: it cannot be tried")
            apart = None if isinstance(one, Auto) else no_match(one)
            require(apart is None, "Auto(candidates=...)", f"{one!r} {apart}")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        for field in ("turns", "steps"):
            value = getattr(self, field)
            require(isinstance(value, int) and value >= 1, f"Auto({field}=...)", f"at least 1 is needed, not {value!r}")

    @property
    def kernels(self) -> tuple[str, ...]:  # type: ignore[override]
        """All candidates'."""
        return tuple(dict.fromkeys(name for spec in self.candidates for name in method(spec).kernels))


def no_match(one: Method) -> str | None:
    """Say why the time of a step alone cannot tell whether a method is better than others; None where it can."""
    if one.direction:
        return "gives a direction, which needs a learning rate of its own"
    if _sends_parts(one):
        return (
            "sends a part of the gradient a round, the faster the more it leaves out, and what is left out is lost "
            "without error feedback: use ErrorFeedback around it, by name rather than by trial"
        )
    return None


def _sends_parts(one: Method) -> bool:
    return isinstance(one, GRandK) or (isinstance(one, Wrapper) and _sends_parts(one.compressor))


_KINDS: tuple[type[Method], ...] = (*METHODS, Auto)


def _key(name: str) -> str:
    """Give what is left of a name where case, "_" and "-" do not matter."""
    return name.lower().replace("_", "").replace("-", "")


_BY_NAME: dict[str, type[Method]] = {_key(name): kind for kind in _KINDS for name in (kind.name, kind.__name__)}
_OPERATORS: dict[str, type[Any]] = {_key(name): kind for name, kind in KINDS.items()}

_WORD = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d[\d.]*(?:[eE][+-]?\d+)?|[^\W\d]\w*(?:-\w+)*""")
"""A quoted text, a number, or a name, which may have hyphens."""


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """A method's declared properties, as ``gradwire methods`` prints them."""

    name: str
    spec: str
    summary: str
    unbiased: bool
    unbiased_note: str | None
    bits_per_element: float
    omega: str | None
    delta: str | None
    bit_stable: bool
    state: str
    stream: str
    collectives: tuple[str, ...]
    paper: str


def methods() -> dict[str, MethodInfo]:
    """Map each method's lower-case name to its declared properties."""
    table = {}
    for kind in METHODS:
        default, p = kind(), kind.properties
        table[kind.name] = MethodInfo(
            name=kind.name,
            spec=repr(default),
            summary=p.summary,
            unbiased=p.unbiased,
            unbiased_note=p.unbiased_note,
            bits_per_element=p.bits_per_element,
            omega=p.omega,
            delta=p.delta,
            bit_stable=p.bit_stable,
            state=p.state,
            stream=p.stream,
            collectives=tuple(default.collectives),
            paper=p.paper,
        )
    return table


def method(spec: str | Method) -> Method:
    """Read a method's spec.

    A spec is a method object, a name (``"terngrad"``: the paper's defaults) or a call expression over known names
    with literal arguments (``"TernGrad(clip=2.5)"``), nested where methods nest. The ``compressor`` of a method around
    another may go without its name (``"DQGD(QSGD(levels=1))"``). A spec is parsed, never evaluated.

    Case, "_" and "-" do not matter in the names of methods: ``"EF-SignSGD"`` is ``"ef_signsgd"``, which is shown.

    Raises:
        HyperparameterError: an unknown name or field (the nearest known one is named), a value that the method
            refuses, or text that is not a spec.

    Example:
        >>> method("terngrad")
        TernGrad(clip=2.5, share_scaler=True)
        >>> method(repr(method("TernGrad(clip=None)"))) == method("TernGrad(clip=None)")
        True
    """
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise HyperparameterError(f"a method is a spec such as 'terngrad' or a method object, not {spec!r}")
    try:
        tree = ast.parse(_WORD.sub(_without_hyphens, spec.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _malformed(spec) from None
    built = _build(tree, spec)
    if not isinstance(built, Method):
        raise _malformed(spec)
    return built


def _without_hyphens(word: re.Match[str]) -> str:
    """Make Python's of a name with hyphens; leave quoted texts and numbers as they are."""
    return word[0] if word[0][0] in "'\"0123456789" else word[0].replace("-", "_")


def _malformed(spec: str) -> HyperparameterError:
    return HyperparameterError(
        f"{spec!r} is not a method spec; write a name, such as 'terngrad', or a call with named literal values, "
        "such as 'TernGrad(clip=2.5)'"
    )


def _build(node: ast.expr, spec: str) -> object:
    if isinstance(node, ast.Name):
        return _make(_kind(node.id), {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _kind(node.func.id)
        known = [f.name for f in fields(kind)]
        values: dict[str, object] = {}
        if len(node.args) == 1 and "compressor" in known:
            values["compressor"] = _build(node.args[0], spec)
        elif node.args:
            raise HyperparameterError(f"{kind.__name__} takes named values only: {_signature(kind)}")
        for word in node.keywords:
            if word.arg not in known:
                raise HyperparameterError(_unknown("field", str(word.arg), known, f" of {kind.__name__}"))
            if word.arg in values:
                raise HyperparameterError(f"field {word.arg!r} of {kind.__name__} is given twice: leave one out")
            values[word.arg] = _value(word.arg, word.value, spec)
        return _make(kind, values)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _malformed(spec) from None


def _value(field: str, node: ast.expr, spec: str) -> object:
    """Build what stands behind a field's name."""
    word, sign = (
        (node.operand, -1.0) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else (node, 1.0)
    )
    if isinstance(word, ast.Name) and word.id == "inf":
        # As repr writes it, which is no literal of Python's.
        return sign * math.inf
    if isinstance(node, ast.Name) and field != "compressor" and _key(node.id) not in (*_BY_NAME, *_OPERATORS):
        near = difflib.get_close_matches(node.id.capitalize(), ("None", "True", "False"), n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ": a text has quotes"
        raise HyperparameterError(f"{field}={node.id} is no value{hint}")
    return _build(node, spec)


def _make(kind: type[Any], values: dict[str, object]) -> object:
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    require(not missing, kind.__name__, f"{', '.join(missing)} must be given: {_signature(kind)}")
    try:
        return kind(**values)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise HyperparameterError(f"{kind.__name__}({given}): a value is of the wrong type ({error})") from None


def _kind(name: str) -> type[Any]:
    found = _BY_NAME.get(_key(name)) or _OPERATORS.get(_key(name))
    if found is not None:
        return found
    raise HyperparameterError(_unknown("method", name, [kind.name for kind in _KINDS]))


def _signature(kind: type[Any]) -> str:
    return f"{kind.__name__}({', '.join(f.name + '=...' for f in fields(kind))})"


def _unknown(what: str, name: str, known: list[str], where: str = "") -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(known) if known else "none"
    return f"unknown {what} {name!r}{where}{hint} (known: {listed})"
