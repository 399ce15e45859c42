# mypy: disable-error-code="no-untyped-call, no-untyped-def, misc, untyped-decorator"
"""Launches of Triton kernels on the device of their tensors, or in Triton's interpreter, and their recording.

Every kernel is compiled without fused multiply-adds, so that products and sums are rounded separately, as in the
reference. Triton keeps subnormal numbers; its divisions of float32 are not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of every kernel."""


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, JITFunction)
"""True if kernels run in Triton's interpreter, on tensors in CPU memory; decided when Triton is imported first."""

MIXED = isinstance(tl.sum, JITFunction) == INTERPRETED
"""True if ``TRITON_INTERPRET`` changed after Triton was imported, so that Triton's functions are of another kind."""

_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
}

# While the interpreter runs, it replaces functions of Triton's modules for all threads of the process.
_one_at_a_time = threading.Lock()

_INTERPRETED_TIMES = 16


class Launch(NamedTuple):
    """A kernel, the types of its arguments by name, and its compile-time constants by name."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]


def tile(size: int) -> int:
    """Return the number of rows of a program: ``size`` on a GPU, more in the interpreter, where programs are slow."""
    return size * _INTERPRETED_TIMES if INTERPRETED else size


def cdiv(a: int, b: int) -> int:
    """Return the quotient, rounded up."""
    return -(-a // b)


def word_arguments(round: int, stream: int) -> tuple[int, int, int]:
    """Return the three words of a draw's counter as signed integers of 32 bits, so that their type never varies."""
    return tuple((word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000 for word in (round, round >> 32, stream))  # type: ignore[return-value]


def _run(kernel, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if INTERPRETED:
        with _one_at_a_time:
            kernel[(programs,)](*arguments, **constants)
        return
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    # Entering the context of a device takes as long as half a launch.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[(programs,)](*arguments, **constants, **OPTIONS)


_launcher: Callable[..., None] = _run


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` instances of a kernel on the current stream of its tensors' device.

    Args:
        kernel: A function that ``triton.jit`` has decorated.
        programs: Number of instances; 0 launches nothing.
        arguments: Tensors, integers of 32 bits and floats.
        constants: Compile-time constants, and ``num_warps``.
    """
    if programs:
        _launcher(kernel, programs, arguments, constants)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of running them, so that their kernels can be compiled without a device.

    Operations called in the body of the context leave their outputs unspecified.
    """
    global _launcher
    found: list[Launch] = []

    def record(kernel, programs, arguments, constants) -> None:
        names = kernel.arg_names
        signature = {name: _type(value) for name, value in zip(names, arguments)}
        signature |= dict.fromkeys(names[len(arguments) :], "constexpr")
        found.append(Launch(kernel, signature, dict(constants)))

    before, _launcher = _launcher, record
    try:
        yield found
    finally:
        _launcher = before


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
