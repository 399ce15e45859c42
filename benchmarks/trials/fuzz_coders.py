"""Coverage-guided fuzzing of what decodes entropy-coded sections.

    python benchmarks/trials/fuzz_coders.py CORPUS -max_total_time=300 -max_len=1200
    python benchmarks/trials/fuzz_coders.py --json benchmarks/results/trials/fuzz_coders.json

Needs `pip install atheris` (not a dependency). The second fuzzes for 330 s from what encoders write alone, and writes
how it ended. Inputs are bodies; the frame around them fits, so that what is fuzzed is
the decoder behind the check. The reference decoder, whose lines guide the fuzzer, must end in an output or a status,
and the compiled ones, each variant, in the same. CORPUS is a folder for inputs found; options of libFuzzer follow it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gradwire.kernels.entropy"]):
    from gradwire.kernels.entropy import reference
    from gradwire.kernels.entropy import tables as huffman_codes  # noqa: F401

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.runs import write
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


OPTIONS = ("-max_total_time=330", "-max_len=1200")


def written(path: Path) -> int:
    """Fuzz in another process, whose end libFuzzer decides, and write how it ended; return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, str(Path(folder) / "corpus"), f"-artifact_prefix={folder}/", *OPTIONS]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr[-2000:])
        ended = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
        covered = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
        found = {"exit_code": done.returncode, "crashes": len(list(Path(folder).glob("crash-*")))}
        if ended is not None and covered:
            found |= {"executions": int(ended[1]), "seconds": int(ended[2])}
            found |= dict(zip(("edges", "features", "inputs_kept"), map(int, covered[-1])))
        decoders = [fast.coder + " " + str(fast.variants) for _, compiled in DECODERS for fast in compiled]
        write(path, atheris=version("atheris"), options=OPTIONS, decoders=decoders, **found)
    return done.returncode


if __name__ == "__main__":
    if sys.argv[1] == "--json":
        sys.exit(written(Path(sys.argv[2])))
    plant(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
