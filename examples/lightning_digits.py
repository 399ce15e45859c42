"""Digits with Lightning's Trainer, or with Fabric.

    pip install 'gradwire[lightning]' scikit-learn
    python lightning_digits.py --method "ErrorFeedback(TopK(density=0.05))"
    python lightning_digits.py --method "ErrorFeedback(TopK(density=0.05))" --resume
    python lightning_digits.py --fabric --method "ErrorFeedback(TopK(density=0.05))"

Lightning starts two processes. The first run saves after half of its steps; the second goes on from there, on as many
processes or on another number (``--devices``). ``--method none`` is plain DDP.
"""

import argparse
import logging
import os
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn

import gradwire as gw

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(digits.target).long()


def batches(steps: int, rank: int, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a rank's batches, of 64 samples over all ranks."""
    inputs, labels = data()
    found = []
    for step in range(steps):
        order = torch.Generator().manual_seed(1000 * step + rank)
        mine = torch.randint(0, len(labels), (64 // workers,), generator=order)
        found.append((inputs[mine], labels[mine]))
    return found


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_trainer(options: argparse.Namespace) -> nn.Module:
    strategy = "ddp" if options.method == "none" else gw.integrations.lightning(options.method)  # the change
    path = f"{options.folder}/half.ckpt"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.steps,
        max_epochs=1,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **quiet,
    )
    module = Digits()
    rows = batches(options.steps, int(os.environ.get("LOCAL_RANK", 0)), options.devices)

    class Halves(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
            if not options.resume and trainer.global_step == options.steps // 2:
                trainer.save_checkpoint(path)

    trainer.callbacks.append(Halves())
    first = options.steps // 2 if options.resume else 0
    loader = torch.utils.data.DataLoader(rows[first:], batch_size=None, shuffle=False)
    trainer.fit(module, loader, ckpt_path=path if options.resume else None)
    return module.model


def with_fabric(options: argparse.Namespace) -> nn.Module:
    strategy = "ddp" if options.method == "none" else gw.integrations.fabric(options.method)  # the change
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=options.devices)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, path = {"model": module, "optimizer": optimizer}, f"{options.folder}/half.fabric"
    first = 0
    if options.resume:
        fabric.load(path, state)
        first = options.steps // 2
    for step, (x, y) in enumerate(batches(options.steps, fabric.global_rank, fabric.world_size)[first:], first):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(module(x), y))
        optimizer.step()
        if not options.resume and step + 1 == options.steps // 2:
            fabric.save(path, state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="EDEN(bits=4)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", default="lightning-digits")
    parser.add_argument("--fabric", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    model = (with_fabric if options.fabric else with_trainer)(options)
    inputs, labels = data()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs), labels)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"loss {loss.item():.9f}")


if __name__ == "__main__":
    main()
