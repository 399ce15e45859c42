"""The methods that the table of accuracy compares, and with which momentum and rates each of them is trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import gradwire as gw
from gradwire.tools.experiments.tasks import build

__all__ = [
    "FORMS",
    "NARROW",
    "RATES",
    "Entry",
    "as_tuned",
    "entries",
    "entry_of",
    "family",
    "label",
    "narrow",
    "places",
    "plain",
    "rates_of",
    "short",
    "tuned_as",
]

MOMENTUM = 0.9
FORMS = (
    "ErrorFeedback(compressor=TopK(density=0.1))",
    "ErrorFeedback(compressor=TopK(density=0.01))",
    "ErrorFeedback(compressor=TopK(density=0.001))",
    "ErrorFeedback(compressor=RandK())",
    "ErrorFeedback(compressor=RandK(density=0.1))",
    "ErrorFeedback(compressor=RandK(contiguous=True))",
    "ErrorFeedback(compressor=RandK(density=0.1, contiguous=True))",
    "ErrorFeedback(compressor=Threshold(threshold=0.01))",
    "ErrorFeedback(compressor=ScaledSign(block_size=64))",
    "EF21(compressor=TopK())",
    "EF21(compressor=TopK(density=0.1))",
    "RandK(rescale=True)",
    "GTopK(density=0.01)",
    "SketchedAMSGrad(density=0.01)",
    "EDEN(bits=1)",
    "EDEN(bits=2)",
    "PowerSGD(matrix_rank=1)",
    "PowerSGD(matrix_rank=4)",
    "PowerSGD(values=QSGDinf(levels=7, block_size=256))",
    "TernGrad(clip=None)",
    "Coded(compressor=TernGrad(clip=None))",
    "Coded(compressor=QSGD())",
    "Coded(compressor=QSGDinf())",
    "Coded(compressor=NUQSGD())",
    "Coded(compressor=ALQ())",
    "Coded(compressor=DIANA())",
    "Coded(compressor=BF16())",
)
"""What is trained beside the defaults of all methods, and beside error feedback around those that need it."""

HUNDREDTH = "ErrorFeedback(compressor=TopK(density=0.003, blocks='model', values=BF16()))"
THOUSANDTH = "ErrorFeedback(compressor=TopK(density=0.0005, blocks='model', values=BF16()))"
NARROW = {
    "mnist": (
        "PowerSGD(values=BF16())",
        "PowerSGD(matrix_rank=1, values=BF16())",
        HUNDREDTH,
        "GTopK(density=0.005)",
        "DGC(density=0.002)",
        THOUSANDTH,
        "GTopK(density=0.0006, values=BF16())",
    ),
    "cifar10": (
        "ErrorFeedback(compressor=TopK(density=0.012, blocks='model', values=QSGDinf(levels=3, block_size=64)))",
        HUNDREDTH,
        "DGC(density=0.002)",
        THOUSANDTH,
    ),
}
"""By the task, what is trained at a hundred and at a thousand times fewer bytes.

Parameters of any size are compressed: in float32, those of fewer than 1024 elements would be most of the bytes.
"""

RATES: dict[str, tuple[float, ...]] = {
    "digits": (0.05, 0.15, 0.5),
    "mnist": (0.005, 0.015, 0.05),
    "text": (0.02, 0.06, 0.2),
    "cifar10": (0.03, 0.1, 0.3),
}
"""Learning rates of SGD with momentum 0.9, by the task."""
WITHOUT_MOMENTUM = 10.0
"""Makes steps as large as a momentum of 0.9 does."""
OF_DIRECTIONS = 0.006
"""Entries of a direction are about 1, where those of a gradient are far smaller."""


@dataclass(frozen=True)
class Entry:
    """A line of the table.

    Attributes:
        spec: The method, without fields that have their defaults.
        momentum: The optimizer's.
        factor: Of the task's learning rates.
        convention: Whose momentum it is, in words.
        min_numel: Below how many elements a parameter travels in float32; None: as ``attach``.
    """

    spec: str
    momentum: float
    factor: float
    convention: str
    min_numel: int | None = None


def short(method: Any) -> str:
    """Return a method's spec without the fields that have their defaults.

    Example:
        >>> short(gw.ErrorFeedback(compressor=gw.TopK(density=0.1)))
        'ErrorFeedback(compressor=TopK(density=0.1))'
    """
    default = type(method)()
    told = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.repr and value != getattr(default, field.name):
            told.append(f"{field.name}={short(value) if isinstance(value, gw.Method) else repr(value)}")
    return f"{type(method).__name__}({', '.join(told)})"


def label(spec: str) -> str:
    """Return a method's name for people: its compressor without the field's name, then fields without their defaults.

    Example:
        >>> label("ErrorFeedback(compressor=TopK(density=0.1))"), label("Coded()"), label("SignSGD()")
        ('ErrorFeedback(TopK(density=0.1))', 'Coded(TernGrad)', 'SignSGD')
    """
    method: Any = gw.method(spec)
    default = type(method)()
    told = []
    for field in (field for field in dataclasses.fields(method) if field.repr):
        value = getattr(method, field.name)
        if field.name == "compressor":
            told.append(label(repr(value)))
        elif value != getattr(default, field.name):
            told.append(f"{field.name}={label(repr(value)) if isinstance(value, gw.Method) else repr(value)}")
    return type(method).__name__ + (f"({', '.join(told)})" if told else "")


def family(spec: str) -> str:
    """Return a method's class, and those of the compressors in it: what settings of one method have in common.

    Example:
        >>> family("ErrorFeedback(compressor=TopK(density=0.1))")
        'ErrorFeedback(TopK)'
    """
    method: Any = gw.method(spec)
    inner = getattr(method, "compressor", None)
    name = type(method).__name__
    return f"{name}({family(repr(inner))})" if isinstance(inner, gw.Method) else name


def entry_of(spec: str, task: str) -> Entry:
    """Return how a method is trained: with the momentum that it asks for.

    The optimizer has a momentum of 0.9, except where the method has its own, gives a direction, or warns of the
    optimizer's; then its own ``momentum`` is 0.9 if it has such a field. :func:`places` has the other places.
    """
    method: Any = gw.method(spec)
    own = f"own, {momentum_of(method):g}" if method.traits.owns_momentum else "none"
    if method.traits.direction:
        return Entry(short(method), 0.0, OF_DIRECTIONS, own)
    if method.traits.owns_momentum:
        return Entry(short(method), 0.0, 1.0, own)
    model = build(task, **({"data": "unread"} if task != "digits" else {})).build_model()
    beside = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
    if method.caution(beside, dict(model.named_parameters())) is None:
        return Entry(short(method), MOMENTUM, 1.0, f"optimizer's, {MOMENTUM:g}")
    if any(field.name == "momentum" for field in dataclasses.fields(method)):
        return Entry(short(dataclasses.replace(method, momentum=MOMENTUM)), 0.0, 1.0, f"own, {MOMENTUM:g}")
    return Entry(short(method), 0.0, WITHOUT_MOMENTUM, "none")


def places(entry: Entry) -> list[Entry]:
    """Return an entry with momentum in each place that its method allows, the entry's own among them.

    Where a method keeps what it has not sent, and has a field for a momentum, that field decides whether momentum acts
    on a worker's own gradient before compression, and the optimizer's acts on the mean after it. Without any, rates
    are ten times as high.
    """
    method: Any = gw.method(entry.spec)
    if method.traits.direction or not any(field.name == "momentum" for field in dataclasses.fields(method)):
        return [entry]
    if type(method)().traits.owns_momentum:
        return [entry]
    none, before = plain(entry.spec), short(dataclasses.replace(method, momentum=MOMENTUM))
    return [
        dataclasses.replace(entry, spec=none, momentum=MOMENTUM, factor=1.0, convention=f"optimizer's, {MOMENTUM:g}"),
        dataclasses.replace(entry, spec=before, momentum=0.0, factor=1.0, convention=f"own, {MOMENTUM:g}"),
        dataclasses.replace(entry, spec=none, momentum=0.0, factor=WITHOUT_MOMENTUM, convention="none"),
    ]


def plain(spec: str) -> str:
    """Return a short spec without a momentum that the method has by choice: what its places have in common.

    Example:
        >>> plain("GTopK(momentum=0.9)"), plain("Signum(momentum=0.5)")
        ('GTopK()', 'Signum(momentum=0.5)')
    """
    method: Any = gw.method(spec)
    default: Any = type(method)()
    if default.traits.owns_momentum or not any(field.name == "momentum" for field in dataclasses.fields(method)):
        return short(method)
    return short(dataclasses.replace(method, momentum=default.momentum))


def as_tuned(entry: Entry, tuned: Entry) -> Entry:
    """Return an entry as that was tuned whose rates it takes, see :func:`tuned_as`."""
    method: Any = gw.method(entry.spec)
    if not isinstance(method, gw.Coded):
        return tuned if short(method) in {place.spec for place in places(tuned)} else entry
    spec = short(dataclasses.replace(method, compressor=gw.method(tuned.spec)))
    return dataclasses.replace(tuned, spec=spec, min_numel=entry.min_numel)


def momentum_of(method: Any) -> float:
    """Return the factor of a method's own momentum, by either of the names that fields of it have.

    Example:
        >>> momentum_of(gw.Signum())
        0.9
    """
    return float(method.momentum if hasattr(method, "momentum") else method.beta1)


def narrow(task: str) -> list[Entry]:
    """Return the lines at a hundred and at a thousand times fewer bytes."""
    return [dataclasses.replace(entry_of(spec, task), min_numel=0) for spec in NARROW.get(task, ())]


def tuned_as(entry: Entry, task: str) -> Entry:
    """Return the entry whose rate this one takes: that of the method that it codes, or is by another name."""
    method: Any = gw.method(entry.spec)
    if method == gw.EDEN(bits=1):
        return entry_of("drive", task)
    return entry_of(repr(method.compressor), task) if isinstance(method, gw.Coded) else entry


def rates_of(entry: Entry, task: str) -> list[float]:
    """Return the learning rates that are tried."""
    return [float(f"{rate * entry.factor:.6g}") for rate in RATES[task]]


def entries(task: str) -> list[Entry]:
    """Return all lines: every method's default, error feedback around those that leave something out, and more."""
    # Workers that step by themselves have a model each, and the simulation has one; on two levels another method errs.
    specs = [
        name for name in gw.methods() if not (gw.method(name).traits.local_steps or gw.method(name).traits.sharded)
    ]
    specs += [fed_back for name in specs if (fed_back := with_feedback(name)) is not None]
    found = {(entry.spec, entry.momentum): entry for entry in (entry_of(spec, task) for spec in [*specs, *FORMS])}
    return list(found.values())


def with_feedback(name: str) -> str | None:
    """Return error feedback around a method's default, if that is biased, forgets what it leaves out, and may have it.

    A cast leaves out less than any of these could show.
    """
    method = gw.method(name)
    if (
        method.traits.unbiased
        or method.traits.direction
        or method.properties.state != "none"
        or name in ("fp16", "bf16")
    ):
        return None
    try:
        return repr(gw.ErrorFeedback(compressor=method))
    except gw.HyperparameterError:
        return None
