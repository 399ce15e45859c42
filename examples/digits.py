"""Data-parallel training on scikit-learn's digits, in five ways.

    torchrun --standalone --nproc-per-node 2 digits.py                                        # plain DDP
    gradwire run --nproc-per-node 2 --method terngrad digits.py                               # the same, unchanged
    torchrun --standalone --nproc-per-node 2 digits.py --mode attach                          # one more line
    torchrun --standalone --nproc-per-node 2 digits.py --mode loop --method qsgdinf           # without DDP
    torchrun --standalone --nproc-per-node 2 digits.py --mode amp --method ef_signsgd         # mixed precision
    torchrun --standalone --nproc-per-node 2 digits.py --mode choose                          # the fastest method

The mode ``plain`` does not import gradwire.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("plain", "attach", "loop", "amp", "choose"), default="plain")
    parser.add_argument("--method", default="TernGrad(clip=2.5)")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    inputs = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target).long()

    torch.manual_seed(0)  # the same weights on every rank, which the mode "loop" needs
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    scaler = torch.amp.GradScaler("cpu", enabled=options.mode == "amp")
    module = model if options.mode == "loop" else DistributedDataParallel(model)
    link = exchange(module, options, scaler)

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.0 if options.mode == "amp" else 0.9)
    order = torch.Generator().manual_seed(rank)
    for _ in range(options.steps):
        mine = torch.randint(0, len(labels), (64 // world_size,), generator=order)
        with torch.autocast("cpu", enabled=options.mode == "amp"):
            loss = nn.functional.cross_entropy(module(inputs[mine]), labels[mine])
        scaler.scale(loss).backward()
        if options.mode == "loop":
            link.reduce_()  # the mean of the gradients over all ranks, in place
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    accuracy = (model(inputs).argmax(1) == labels).float().mean()
    if rank == 0:
        saved = f", {link.traffic().compression_factor:.1f} times fewer bytes sent" if link else ""
        print(f"training accuracy {accuracy:.3f}{saved}")
        if options.mode == "choose":
            print(f"chosen: {link.record()['choice']['chosen']}, {link.record()['choice']['reason']}")
    if link:
        link.close()
    del module  # before its process group: see "No error, and yet" on the page of what can go wrong
    dist.destroy_process_group()


def exchange(module, options, scaler):
    """Make gradwire exchange the module's gradients, as the mode says; return the link."""
    if options.mode == "plain":
        return None
    import gradwire as gw

    if options.mode == "loop":
        return gw.Link(module.named_parameters(), options.method)
    if options.mode == "amp":
        # Methods that keep a residual must know by how much the loss is scaled.
        return gw.attach(module, options.method, grad_scaler=scaler)
    return gw.attach(module, "auto" if options.mode == "choose" else options.method)


if __name__ == "__main__":
    main()
