"""What two peers' programs send: GRACE's codes and its natural compression, and Vineeth's Elias code and integers.

    python benchmarks/claims/peer_programs.py --grace FOLDER --gradient-compression FOLDER \\
        --json benchmarks/results/claims/peer_programs.json

FOLDER is a checkout of sands-lab/grace or of vineeths96/Gradient-Compression, whose compressors are imported and run;
none of their code is here. Measured are:

- the bytes of what each of GRACE's compressors returns to be sent, for a Gaussian vector, beside the bits that its
  alphabet needs: a sign 1, a trit log2(3), a position log2(numel);
- which powers of two GRACE's natural compression can send: those of float32, with both signs, that come back as they
  were. Its program computes with CuPy, in whose place it is given NumPy. The bytes are compared with those of its CUDA
  program, by that program's table of 256 values, as the kernel itself cannot run here;
- the Elias codes of the levels 0 to 9 by Gradient-Compression, what their decoder makes of them, and the bytes of an
  element of the quantiser with a shared maximum at 2, 4 and 8 bits, which are added up in that type.

Sources: sands-lab/grace (``grace_dl/dist/compressor``: signsgd, terngrad, topk at 106e3de, natural at 1e44403;
``grace_dl/torch/compressor/cnat_cuda_kernel.cu`` at 812276a); vineeths96/Gradient-Compression at 9afdfd9
(``compressors.py``).
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import site
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import dlpack

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write

NUMEL, DENSITY, SEED = 100_000, 0.01, 0
EXPONENTS = range(-149, 128)
"""Of all powers of two that float32 has."""

Row = dict[str, Any]


def parts_of(payload: Any) -> list[Tensor]:
    """Return the tensors of a payload."""
    return [payload] if isinstance(payload, Tensor) else list(payload)


def payloads() -> list[Row]:
    """Return the type and bytes of each tensor that GRACE's compressors return, and the bits that would do."""
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(SEED))
    place = math.log2(NUMEL)
    known: list[tuple[str, str, tuple[Any, ...], list[float]]] = [
        ("signsgd", "SignSGDCompressor", (), [1.0]),
        ("terngrad", "TernGradCompressor", (), [math.log2(3), 32.0]),
        ("topk", "TopKCompressor", (DENSITY,), [32.0, place]),
    ]
    rows = []
    for module, name, settings, needed in known:
        compressor = getattr(importlib.import_module(f"grace_dl.dist.compressor.{module}"), name)(*settings)
        tensors = parts_of(compressor.compress(x.clone(), "w")[0])
        for number, (tensor, bits) in enumerate(zip(tensors, needed)):
            row: Row = {"compressor": name, "tensor": number, "type": str(tensor.dtype).removeprefix("torch.")}
            rows.append({**row, "numel": tensor.numel(), "bits": 8 * tensor.element_size(), "bits_that_do": bits})
    return rows


class OnCPU(np.ndarray):
    """A NumPy array with the one method of CuPy's arrays that the peer's program calls."""

    def toDlpack(self) -> Any:
        """Return the array for ``torch.utils.dlpack.from_dlpack``."""
        return torch.utils.dlpack.to_dlpack(torch.from_numpy(np.array(self)))  # type: ignore[attr-defined]


class Int32:
    """CuPy's int32, as a type and as a function that wraps the pattern of the sign bit, which NumPy's refuses."""

    dtype = np.dtype(np.int32)

    def __call__(self, bits: int) -> np.int32:
        """Return the number that has these 32 bits."""
        return np.uint32(bits).astype(np.int32)


def cupy_stand_in() -> ModuleType:
    """Return NumPy under CuPy's name, whose functions are NumPy's; the program computes with 32-bit integers alone."""
    module = ModuleType("cupy")
    for name in ("uint8", "float32", "where", "clip", "right_shift", "left_shift", "bitwise_or"):
        setattr(module, name, getattr(np, name))
    for name in ("bitwise_and", "multiply", "random"):
        setattr(module, name, getattr(np, name))
    module.int32 = Int32()  # type: ignore[attr-defined]
    module.fromDlpack = lambda capsule: dlpack.from_dlpack(capsule).numpy().view(OnCPU)  # type: ignore[attr-defined]
    return module


def natural(cuda: Path) -> Row:
    """Return what GRACE's natural compression can send, by the Python program, and where the CUDA program differs."""
    compressor = importlib.import_module("grace_dl.dist.compressor.natural").NaturalCompressor()
    found = re.search(r"encoding_to_sign_and_exp\[256\]\s*=\s*\{([^}]*)\}", cuda.read_text())
    if found is None:
        raise ValueError(f"{cuda} has no table encoding_to_sign_and_exp")
    # A float32's leading nine bits, sign and biased exponent, of each byte.
    of_cuda = [int(text) for text in found.group(1).split(",")]
    powers = torch.tensor([2.0**e for e in EXPONENTS])
    x = torch.cat([powers, -powers])
    (codes,), shape = compressor.compress(x, "w")
    back = compressor.decompress([codes], shape)
    exact = back == x
    exponents = torch.log2(x[exact].abs())
    bits = (x.view(torch.int32) >> 23) & 511
    by_cuda = {value: byte for byte, value in enumerate(of_cuda)}
    joint = [(int(code), by_cuda[int(b)]) for code, b in zip(codes[exact], bits[exact]) if int(b) in by_cuda]
    held = [value % 256 - 127 for value in of_cuda if value % 256]
    return {
        "type": str(codes.dtype).removeprefix("torch."), "bits": 8 * codes.element_size(),
        "least_exponent": int(exponents.min()), "largest_exponent": int(exponents.max()),
        "exponents_of_a_sign": int(exact[: len(powers)].sum()),
        "below_comes_back_as": sorted({float(v) for v, e in zip(back, EXPONENTS) if e < exponents.min()}),
        "above_comes_back_as": sorted({float(v) for v, e in zip(back, EXPONENTS) if e > exponents.max()}),
        "cuda_least_exponent": min(held), "cuda_largest_exponent": max(held),
        "powers_of_both_programs": len(joint), "with_the_same_byte": sum(a == b for a, b in joint),
        "cuda_byte_less_python_byte": sorted({b - a for a, b in joint}),
    }  # fmt: skip


def elias(compressors: Any) -> list[Row]:
    """Return codes of levels by Gradient-Compression, and what its decoder makes of them."""
    coder = compressors.QSGDCompressor("cpu", quantization_level=4)
    rows = []
    for level in range(10):
        code = coder.elias_encode(level)
        rows.append({"level": level, "code": code, "decoded": coder.elias_decode(code)[0]})
    return rows


def integers(compressors: Any) -> list[Row]:
    """Return the type of the levels of the quantiser with a shared maximum, by bits."""
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(SEED))
    rows = []
    for bits in (2, 4, 8):
        levels = compressors.QSGDMaxNormCompressor("cpu", quantization_level=bits).compress(x.abs().max(), x)
        rows.append({
            "bits": bits, "type": str(levels.dtype).removeprefix("torch."), "sent_bits": 8 * levels.element_size(),
            "largest": int(levels.abs().max()),
        })  # fmt: skip
    return rows


def main() -> int:
    """Run the peers' programs, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grace", type=Path, required=True, help="checkout of sands-lab/grace")
    parser.add_argument("--gradient-compression", type=Path, required=True, help="checkout of that repository")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    for folder in (chosen.grace, chosen.gradient_compression):
        site.addsitedir(str(folder))
    sys.modules["cupy"] = cupy_stand_in()
    compressors = importlib.import_module("compressors")
    found: Row = {
        "payloads": payloads(),
        "natural": natural(chosen.grace / "grace_dl/torch/compressor/cnat_cuda_kernel.cu"),
        "elias": elias(compressors),
        "integers": integers(compressors),
    }
    for name, part in found.items():
        for row in part if isinstance(part, list) else [part]:
            print(name, row)
    write(chosen.json, numel=NUMEL, density=DENSITY, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
