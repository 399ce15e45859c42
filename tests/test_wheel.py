"""The wheel holds the package, and works where there is no repository around it.

Its files have the bytes of the sources. What may still go wrong is how files that are no modules are found, and the
commands. All other tests run against the same sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.repository, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[1]


def python(*words: str | Path, folder: Path, site: Path | None = None) -> str:
    """Run Python in a folder, with the installed wheel in place of the sources, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    python("-m", "pip", "wheel", *options, REPOSITORY, folder=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which the wheel was installed."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-index", "--target", folder)
    python("-m", "pip", "install", *options, wheel, folder=folder)
    return folder


def test_it_is_pure_python_and_has_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("gradwire/")}
    source = REPOSITORY / "src"
    files = [p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert packed == {p.relative_to(source).as_posix(): p.read_bytes() for p in files}


def test_it_is_what_is_imported(site: Path, tmp_path: Path) -> None:
    told = python("-c", "import gradwire; print(gradwire.__file__)", folder=tmp_path, site=site)
    assert Path(told.strip()) == site / "gradwire" / "__init__.py"


def test_commands_and_reports_pass_their_tests(site: Path, tmp_path: Path) -> None:
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "tests", tmp_path / "tests", ignore=without)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    # A command that reads and writes files of the package, those that import late, and a page with all its parts: the
    # other tests find the same files, as the first of this file says.
    names = "train_report or help_is or importing or what_methods_report"
    chosen = ("tests/cli/test_commands.py", "tests/report", "-m", "not ranks and not repository", "-k", names)
    told = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, folder=tmp_path, site=site)
    assert int(told.rsplit(" passed", 1)[0].split()[-1]) >= 4


def test_its_command_attaches_to_real_ranks_under_ddp(site: Path, tmp_path: Path) -> None:
    words = ("-m", "gradwire", "run", "--nproc-per-node", "2", "--method", "terngrad")
    script = (REPOSITORY / "examples" / "digits.py", "--steps", "20")
    assert "training accuracy" in python(*words, *script, folder=tmp_path, site=site)
