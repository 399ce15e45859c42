"""Fitted levels against the best there are, which an oracle in NumPy and SciPy finds by itself."""

from __future__ import annotations

from typing import Any

import pytest

import gradwire as gw
from fitted_models import SETTINGS, fitted, normals_of, values_of

FACTOR = 1.02
"""A fit may lose two percent: statistics travel in float32, blocks are merged, and the oracle's own grid is finite."""

FACTOR_OF_BINS = {2: 1.01, 3: 1.01, 4: 1.01, 8: 1.03}
"""What is lost is of the order of the square of a bin's width, at most a sixteenth, beside the levels' distance. With
eight bits that is as small as a bin, and an oracle that sees single values gains from which of them lie next to a
level: between ratios that differ by 0.001 the variance of these 131 072 values jumps by two percent."""

MODELS = {"normal": normals_of, "histogram": values_of}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", [gw.ALQ, gw.ALQN])
def test_levels_are_the_best_of_their_model(method: type[gw.ALQ], setting: Any, bits: int, model: str) -> None:
    g, sizes, options = setting()
    found = fitted(method(bits=bits, model=model, **options), g, sizes)
    best = MODELS[model](g, sizes, options.get("norm", "l2"), method.weighted)
    factor = FACTOR if model == "normal" else FACTOR_OF_BINS[bits]
    assert best.variance(found) <= factor * best.best_levels(2**bits)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", [gw.AMQ, gw.AMQN])
def test_ratios_are_the_best_of_their_model(method: type[gw.AMQ], setting: Any, bits: int, model: str) -> None:
    """At eight bits the best ratio is above 0.94, and may be next to one."""
    g, sizes, options = setting()
    found = fitted(method(bits=bits, model=model, **options), g, sizes)
    best = MODELS[model](g, sizes, options.get("norm", "l2"), method.weighted)
    factor = FACTOR if model == "normal" else FACTOR_OF_BINS[bits]
    assert best.variance(found) <= factor * best.best_ratio(2**bits)
