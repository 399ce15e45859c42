"""Options of a link, as they are given and as they are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.planning import Options


@pytest.mark.parametrize(
    "exclude",
    [
        ("v", "w*"),
        ["v", "w*"],
        (pattern for pattern in ("v", "w*")),
        map(str, ("v", "w*")),
        filter(None, ("", "v", "w*")),
        {"v": 1, "w*": 2},
    ],
    ids=lambda given: type(given).__name__,
)
def test_patterns_may_come_from_anything_that_can_be_read_once(exclude: Any) -> None:
    like = [(name, torch.empty(4)) for name in ("u", "v", "w1", "w2")]
    link = gw.SimulatedLink(like, "terngrad", 2, min_numel=0, exclude=exclude)
    assert link.options.exclude == ("v", "w*")
    assert link.record()["dense_parameters"] == ["v", "w1", "w2"]


@pytest.mark.parametrize("exclude", [3, None, [3], (n for n in (1, 2)), b"w"])
def test_what_holds_no_patterns_is_refused(exclude: Any) -> None:
    with pytest.raises(gw.HyperparameterError, match="patterns of parameter names are needed"):
        Options(exclude=exclude)


@pytest.mark.parametrize(
    ("method", "options", "error", "told"),
    [
        ("no_such", {}, HyperparameterError, "unknown method"),
        ("terngrad", {"chunk": 1}, HyperparameterError, "did you mean 'chunk_numel'"),
        ("terngrad", {"collective": "ring"}, HyperparameterError, "unknown collective 'ring'"),
        ("natural", {"collective": "two_shot"}, IncompatibleError, "cannot travel by two_shot"),
        ("Auto(candidates=('fp32', 'qsgd'))", {"collective": "two_shot"}, IncompatibleError, "cannot travel by"),
        ("DIANA(prox=L1(strength=0.1))", {}, IncompatibleError, "no optimizer"),
        ("signum", {"fallback": "bf16", "fallback_limit": 2.0}, IncompatibleError, "fallback= has no place here"),
    ],
)
def test_what_no_rank_could_attach_is_refused_before_there_are_ranks(
    method: str, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        gw.check_options(method, **options)
    gw.check_options("auto", optimizer=None, collective="auto")
