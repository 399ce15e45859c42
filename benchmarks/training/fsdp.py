"""A small transformer under FSDP2 and HSDP, natively and by methods: losses, and bytes by the operating system.

    python benchmarks/training/fsdp.py --json benchmarks/results/training/fsdp.json

Four ranks on the loopback interface of a network namespace of their own, so that nothing else is counted. "shards":
four shards, and a compressing reduce-scatter. "replicas": two replicas of two shards, and a compressed exchange between
the replicas. Characters of the standard library's source text, AdamW; every method, seed and mesh trains for as many
steps. The loss is that on held-out text after the last step, and the mean over the last 20 steps on training text.

``silent`` lets the compressed exchange send nothing: what the interface counts then are the collectives that FSDP2
keeps, the parameters' all-gathers above all, and between replicas the reduce-scatter inside of the shards. The
``exchange_bytes`` of a row are those of the interface less the silent ones, over all ranks and a step; TCP's and IP's
headers and acknowledgements are in both. ``traffic_bytes`` is what ``link.traffic()`` says of the same steps.

    python benchmarks/training/fsdp.py --kinds shards --methods "weights QSGDinf(levels=7, block_size=128)" \\
        --json benchmarks/results/training/fsdp_weights.json

compresses the all-gather of the parameters in place of the gradients; ``drift`` is how far what ranks compute with is
from the weights after the last step, on rank 0: |k - w| / |w| of the unit that is furthest off.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.interface import interface_bytes, isolate

RANKS, BLOCKS, WIDTH, HEADS, LENGTH, BATCH, CHARACTERS = 4, 4, 64, 4, 64, 8, 128
LAST, SHORT = 20, 10
METHODS = ("terngrad", "EDEN(bits=4)", "qsgd", "errorfeedback")
WEIGHTS = "weights "
"""Before an operator that compresses the parameters' all-gather, and not the gradients."""
KINDS = {"shards": (4,), "replicas": (2, 2)}
SOURCES = ("argparse", "ast", "datetime", "decimal", "difflib", "inspect", "logging", "pathlib", "tarfile", "typing")


def text() -> Any:
    """Return the characters of the sources, the last twentieth held out by the caller."""
    import torch

    pages = [Path(str(importlib.import_module(name).__file__)).read_bytes() for name in SOURCES]
    return torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8).long().clamp(max=CHARACTERS - 1)


def transformer(seed: int) -> Any:
    """Build the model; the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layer = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks, self.norm, self.head = nn.ModuleList(layer), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

        def forward(self, x: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            x = self.characters(x) + self.places(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=True)
            return self.head(self.norm(x))

    return Model()


def silence(model: Any, kind: str) -> None:
    """Let the exchange that a method would compress send nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    class Nothing:
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            if kind == "shards":
                part.set_custom_reduce_scatter(Nothing())
            else:
                for group in part._get_fsdp_state()._fsdp_param_groups:
                    group.mesh_info.replicate_process_group = alone


def run(kind: str, method: str, seed: int, steps: int, wrap: bool = True) -> dict[str, Any]:
    """Train once on this rank, and return what rank 0 is to tell."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import gradwire as gw

    shape = KINDS[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = transformer(seed)
    for block in model.blocks if wrap else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    link: Any = None
    if method == "silent":
        silence(model, kind)
    elif method.startswith(WEIGHTS):
        link = gw.compress_weights(model, method.removeprefix(WEIGHTS), seed=seed)
    elif method != "native":
        link = gw.attach(model, method, seed=seed)
    characters = text()
    training, held_out = characters.split([len(characters) * 19 // 20, len(characters) - len(characters) * 19 // 20])
    draw = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_of(source: Any, at: Any) -> Any:
        rows = torch.stack([source[i : i + LENGTH + 1] for i in at.tolist()])
        return torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    losses = []
    for step in range(steps):
        if step == 1:
            # The first step also makes connections.
            before, sent = interface_at_rest(), link.traffic().sent_bytes if link else 0
        optimizer.zero_grad()
        loss = loss_of(training, torch.randint(0, len(training) - LENGTH - 1, (BATCH,), generator=draw))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = interface_at_rest()
    with torch.no_grad():
        held = loss_of(held_out, torch.arange(0, len(held_out) - LENGTH - 1, LENGTH)[: 8 * BATCH]).item()
    told = torch.tensor([mean(losses[-LAST:]), (link.traffic().sent_bytes - sent) / (steps - 1) if link else 0.0])
    dist.all_reduce(told)
    drift = max(link.drift().values()) if method.startswith(WEIGHTS) else None
    digest = hashlib.sha256()
    model.reshard()
    for p in model.parameters():
        digest.update(p.full_tensor().detach().numpy().tobytes())
    if link is not None:
        link.close()
    return {
        "kind": kind,
        "method": method,
        "seed": seed,
        "steps": steps,
        "wrapped_blocks": BLOCKS if wrap else 0,
        "loss": held,
        "training_loss": float(told[0]) / RANKS,
        "interface_bytes": (after - before) / (steps - 1),
        "traffic_bytes": float(told[1]),
        "drift": drift,
        "parameters_sha256": digest.hexdigest(),
    }


def interface_at_rest() -> int:
    """Return the interface's count while no rank sends anything."""
    import torch.distributed as dist

    dist.barrier()
    found = interface_bytes()
    dist.barrier()
    return found


def rank_main(rank: int, port: int, plan: list[tuple[str, str, int, int, bool]], pipe: Any) -> None:
    """Run all of a plan."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    for one in plan:
        row = run(*one)
        if rank == 0:
            pipe.send(row)
    dist.barrier()
    os._exit(0)


def measure(plan: list[tuple[str, str, int, int, bool]]) -> list[dict[str, Any]]:
    """Run a plan on four ranks, and print each row."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=rank_main, args=(rank, store.port, plan, theirs)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    theirs.close()
    rows = []
    for _ in plan:
        rows.append(ours.recv())
        row = rows[-1]
        print(
            f"{row['kind']:9s} {row['method']:14s} seed {row['seed']}: loss {row['loss']:.4f}, training "
            f"{row['training_loss']:.4f}, interface {row['interface_bytes']:>12,.0f} bytes a step, traffic() "
            f"{row['traffic_bytes']:>12,.0f}",
            flush=True,
        )
    for process in processes:
        process.join()
    return rows


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each method with the native run of its mesh: the distance of mean losses, and the native spread."""
    found = []
    names = list(dict.fromkeys(row["method"] for row in rows))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of = {m: [r for r in rows if (r["kind"], r["method"]) == (kind, m)] for m in names}
        whole = {m: [r for r in mine if r["wrapped_blocks"]] for m, mine in of.items()}
        silent = mean(r["interface_bytes"] for r in whole["silent"])
        native = [r["loss"] for r in whole["native"]]
        for method in (name for name in names if name != "silent"):
            mine = whole[method]
            if not mine:
                continue
            losses = [r["loss"] for r in mine]
            found.append(
                {
                    "kind": kind,
                    "method": method,
                    "loss": mean(losses),
                    "loss_less_native": mean(losses) - mean(native),
                    "native_spread": max(native) - min(native),
                    "native_deviation": stdev(native) if len(native) > 1 else None,
                    "within_spread": all(min(native) <= loss <= max(native) for loss in losses)
                    or abs(mean(losses) - mean(native)) <= max(native) - min(native),
                    "interface_bytes": mean(r["interface_bytes"] for r in mine),
                    "exchange_bytes": mean(r["interface_bytes"] for r in mine) - silent,
                    "traffic_bytes": mean(r["traffic_bytes"] for r in mine),
                    "drift": max((r["drift"] for r in mine if r["drift"] is not None), default=None),
                }
            )
    return found


def main() -> int:
    """Measure and print; exit with 1 where the wrapping of blocks decides a bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2, help="of each method")
    parser.add_argument("--native-seeds", type=int, default=4, help="of the native runs, for their spread")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    isolate()
    plan: list[tuple[str, str, int, int, bool]] = []
    for kind in given.kinds:
        plan.append((kind, "silent", 0, min(SHORT, given.steps), True))
        plan += [(kind, "native", seed, given.steps, True) for seed in range(given.native_seeds)]
        plan += [(kind, method, seed, given.steps, True) for method in given.methods for seed in range(given.seeds)]
        plan += [(kind, "terngrad", 0, min(3 * SHORT, given.steps), wrap) for wrap in (True, False)]
    rows = measure(plan)
    pairs = [[r["parameters_sha256"] for r in rows[i : i + 2]] for i, one in enumerate(plan[:-1]) if not plan[i + 1][4]]
    alike = all(first == second for first, second in pairs)
    rows = [r for r in rows if r["steps"] == given.steps or r["method"] == "silent"]
    summary = judge(rows)
    for row in summary:
        print(
            f"{row['kind']:9s} {row['method']:14s} loss {row['loss']:.4f} ({row['loss_less_native']:+.4f}; native "
            f"spread {row['native_spread']:.4f}), exchange {row['exchange_bytes']:>12,.0f} bytes a step"
        )
    print("blocks wrapped one by one and all in one give", "the same bits" if alike else "DIFFERENT BITS")
    if given.json:
        import torch

        import gradwire

        versions = {"gradwire": gradwire.__version__, "torch": torch.__version__, "python": platform.python_version()}
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found = {
            "date_utc": date,
            "system": platform.release(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "versions": versions,
            "ranks": RANKS,
            "steps": given.steps,
            "wrapping_decides_no_bit": alike,
            "summary": summary,
            "rows": rows,
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if alike else 1


if __name__ == "__main__":
    raise SystemExit(main())
