"""Timelines of steps: the spans of each rank's lanes, and how long the network link was idle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradwire.exchange.drivers import Span
from gradwire.tools.bench.row_file import write_text
from gradwire.tools.bench.step import StepGrid, open_cluster, tell_to_sleep
from gradwire.tools.bench.variants import COMPUTE
from gradwire.tools.experiments.errors import UsageError

WARM_UP = 5
"""Steps before the recorded ones: DDP lays out its buckets again after the first, and buffers grow."""

Row = dict[str, Any]
Interval = tuple[float, float]


class RankTrace:
    """The spans of one rank in a few steps.

    Args:
        rank: Number of the rank.
        spans: Spans of the computing thread (track "compute") and of the link's lanes.
        sent_bytes: Bytes sent by this rank in all steps.
    """

    def __init__(self, rank: int, spans: Sequence[Span], sent_bytes: float) -> None:
        self.rank, self.spans, self.sent_bytes = rank, list(spans), sent_bytes

    def steps(self) -> list[tuple[dict[str, Interval], list[Span]]]:
        """Return, for each step, the intervals of its parts, and the lanes' spans that began in it."""
        parts: dict[str, dict[str, Interval]] = {}
        for span in self.spans:
            if span.track == COMPUTE:
                parts.setdefault(span.detail, {})[span.name] = span.began_s, span.ended_s
        found = []
        for step in parts.values():
            begin, end = step["forward"][0], step["update"][1]
            lanes = [s for s in self.spans if s.track != COMPUTE and begin <= s.began_s < end]
            found.append((step, lanes))
        return found


def trace_steps(grid: StepGrid, steps: int) -> list[RankTrace]:
    """Take steps of one model on one cluster by one exchange, and record the spans of every rank.

    Raises:
        UsageError: the grid has several cells or variants, or its variant has no lanes.
        BackendError: no emulated cluster can be built here.
        WorkerError: a rank died.
    """
    if len(grid.models) != 1 or len(grid.topologies) != 1 or len(grid.variants) != 1:
        raise UsageError("a timeline is of one model, one cluster and one exchange: give each of them once")
    (model,), (topology,), (variant,) = grid.models, grid.topologies, grid.variants
    if not variant.startswith("gradwire "):
        raise UsageError(f"{variant!r} has no lanes to record: give 'gradwire SPEC'")
    if steps < 1:
        raise UsageError(f"{steps} steps have no timeline: at least 1 is needed")
    with open_cluster(grid, model, topology) as (ranks, network):
        tell_to_sleep(grid, model, ranks)
        # Some methods measure the network when their link is made.
        if network is not None:
            network.set_bandwidth(topology.bandwidth)
        ranks.ask("build", variant=variant)
        ranks.ask("steps", variant=variant, count=WARM_UP)
        answers = ranks.ask("trace", variant=variant, count=steps)
    return [
        RankTrace(rank, [Span(**span) for span in answer["spans"]], answer["sent_bytes"])
        for rank, answer in enumerate(answers)
    ]


def summarise(traces: Sequence[RankTrace], bandwidth_bits_per_s: float | None) -> list[Row]:
    """Return a row for each rank and step: how long the network link carried rows, and when it was idle.

    ``rows_s`` is the time in which some lane sent or received large rows. The link was idle in ``before_rows_s``, from
    the end of the forward pass to the first row, in ``between_rows_s``, the gaps from the first to the last row, and in
    ``after_rows_s``, from the last row to the end of the backward pass. ``earliest_s`` is the least time of the step,
    see :func:`earliest`. ``encode_s``, ``decode_s``, ``wait_for_turn_s`` and ``small_messages_s`` are sums over lanes,
    which work side by side.
    """
    found = []
    for trace in traces:
        steps = trace.steps()
        sent_bytes = trace.sent_bytes / max(1, len(steps))
        for number, (parts, lanes) in enumerate(steps):
            rows = union((s.began_s, s.ended_s) for s in lanes if s.name == "send rows")
            busy_s = sum(end - begin for begin, end in rows)
            first_s, last_s = (rows[0][0], rows[-1][1]) if rows else (parts["forward"][1], parts["forward"][1])
            found.append(
                {
                    "rank": trace.rank,
                    "step": number,
                    "step_time_s": parts["update"][1] - parts["forward"][0],
                    "forward_s": parts["forward"][1] - parts["forward"][0],
                    "before_rows_s": first_s - parts["forward"][1],
                    "rows_s": busy_s,
                    "between_rows_s": last_s - first_s - busy_s,
                    "after_rows_s": parts["backward"][1] - last_s,
                    "update_s": parts["update"][1] - parts["update"][0],
                    "sent_bytes_per_step": sent_bytes,
                    "wire_floor_s": 8 * sent_bytes / bandwidth_bits_per_s if bandwidth_bits_per_s else None,
                    "earliest_s": earliest(parts, lanes, bandwidth_bits_per_s) if bandwidth_bits_per_s else None,
                    **{
                        f"{key}_s": sum(s.ended_s - s.began_s for s in lanes if s.name == name)
                        for key, name in (
                            ("encode", "encode"),
                            ("decode", "decode"),
                            ("wait_for_turn", "wait for turn"),
                            ("small_messages", "small message"),
                        )
                    },
                }
            )
    return found


def earliest(parts: dict[str, Interval], lanes: Sequence[Span], bandwidth_bits_per_s: float) -> float:
    """Return the least duration of a step if its buckets become ready as recorded and only the network link takes time.

    A bucket is ready when its first span begins. Its bytes, and those of all later buckets, cannot leave before. So the
    step takes at least the time until any bucket is ready, plus the transfer of these bytes, plus the update. The last
    bucket is ready near the end of the backward pass: the larger it is, the further this bound lies above the larger
    one of computing and sending.
    """
    ready: dict[str, float] = {}
    size: dict[str, int] = {}
    for span in sorted(lanes, key=lambda span: span.began_s):
        bucket = span.detail.partition(",")[0]
        ready.setdefault(bucket, span.began_s)
        size[bucket] = size.get(bucket, 0) + span.sent_bytes
    begin, computed = parts["forward"][0], max(ready.values(), default=parts["forward"][1])
    left = 0
    for bucket in reversed(ready):
        left += size[bucket]
        computed = max(computed, ready[bucket] + 8 * left / bandwidth_bits_per_s)
    return computed - begin + parts["update"][1] - parts["update"][0]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, as ascending intervals that do not touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def chrome_trace(traces: Sequence[RankTrace]) -> str:
    """Return the spans of all ranks as JSON in the Trace Event Format, which Perfetto and Chrome's tracing page show.

    A process is a rank, a thread one of its tracks; times are microseconds from the first span.
    """
    origin_s = min((s.began_s for trace in traces for s in trace.spans), default=0.0)
    events: list[Row] = []
    for trace in traces:
        tracks = sorted({s.track for s in trace.spans}, key=lambda track: (track != COMPUTE, track))
        events.append({"name": "process_name", "ph": "M", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}})
        for number, track in enumerate(tracks):
            names = {"name": "thread_name", "ph": "M", "pid": trace.rank, "tid": number, "args": {"name": track}}
            events.append(names)
        for s in trace.spans:
            events.append(
                {
                    "name": s.name,
                    "ph": "X",
                    "pid": trace.rank,
                    "tid": tracks.index(s.track),
                    "ts": round(1e6 * (s.began_s - origin_s), 3),
                    "dur": round(1e6 * (s.ended_s - s.began_s), 3),
                    "args": {"detail": s.detail},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def write_trace(path: Path, traces: Sequence[RankTrace]) -> None:
    """Write :func:`chrome_trace`'s text to a file; raises RunError."""
    write_text(path, chrome_trace(traces) + "\n")
