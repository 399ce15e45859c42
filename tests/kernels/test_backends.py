"""A backend is the functions of each family and one line: shown by a copy of the reference under another name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import test_digit_sums
import test_lattice
import test_levels
import test_natural
import test_parity
import test_signs

from gradwire.kernels import FAMILIES, get_kernels, self_test
from gradwire.kernels.backends import BACKENDS, Functions
from gradwire.kernels.families import OPERATIONS

NAME = "copied"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Copies of the modules that define the bits, which serve as the backend ``copied``; those that were asked for."""
    asked: dict[str, ModuleType] = {}
    made = {family: copy_of(OPERATIONS[family]) for family in FAMILIES}
    monkeypatch.setitem(
        BACKENDS, NAME, lambda threads: Functions(NAME, lambda family: asked.setdefault(family, made[family]))
    )
    yield asked
    get_kernels.cache_clear()


def copy_of(module: ModuleType) -> ModuleType:
    """Execute a module's file once more, under another name."""
    spec = spec_from_file_location(f"{module.__name__}_{NAME}", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_copy_of_the_reference_serves_under_another_name(copies: dict[str, ModuleType]) -> None:
    kernels = get_kernels(NAME)
    assert kernels.name == NAME
    for family in FAMILIES:
        assert self_test.agree(family, kernels, get_kernels("reference"))
    assert set(copies) == set(FAMILIES)
    assert kernels.warm_up(FAMILIES) == 0.0


@pytest.mark.parametrize(
    "parity",
    [
        test_parity.test_moments_have_the_bits_of_the_reference,
        test_parity.test_encode_has_the_bits_of_the_reference,
        test_parity.test_decode_has_the_bits_of_the_reference_and_leaves_gaps_alone,
        test_digit_sums.test_any_bytes_give_the_bits_of_the_reference,
        test_lattice.test_every_backend_gives_the_bits_of_the_reference,
        test_levels.test_every_backend_gives_the_bits_of_the_reference,
        test_natural.test_every_backend_gives_the_bits_of_the_reference,
        test_signs.test_every_backend_gives_the_bits_of_the_reference,
    ],
)
def test_the_copy_passes_the_parity_tests(parity, copies: dict[str, ModuleType]) -> None:
    parity(NAME)
    # The parity tests assert; here it must be the copy that they called.
    assert copies


def test_an_operation_that_a_backend_lacks_is_missed_by_name(
    copies: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = get_kernels(NAME)
    self_test.SELF_TESTS["signs"](kernels)
    monkeypatch.delattr(copies["signs"], "sign_vote")
    with pytest.raises(AttributeError, match="sign_vote"):
        self_test.SELF_TESTS["signs"](kernels)
