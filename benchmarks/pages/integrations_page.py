"""The measured part of the page about integrations."""

from __future__ import annotations

from benchmarks.lib.results import result

__all__ = ["measured"]


def measured() -> str:
    """Return the table; nothing where nothing was measured."""
    made = result("training/integrations")
    if made is None:
        return ""
    rows = made["rows"]
    lines = [
        "`python benchmarks/training/integrations.py --json benchmarks/results/training/integrations.json` ran each framework in a new environment "
        f"with only its extra installed; torch {made['versions']['torch']}; {made['date_utc'][:10]}. The table shows the losses at the end of a training with "
        f"`{rows[0]['method']}` on two processes, of the same training resumed half way on two and on three processes, and of plain DDP.",
        "",
        "| framework | loss | resumed | resumed on three | plain DDP |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['framework']} | {row['loss']:.6f} | {'the same' if row['resumed_exactly'] else row['loss_resumed']} | "
        f"{row['loss_resumed_on_three']:.6f} | {row['loss_ddp']:.6f} |"
        for row in rows
    ]
    return "\n".join([*lines, *_elastic()])


def _elastic() -> list[str]:
    made = result("trials/elastic")
    if made is None:
        return []
    whole, torn = made["rows"]
    (first, before), (again, after) = torn["starts"]
    return [
        "",
        f"`python benchmarks/trials/elastic.py --json benchmarks/results/trials/elastic.json` ({made['date_utc'][:10]}) starts two agents "
        f"of torchrun with {made['workers']} workers each, and kills one agent with its workers. {before} workers "
        f"began at step {first}; {after} resumed from step {again}, {torn['seconds_until_resumed']:.0f} seconds later, "
        f'after torchrun had noticed the loss. The error named the lost workers: "{"; ".join(torn["named"])}". The loss after '
        f"{made['steps']} steps is {torn['loss']:.4f}, and {whole['loss']:.4f} if no worker is killed.",
    ]
