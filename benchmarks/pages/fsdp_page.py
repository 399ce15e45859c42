"""The measured part of the page about FSDP2 and HSDP."""

from __future__ import annotations

from benchmarks.lib.page_parts import Row
from benchmarks.lib.results import result

__all__ = ["measured"]

KINDS = {"replicas": "two replicas of two shards", "shards": "four shards"}


def measured() -> str:
    """Return the table; nothing where nothing was measured."""
    made = result("training/fsdp")
    if made is None:
        return ""
    seeds = {
        method: len({row["seed"] for row in made["rows"] if row["method"] == method})
        for method in {row["method"] for row in made["rows"]}
    }
    rewrapped = "give the same bits" if made["wrapping_decides_no_bit"] else "GIVE DIFFERENT BITS"
    natives, others = seeds["native"], seeds[made["summary"][1]["method"]]
    lines = [
        f"{made['cores']} cores; torch {made['versions']['torch']}; {made['date_utc'][:10]}. The table shows the held-out loss after "
        f"{made['steps']} steps and its difference from that of the native run, as means over {natives} native seeds and {others} "
        f"of each method. The kB are those that the compressed exchange sends in a step, over all ranks, by the interface's "
        "counter and by `link.traffic()`.",
        "",
        "| | method | loss | against native | spread of native seeds | kB, interface | kB, `traffic()` |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind, name in KINDS.items():
        lines += [_row(name, row) for row in made["summary"] if row["kind"] == kind]
    lines += ["", f"Wrapping each block by itself and wrapping all blocks in one {rewrapped}."]
    return "\n".join([*lines, *_weights()])


def _weights() -> list[str]:
    """Return what was measured of the parameters' all-gather."""
    made = result("training/fsdp_weights")
    if made is None:
        return []
    native, ours = (next(r for r in made["summary"] if (r["method"] == "native") == own) for own in (True, False))
    return [
        "",
        f"With the parameters' all-gather by `{ours['method'].removeprefix('weights ')}` and uncompressed gradients, the loss after "
        f"{made['steps']} steps over four shards is {ours['loss']:.4f}, which differs by {ours['loss_less_native']:+.4f} from that of the "
        f"native run ({native['native_spread']:.4f} between its seeds). Over all ranks the interface carried "
        f"{ours['interface_bytes'] / 1e3:,.0f} kB in a step, and {native['interface_bytes'] / 1e3:,.0f} kB in the native run; "
        f"gradients are {native['exchange_bytes'] / 1e3:,.0f} kB of both. `traffic()` counts "
        f"{ours['traffic_bytes'] / 1e3:,.0f} kB of weights. After the last step, the copies with which ranks compute were at most "
        f"{ours['drift']:.2g} of |w| away from the weights.",
    ]


def _row(name: str, row: Row) -> str:
    apart = "" if row["method"] == "native" else f"{row['loss_less_native']:+.4f}"
    told = "" if row["method"] == "native" else f"{row['traffic_bytes'] / 1e3:,.1f}"
    return (
        f"| {name} | {row['method']} | {row['loss']:.4f} | {apart} | {row['native_spread']:.4f} | "
        f"{row['exchange_bytes'] / 1e3:,.1f} | {told} |"
    )
