"""Run folders made by hand: the report must not need a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_run(
    folder: Path,
    method: str = "FP32()",
    *,
    name: str = "fp32",
    accuracies: tuple[float, ...] = (0.1, 0.8, 0.9),
    step_time_s: float = 0.010,
    sent_bytes: int = 3000,
    gauges: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """Write a run of ten steps between evaluations; each step would send 300 bytes at float32.

    Gauges rise by a quarter from row to row, from a quarter on, with a deviation of an eighth.
    """
    folder.mkdir(parents=True)
    record: dict[str, Any] = {
        "method": method,
        "name": name,
        "task": "digits",
        "seed": 0,
        "world_size": 4,
        "simulated": False,
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "hardware": {"processor": "a <fast> one", "cores": 2, "system": "Linux"},
        "started": "2026-01-02T03:04:05+00:00",
        "evaluated_on": "some images",
        "plan": {"log_every": 10, "settings": {"steps": 10 * (len(accuracies) - 1), "data": None}},
        "link": {"backend": "cpu"},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(record))
    with (folder / "metrics.jsonl").open("w") as file:
        for i, accuracy in enumerate(accuracies):
            if i:
                file.write(row(i, "train", None, step_time_s, sent_bytes, gauges))
            file.write(row(i, "eval", accuracy, step_time_s, sent_bytes))
    return folder


def row(
    i: int, event: str, accuracy: float | None, step_time_s: float, sent_bytes: int, gauges: tuple[str, ...] = ()
) -> str:
    content: dict[str, Any] = {
        "step": 10 * i,
        "event": event,
        "loss": 2.0 / (1 + i),
        "accuracy": accuracy,
        "step_time_s": step_time_s * (1 + 0.1 * i) if event == "train" else None,
        "elapsed_s": 10 * i * step_time_s,
        "sent_bytes": i * sent_bytes,
        "received_bytes": i * sent_bytes,
        "dense_bytes": i * 3000,
        "bits_per_element": 32.0 * sent_bytes / 3000 if i else None,
    }
    if gauges:
        content["gauges"] = {name: {"mean": i / 4, "deviation": 1 / 8} for name in gauges}
    return json.dumps(content) + "\n"
