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


def stride_of(rows: torch.Tensor) -> int:
    """Return the distance between rows of several bytes: never 1, which Triton would replace by a constant."""
    return rows.stride(0) if len(rows) > 1 else 16


def word_arguments(round: int, stream: int) -> tuple[int, int, int]:
    """Return the three words of a draw's counter as signed integers of 32 bits, so that their type never varies."""
    return tuple((word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000 for word in (round, round >> 32, stream))  # type: ignore[return-value]


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Machine code of kernels, with their constants in the order of their parameters."""


def _variant(value: Any) -> Any:
    """Return what Triton compiles variants of a kernel for: types, alignments, and integers that are one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return None


def _run(kernel, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if INTERPRETED:
        with _one_at_a_time:
            kernel[(programs,)](*arguments, **constants)
        return
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    # Entering the context of a device takes as long as half a launch.
    elsewhere = device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        # Triton would find the machine code by a text that it makes of all types and options, in each launch.
        variant = id(kernel), device.index, *constants.items(), *map(_variant, arguments)
        found = _compiled.get(variant)
        if found is None:
            code = kernel[(programs,)](*arguments, **constants, **OPTIONS)
            _compiled[variant] = code, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        else:
            code, values = found
            code[(programs, 1, 1)](*arguments, *values)


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
