"""Names and specs."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from cases import ALL, CASES
from gradwire.cli.show_methods import method_rows
from gradwire.registry import METHODS


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_repr_is_the_spec(method: gw.Method) -> None:
    assert gw.method(repr(method)) == method
    assert gw.method(method) is method


@pytest.mark.parametrize("kind", METHODS)
def test_a_name_alone_is_the_default(kind: type[gw.Method]) -> None:
    assert gw.method(kind.name) == gw.method(kind.__name__) == kind()
    assert kind.name.replace("_", "") == kind.__name__.lower()


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_methods_are_frozen_and_keyword_only(method: gw.Method) -> None:
    for field in dataclasses.fields(method):
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)


def test_declared_properties() -> None:
    info = gw.methods()
    assert set(info) == set(CASES)
    assert info["terngrad"].unbiased
    assert info["terngrad"].bit_stable
    assert info["terngrad"].bits_per_element == 2.4
    assert not info["fp32"].bit_stable


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("ef-signsdg", "did you mean 'ef_signsgd'"),
        ("terngard", "did you mean 'terngrad'"),
        ("TernGrad(clp=2)", "unknown field 'clp' of TernGrad; did you mean 'clip'"),
        ("TernGrad(2.5)", "named values only: TernGrad(clip=..., clip_by=..., share_scaler=...)"),
        ("QSGD(TernGrad())", "named values only: QSGD(levels=..., block_size=..., blocks=...)"),
        ("ErrorFeedback(QSGDinf(), 3)", "named values only: ErrorFeedback(compressor=..., momentum=...)"),
        ("ErrorFeedback(QSGDinf(), compressor=QSGDinf())", "field 'compressor' of ErrorFeedback is given twice"),
        ("ErrorFeedback(*x)", "not a method spec"),
        ("TernGrad(clip=", "not a method spec"),
        ("TernGrad(clip=1+1)", "not a method spec"),
        ("__import__('os')", "unknown method '__import__'"),
        ("TernGrad(clip=open('x'))", "unknown method 'open'"),
        ("2.5", "not a method spec"),
        ("", "not a method spec"),
        ("(" * 500, "not a method spec"),
        ("TernGrad(**{'clip': 2})", "unknown field"),
        ("TernGrad(clip=0)", "positive number"),
        ("TernGrad(clip=-1.0)", "positive number"),
        ("TernGrad(clip='2')", "positive number"),
        ("TernGrad(clip=True)", "positive number"),
        ("TernGrad(clip=1e999)", "positive number"),
        ("TernGrad(clip_by='max')", "clip_by is 'rms' (root mean square) or 'std' (standard deviation), not 'max'"),
        ("TernGrad(share_scaler=1)", "True or False"),
        ("fp32(bits=8)", "unknown field 'bits' of FP32"),
        ("TernGrad(clip=1, clip=2)", "field 'clip' of TernGrad is given twice"),
        ("DIANA(alpha='auto')", "alpha is a finite number, not 'auto'"),
        ("DIANA(momentum=[0.9])", "momentum is a finite number, not [0.9]"),
        ("DIANA(shifts=['a'])", "shifts is 'float64' or 'float32', not ['a']"),
        ("DIANA(prox=L1())", "L1: strength must be given: L1(strength=...)"),
        ("DIANA(prox=L1)", "L1: strength must be given: L1(strength=...)"),
        ("DIANA(prox=Box(low=0))", "Box: high must be given: Box(low=..., high=...)"),
    ],
)
def test_bad_specs_are_one_clear_error(spec: str, part: str) -> None:
    with pytest.raises(gw.HyperparameterError) as caught:
        gw.method(spec)
    assert part in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("kind", [*METHODS, gw.Auto])
def test_names_are_the_same_without_case_underscores_and_hyphens(kind: type[gw.Method]) -> None:
    name = kind.name
    for said in (name.upper(), name.title(), name.replace("_", ""), name.replace("_", "-"), f"{name[:2]}-{name[2:]}"):
        assert gw.method(said) == gw.method(f"{said}()") == kind(), said


def test_hyphens_are_names_only_where_names_may_stand() -> None:
    assert gw.method("error-feedback(compressor=QSGD-inf(block_size=256))") == gw.ErrorFeedback()
    assert gw.method("Auto(candidates=('fp-16', 'bf16'))").candidates == ("fp-16", "bf16")  # type: ignore[attr-defined]
    assert gw.method("TernGrad(clip=25e-1)") == gw.method("TernGrad(clip=.25E+1)") == gw.TernGrad()
    assert gw.method("DIANA(prox=Box(low=-1.0, high=1e-3))") == gw.DIANA(prox=gw.Box(low=-1.0, high=1e-3))
    assert gw.method("diana(prox=l1(strength=0.5))") == gw.DIANA(prox=gw.L1(strength=0.5))
    with pytest.raises(gw.HyperparameterError, match="not 'ra-ns'"):
        gw.method("Coded(coder='ra-ns')")


def test_the_method_inside_another_may_go_without_its_name() -> None:
    inner = gw.QSGDinf(block_size=256)
    assert gw.method("ErrorFeedback(QSGDinf(block_size=256))") == gw.ErrorFeedback(compressor=inner)
    assert gw.method("Coded(errorfeedback, coder='huffman')") == gw.Coded(
        compressor=gw.ErrorFeedback(), coder="huffman"
    )


def test_a_spec_of_another_number_type_is_the_same_spec() -> None:
    import numpy as np

    for clip in (2, 2.0, np.float64(2)):
        assert repr(gw.TernGrad(clip=clip)) == "TernGrad(clip=2.0, clip_by='rms', share_scaler=True)"


def test_not_a_spec_at_all() -> None:
    with pytest.raises(gw.HyperparameterError, match="not 3"):
        gw.method(3)  # type: ignore[arg-type]


ODD = ("auto", ["a"], {}, {1}, None, True, -1, 1.5, float("nan"), b"x", (), (1, "a"), 1j)


@pytest.mark.parametrize("kind", [*METHODS, gw.Auto, gw.L1, gw.Box])
def test_any_value_of_any_field_is_taken_or_refused_in_a_sentence(kind: type[gw.Method]) -> None:
    needed = {f.name: 1.0 for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    answers: list[object] = []
    for field in dataclasses.fields(kind):
        for value in ODD:
            try:
                answers.append(kind(**{**needed, field.name: value}))
            except gw.HyperparameterError as error:
                answers.append(str(error))
    assert len(answers) == len(ODD) * len(dataclasses.fields(kind))
    assert all(isinstance(a, kind) or (isinstance(a, str) and len(a.split()) > 3) for a in answers)


@given(st.text(max_size=60))
def test_any_text_is_a_method_or_one_error(text: str) -> None:
    try:
        found = gw.method(text)
    except gw.HyperparameterError:
        return
    assert isinstance(found, gw.Method)


@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (-math.inf, 2.0)])
def test_infinite_bounds_are_part_of_the_spec(low: float, high: float) -> None:
    method = gw.DIANA(prox=gw.Box(low=low, high=high))
    assert gw.method(repr(method)) == method


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("TernGrad(clip=none)", "clip=none is no value; did you mean None"),
        ("NUQSGD(zero=false)", "did you mean False"),
        ("NUQSGD(norm=l2)", "norm=l2 is no value: a text has quotes"),
    ],
)
def test_a_word_behind_a_field_is_not_taken_for_a_method(spec: str, told: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=re.escape(told)):
        gw.method(spec)


@pytest.mark.parametrize(("levels", "block_size"), [(1, 16), (7, 64), (7, 512), (3, 4096), (16, 48)])
def test_the_omega_that_is_shown_is_the_one_that_is_used(levels: int, block_size: int) -> None:
    names = {"sqrt": math.sqrt, "min": min, "max": max, "d": block_size, "s": levels}
    method = gw.QSGDinf(levels=levels, block_size=block_size)
    shown = eval(str(method.properties.omega).replace("^", "**"), {"__builtins__": {}}, names)
    assert shown == pytest.approx(method.worst_error)
    bound = eval(str(gw.QSGD.properties.omega).replace("^", "**").partition(" for")[0], {"__builtins__": {}}, names)
    assert gw.QSGD(levels=levels, block_size=block_size).worst_error <= bound + 1e-12


def test_properties_are_shown_of_what_was_asked_for() -> None:
    (row,) = method_rows(["QSGD(levels=1)"])
    assert row["spec"] == "QSGD(levels=1, block_size=512, blocks='parameter')"
    assert row["bits_per_element"] is None
    assert method_rows(["qsgd"])[0]["bits_per_element"] == gw.QSGD.properties.bits_per_element
