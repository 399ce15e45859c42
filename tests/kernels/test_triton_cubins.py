"""Every Triton kernel becomes code for the GPUs of data centres, without one at hand, and rounds as the reference."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire.kernels

CAPABILITIES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Compute capabilities, and the shared memory that a block of threads may have, in bytes."""

KERNELS = Path(gradwire.kernels.__file__).parent


def declared() -> set[str]:
    """Name the kernels: functions that ``triton.jit`` decorates and that return nothing."""
    found = set()
    for path in [*KERNELS.glob("*/triton.py"), *KERNELS.glob("triton_core/*.py")]:
        for node in ast.parse(path.read_text()).body:
            decorated = isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            )
            if (
                decorated
                and "program_id" in ast.unparse(node)
                and not any(isinstance(n, ast.Return) for n in ast.walk(node))
            ):
                found.add(f"{path.stem if path.parent.name == 'triton_core' else path.parent.name}.{node.name}")
    return found


def test_every_kernel_is_compiled_for_every_gpu(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "triton_cubins.py"), *map(str, CAPABILITIES)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    kernels = declared()
    assert len(kernels) >= 20
    for capability, shared_bytes in CAPABILITIES.items():
        ours = [row for row in rows if row["capability"] == capability]
        assert {row["kernel"] for row in ours} == kernels
        for row in ours:
            assert row["elf"], row
            # Products and sums are rounded one by one, subnormal numbers kept, divisions and roots exact.
            assert (row["fused"], row["flushed"], row["approximate"]) == (0, 0, 0), row
            assert row["shared_bytes"] <= shared_bytes, row
