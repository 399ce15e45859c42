"""Classes of methods from outside the package: what is wrong in them is named before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange.codecs import Codec, DenseCodec
from gradwire.exchange.compressor import Compressor
from gradwire.methods import spec

PROPERTIES = gw.Properties(summary="Float32", paper="none", bit_stable=True, bits_per_element=32)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "_KINDS", list(spec._KINDS))
    monkeypatch.setattr(spec, "_BY_NAME", dict(spec._BY_NAME))


def gathers(**traits: object) -> Callable[[gw.Method], gw.Traits]:
    given: dict[str, Any] = {"collectives": ("all_gather",), **traits}
    return lambda self: replace(gw.Traits(), **given)


def plain(self: object, kernels: object, segments: Any, world_size: int, seed: int) -> Codec:
    return DenseCodec(segments, world_size)


def built(**changed: object) -> type[gw.Method]:
    """Return a compressor that sends float32, with some of its declarations changed, or left out where None."""
    body = {"name": "own", "tag": 120, "properties": PROPERTIES, "declare": gathers(), "codec": plain, **changed}
    kind = type("Own", (Compressor,), {name: value for name, value in body.items() if value is not None})
    return dataclass(frozen=True, kw_only=True)(kind)


def test_a_class_of_ones_own_is_a_spec_and_is_exchanged() -> None:
    gw.register(built())
    assert torch.equal(gw.simulate(torch.full((2, 2000), 3.0), "own").mean, torch.full((2000,), 3.0))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"name": None}, "Own: name is its name in specs, .* not None"),
        ({"name": "my own!"}, "Own: name is its name in specs, .* not 'my own!'"),
        ({"name": "natural"}, "Own: the name 'natural' belongs to Natural already"),
        ({"properties": None}, "Own: properties is a gw.Properties, not None"),
        ({"codec": None}, "Own: it must define codec"),
        ({"tag": None}, "Own: tag is a whole number from 1 to 126 .*, such as 126, not None"),
        ({"tag": 127}, "Own: tag is a whole number from 1 to 126 .* not 127"),
        ({"tag": gw.Natural.tag}, f"Own: tag {gw.Natural.tag} belongs to Natural: choose another one, such as 126"),
    ],
)
def test_a_wrong_declaration_is_refused_when_the_class_is_registered(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=told):
        gw.register(built(**changed))


@pytest.mark.parametrize("thing", ["own", int, lambda: None])
def test_only_classes_of_methods_are_registered(thing: Any) -> None:
    with pytest.raises(gw.HyperparameterError, match="register takes a class of methods"):
        gw.register(thing)


def test_a_class_that_is_defined_again_replaces_the_one_before() -> None:
    """As where a cell of a notebook runs once more."""
    for bits in (32, 16):
        gw.register(built(properties=replace(PROPERTIES, bits_per_element=bits)))
        assert type(gw.method("own")).properties.bits_per_element == bits
        assert gw.method("Own()") == gw.method("own")
    other = type("Other", (built(),), {"tag": 121})
    with pytest.raises(gw.HyperparameterError, match="Other: the name 'own' belongs to Own already"):
        gw.register(other)


class Codecs:
    """Codecs that are wrong, each in one way."""

    class NoUnits(DenseCodec):
        def __init__(self, segments: Any, world_size: int) -> None:
            super().__init__(segments, world_size)
            del self.units

    class NoGrain(DenseCodec):
        grain = 0

    class Fraction(DenseCodec):
        def payload_bytes(self, units: int) -> Any:
            return units / 2

    class Negative(DenseCodec):
        def payload_bytes(self, units: int) -> int:
            return -8


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"declare": lambda self: None}, r"Own: declare\(\) returned None, not a gw.Traits"),
        (
            {"declare": gathers(collectives="all_gather")},
            "trait 'collectives' is a tuple of names, .*not 'all_gat",
        ),
        ({"declare": gathers(collectives=("gather",))}, "Own: unknown protocol 'gather'; did you mean 'all_gather'"),
        ({"declare": gathers(kernels=("momments",))}, "Own: unknown family of kernels 'momments'; did you mean"),
        ({"declare": gathers(cut=0)}, "trait 'cut' is a whole number of at least 1, not 0"),
        ({"declare": gathers(joined="no")}, "trait 'joined' is True or False, not 'no'"),
        ({"codec": lambda *_: None}, r"Own: codec\(\) returned None: return a gradwire.exchange.codecs.Codec"),
        ({"codec": lambda s, k, segments, n, _: Codecs.NoUnits(segments, n)}, "'units' of NoUnits .* not None"),
        (
            {"codec": lambda s, k, segments, n, _: Codecs.NoGrain(segments, n)},
            "'grain' of NoGrain .* not 0",
        ),
        ({"codec": lambda s, k, segments, n, _: Codecs.Fraction(segments, n)}, "Fraction.payload_bytes returned 250.0"),
        ({"codec": lambda s, k, segments, n, _: Codecs.Negative(segments, n)}, "Negative.payload_bytes returned -8"),
    ],
)
def test_wrong_traits_and_codecs_are_named_before_an_exchange(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(gw.GradwireError, match=told):
        gw.simulate(torch.zeros(2, 2000), built(**changed)())
