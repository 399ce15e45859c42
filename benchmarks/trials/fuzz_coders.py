"""Coverage-guided fuzzing of what decodes entropy-coded sections.

    python benchmarks/trials/fuzz_coders.py CORPUS -max_total_time=300 -max_len=1200

Needs `pip install atheris` (not a dependency). Inputs are bodies; the frame around them fits, so that what is fuzzed is
the decoder behind the check. The reference decoder, whose lines guide the fuzzer, must end in an output or a status,
and the compiled ones, each variant, in the same. CORPUS is a folder for inputs found; options of libFuzzer follow it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gradwire.kernels.entropy"]):
    from gradwire.kernels.entropy import reference
    from gradwire.kernels.entropy import tables as huffman_codes  # noqa: F401

import numpy as np

from gradwire.kernels.entropy.base import VARIANTS, Body, Bytes, Variants
from gradwire.kernels.entropy.cpu import compiled_body

DECODERS: list[tuple[Body, list[Body]]] = [
    (
        reference.reference_body(name),
        [compiled_body(name, Variants("scalar", "scalar", decoder)) for decoder in parts["decode"]],
    )
    for name, parts in VARIANTS.items()
]
MOST = 1023


def decode(decoder: Body, body: Bytes, number: int) -> tuple[int, bytes]:
    """Return the status, and the output where it is 0; look at guards around the output."""
    whole = np.full(number + 64, 0x5A, np.uint8)
    status = decoder.decode(body, whole[32 : number + 32])
    if (whole[:32] != 0x5A).any() or (whole[number + 32 :] != 0x5A).any():
        raise RuntimeError(f"{decoder.coder} ({decoder.variants}) wrote outside of its output")
    return status, b"" if status else whole[32 : number + 32].tobytes()


def one_input(data: bytes) -> None:
    """Decode one body by every decoder: two bytes choose the coder and the number of symbols, the rest is the body."""
    if len(data) < 3:
        return
    choice = int.from_bytes(data[:2], "little")
    slow, compiled = DECODERS[choice >> 15]
    body = np.frombuffer(data[2:], np.uint8).copy()
    number = choice & MOST
    expected = decode(slow, body, number)
    for fast in compiled:
        if decode(fast, body, number) != expected:
            raise RuntimeError(f"{fast.coder} ({fast.variants}) differs from the reference")


def plant(corpus: Path) -> None:
    """Start from what encoders write."""
    corpus.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in (640, 1000, MOST):
        for largest in (1, 3, 40, 200):
            symbols = np.minimum(generator.geometric(min(0.9, 4 / (largest + 4)), number) - 1, largest).astype(np.uint8)
            for which, (encoder, _) in enumerate(DECODERS):
                room = np.zeros(number, np.uint8)
                size = encoder.encode(symbols, room)
                if size > 0:
                    head = (number | which << 15).to_bytes(2, "little")
                    (corpus / f"seed-{which}-{number}-{largest}").write_bytes(head + room[:size].tobytes())


if __name__ == "__main__":
    plant(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
