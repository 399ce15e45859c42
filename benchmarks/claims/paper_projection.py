"""TernGrad's published projection, 4 to 512 GPUs, from stated inputs, beside the figures digitised from the poster.

    python benchmarks/claims/paper_projection.py

Writes ``benchmarks/results/claims/projection.json`` and ``docs/figures/projection.png``; takes a second, measures
nothing.

Variants: ``as read``, which explains the digitised figures (one direction counted, AlexNet's batches of 256 images a
GPU); ``as stated``, with batches of 128; ``both directions``, float32 both ways against ternary up and 2N + 1 levels
down.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.cluster import Cluster, Fabric, Message, Pattern, Step, Workload, dense, step, ternary
from benchmarks.lib.results import RESULTS, ROOT
from gradwire.version import __version__

OUT = RESULTS / "claims/projection.json"
FIGURE = ROOT / "docs" / "figures" / "projection.png"

GPUS_PER_HOST = 4
SOURCE = (
    "W. Wen et al., TernGrad, NeurIPS 2017, fig. 5, digitised from the authors' poster; +-2 %, AlexNet on InfiniBand"
    " with 16 GPUs read as 6.0 to 6.8 (middle taken)"
)
# (network, model) -> GPUs -> thousand images/s in float32 and with TernGrad. No 4-GPU row could be read for the last.
DIGITISED: dict[tuple[str, str], dict[int, tuple[float, float]]] = {
    ("ethernet", "AlexNet"): {4: (1.50, 1.54), 8: (0.72, 2.19), 16: (0.83, 3.46), 64: (3.25, 13.7), 512: (25.7, 99.4)},
    ("ethernet", "GoogLeNet"): {
        4: (0.69, 0.70),
        8: (0.85, 1.23),
        16: (1.28, 2.33),
        64: (4.92, 8.79),
        512: (36.5, 62.6),
    },
    ("ethernet", "VGG-A"): {4: (0.32, 0.36), 8: (0.049, 0.32), 16: (0.053, 0.42), 64: (0.21, 1.66), 512: (1.67, 12.6)},
    ("infiniband", "AlexNet"): {4: (1.68, 1.68), 8: (2.76, 3.35), 16: (5.22, 6.4), 64: (20.4, 26.7), 512: (162, 211)},
    ("infiniband", "GoogLeNet"): {8: (1.48, 1.54), 16: (2.96, 3.08), 64: (11.8, 12.2), 512: (93.9, 98.1)},
    ("infiniband", "VGG-A"): {8: (0.39, 0.72), 16: (0.69, 1.42), 64: (2.66, 5.55), 512: (20.3, 44.3)},
}

# Parameters, those of the classification layer (kept in float32), batch per GPU (stated in the paper).
MODELS = {
    "AlexNet": (60_965_224, 4_097_000, 128),
    "GoogLeNet": (6_998_552, 1_025_000, 64),
    "VGG-A": (132_863_336, 4_097_000, 32),
}
# From specifications. Ethernet: TCP's 1448 payload bytes of a 1538-byte frame. InfiniBand: 100 Gbit/s less 3 % of
# headers. PCIe 3.0 x16: 15.75 GB/s less packet headers. NVLink 1: one link, one direction.
FABRICS = {
    "ethernet": (Fabric(bandwidth_bytes_per_s=12e9), Fabric(bandwidth_bytes_per_s=125e6 * 1448 / 1538, latency_s=5e-5)),
    "infiniband": (Fabric(bandwidth_bytes_per_s=20e9), Fabric(bandwidth_bytes_per_s=12.5e9 * 0.97, latency_s=2e-6)),
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is assumed beside the inputs above.

    Attributes:
        ways: ``up``: the way back is left out; ``both``: one after the other; ``at once``: the larger counts.
        alexnet_batch: AlexNet's images a GPU; chosen to fit, as are ``staging_bytes_per_s`` and ``chunk_bytes``.
        alexnet_share: Of AlexNet's message.
        bits: Of a trit; 2 in the authors' code.
        keep_classifier: In float32, as the paper does on ImageNet.
    """

    pattern: Pattern = "tree"
    ways: str = "up"
    alexnet_batch: int = 256
    alexnet_share: float = 1.0
    bits: float = 2.0
    keep_classifier: bool = True
    staging_bytes_per_s: float = 1.75e9
    chunk_bytes: float = 2.0**20


READ = Reading()
VARIANTS = {
    "as read": READ,
    "as stated": replace(READ, alexnet_batch=128),
    "both directions": replace(READ, ways="both"),
}
ALTERNATIVES = {
    "as read: tree, one direction, 2 bits, float32 classifier": READ,
    "128 of AlexNet's images a GPU": replace(READ, alexnet_batch=128),
    "128 of AlexNet's images a GPU, half its message": replace(READ, alexnet_batch=128, alexnet_share=0.5),
    "both directions, 2N + 1 levels down": replace(READ, ways="both"),
    "both directions at once, 2N + 1 levels down": replace(READ, ways="at once"),
    "1.585 bits a trit": replace(READ, bits=math.log2(3)),
    "ternary classifier too": replace(READ, keep_classifier=False),
    "no staging": replace(READ, staging_bytes_per_s=math.inf),
    "no chunks": replace(READ, chunk_bytes=0.0),
    "one server": replace(READ, pattern="server"),
    "ring, one direction": replace(READ, pattern="ring"),
    "ring, both directions": replace(READ, pattern="ring", ways="both"),
    "sharded server, both directions": replace(READ, pattern="sharded", ways="both"),
}


def cluster(network: str, gpus: int, reading: Reading) -> Cluster:
    """Return the paper's cluster with that many GPUs."""
    inside, between = FABRICS[network]
    return Cluster(
        hosts=gpus // GPUS_PER_HOST,
        gpus_per_host=GPUS_PER_HOST,
        inside=inside,
        between=between,
        staging_bytes_per_s=reading.staging_bytes_per_s,
        chunk_bytes=reading.chunk_bytes,
    )


def messages(model: str, gpus: int, reading: Reading) -> list[Message]:
    """Return the messages of float32 and TernGrad."""
    parameters, classifier, _ = MODELS[model]
    if model == "AlexNet":
        parameters, classifier = (round(n * reading.alexnet_share) for n in (parameters, classifier))
    kept = classifier if reading.keep_classifier else 0
    whole = [
        sizes(gpus) for sizes in (dense(parameters), ternary(parameters, dense_parameters=kept, bits=reading.bits))
    ]
    if reading.ways == "both":
        return whole
    down_counts = reading.ways == "at once"
    return [Message(up_bytes=max(m.up_bytes, m.down_bytes * down_counts), down_bytes=0.0) for m in whole]


def workload(network: str, model: str, reading: Reading = READ) -> Workload:
    """Derive a GPU's computation from TernGrad's first digitised row, where hardly anything is exchanged."""
    parameters, _, batch = MODELS[model]
    if model == "AlexNet":
        batch = reading.alexnet_batch
    gpus, (_, thousands) = next(iter(DIGITISED[network, model].items()))
    idle = Workload(name=model, parameters=parameters, batch=batch, compute_s=0.0)
    exchange = step(idle, cluster(network, gpus, reading), messages(model, gpus, reading)[1], reading.pattern)
    return replace(idle, compute_s=max(0.0, gpus * batch / (thousands * 1e3) - exchange.step_s))


def project(network: str, model: str, gpus: int, reading: Reading, load: Workload) -> list[Step]:
    """Return the steps of float32 and TernGrad."""
    there = cluster(network, gpus, reading)
    return [step(load, there, message, reading.pattern) for message in messages(model, gpus, reading)]


def projected() -> Iterator[dict[str, Any]]:
    """Return all rows: each digitised cell under each variant."""
    for (network, model), column in DIGITISED.items():
        for gpus, (digitised_fp32, digitised_terngrad) in column.items():
            for variant, reading in VARIANTS.items():
                load = workload(network, model, replace(READ, alexnet_batch=reading.alexnet_batch))
                fp32, trits = project(network, model, gpus, reading, load)
                speedup, digitised = trits.images_per_s / fp32.images_per_s, digitised_terngrad / digitised_fp32
                yield {
                    "network": network,
                    "model": model,
                    "gpus": gpus,
                    "variant": variant,
                    "fp32_images_per_s": round(fp32.images_per_s, 2),
                    "terngrad_images_per_s": round(trits.images_per_s, 2),
                    "speedup": round(speedup, 4),
                    "digitised_fp32_images_per_s": round(digitised_fp32 * 1e3, 2),
                    "digitised_terngrad_images_per_s": round(digitised_terngrad * 1e3, 2),
                    "digitised_speedup": round(digitised, 4),
                    "fp32_deviation_percent": round(100 * (fp32.images_per_s / digitised_fp32 / 1e3 - 1), 2),
                    "terngrad_deviation_percent": round(100 * (trits.images_per_s / digitised_terngrad / 1e3 - 1), 2),
                    "speedup_deviation_percent": round(100 * (speedup / digitised - 1), 2),
                    "fp32_bottleneck": fp32.bottleneck,
                    "terngrad_bottleneck": trits.bottleneck,
                }


def study() -> Iterator[dict[str, Any]]:
    """Return the root mean square of log(ours / digitised) under each assumption, over all cells."""
    for name, reading in ALTERNATIVES.items():
        errors: dict[str, list[float]] = {"ethernet": [], "infiniband": [], "speedup": []}
        for (network, model), column in DIGITISED.items():
            for gpus, digitised in column.items():
                steps = project(network, model, gpus, reading, workload(network, model, reading))
                wrong = [math.log(ours.images_per_s / 1e3 / theirs) for ours, theirs in zip(steps, digitised)]
                errors[network] += wrong
                errors["speedup"].append(wrong[1] - wrong[0])
        rms = {k: round(100 * math.sqrt(sum(e * e for e in v) / len(v)), 1) for k, v in errors.items()}
        yield {
            "assumption": name,
            "ethernet_rms_percent": rms["ethernet"],
            "infiniband_rms_percent": rms["infiniband"],
            "speedup_rms_percent": rms["speedup"],
        }


def inputs() -> dict[str, Any]:
    """Return everything that the rows rest on."""
    return {
        "gpus_per_host": GPUS_PER_HOST,
        "fabrics": {n: {"inside": asdict(i), "between": asdict(b)} for n, (i, b) in FABRICS.items()},
        "chosen_to_fit": {n: getattr(READ, n) for n in ("staging_bytes_per_s", "chunk_bytes", "alexnet_batch")},
        "bits_per_trit": READ.bits,
        "models": [
            {
                "model": model,
                "network": network,
                "parameters": MODELS[model][0],
                "classifier_parameters": MODELS[model][1],
                "batch_per_gpu": workload(network, model).batch,
                "compute_s": round(workload(network, model).compute_s, 5),
                "images_per_s_per_gpu": round(workload(network, model).batch / workload(network, model).compute_s, 1),
                "compute_from": f"digitised TernGrad row of {next(iter(DIGITISED[network, model]))} GPUs",
            }
            for network, model in DIGITISED
        ],
    }


def show(rows: list[dict[str, Any]], assumptions: list[dict[str, Any]], given: dict[str, Any]) -> None:
    """Print the inputs, the table and the study."""
    for m in given["models"]:
        print(
            f"{m['network']:11}{m['model']:10} one GPU computes {m['images_per_s_per_gpu']:6.1f} images/s"
            f" ({m['compute_s'] * 1e3:.0f} ms a step of {m['batch_per_gpu']}; from the {m['compute_from']})"
        )
    print(f"\n{'':27}{'fp32, img/s':>13}{'terngrad':>10}{'speed-up':>10}{'digitised':>10}{'off':>7}", end="")
    print(f"{'as stated':>11}{'both directions':>17}")
    cells = {(r["network"], r["model"], r["gpus"], r["variant"]): r for r in rows}
    for (network, model, gpus, variant), row in cells.items():
        if variant != "as read":
            continue
        stated, both = (cells[network, model, gpus, v]["speedup"] for v in ("as stated", "both directions"))
        print(
            f"{network:11}{model:10}{gpus:6d} {row['fp32_images_per_s']:12.0f}{row['terngrad_images_per_s']:10.0f}"
            f"{row['speedup']:10.2f}{row['digitised_speedup']:10.2f}{row['speedup_deviation_percent']:+6.1f}%"
            f"{stated:11.2f}{both:17.2f}"
        )
    print(f"\n{'root mean square deviation, %':58}{'Ethernet':>10}{'InfiniBand':>12}{'speed-up':>10}")
    for a in assumptions:
        print(
            f"{a['assumption']:58}{a['ethernet_rms_percent']:10.1f}{a['infiniband_rms_percent']:12.1f}"
            f"{a['speedup_rms_percent']:10.1f}"
        )


def draw() -> None:
    """Draw throughput against GPUs: lines ours, markers digitised."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    gpus = [GPUS_PER_HOST * 2**i for i in range(8)]
    figure = Figure(figsize=(5.8, 8.6), layout="constrained")
    axes = figure.subplots(3, 2, sharex=True, sharey=True).T
    names = {"ethernet": "1 Gbit/s Ethernet, GTX 1080", "infiniband": "100 Gbit/s InfiniBand, P100"}
    for axis, ((network, model), column) in zip(axes.flat, DIGITISED.items()):
        loads = {v: workload(network, model, replace(READ, alexnet_batch=r.alexnet_batch)) for v, r in VARIANTS.items()}
        lines = {v: [project(network, model, n, reading, loads[v]) for n in gpus] for v, reading in VARIANTS.items()}
        for i, (name, colour, marker) in enumerate((("float32", "#0072b2", "o"), ("TernGrad", "#d55e00", "s"))):
            axis.plot(gpus, [s[i].images_per_s for s in lines["as read"]], color=colour, label=f"{name}, ours as read")
            if model == "AlexNet":
                stated = [s[i].images_per_s for s in lines["as stated"]]
                label = f"{name}, ours with 128 of AlexNet's images a GPU"
                axis.plot(gpus, stated, color=colour, linestyle="--", linewidth=1, label=label)
            both = [s[i].images_per_s for s in lines["both directions"]]
            axis.plot(
                gpus, both, color=colour, linestyle=":", linewidth=1.2, label=f"{name}, ours with both directions"
            )
            digitised = [pair[i] * 1e3 for pair in column.values()]
            axis.plot(list(column), digitised, marker, color=colour, mfc="white", mew=1.6, label=f"{name}, digitised")
        axis.set(xscale="log", yscale="log", xlabel="GPUs, 4 a host", ylabel="images/s")
        axis.set_title(f"{model}\n{names[network]}", fontsize=9)
        axis.set_xticks(gpus, [str(n) for n in gpus], fontsize=8)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        axis.grid(True, alpha=0.3)
        axis.label_outer()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    """Print the table, write the results and the figure."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, assumptions, given = list(projected()), list(study()), inputs()
    show(rows, assumptions, given)
    record = {
        "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gradwire": __version__,
        "source_of_digitised": SOURCE,
        "digitised_thousand_images_per_s": {f"{n} {m}": column for (n, m), column in DIGITISED.items()},
        "inputs": given,
        "assumptions": assumptions,
        "rows": rows,
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    draw()


if __name__ == "__main__":
    main()
