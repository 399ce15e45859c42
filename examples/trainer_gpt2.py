"""A tiny GPT-2 with the Trainer of Transformers, from random weights: nothing is downloaded.

    pip install 'gradwire[trainer]'
    torchrun --standalone --nproc-per-node 2 trainer_gpt2.py --method "ErrorFeedback(TopK(density=0.05))"
    torchrun --standalone --nproc-per-node 2 trainer_gpt2.py --method "ErrorFeedback(TopK(density=0.05))" --resume

The first run saves after half of its steps; the second goes on from there, on as many processes or on another number.
``--method none`` is plain DDP.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradwire as gw


class Text(torch.utils.data.Dataset):
    """This file's own characters, in pieces."""

    def __init__(self, length: int = 32) -> None:
        text = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=127)
        self.rows = [text[i : i + length] for i in range(0, len(text) - length, 8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="EDEN(bits=4)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="trainer-gpt2")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=options.folder,
        use_cpu=True,
        max_steps=options.steps,
        save_steps=options.steps // 2,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=options.steps,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=Text())
    if options.method != "none":
        gw.integrations.trainer(trainer, options.method)  # the one line that is added
    half = str(Path(options.folder, f"checkpoint-{options.steps // 2}"))
    trainer.train(resume_from_checkpoint=half if options.resume else None)
    rows = torch.stack([row["input_ids"] for row in Text()])
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss
    if trainer.is_world_process_zero():
        print(f"loss {loss.item():.9f}")


if __name__ == "__main__":
    main()
