"""One rank of the step benchmark: it builds variants, and takes steps at its parent's command.

The parent starts ``python -m gradwire.tools.bench.rank`` with torchrun's variables and ``GRADWIRE_BENCH``. The rank
reads a command as JSON from each line of standard input, and answers with a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from gradwire.model.profile import Timeline
from gradwire.tools.bench.models import bench_model
from gradwire.tools.bench.profile import profile_name
from gradwire.tools.bench.sharded import Passes, measure_passes
from gradwire.tools.bench.variants import Variant

ENVIRONMENT = "GRADWIRE_BENCH"


class Rank:
    """The variants of this rank; each public method is a command of the parent."""

    def __init__(self, model: str, device: str = "cpu", backend: str = "gloo") -> None:
        torch.set_num_threads(1)
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend)
        self.model = bench_model(model)
        self.batch = self.model.batch(torch.Generator().manual_seed(dist.get_rank()))
        self.variants: dict[str, Variant] = {}
        self.sleeps: Timeline | None = None
        self.passes: Passes | None = None

    def profile(self) -> dict[str, Any]:
        """Measure the model's timeline on rank 0 while the other ranks wait."""
        found = profile_name(self.model.name).timeline.to_json() if dist.get_rank() == 0 else None
        dist.barrier()
        return {"timeline": found}

    def profile_passes(self) -> dict[str, Any]:
        """Measure the passes of the model's units on rank 0 while the other ranks wait."""
        found = measure_passes(self.model, self.batch).to_json() if dist.get_rank() == 0 else None
        dist.barrier()
        return {"passes": found}

    def sleep(self, timeline: dict[str, Any], passes: dict[str, Any] | None = None) -> dict[str, Any]:
        """Let all variants built from now on sleep through a timeline instead of computing.

        Args:
            timeline: The timeline.
            passes: How sharded modules divide it among their units; None: measured when they are built.
        """
        self.sleeps, self.passes = Timeline.from_json(timeline), Passes.from_json(passes) if passes else None
        return {}

    def build(self, variant: str) -> dict[str, Any]:
        """Build a variant; one of that name is replaced."""
        if variant in self.variants:
            self.variants.pop(variant).close()
        built = self.variants[variant] = Variant.build(
            variant, self.model, self.batch, self.sleeps, self.device, self.passes
        )
        return {"numel": built.numel}

    def steps(self, variant: str, count: int) -> dict[str, Any]:
        """Take steps; return their seconds, this process's CPU time, and the link's counters."""
        chosen = self.variants[variant]
        before, busy = chosen.counts(), time.process_time()
        times = chosen.steps(count)
        cpu_s = time.process_time() - busy
        counted = {key: value - before[key] for key, value in chosen.counts().items()}
        return {"times_s": times, "cpu_s": cpu_s, "counted": counted}

    def trace(self, variant: str, count: int) -> dict[str, Any]:
        """Take steps; return this process's spans in them, and the bytes sent."""
        chosen = self.variants[variant]
        before = chosen.counts()
        spans = [dataclasses.asdict(span) for span in chosen.trace(count)]
        return {"spans": spans, "sent_bytes": chosen.counts().get("sent_bytes", 0) - before.get("sent_bytes", 0)}

    def forget_timeline(self, variant: str) -> dict[str, Any]:
        """Discard the recorded timeline."""
        recorder = self.variants[variant].recorder
        if recorder:
            recorder.reset()
        return {}

    def timeline(self, variant: str) -> dict[str, Any]:
        """Return the variant's timeline, if it records one."""
        recorder = self.variants[variant].recorder
        found = recorder.timeline() if recorder else None
        return {"timeline": found.to_json() if found else None}

    def record(self, variant: str) -> dict[str, Any]:
        """Return the record of the variant's link, if it has one."""
        link = self.variants[variant].link
        return {"record": link.record() if link else None}

    def close(self) -> None:
        """Close all links."""
        for variant in self.variants.values():
            variant.close()


def main() -> None:
    """Obey the parent until its pipe closes."""
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank = Rank(**json.loads(os.environ[ENVIRONMENT]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
    rank.close()
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
