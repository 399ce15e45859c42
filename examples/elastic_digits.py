"""Digits on as many workers as there are: torchrun starts them anew, on fewer or on more, and they go on.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        elastic_digits.py --folder /shared/digits

The same commands on each of two machines. When a machine dies, torchrun ends the workers of the other, and starts them
anew as a smaller group; when it comes back, all are started anew as a larger one. Each time they go on from the latest
checkpoint, which every machine must see. With one process a machine, the one that is left trains on without an
exchange. Without the first line, workers that PyTorch 2.13 starts anew find the addresses of those before them in the
store that it shares, and cannot connect.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="ErrorFeedback(TopK(density=0.05))")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(digits.target).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    link = gw.attach(ddp, options.method)

    first = resume(options.folder, model, optimizer, link)
    if rank == 0:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"from step {first} on {world_size} workers, attempt {attempt}", flush=True)
    for step in range(first, options.steps):
        order = torch.Generator().manual_seed(1000 * step + rank)
        mine = torch.randint(0, len(labels), (64 // world_size,), generator=order)
        loss = nn.functional.cross_entropy(ddp(inputs[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.pause)
        if (step + 1) % options.every == 0:
            save(options.folder, step + 1, model, optimizer, link)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs), labels)
    if rank == 0:
        print(f"loss {loss.item():.9f} after {options.steps} steps, at the end on {world_size} workers", flush=True)
    link.close()
    del ddp  # before its process group: see "No error, and yet" on the page of what can go wrong
    dist.destroy_process_group()


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, link: gw.Link) -> None:
    """Write a checkpoint of its own folder, and then say that it is the latest."""
    mine = folder / f"step-{step}"
    gw.save(link, mine / "link")  # what the method remembers on each rank; all ranks take part
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, mine / "model.pt")
        partial = folder / "latest.partial"
        partial.write_text(str(step))
        partial.replace(folder / "latest")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, link: gw.Link) -> int:
    """Go on from the latest checkpoint, if there is one, on any number of ranks; return the number of steps taken."""
    latest = torch.tensor(int((folder / "latest").read_text()) if (folder / "latest").exists() else 0)
    dist.broadcast(latest, src=0)  # the same one on all ranks
    if latest:
        mine = folder / f"step-{latest}"
        kept = torch.load(mine / "model.pt", weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        gw.load(link, mine / "link")
    return int(latest)


if __name__ == "__main__":
    main()
