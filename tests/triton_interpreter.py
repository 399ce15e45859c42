"""Triton's interpreter for tests: it runs the kernels of the backend ``triton`` on tensors in CPU memory."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

import pytest

from gradwire.kernels import Kernels, get_kernels
from gradwire.kernels.self_test import SELF_TESTS
from gradwire.kernels.triton_core.backend import SERVED


@cache
def interpreted() -> Kernels:
    """Return the kernels ``triton``, interpreted; skip the test where Triton is not installed.

    The variable must be set while Triton and the kernels are imported, and no longer: other processes that tests start
    do not inherit it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton")
        kernels = get_kernels("triton")
        for family in SERVED:
            import_module(f"gradwire.kernels.{family}.triton")
        # Triton imports the rest of itself when it sees the first arguments.
        SELF_TESTS["moments"](kernels)
    finally:
        del os.environ["TRITON_INTERPRET"]
    return kernels
