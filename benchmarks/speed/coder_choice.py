"""Which variants of the entropy coders serve on this machine, and which coder ``Coded`` takes, with the times.

    python benchmarks/speed/coder_choice.py --json benchmarks/results/speed/coder_choice.json --page docs/coders.md

Times every variant of every part of every coder on 20 M trits (Gaussian, clipped at 2.5 deviations, five to a byte; the
least of some turns), then both coders on the payload of each method, as a link does when it is built. The variants
are compiled for this machine and, in processes of their own, for the instruction sets of other CPUs: what is
compiled for them runs here, if not as it would there. A minute, most of it compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.runs import machine, write
from gradwire.exchange.planning import measure_coders
from gradwire.kernels import CODERS, get_kernels
from gradwire.kernels.entropy.base import PARTS, VARIANTS, Variants
from gradwire.kernels.entropy.cpu import compiled_body
from gradwire.kernels.entropy.select import fastest
from gradwire.methods.wrappers.coded import Coded
from gradwire.tools.bench.codecs import trits_of_a_gaussian

ELEMENTS = 20_000_000
TURNS = 15
METHODS = (
    "TernGrad()",
    "TernGrad(clip=None)",
    "QSGD()",
    "QSGD(levels=1)",
    "QSGDinf()",
    "NUQSGD()",
    "ALQ()",
    "Natural()",
)
CPUS = {"cascadelake": "AVX-512 without VBMI2", "haswell": "AVX2"}
BEGIN, END = "<!-- written by benchmarks/speed/coder_choice.py -->", "<!-- end -->"


def variants() -> list[dict[str, Any]]:
    """Time every variant on 20 M trits."""
    symbols = trits_of_a_gaussian(get_kernels("cpu-plain"), ELEMENTS, 2.5).numpy()
    rows = []
    for coder, parts in VARIANTS.items():
        room, back = np.zeros(len(symbols), np.uint8), np.zeros(len(symbols), np.uint8)
        plain = compiled_body(coder, Variants("scalar", "scalar", "scalar"))
        body = room[: plain.encode(symbols, room)].copy()
        for part in PARTS:
            calls: dict[str, Callable[[], object]] = {}
            for variant in parts[part]:
                one = compiled_body(coder, Variants(**{p: variant if p == part else "scalar" for p in PARTS}))
                arguments = {"check": (bytes(16), body), "encode": (symbols, room), "decode": (body, back)}
                calls[variant] = partial(getattr(one, part), *arguments[part])
            for variant, seconds in fastest(calls, TURNS).items():
                rows.append({"coder": coder, "part": part, "variant": variant, "ms": 1e3 * seconds})
    return rows


def choices() -> list[dict[str, Any]]:
    """Let the coder be chosen for each method, as a link does it."""
    rows = []
    for spec in METHODS:
        method = gw.method(f"Coded({spec})")
        if isinstance(method, Coded):
            times = measure_coders(method, "auto")
            chosen = min(times, key=lambda name: times[name])
            rows.append({"method": spec, "chosen": chosen, **{f"{name}_s": s for name, s in times.items()}})
    return rows


def compiled_for(cpu: str) -> list[dict[str, Any]]:
    """Time the variants in a process whose code is compiled for another CPU."""
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "+sse2"}
    command = [sys.executable, __file__, "--variants-only"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def page(found: dict[str, Any]) -> list[str]:
    """Write the two tables."""
    of_cpu: dict[str, list[dict[str, Any]]] = {"this machine": found["variants"], **found["compiled_for"]}
    names = [name if name not in CPUS else f"{name} ({CPUS[name]})" for name in of_cpu]
    day, cores = found["date_utc"][:10], found["cores"]
    lines = [
        f"{found['cpu']}, {cores} cores, {day}. Milliseconds for 20 M trits on one thread, with code compiled for this "
        "machine and for the instruction sets of other processors. The fastest variant of a part is bold.",
        "",
        f"| coder | part | variant | {' | '.join(names)} |",
        f"|---|---|---|{'---:|' * len(names)}",
    ]
    for index, row in enumerate(found["variants"]):
        cells = []
        for rows in of_cpu.values():
            same = [r["ms"] for r in rows if (r["coder"], r["part"]) == (row["coder"], row["part"])]
            text = f"{rows[index]['ms']:.2f}"
            cells.append(f"**{text}**" if len(same) > 1 and rows[index]["ms"] == min(same) else text)
        lines.append(f"| {row['coder']} | {row['part']} | {row['variant']} | {' | '.join(cells)} |")
    lines += [
        "",
        "A link measures these times when it is built: microseconds to encode and decode one payload of 2^18 elements.",
        "",
        f"| method | {' | '.join(CODERS)} | chosen |",
        f"|---|{'---:|' * len(CODERS)}---|",
    ]
    for row in found["choices"]:
        times = " | ".join(f"{1e6 * row[f'{name}_s']:.0f}" for name in CODERS)
        lines.append(f"| `{row['method']}` | {times} | `{row['chosen']}` |")
    return lines


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables between their marks in this page")
    parser.add_argument("--variants-only", action="store_true", help="print the variants' times as JSON, nothing else")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.variants_only:
        print(json.dumps(variants()))
        return 0
    found = {"variants": variants(), "choices": choices(), "compiled_for": {cpu: compiled_for(cpu) for cpu in CPUS}}
    text = "\n".join(page({**machine(), **found}))
    print(text)
    write(chosen.json, **found)
    if chosen.page:
        before, _, rest = chosen.page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        chosen.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
