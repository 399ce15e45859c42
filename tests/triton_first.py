"""Import this before anything that may import Triton, as ``torch._dynamo`` does: it settles that Triton interprets.

Triton decides when it is first imported whether its own functions are compiled or interpreted, and tests run its
kernels in the interpreter. The variable is taken back, so that other processes that tests start do not inherit it. The
tests in ``gpu`` run them on a GPU instead: ``TRITON_INTERPRET=0 python -m pytest tests/gpu``.
"""

import importlib
import importlib.util
import os

if importlib.util.find_spec("triton") is not None and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.language  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]


def import_kernels() -> None:
    """Import all modules with kernels likewise, where Triton is installed: each settles it for its own."""
    if importlib.util.find_spec("triton") is None:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        from gradwire.kernels.triton_core.backend import SERVED

        for module in (
            "triton_core.launch",
            "packing.triton",
            "checksum.triton",
            *(f"{family}.triton" for family in SERVED),
        ):
            importlib.import_module(f"gradwire.kernels.{module}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
