"""Compiled code kept on disk is thrown away when anything it was compiled from changes."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
from compiled_sources import KERNELS, digest, kept, written
from kernel_cases import kept_loops

from gradwire.kernels import FAMILIES

pytestmark = pytest.mark.repository


@pytest.mark.parametrize("path", kept(), ids=lambda path: str(path.relative_to(KERNELS)))
def test_a_driver_carries_the_digest_of_its_sources(path: Path) -> None:
    assert written(path) == digest(path), "sources of compiled code have changed: run make digests"


@pytest.mark.parametrize(
    ("source", "driver"),
    [
        ("moments/simd.py", "signs/loops.py"),
        ("numba_core/philox.py", "lattice/loops.py"),
        ("numba_core/philox.py", "natural/loops.py"),
        ("packing/simd.py", "levels/loops.py"),
        ("moments/loops.py", "signs/loops.py"),
        ("checksum/simd.py", "checksum/loops.py"),
        ("entropy/rans_simd.py", "entropy/rans_loops.py"),
        ("entropy/tables.py", "entropy/huffman_loops.py"),
        ("moments/loops.py", "moments/loops.py"),
    ],
)
def test_an_edit_shows_in_the_digest_however_far_away_it_is(tmp_path: Path, source: str, driver: str) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest(kernels / driver, kernels)
    assert before == digest(KERNELS / driver)
    edited = kernels / source
    edited.write_text(edited.read_text() + "\n_EDITED = 1\n")
    assert digest(kernels / driver, kernels) != before


@pytest.mark.parametrize("family", FAMILIES)
def test_code_kept_of_other_sources_is_not_looked_at(family: str) -> None:
    """Its file has another name: reading it could fail, since the types that it names may be gone."""
    loops = import_module(f"gradwire.kernels.{family}.loops")
    names = kept_loops(loops)
    assert names
    for name, loop in names.items():
        assert loop.py_func.__qualname__ == f"{name}.{loops.DIGEST}"
