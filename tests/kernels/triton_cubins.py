"""Compile every Triton kernel for given GPUs, without one, and print what became of it as JSON.

Usage: ``python triton_cubins.py 90 80 100``. Kernels are those that the families' self tests launch: for the first GPU
with each combination of their switches, for the others with the first combination alone. And a rotation of the largest
block, for the GPU that has the least room for it. All GPUs in one process: what is launched is found once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradwire.kernels import Kernels, RotationTable
from gradwire.kernels.backends import Functions
from gradwire.kernels.checksum.triton import row_checksums
from gradwire.kernels.families import triton_module
from gradwire.kernels.rotation.blocks import MOST_BLOCK
from gradwire.kernels.self_test import SELF_TESTS
from gradwire.kernels.triton_core.backend import SERVED
from gradwire.kernels.triton_core.launch import OPTIONS, Launch, recorded


def launches() -> tuple[list[Launch], Launch]:
    """Return a launch of each kernel with each combination of its switches, and a rotation of the largest block."""
    kernels = Kernels(Functions("triton", triton_module))
    with recorded() as found:
        for family in SERVED:
            SELF_TESTS[family](kernels)
        heads, rows = torch.zeros((2, 3), dtype=torch.int64), torch.zeros((2, 200), dtype=torch.uint8)
        for begin in (0, 1):  # at whole words, and beside them
            row_checksums(heads, rows[:, begin:], heads[:, 0].clone())
    with recorded() as rotations:
        table = RotationTable([0], [MOST_BLOCK], [0], [(1, 2)], MOST_BLOCK)
        kernels.rotate(torch.zeros(MOST_BLOCK), table, torch.ones(1), 0, 0, torch.zeros(MOST_BLOCK))
    # A switch is what is no power or size.
    switches = ("KIND", "STEPS")
    chosen: dict[object, Launch] = {}
    for launch in found:
        kept = tuple((k, v) for k, v in launch.constants.items() if isinstance(v, bool) or k in switches)
        chosen.setdefault((launch.kernel.__name__, launch.kernel.__module__, kept), launch)
    (largest,) = rotations
    return list(chosen.values()), largest


def home(launch: Launch) -> str:
    """Return the name of a kernel's family, or of its module where it serves several."""
    folder, module = launch.kernel.__module__.split(".")[-2:]
    return module if folder == "triton_core" else folder


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile a kernel and tell what is in its code."""
    constants, names = dict(launch.constants), launch.kernel.arg_names
    options = {**OPTIONS, **{k: constants.pop(k) for k in ("num_warps",) if k in constants}}
    source = ASTSource(
        fn=launch.kernel,
        signature={name: launch.signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = made.asm["ptx"]
    return {
        "kernel": f"{home(launch)}.{launch.kernel.__name__}",
        "constants": launch.constants,
        "capability": capability,
        "elf": made.asm["cubin"][:4] == b"\x7fELF",
        "fused": code.count("fma."),
        "flushed": code.count(".ftz"),
        "approximate": code.count(".approx") + code.count("div.full"),
        "shared_bytes": made.metadata.shared,
    }


if __name__ == "__main__":
    first, *others = [int(word) for word in sys.argv[1:]]
    every, largest = launches()
    once = list({launch.kernel: launch for launch in reversed(every)}.values())
    chosen = [(launch, first) for launch in every] + [(launch, c) for c in others for launch in once]
    print(json.dumps([compiled(launch, capability) for launch, capability in [*chosen, (largest, 80)]]))
