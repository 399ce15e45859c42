"""Digits with Accelerate.

    pip install 'gradwire[accelerate]' scikit-learn
    accelerate launch --cpu --num_processes 2 accelerate_digits.py --method "ErrorFeedback(TopK(density=0.05))"
    accelerate launch --cpu --num_processes 2 accelerate_digits.py --method "ErrorFeedback(TopK(density=0.05))" --resume

The first run saves after half of its steps; the second goes on from there, on as many processes or on another number.
``--method none`` is plain DDP.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

import gradwire as gw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="EDEN(bits=4)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="accelerate-digits")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(digits.target).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    if options.method != "none":
        gw.integrations.accelerate(accelerator, options.method)  # the one line that is added
    model, optimizer = accelerator.prepare(model, optimizer)

    first = 0
    if options.resume:
        accelerator.load_state(options.folder)
        first = options.steps // 2
    for step in range(first, options.steps):
        order = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
        mine = torch.randint(0, len(labels), (64 // accelerator.num_processes,), generator=order)
        loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not options.resume and step + 1 == options.steps // 2:
            accelerator.save_state(options.folder)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs), labels)
    if accelerator.is_main_process:
        print(f"loss {loss.item():.9f}")
    # The module goes before its process group: if it is the last to hold the group, torch joins the group's threads
    # under Python's lock, for which one of them may wait.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
