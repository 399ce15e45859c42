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
        "`python benchmarks/training/integrations.py --json benchmarks/results/training/integrations.json`, each in a fresh environment "
        f"with its extra alone; torch {made['versions']['torch']}; {made['date_utc'][:10]}. Losses at the end, by "
        f"`{rows[0]['method']}` on two processes, resumed half way on two and on three, and by plain DDP.",
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
        f"`python benchmarks/trials/elastic.py --json benchmarks/results/trials/elastic.json`, {made['date_utc'][:10]}: two agents "
        f"of torchrun with {made['workers']} workers each, of which one is killed with its workers. {before} workers "
        f"began at step {first}; {after} went on from step {again}, {torn['seconds_until_resumed']:.0f} seconds later, "
        f'once torchrun had noticed it. The error named them: "{"; ".join(torn["named"])}". Loss after '
        f"{made['steps']} steps {torn['loss']:.4f}; where nobody died {whole['loss']:.4f}.",
    ]
