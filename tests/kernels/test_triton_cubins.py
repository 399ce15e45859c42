"""Every Triton kernel becomes code for the GPUs of data centres, without one at hand, and rounds as the reference."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradwire.kernels

SHARED_BYTES = {90: 227 << 10, 80: 163 << 10, 100: 227 << 10}
"""The shared memory that a block of threads may have, by compute capability."""

KERNELS = Path(gradwire.kernels.__file__).parent


def declared() -> set[str]:
    """Name the kernels: functions that ``triton.jit`` decorates and that are launched, not called by others."""
    found = set()
    for path in [*KERNELS.glob("*/triton.py"), *KERNELS.glob("triton_core/*.py")]:
        home, tree = path.stem if path.parent.name == "triton_core" else path.parent.name, ast.parse(path.read_text())
        compiled = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch" and isinstance(node.args[0], ast.Name):
                assert node.args[0].id in compiled, f"{path}: {node.args[0].id} is launched and lives elsewhere"
                found.add(f"{home}.{node.args[0].id}")
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile all kernels for all GPUs in one process, which finds once what is launched."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "triton_cubins.py"), *map(str, SHARED_BYTES)]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_is_compiled_for_every_gpu(capability: int, compiled: list[dict[str, Any]]) -> None:
    rows = [row for row in compiled if row["capability"] == capability]
    assert len(declared()) >= 20
    assert {row["kernel"] for row in rows} == declared()
    for row in rows:
        assert row["elf"], row
        # Products and sums are rounded one by one, subnormal numbers kept, divisions and roots exact.
        assert (row["fused"], row["flushed"], row["approximate"]) == (0, 0, 0), row
        assert row["shared_bytes"] <= SHARED_BYTES[capability], row
