"""Kernels are compiled, and training goes on, where compiled code cannot be stored; one warning says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from compiled_sources import KERNELS

from gradwire.kernels.numba_core import storing
from module_files import load_module

PROGRAM = """
import sys, warnings
import torch
from numba.core import caching
import gradwire as gw
from gradwire.kernels.compiling import cache_folder, default_file

def refuse(*_):
    raise {error}

caching.{place} = refuse
gradients = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    compiled_s = gw.warm_up("natural")
    simulated = gw.simulate(gradients, "natural")
[warning] = [str(one.message) for one in told]
assert "NUMBA_CACHE_DIR" in warning and {reason!r} in warning, warning
assert cache_folder() is default_file() is None
assert compiled_s > 0
# One of the two nearest powers of two.
power = simulated.mean / gradients[0]
assert bool(((power > 0.5) & (power < 2) & (torch.frexp(simulated.mean.abs()).mantissa == 0.5)).all()), simulated.mean
"""


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        ("_CacheLocator.ensure_cache_path", "PermissionError(13, 'Permission denied')", "no locator available"),
        ("IndexDataCacheFile._save_index", "OSError(28, 'No space left on device')", "No space left on device"),
    ],
    ids=["no writable folder", "full disk"],
)
def test_kernels_serve_where_no_code_can_be_stored(place: str, error: str, reason: str, tmp_path: Path) -> None:
    program = PROGRAM.format(place=place, error=error, reason=reason)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc", ".compiled", ".json")] == []


SWITCHED_OFF = """
import torch
from gradwire.errors import BackendError
from gradwire.kernels import checksum, get_kernels
from gradwire.kernels.entropy.elias import elias_bits
from gradwire.kernels.entropy.select import get_coder

calls = {
    "kernels": get_kernels,
    "checksum": checksum.warm_up,
    "coder": lambda: get_coder("rans"),
    "elias": lambda: elias_bits(torch.ones(1, dtype=torch.int32)),
}
for name, call in calls.items():
    try:
        call()
    except BackendError as error:
        print(name, error)
"""


def test_a_compiler_that_is_switched_off_is_named() -> None:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", SWITCHED_OFF]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    told = "NUMBA_DISABLE_JIT switches off the compiler of gradwire's kernels: unset it"
    assert done.stdout.splitlines() == [f"{name} {told}" for name in ("kernels", "checksum", "coder", "elias")], (
        done.stderr
    )


def loaded(path: Path, value: int) -> ModuleType:
    """Write a module with one stored function, which returns a value, and load it."""
    path.write_text(
        "from gradwire.kernels.numba_core.storing import stored\n\n@stored\ndef number():\n"
        f"    return {value}  # {'padding' * value}\n"
    )
    return load_module(path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of a module whose code is stored in a folder of its own."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(storing, "_refusals", [])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "numbers_of_test.py"


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def unreadable(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_code_is_stored_and_loaded(place: Path) -> None:
    assert loaded(place, 1).number() == 1
    again = loaded(place, 1)
    assert again.number() == 1
    assert again.number.stats.cache_hits
    assert not storing.refused()


def test_code_that_could_not_be_written_is_not_confused_with_older_code(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba writes its index before the code, in a file whose name an older version of the function may have used."""
    assert loaded(place, 1).number() == 1
    with monkeypatch.context() as full:
        full.setattr(storing.CheckedFile, "_save_data", no_space)
        with pytest.warns(UserWarning, match="No space left on device"):
            assert loaded(place, 2).number() == 2
    assert loaded(place, 2).number() == 2


def test_code_that_cannot_be_read_is_compiled(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(place, 1).number() == 1
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.load", unreadable)
    again = loaded(place, 1)
    assert again.number() == 1
    assert not again.number.stats.cache_hits
    assert not storing.refused()


def check_it_is_compiled_and_stored_anew(place: Path) -> None:
    for is_stored in (False, True):
        function = loaded(place, 1).number
        assert function() == 1
        assert bool(function.stats.cache_hits) == is_stored


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 40])
def test_damaged_files_are_replaced(suffix: str, left: int, place: Path) -> None:
    """A file that was being written when the machine lost power may be empty or end early."""
    assert loaded(place, 1).number() == 1
    [damaged] = (place.parent / "cache").rglob(f"*{suffix}")
    damaged.write_bytes(damaged.read_bytes()[:left])
    check_it_is_compiled_and_stored_anew(place)
    assert not storing.refused()


@pytest.mark.parametrize("place_of_zeros", [0.02, 0.3, 0.6, 0.95])
def test_code_with_pages_of_zeros_is_not_run(place_of_zeros: float, place: Path) -> None:
    """After a power loss a file may have its length, and zeros in the middle: machine code would end the process."""
    assert loaded(place, 1).number() == 1
    [damaged] = (place.parent / "cache").rglob("*.nbc")
    octets = bytearray(damaged.read_bytes())
    begin = int(place_of_zeros * len(octets))
    octets[begin : begin + 256] = bytes(len(octets[begin : begin + 256]))
    damaged.write_bytes(octets)
    check_it_is_compiled_and_stored_anew(place)


def test_code_of_another_processor_under_the_same_name_is_not_run(place: Path) -> None:
    """Of two hosts that share a folder, each may write the file that the other's index names."""
    function = loaded(place, 1).number
    assert function() == 1
    store = function._cache._cache_file
    [(key, name)] = store._load_index().items()
    store._save_data(name, (("another processor", *key[1:]), store._load_data(name)[1]))
    again = loaded(place, 1)
    assert again.number() == 1
    assert not again.number.stats.cache_hits


@pytest.mark.repository
@pytest.mark.parametrize("way", ["@stored", "@njit(nogil=True, cache=True)"])
def test_kernels_are_stored_by_kept_alone(way: str) -> None:
    """It puts the digest of all sources into the name, and Numba's own way raises an error where there is no place."""
    assert [path.name for path in KERNELS.rglob("*.py") if f"\n{way}\n" in path.read_text()] == []
