"""What a method does when nothing but its name is given: the settings of its paper, or those that the page names."""

from __future__ import annotations

from typing import Any

import pytest

import gradwire as gw

DEFAULTS: dict[str, dict[str, Any]] = {
    # Wen et al., NeurIPS 2017, sec. 3.4: c = 2.5.
    "terngrad": {"clip": 2.5, "share_scaler": True},
    # Alistarh et al., NeurIPS 2017, sec. 5: buckets of 512, and 4 bits with the largest magnitude as norm.
    "qsgd": {"levels": 16, "block_size": 512},
    "qsgdinf": {"levels": 7, "block_size": 512},
    # Ramezani-Kebrya et al., 2021.
    "nuqsgd": {"levels": 7, "zero": True, "norm": "l2", "block_size": 512},
    # Zhou et al., 2016: AlexNet with gradients of 6 bits.
    "dorefa": {"bits": 6, "block_size": 512},
    "dqgd": {"compressor": gw.QSGDinf(levels=1, block_size=64)},
    # Bernstein et al., ICLR 2019, algorithm 1.
    "signum": {"momentum": 0.9},
    # Mishchenko et al., 2019: theorem 2's rate, no momentum.
    "diana": {"alpha": None, "momentum": 0.0, "shifts": "float64", "prox": None},
    # Richtarik et al., 2021; any contraction, no momentum.
    "ef21": {"compressor": gw.ScaledSign(block_size=64), "momentum": 0.0, "shifts": "float64"},
    "coded": {"compressor": gw.TernGrad()},
    "errorfeedback": {"compressor": gw.QSGDinf(block_size=256)},
    "ef_signsgd": {"compressor": gw.ScaledSign()},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    method = gw.method(name)
    assert {field: getattr(method, field) for field in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("levels", [1, 3])
def test_shifts_learn_as_fast_as_the_theorem_allows(levels: int) -> None:
    """By 1 / (1 + omega), or a little less, where nothing is said."""
    compressor = gw.QSGDinf(levels=levels, block_size=64)
    most = 1 / (1 + float(compressor.omega or 0.0))
    assert 0.9 * most < gw.DIANA(compressor=compressor).rate <= most
    assert gw.DIANA(compressor=compressor, alpha=0.125).rate == 0.125


def test_what_travels_in_float32_by_default() -> None:
    assert {name: gw.method(name).traits.min_numel for name in ("terngrad", "qsgd", "bf16", "fp16", "signsgd")} == {
        "terngrad": 1024,
        "qsgd": 1024,
        "bf16": 0,
        "fp16": 0,
        "signsgd": 0,
    }


# A thousandth of the elements, and a message as dear as a packet of Ethernet.
PAPERS: dict[str, dict[str, Any]] = {
    # Lin et al., ICLR 2018: the largest 0.1 %, momentum 0.9.
    "dgc": {"density": 0.001, "momentum": 0.9},
    # Shi et al., ICDCS 2019.
    "gtopk": {"density": 0.001},
    "clt_k": {"density": 0.001},
    "sidco": {"density": 0.001},
    "sketched_sgd": {"density": 0.001},
    "sketched_amsgrad": {"density": 0.001},
    "cat": {"fixed_bytes": 1500.0},
    # Wang et al., NeurIPS 2018: all pairs.
    "spectral_atomo": {"pairs": None},
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_setting_is_had_by_name_where_it_is_not_the_default(name: str) -> None:
    kind = type(gw.method(name))
    assert {field: getattr(kind.paper(), field) for field in PAPERS[name]} == PAPERS[name]
    assert kind.paper() != kind()


def test_elsewhere_the_default_is_the_papers_setting() -> None:
    others = [type(gw.method(name)) for name in gw.methods() if name not in PAPERS]
    assert all(kind.paper() == kind() for kind in others)


def test_fields_go_before_the_papers_setting() -> None:
    assert gw.DGC.paper(density=0.25, momentum=0.5) == gw.DGC(density=0.25, momentum=0.5)
    assert gw.DGC.paper(momentum=0.5) == gw.DGC(density=0.001, momentum=0.5)
    with pytest.raises(gw.HyperparameterError, match="density"):
        gw.GTopK.paper(density=2.0)
