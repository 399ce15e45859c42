"""Plans around other plans: each attribute of a plan is passed on by every method around another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.method import Method
from gradwire.exchange.protocols import Context, Memory
from gradwire.exchange.protocols.bucket_plan import BucketPlan
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import CODERS, get_kernels
from gradwire.methods.registry import METHODS
from plans import make_plan

OWN, AT_MOST, SAME, CALLED = "its own", "True only if the inner plan's is", "the inner plan's", "calls the inner plan's"
KEPT = "the inner plan's, if the plan keeps the dtype"
RULES: dict[str, str] = {
    # A plan around another may exchange a bucket in other parts.
    "chunks": OWN,
    "runs": OWN,
    "prepare": OWN,
    "run": OWN,
    "whole": OWN,
    "collective": SAME,
    # Work before or after the exchange may need the whole bucket, in float32.
    "asynchronous": AT_MOST,
    "keeps_dtype": AT_MOST,
    "dtype": KEPT,
    "finishes": SAME,
    "finish": CALLED,
    "target_": CALLED,
}
"""Where a plan around another has each attribute from. One that is not passed on has the value of the base class."""

AROUND = [kind for kind in METHODS if kind is not gw.Auto and any(isinstance(v, Method) for v in vars(kind()).values())]
FIELDS: dict[type[Method], dict[str, Any]] = {
    gw.DIANA: {"alpha": 0.1},
    gw.Hierarchical: {"node_size": 1},
    gw.StreamingDiLoCo: {"fragments": 1},
}
"""Fields without which a method around another accepts few others, or has no plan."""

INNER = [
    gw.ALQ(blocks="parameter", overlap=True),
    gw.EF21(momentum=0.9),
    *(kind(**FIELDS.get(kind, {})) for kind in METHODS if kind is not gw.Auto),
]
"""A method of each kind, and those that do something at the end of a round or replace the target."""

FINISHING = {
    gw.AsyncServer, gw.Coded, gw.DiLoCo, gw.EASGD, gw.Hierarchical, gw.LocalSGD, gw.Scheduled, gw.StreamingDiLoCo
}  # fmt: skip
"""Kinds that accept a method with work at the end of a round."""

MEASURED = (gw.Hierarchical, "target_")
"""A node's target is what it has exchanged in a round that is measured, and there is no such round here."""

SIZES = (64 * 128, 300)


def around(kind: type[Method], inner: Method) -> Iterator[Method]:
    """Yield methods of a kind around another: one for each field that accepts it, and for each dial."""
    dials = [name for name, value in vars(inner).items() if type(value) in (int, float)]
    # With the method's own value from the first round on there is one stage.
    settings = [{"field": d, "start": (getattr(inner, d),), "schedule": "step", "rounds": 1} for d in dials]
    for name in (name for name, value in vars(kind()).items() if isinstance(value, Method)):
        for fields in settings if kind is gw.Scheduled else [FIELDS.get(kind, {})]:
            try:
                yield kind(**{name: inner}, **fields)
            except gw.GradwireError:
                continue


def planned(method: Method, inner: Method, monkeypatch: pytest.MonkeyPatch) -> tuple[BucketPlan, list[BucketPlan]]:
    """Return the plan of a bucket, and the plans that the inner method made for it."""
    made, real = list[BucketPlan](), type(inner).plan

    def plan(self: Method, setting: Any) -> BucketPlan:
        made.append(real(self, setting))
        return made[-1]

    matrix, vector = Parameter("matrix", (64, 128), (128, 1)), Parameter("vector", (300,), (1,))
    with monkeypatch.context() as patch:
        patch.setattr(type(inner), "plan", plan)
        outer = make_plan(
            method.with_coder(CODERS[0]) if method.traits.open_coders else method, lay_out([matrix, vector]),
            kernels=get_kernels("meta"), world_size=2, collective=method.traits.collectives[0], seed=0,
            chunk_numel=1 << 20,
        )  # fmt: skip
    return outer, made


def is_lost(name: str, outer: BucketPlan, inner: BucketPlan) -> bool:
    """Return whether a plan around another should have its attribute and has not."""
    ours, theirs = getattr(outer, name), getattr(inner, name)
    if RULES[name] == SAME:
        return bool(ours != theirs)
    if RULES[name] == KEPT:
        return outer.keeps_dtype and bool(ours != theirs)
    if RULES[name] == AT_MOST:
        return bool(ours and not theirs)
    if RULES[name] == OWN or getattr(type(inner), name) is getattr(BucketPlan, name):
        return False
    called = []

    def instead(*given: object) -> Iterator[Any]:
        called.append(given)
        return iter(())

    setattr(inner, name, instead)
    context = Context(0, 2, 5, memory=Memory())
    if name == "target_":
        outer.target_(context, torch.zeros(sum(SIZES)))
    else:
        list(outer.finish(context))
    return not called


def test_these_are_the_attributes_of_a_plan() -> None:
    """A new one needs a rule here, and plans around others that follow it."""
    names = {*BucketPlan.__annotations__, *vars(BucketPlan)}
    assert {name for name in names if not name.startswith("_")} == RULES.keys()


@pytest.mark.parametrize("kind", AROUND, ids=lambda kind: kind.name)
def test_a_plan_around_another_loses_nothing(kind: type[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    lost, finish = [], False
    for inner in INNER:
        for method in around(kind, inner):
            try:
                outer, made = planned(method, inner, monkeypatch)
            except gw.IncompatibleError:
                continue
            finish = finish or any(plan.finishes for plan in made)
            names = [name for name in RULES if (kind, name) != MEASURED]
            lost += [(name, repr(method)) for plan in made for name in names if is_lost(name, outer, plan)]
    assert lost == []
    assert finish == (kind in FINISHING), "a method of this kind is around one with work at the end of a round"
