"""A training loop without DDP: ``link.reduce_()`` takes the place of its hook.

torchrun --standalone --nproc-per-node 2 no_ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    inputs = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target).long()

    torch.manual_seed(0)  # the same weights on every rank: nothing else makes them equal here
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    link = gw.Link(model.named_parameters(), "terngrad")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(rank)
    for _ in range(150):
        mine = torch.randint(0, len(labels), (64 // world_size,), generator=order)
        loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
        loss.backward()
        link.reduce_()
        optimizer.step()
        optimizer.zero_grad()

    accuracy = (model(inputs).argmax(1) == labels).float().mean()
    if rank == 0:
        traffic = link.traffic()
        print(f"training accuracy {accuracy:.3f}, {traffic.compression_factor:.1f} times fewer bytes sent")
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
