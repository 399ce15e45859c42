"""Options of a link, as they are given and as they are kept."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_args, get_type_hints

import pytest
import torch

import gradwire as gw
from cases import CASES
from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.planning import Options
from gradwire.graphs import Graph, partition, subgraphs, symmetrised
from gradwire.methods.registry import METHODS


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


def test_an_unknown_backend_is_refused_also_where_no_kernel_is_needed() -> None:
    with pytest.raises(gw.HyperparameterError, match="unknown kernel backend 'cpu-plane'; did you mean 'cpu-plain'"):
        gw.SimulatedLink([("w", torch.zeros(10))], "bf16", 2, backend="cpu-plane")
    with pytest.raises(gw.HyperparameterError, match="unknown kernel backend 'None'"):
        Options(backend=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [True, False, 1.0, "1", None, 1 << 1024])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    """True would pass for 1, and draw another stream where a seed is hashed as text."""
    nodes = torch.ones(2, dtype=torch.bool)
    graph = Graph(symmetrised(torch.tensor([[0], [1]]), 2), torch.zeros(2, 1), nodes.long(), nodes, ~nodes)
    (part,) = subgraphs(graph, partition(graph, 1))
    for build in (
        lambda: Options(seed=seed),
        lambda: gw.simulate(torch.ones(2, 3), "terngrad", seed=seed),
        lambda: gw.SimulatedHaloLink([part.boundary], "fp32", seed=seed),
        lambda: partition(graph, 1, seed=seed),
    ):
        with pytest.raises(gw.HyperparameterError, match="seed: "):
            build()
    assert Options(seed=(1 << 1024) - 1).seed


@pytest.mark.parametrize(
    ("method", "options", "error", "told"),
    [
        ("no_such", {}, HyperparameterError, "unknown method"),
        ("terngrad", {"chunk": 1}, HyperparameterError, "did you mean 'chunk_numel'"),
        ("terngrad", {"collective": "ring"}, HyperparameterError, "unknown collective 'ring'"),
        ("lattice", {"collective": "two_shot"}, IncompatibleError, "cannot travel by two_shot"),
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


def test_types_of_options_name_what_is_there() -> None:
    """A type checker finds a mistyped option, or value of one, before the script runs."""
    from gradwire.exchange.planning import Collective, KernelBackend, LinkOptions, RareOptions
    from gradwire.kernels import BACKENDS
    from gradwire.link.adapters.attach import attach

    assert set(get_type_hints(LinkOptions)) == {field.name for field in dataclasses.fields(Options)}
    named = set(inspect.signature(attach).parameters) - {"more"} | set(get_type_hints(RareOptions))
    assert set(get_type_hints(LinkOptions)) <= named
    assert set(get_args(KernelBackend)) == set(BACKENDS) - {"meta"}
    protocols = {name for kind in METHODS for case in CASES[kind.name] for name in case.traits.collectives}
    assert {"auto", *protocols} - {"gossip"} == set(get_args(Collective))
