"""A backend is one file a family and one line: shown by a copy of the reference under another name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import test_digit_sums
import test_lattice
import test_levels
import test_natural
import test_parity
import test_signs

from gradwire.kernels import FAMILIES, get_kernels, self_test
from gradwire.kernels.backends import BACKENDS, Modules

NAME = "copied"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend whose files are the reference's, in each family's folder as far as imports can tell."""
    for family in FAMILIES:
        package = import_module(f"gradwire.kernels.{family}")
        (tmp_path / family).mkdir()
        shutil.copy(Path(str(package.__file__)).parent / "reference.py", tmp_path / family / f"{NAME}.py")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / family)])
    monkeypatch.setitem(BACKENDS, NAME, lambda threads: Modules(NAME))
    yield NAME
    get_kernels.cache_clear()
    for family in FAMILIES:
        sys.modules.pop(f"gradwire.kernels.{family}.{NAME}", None)


def test_a_copy_of_the_reference_serves_under_another_name(copied: str) -> None:
    kernels = get_kernels(copied)
    assert kernels.name == copied
    for family in FAMILIES:
        assert self_test.agree(family, kernels, get_kernels("reference"))
        home = sys.modules[f"gradwire.kernels.{family}.{copied}"].__file__
        assert home is not None
        assert home.endswith(f"{family}/{copied}.py")
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
def test_the_copy_passes_the_parity_tests(parity, copied: str) -> None:
    parity(copied)
    # The parity tests assert; here it must be the copy that they called.
    assert any(f"gradwire.kernels.{family}.{copied}" in sys.modules for family in FAMILIES)


def test_an_operation_that_a_backend_lacks_is_missed_by_name(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"gradwire.kernels.signs.{copied}")
    monkeypatch.delattr(module, "sign_vote")
    with pytest.raises(AttributeError, match="sign_vote"):
        self_test.SELF_TESTS["signs"](get_kernels(copied))
