"""What a method states that it calls is what is compiled for it, no more and no less."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import gradwire as gw
from cases import ALL
from gradwire.exchange.planning import measure_coders
from gradwire.kernels import CODERS, FAMILIES, Coder, Kernels, entropy

PROBE = """
import sys, torch, gradwire as gw
from gradwire.kernels.ternary import loops as ternary
from gradwire.kernels.lattice import loops as lattice
from gradwire.kernels.levels import loops as levels
from gradwire.kernels.moments import loops as moments
from gradwire.kernels.natural import loops as natural
from gradwire.kernels.signs import loops as signs
from gradwire.kernels.checksum.loops import row_checksums

homes = {"moments": moments, "ternary": ternary, "levels": levels, "signs": signs, "natural": natural}
homes["lattice"] = lattice
drivers = {
    f"{home}.{name}": value
    for home, module in homes.items()
    for name, value in vars(module).items()
    if name.endswith("_range") and value.__module__ == module.__name__
}
drivers["checksum.row_checksums"] = row_checksums
for prepare in (lambda: gw.warm_up(sys.argv[1]), lambda: gw.simulate(torch.ones(3, 2000), sys.argv[1])):
    prepare()
    print(*sorted(f"{name}:{len(driver.signatures)}" for name, driver in drivers.items() if driver.signatures))
"""


def test_only_the_families_of_the_method_are_compiled() -> None:
    """By the compiler's own record, in a fresh process: nothing of levels, signs, powers of two or lattices.

    And nothing is compiled in the middle of a step, for arrays of another type.
    """
    command = [sys.executable, "-c", PROBE, "TernGrad()"]
    warm, used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {entry.split(":")[0] for entry in warm.split()}
    ternary = {f"ternary.{name}_range" for name in ("decode", "encode", "sum")}
    assert names == {"moments.moments_range", "checksum.row_checksums", *ternary}
    assert used == warm


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_methods_state_the_families_that_they_call(method: gw.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation asks for the functions of its family, every use of a coder asks for it."""
    called = set()
    measure_coders.cache_clear()
    serve, coder = Kernels._serve, entropy.get_coder

    def asked(self: Kernels, family: str) -> object:
        called.add(family)
        return serve(self, family)

    def given(name: str, backend: str = "auto") -> Coder:
        called.add(name)
        return coder(name, backend)

    monkeypatch.setattr(Kernels, "_serve", asked)
    monkeypatch.setattr("gradwire.kernels.api.get_coder", given)
    assert set(method.traits.kernels) <= {*FAMILIES, *CODERS}
    x = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    # A matrix that is compressed, and a vector that travels beside it in float32.
    for warmup_steps in (0, 1):
        link = gw.SimulatedLink(
            {"a": torch.zeros(36, 50), "b": torch.zeros(200)}.items(), method, 3, min_numel=1000,
            warmup_steps=warmup_steps, backend="cpu", collective=method.traits.collectives[-1],
        )  # fmt: skip
        for _ in range(2):
            link.reduce_(x.clone())
        for collective in method.traits.collectives[:-1]:
            whole = {"a": torch.zeros(40, 50)}.items()
            other = gw.SimulatedLink(whole, method, 3, backend="cpu", collective=collective)
            other.reduce_(x.clone())
    assert called == set(method.traits.kernels)


def test_auto_compiles_for_all_that_it_tries() -> None:
    assert gw.Auto(candidates=("fp32", "qsgd", "coded")).traits.kernels == (
        "moments",
        "levels",
        "ternary",
        "rans",
        "huffman",
    )


def test_methods_without_kernels_compile_nothing() -> None:
    assert gw.warm_up("fp32") == 0.0
