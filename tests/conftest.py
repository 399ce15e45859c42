"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Helpers beside this file (ranks, cases, oracle) are imported by name, in pytest's own process and in the ranks'.
sys.path.insert(0, str(Path(__file__).parent))
# And what benchmarks share, as ``benchmarks.lib.corruptions``. Benchmarks never import tests.
sys.path.insert(1, str(Path(__file__).parents[1]))

# As torchrun sets it: tests start many processes beside each other, whose threads would wait for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start hundreds of processes. Each would compile the 360 modules of the package anew, which takes a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import triton_first

if "NUMBA_CACHE_DIR" not in os.environ:
    # Numba does not notice an edit in a module that a kernel imports, so the folder's name says what was compiled.
    import importlib.util

    _package = importlib.util.find_spec("gradwire")
    _origin = Path(str(_package.origin)).parent if _package else Path()
    _sources = b"".join(p.read_bytes() for p in sorted((_origin / "kernels").rglob("*.py")))
    _digest = hashlib.sha256(_sources).hexdigest()[:12]
    os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"gradwire-numba-{os.getuid()}-{_digest}")

import pytest
import torch
from hypothesis import HealthCheck, settings

from gradwire.link.membership.store_connections import forget_name_servers
from interpreters import forks_for
from ranks import Ranks, start_server

sys.dont_write_bytecode = False
torch.set_num_threads(1)
triton_first.import_kernels()
# Torch's store has the name of each connection's other end looked up, at both ends, and waits for the answer. A name
# server that leaves out some answers would hold up tests for seconds. Forks of this process ask nobody either.
forget_name_servers()

# No test is timed: machines are shared. A fixture of properties says what they run on and holds no state.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
# The same examples each time, so that a checkout that passed passes again; "make soak" looks for others.
settings.register_profile("same", _untimed, derandomize=True)
settings.register_profile("others", _untimed, derandomize=False, print_blob=True)
settings.load_profile("same")

# Started by nohup, or in the background of a script, all children would ignore these signals, too.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


STARTING_COMMANDS = {"bench", "cli", "examples", "experiments", "lab", "model", "site"}
WARM_UP = """
import sys
from gradwire.kernels import CODERS, FAMILIES, get_kernels
for name in ("auto", "cpu-plain"):
    get_kernels(name).warm_up((*FAMILIES, *CODERS)[int(sys.argv[1])::2])
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before several runners start on all tests, compile all kernels once: each would, and it takes over a minute.

    Those of tests alone, too: while one runner compiles a family, another that wants it waits for minutes.
    """
    everything = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if everything and getattr(session.config.option, "numprocesses", None):
        compiling = [subprocess.Popen([sys.executable, "-c", WARM_UP, half]) for half in "01"]
        for process in compiling:
            process.wait()


@pytest.fixture(autouse=True)
def _forks(request: pytest.FixtureRequest) -> None:
    """What the first rank waits for, outside of the time that a test may take."""
    if request.node.get_closest_marker("ranks") is not None:
        start_server()


@pytest.fixture(autouse=True)
def _commands_are_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the commands of these folders' tests as forks of one process that has imported what they need."""
    if request.path.parent.name in STARTING_COMMANDS:
        with forks_for(request):
            yield
    else:
        yield


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three ranks that live as long as the test session."""
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks that live as long as the test session."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports that this process writes have empty drawings: these take most of the time of a short run."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("gradwire.tools.report.panels.svg", lambda figure, label: f"<svg><!-- {label} --></svg>")


def pytest_collection_finish() -> None:
    """Keep what was collected out of later garbage collections, and searches: a runner holds all 14,000 tests.

    It took two fifths of the time of tests that make links or draw examples.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Likewise with what the tests of a file leave behind, which grows to a million objects in a run of all."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    # What the interpreter finds at its end it frees.
    gc.unfreeze()
