"""Names and specs."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
import types
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from cases import CASES, EVERY
from gradwire.methods.registry import METHODS
from gradwire.tools.cli.methods_command import method_rows


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_repr_is_the_spec(method: gw.Method) -> None:
    assert gw.method(repr(method)) == method
    assert gw.method(method) is method


@pytest.mark.parametrize("kind", METHODS)
def test_a_name_alone_is_the_default(kind: type[gw.Method]) -> None:
    assert gw.method(kind.name) == gw.method(kind.__name__) == kind()
    assert kind.name.replace("_", "") == kind.__name__.lower()


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_methods_are_frozen(method: gw.Method) -> None:
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)


def test_declared_properties() -> None:
    info = gw.methods()
    assert set(info) == set(CASES)
    assert not info["terngrad"].unbiased
    for name, told in info.items():
        method = gw.method(name)
        for field in ("unbiased", "unbiased_note", "omega_formula"):
            assert getattr(told, field) == getattr(method.traits, field)
        for field in ("omega", "delta", "delta_formula"):
            assert getattr(told, field) == getattr(method, field)
        assert told.omega is None or told.unbiased
        assert told.delta is None or 0 < told.delta <= 1
    assert info["terngrad"].bit_stable
    assert info["terngrad"].bits_per_element == 2.4
    assert not info["fp32"].bit_stable


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("ef-signsdg", "did you mean 'ef_signsgd'"),
        ("terngard", "did you mean 'terngrad'"),
        ("TernGrad(clp=2)", "unknown field 'clp' of TernGrad; did you mean 'clip'"),
        ("TernGrad(2.5)", "named values only: TernGrad(clip=..., clip_by=..., share_scaler=..., ahead=...)"),
        ("QSGD(TernGrad())", "named values only: QSGD(levels=..., block_size=..., blocks=...)"),
        (
            "ErrorFeedback(QSGDinf(), 3)",
            "one value without a name: ErrorFeedback(compressor=..., momentum=..., decay=...)",
        ),
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


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_what_a_method_is_around_may_go_without_its_name_in_python_and_in_specs(method: gw.Method) -> None:
    kind, first = type(method), next((f for f in dataclasses.fields(method) if not f.kw_only), None)
    holds = next((f for f in dataclasses.fields(method) if f.name in ("compressor", "inner")), None)
    assert first == holds
    if first is not None:
        others = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name != first.name}
        assert kind(getattr(method, first.name), **others) == method
        words = ", ".join(f"{name}={value!r}" for name, value in others.items())
        assert gw.method(f"{kind.__name__}({getattr(method, first.name)!r}, {words})") == method


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (lambda: gw.TernGrad(clp=2), "unknown field 'clp' of TernGrad; did you mean 'clip'"),
        (lambda: gw.TernGrad(2.5), "TernGrad takes named values only: TernGrad(clip=..., "),
        (lambda: gw.ErrorFeedback(gw.TopK(), 0.9), "takes one value without a name: ErrorFeedback(compressor=..., "),
        (lambda: gw.DiLoCo(gw.FP32(), inner=gw.FP32()), "field 'inner' of DiLoCo is given twice"),
        (lambda: dataclasses.replace(gw.QSGD(), level=3), "did you mean 'levels'"),
        (lambda: gw.QSGD(levels=10**5000), "QSGD: levels has more than 1024 bits"),
    ],
)
def test_python_gets_the_sentences_of_specs(build: Callable[[], gw.Method], part: str) -> None:
    with pytest.raises(gw.HyperparameterError) as caught:
        build()
    assert part in str(caught.value)


def test_methods_are_copied_and_pickled() -> None:
    method = gw.DiLoCo(gw.ErrorFeedback(gw.TopK(density=0.1), momentum=0.9), every=7)
    assert copy.deepcopy(method) == copy.copy(method) == pickle.loads(pickle.dumps(method)) == method


def test_the_package_lists_what_users_need_and_no_modules() -> None:
    listed = [name for name in dir(gw) if not name.startswith("_")]
    assert sorted(listed) == sorted(name for name in gw.__all__ if not name.startswith("_"))
    modules = [name for name in listed if isinstance(getattr(gw, name), types.ModuleType)]
    assert modules == ["integrations"]


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
        assert repr(gw.TernGrad(clip=clip)) == "TernGrad(clip=2.0, clip_by='rms', share_scaler=True, ahead=False)"


@pytest.mark.parametrize(
    "build",
    [
        lambda number: gw.Scheduled(gw.TopK(density=0.01), start=number(0.25)),
        lambda number: gw.Scheduled(gw.TopK(density=0.01), rounds=number(100)),
        lambda number: gw.Scheduled(gw.TopK(density=0.01), start=(number(0.5), number(0.1)), schedule="step"),
        lambda number: gw.LGreCo(gw.TopK(density=0.01), field="density", values=(number(0.02), number(0.1))),
        lambda number: gw.DIANA(prox=gw.L1(strength=number(0.1))),
        lambda number: gw.DIANA(prox=gw.Box(low=number(-1.0), high=number(1.0))),
    ],
)
def test_a_method_of_numpy_numbers_reads_back(build: Callable[[type], gw.Method]) -> None:
    import numpy as np

    method = build(np.float64)
    assert gw.method(repr(method)) == method
    assert repr(method) == repr(build(float))


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


@pytest.mark.parametrize("kind", [*METHODS, gw.Auto, gw.L1, gw.Box])
def test_true_is_no_number(kind: type[gw.Method]) -> None:
    needed = {f.name: 1.0 for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    for field in dataclasses.fields(kind):
        words = set(re.findall(r"\w+", str(field.type)))
        if words & {"int", "float"} and "bool" not in words:
            with pytest.raises(gw.HyperparameterError):
                kind(**{**needed, field.name: True})


LONG = {
    "a long number": ("QSGD(levels=" + "9" * 50_000 + ")", "QSGD"),
    "a long number of sixteens": ("QSGD(levels=0x" + "f" * 50_000 + ")", "more than 1024 bits"),
    "a longer number": ("QSGD(levels=" + "9" * 100_000 + ")", "at most 65536 characters"),
    "a long text": ("x" * 1_000_000, "at most 65536 characters"),
    "a long name": ("x" * 50_000, "unknown method"),
    "a long field": ("QSGD(" + "x" * 50_000 + "=1)", "unknown field"),
    "a long word": ("QSGD(levels=" + "x" * 50_000 + ")", "is no value"),
    "a long value": ("DPSGD(graph='" + "x" * 50_000 + "', every=0)", "every is at least 1"),
    "a long list": ("MultiScale(levels=(" + "1, " * 15_000 + "))", "levels is two or more"),
    "deep brackets": ("(" * 30_000 + ")" * 30_000, "is not a method spec"),
    "many signs": ("QSGD(levels=" + "-" * 50_000 + "1)", "is not a method spec"),
}


@pytest.mark.parametrize(("spec", "told"), LONG.values(), ids=LONG)
def test_a_long_spec_is_refused_in_a_short_sentence(spec: str, told: str) -> None:
    with pytest.raises(gw.HyperparameterError, match=re.escape(told)) as caught:
        gw.method(spec)
    assert len(str(caught.value)) < 2500


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


def evaluated(formula: str, d: int, s: int) -> float:
    """Return the value of a formula for blocks of d and s levels."""
    names = {"sqrt": math.sqrt, "min": min, "max": max, "d": d, "s": s}
    shown, _, where = formula.replace("^", "**").partition(" with ")
    for equation in filter(None, where.split(", ")):
        name, _, value = equation.partition(" = ")
        names[name] = eval(value, {"__builtins__": {}}, names)
    return float(eval(shown, {"__builtins__": {}}, names))


EXACT = [
    *(gw.QSGDinf(levels=s, block_size=d) for s, d in ((1, 16), (7, 64), (7, 512), (3, 4096), (16, 48))),
    *(gw.PQuantisation(p=p, block_size=d) for p in (1, 2, "inf") for d in (16, 512)),
    gw.Natural(),
    gw.FP32(),
    gw.DQGD(compressor=gw.QSGDinf(levels=3, block_size=64)),
    gw.Coded(compressor=gw.QSGDinf(levels=3, block_size=64)),
]


@pytest.mark.parametrize("method", EXACT, ids=repr)
def test_the_omega_that_is_shown_is_the_one_that_is_used(method: gw.Method) -> None:
    inner = getattr(method, "compressor", method)
    shown = evaluated(method.traits.omega_formula, getattr(inner, "block_size", 0), getattr(inner, "levels", 0))
    assert shown == pytest.approx(method.omega, rel=1e-12)


@pytest.mark.parametrize("block_size", [16, 64, 512, 4096])
@pytest.mark.parametrize("levels", [1, 2, 3, 5, 9, 16, 40])
def test_the_bound_that_is_shown_is_close_above_what_is_used(levels: int, block_size: int) -> None:
    even = gw.QSGD(levels=levels, block_size=block_size)
    shown = evaluated(even.traits.omega_formula, block_size, levels)
    assert shown - 1 / levels**4 - 1e-12 <= even.omega <= shown + 1e-12
    for norm in ("l2", "max"):
        for kind in (gw.NUQSGD, gw.NaturalDithering):
            method = kind(levels=levels, block_size=block_size, norm=norm)
            shown = evaluated(method.traits.omega_formula, block_size, levels)
            assert 0.35 * shown <= method.omega <= shown * (1 + 1e-12)


@pytest.mark.parametrize(("block_size", "numel"), [(64, 64), (64, 1000), (None, 100), (64, 20)])
def test_the_delta_that_is_shown_is_the_one_that_is_used(block_size: int | None, numel: int) -> None:
    method = gw.ScaledSign(block_size=block_size)
    assert method.delta_of(numel) == evaluated(method.delta_formula, min(numel, block_size or numel), 0)
    small = gw.QSGDinf(block_size=256)
    assert small.delta_formula == "1 - omega"
    assert small.delta == 1 - small.omega
    for cast, x in ((gw.FP16(), 1 + 2.0**-11), (gw.BF16(), 1 + 2.0**-8)):
        assert cast.delta == evaluated(cast.delta_formula, 0, 0)
        # Halfway between two numbers of the format: nearly the worst.
        error = (float(gw.simulate(torch.tensor([[x]]), cast).mean) / x - 1) ** 2
        assert 0.98 * (1 - cast.delta) <= error <= 1 - cast.delta


def test_constants_depend_on_the_size_of_a_parameter_where_a_block_is_one() -> None:
    whole = gw.QSGDinf(levels=7, block_size=None)
    assert whole.omega is None
    assert whole.omega_of(256) == gw.QSGDinf(levels=7, block_size=256).omega
    joined = gw.QSGDinf(levels=7, block_size=256, blocks="model")
    assert joined.omega_of(16) == joined.omega
    own = gw.TernGrad(clip=None, share_scaler=False)
    assert own.traits.unbiased
    assert own.omega_of(400) == pytest.approx(evaluated(own.traits.omega_formula, 400, 1)) == pytest.approx(9.5)
    assert own.omega is gw.TernGrad(clip=None).omega_of(400) is None
    assert not gw.TernGrad().traits.unbiased


def test_properties_are_shown_of_what_was_asked_for() -> None:
    (row,) = method_rows(["QSGD(levels=1)"])
    assert row["spec"] == "QSGD(levels=1, block_size=512, blocks='parameter')"
    assert row["bits_per_element"] is None
    assert method_rows(["qsgd"])[0]["bits_per_element"] == gw.QSGD.properties.bits_per_element


def test_a_trait_that_nobody_would_read_is_refused() -> None:
    with pytest.raises(gw.HyperparameterError, match=r"Mine: kernels is a trait: return it from declare"):

        class Mine(gw.Method):
            kernels = ("ternary",)
