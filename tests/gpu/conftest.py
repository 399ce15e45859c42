"""Tests on a real GPU: ``TRITON_INTERPRET=0 python -m pytest tests/gpu``. Otherwise they are not collected.

Several ranks share the first GPU, which suffices to compare bits. NCCL refuses two ranks of one host on one GPU, so
that each of them names another host, and they exchange over the loopback interface.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.kernels import Kernels, backends, get_kernels
from ranks import Ranks

HERE = Path(__file__).parent
# The tests of other folders are held against a GPU, too.
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels"), str(HERE.parent / "link"), str(HERE.parent / "exchange")]

# Set before Triton is imported, so that kernels run on the GPU.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "0" else ["test_*.py"]

MISSING = None
if not torch.cuda.is_available():
    MISSING = "no CUDA device"
elif importlib.util.find_spec("triton") is None:
    MISSING = "triton is not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Triton's kernels on the GPU, for tensors in main memory; ``get_kernels("triton")`` returns them.

    A test fails if none of them was launched: another backend in their place would give the bits of the reference, too.
    """
    from real_gpu import CopiedThere

    from gradwire.kernels.triton_core import launch

    run, launches = launch._launcher, list[str]()

    def counted(kernel: Any, *rest: Any) -> None:
        launches.append(kernel.__name__)
        run(kernel, *rest)

    monkeypatch.setattr(launch, "_launcher", counted)
    monkeypatch.setitem(backends.BACKENDS, "triton", lambda threads: CopiedThere())
    get_kernels.cache_clear()
    yield get_kernels("triton")
    get_kernels.cache_clear()
    assert launches, "no kernel was launched"


def joined(number: int) -> Iterator[Ranks]:
    """Ranks whose default group has NCCL for tensors on the GPU, and Gloo for others."""
    from real_gpu import join_by_nccl

    ranks = Ranks(number)
    ranks(join_by_nccl)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[Ranks]:
    yield from joined(3)


@pytest.fixture(scope="session")
def four_nccl_ranks() -> Iterator[Ranks]:
    yield from joined(4)
