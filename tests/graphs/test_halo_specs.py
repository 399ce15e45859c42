"""Specs of methods for halos, and exact bytes of operators."""

from __future__ import annotations

import pytest
import torch
from small_graphs import link_of, parts_of, random_graph

import gradwire as gw
from gradwire.graphs import HALO_METHODS, Halo, Isolated, extended
from gradwire.methods.registry import METHODS

SPECS = [
    "Halo(compressor=FP32())",
    "Halo(compressor=TopK(density=0.1))",
    "VARCO(start=64.0, end=2.0, slope=3.0, steps=100, values=QSGDinf(levels=7))",
    "CDFGNN(tolerance=0.25, values=BF16())",
    "CDFGNN(tolerance=0.25, adaptive=True, values=BF16())",
    "Isolated()",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_read_and_written(spec: str) -> None:
    method = gw.halo_method(spec)
    assert gw.halo_method(repr(method)) == method
    assert gw.halo_method(method) is method
    assert type(method) in HALO_METHODS


def test_names_stand_for_the_defaults_and_operators_for_themselves() -> None:
    assert [gw.halo_method(kind.name) for kind in HALO_METHODS] == [kind() for kind in HALO_METHODS]
    assert gw.halo_method("qsgdinf") == Halo(compressor=gw.QSGDinf())
    assert gw.halo_method(gw.BF16()) == gw.halo_method("Halo(bf16)")
    assert gw.halo_method("isolated") == Isolated()


@pytest.mark.parametrize("spec", ["vargo", "Halo(varco)", "VARCO(3)", "L1(strength=1.0)", "3"])
def test_what_is_no_method_for_halos_is_refused(spec: str) -> None:
    with pytest.raises(gw.HyperparameterError):
        gw.halo_method(spec)


def test_a_method_for_halos_exchanges_no_gradients() -> None:
    with pytest.raises(gw.HyperparameterError, match="unknown method 'varco'"):
        gw.method("varco")


def test_tags_are_of_one_method_each() -> None:
    tags = [kind.tag for kind in HALO_METHODS]
    others = {kind.tag for kind in METHODS if hasattr(kind, "tag")}
    assert len(set(tags)) == len(tags)
    assert not others & set(tags)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("fp32", lambda n: 16 * -(-n // 4)),
        ("bf16", lambda n: 16 * -(-n // 8)),
        # Scales of blocks of 512 in float32, and groups of 80 digits of base 15 in 40 bytes.
        ("QSGDinf(levels=7)", lambda n: 16 * -(-4 * -(-n // 512) // 16) + 16 * -(-(40 * -(-n // 80)) // 16)),
        ("RandK(density=0.1, coordinates='private')", lambda n: 16 * -(-4 * max(1, int(0.1 * n)) // 16)),
    ],
)
def test_bytes_are_those_of_the_operator(spec: str, size: object) -> None:
    parts = parts_of(random_graph(), 4)
    link, width = link_of(parts, spec), 12
    extended(link, 0, [torch.randn(len(p.own), width) for p in parts])
    counts = parts[0].boundary.counts
    for rank, traffic in enumerate(link.traffic()):
        sent = [int(n) for n in counts[rank] if n]
        came = [int(n) for n in counts[:, rank] if n]
        assert traffic.sent_bytes == sum(32 + size(n * width) for n in sent) + 3 * 8  # type: ignore[operator]
        assert traffic.received_bytes == sum(32 + size(n * width) for n in came) + 3 * 8  # type: ignore[operator]
        assert traffic.dense_bytes == 4 * width * sum(sent)


def test_without_communication_nothing_travels_and_halos_are_zeros() -> None:
    parts = parts_of(random_graph(), 4)
    link = link_of(parts, "isolated")
    rows = [torch.randn(len(p.own), 5, requires_grad=True) for p in parts]
    known = extended(link, 0, rows)
    torch.stack([k.sum() for k in known]).sum().backward()
    for k, own in zip(known, rows):
        assert torch.equal(k[: len(own)], own)
        assert not bool(k[len(own) :].any())
        assert torch.equal(own.grad, torch.ones_like(own))  # type: ignore[arg-type]
    assert all(t.sent_bytes == t.received_bytes == 0 for t in link.traffic())


@pytest.mark.parametrize("method", ["fp32", "QSGDinf(levels=7)", "TopK(density=0.5)", "VARCO(start=2, end=2)"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_any_type_are_exchanged_in_float32_and_returned_in_their_own(method: str, dtype: torch.dtype) -> None:
    """So are their gradients; under autocast, rows are in sixteen bits, too."""
    parts, found = parts_of(random_graph(), 3), {}
    for kind in (torch.float32, dtype):
        link = link_of(parts, method)
        rows = [torch.linspace(-1, 1, 4 * len(p.own)).bfloat16().to(kind).view(-1, 4).requires_grad_() for p in parts]
        known = extended(link, 0, rows)
        sum(k.sum() for k in known).backward()  # type: ignore[union-attr]
        assert {x.dtype for x in known} == {row.grad.dtype for row in rows if row.grad is not None} == {kind}
        found[kind] = [*known, *(row.grad for row in rows)]
    assert all(torch.equal(a.to(dtype), b) for a, b in zip(found[torch.float32], found[dtype]))
