"""Elias' recursive code of integer levels, dense or sparse, as in the QSGD paper, in a checked section.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017, section 3.
Elias' recursive code of a positive integer (omega; Elias, IEEE Trans. Inf. Theory 21, 1975) begins as a zero. The
binary digits of the integer are put before it, then those of their number less one, and so on until the number is one.
"""

from __future__ import annotations

import struct
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import BackendError, HyperparameterError
from gradwire.kernels.entropy.base import HEADER_BYTES, bytes_of, refusal

FORMS = ("dense", "sparse")

_ID = 3
_FIELDS = struct.Struct("<BBHIII")
_COUNT = struct.Struct("<I")
_BODY = HEADER_BYTES + _COUNT.size


def elias_bits(levels: torch.Tensor, form: str = "dense") -> int:
    """Count the bits of the codes of ``levels`` (int32 ``[n]``), without the header.

    ``dense``: for each level ``Elias(|level| + 1)``, and a sign bit if it is not zero. ``sparse``: for each level that
    is not zero ``Elias(gap)``, a sign bit and ``Elias(|level|)``, where ``gap`` is the distance from the previous
    one (from index -1 for the first).

    Example:
        >>> elias_bits(torch.tensor([0, 1, 0, -3], dtype=torch.int32))
        13
    """
    return int(_loops().count_bits(_levels("levels", levels), _sparse(form))[0])


def elias_encode(levels: torch.Tensor, out: torch.Tensor, form: str = "dense") -> int:
    """Code ``levels`` (int32 ``[n]``) into ``out`` (uint8); return the bytes written, ``28 + ceil(bits / 8)``.

    Raises:
        HyperparameterError: no such form, a tensor of another kind, or ``out`` is too short.
    """
    values, sparse = _levels("levels", levels), _sparse(form)
    bits, coded = (int(number) for number in _loops().count_bits(values, sparse))
    size = _BODY + -(-bits // 8)
    if size - HEADER_BYTES >= 2**32:
        raise HyperparameterError(f"levels take {size} bytes when coded: cut them, a section has at most 2^32")
    target = bytes_of("out", out, size)[:size]
    head = _FIELDS.pack(_ID, int(sparse), 0, len(values), size - HEADER_BYTES, 0)
    target[:] = 0
    target[HEADER_BYTES:_BODY] = np.frombuffer(_COUNT.pack(coded), np.uint8)
    _loops().write_levels(values, sparse, target[_BODY:])
    target[:HEADER_BYTES] = np.frombuffer(head + _check(head, target).to_bytes(8, "little"), np.uint8)
    return size


def elias_decode(data: torch.Tensor, out: torch.Tensor, form: str = "dense") -> None:
    """Invert :func:`elias_encode`: all of ``data`` (uint8) into all of ``out`` (int32 ``[n]``).

    Raises:
        PayloadError: the bytes are not what an encoder wrote for that many levels; ``out`` is then unspecified.
        HyperparameterError: no such form, or a tensor of another kind.
    """
    source, target, sparse = bytes_of("data", data), _levels("out", out), _sparse(form)
    if len(source) < _BODY:
        raise refusal("elias", f"{len(source)} bytes are fewer than its header's {_BODY}")
    head = source[: _FIELDS.size].tobytes()
    if head != _FIELDS.pack(_ID, int(sparse), 0, len(target), len(source) - HEADER_BYTES, 0):
        raise refusal("elias", f"its header is not that of {len(target)} {form} levels in {len(source)} bytes")
    if _check(head, source) != int.from_bytes(source[16:HEADER_BYTES].tobytes(), "little"):
        raise refusal("elias", "its check differs")
    coded = _COUNT.unpack(source[HEADER_BYTES:_BODY].tobytes())[0]
    if coded > len(target) or (coded < len(target) and not sparse):
        raise refusal("elias", f"it codes {coded} of {len(target)} levels")
    if not _loops().read_levels(source[_BODY:], sparse, coded, target):
        raise refusal("elias", "its codes do not end where the section does, or leave the levels' range")


def _sparse(form: str) -> bool:
    if form not in FORMS:
        raise HyperparameterError(f"no form {form!r} of Elias codes: there are {', '.join(FORMS)}")
    return form == "sparse"


def _levels(name: str, tensor: torch.Tensor) -> npt.NDArray[np.int32]:
    if tensor.dtype != torch.int32 or tensor.ndim != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise HyperparameterError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: a contiguous vector of "
            "torch.int32 on the CPU is needed"
        )
    if tensor.numel() >= 2**31:
        raise HyperparameterError(f"{name} has {tensor.numel()} elements: cut it, a section has fewer than 2^31")
    array: npt.NDArray[np.int32] = tensor.detach().numpy()
    return array


def _check(head: bytes, section: npt.NDArray[np.uint8]) -> int:
    from gradwire.kernels.entropy.cpu import compiled_check

    return compiled_check(False, head, section[HEADER_BYTES:])


def _loops() -> ModuleType:
    # Imported here: Numba takes half a second to import, and importing the package must not need it.
    try:
        from gradwire.kernels.entropy import elias_loops
    except BackendError:
        raise
    except ImportError as error:
        raise BackendError(f"Elias codes need numba ({error}): pip install 'numba>=0.61'") from error
    return elias_loops
