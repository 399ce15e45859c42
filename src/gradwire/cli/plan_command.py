"""What ``gradwire plan`` does once its options are read."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradwire as gw
from gradwire.bench.calibration import default_path, machine_of_rows, measure_machine
from gradwire.bench.profile import profile_name, profile_script
from gradwire.cli.show import print_json, print_plan
from gradwire.experiments.errors import UsageError
from gradwire.lab import format_rate, parse_delay, parse_rate
from gradwire.perf.forecast import Forecast, Setting, forecast, recommend
from gradwire.perf.machine import Link, Machine
from gradwire.perf.profile import Profile

__all__ = ["plan"]

METHODS = ("bf16", "fp16", "terngrad")
HOSTS = (2, 4, 8)
BANDWIDTHS = ("100mbit", "1gbit", "10gbit")


def plan(
    *,
    profile: str,
    arguments: Sequence[str],
    data: str | None,
    methods: Sequence[str] | None,
    hosts: Sequence[int] | None,
    ranks_per_host: int,
    cores: int | None,
    bandwidths: Sequence[str] | None,
    latency: str,
    probe: bool,
    calibration: Path | None,
    calibrate: bool,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Profile, calibrate, predict, print.

    Raises:
        UsageError: options that do not go together.
    """
    for spec in methods or ():
        if isinstance(gw.method(spec), gw.Auto):
            raise UsageError(f"{spec} chooses among methods while it trains: name the methods to predict, one by one")
    _check_calibration(calibration, calibrate)
    latency_s = parse_delay(latency)
    links = {text: _link(text, latency_s) for text in bandwidths or BANDWIDTHS}
    counts = list(hosts or HOSTS)
    if min(counts) < 1 or ranks_per_host < 1 or min(counts) * ranks_per_host < 2:
        raise UsageError("one worker exchanges nothing: give --hosts 2 or more, or --gpus-per-host")
    if probe:
        if bandwidths or hosts:
            raise UsageError("--probe measures the group that runs: leave --hosts and --bandwidth out")
        rank, found, world_size = _probed()
        if rank:
            return
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        counts, ranks_per_host, links = [max(1, world_size // per_host)], per_host, {_rate(found): found}
    machine = _machine(calibration, calibrate)
    known = _profile(profile, arguments, data)
    rows: list[dict[str, Any]] = []
    curves: list[tuple[str, Forecast]] = []
    advice: list[tuple[str, str]] = []
    for name, link in links.items():
        for count in counts:
            setting = Setting(hosts=count, ranks_per_host=ranks_per_host, cores=cores, link=link)
            forecasts, refused = forecast(known, methods or METHODS, setting, machine)
            choice, reason = recommend(forecasts)
            advice.append((f"{count} x {ranks_per_host} workers, {name}", reason))
            curves += [(name, f) for f in forecasts]
            for f in forecasts:
                rows.append(
                    {
                        "profile": known.source,
                        "hosts": count,
                        "ranks_per_host": ranks_per_host,
                        "bandwidth_bits_per_s": link.bandwidth_bytes_per_s and 8 * link.bandwidth_bytes_per_s,
                        **dataclasses.asdict(f),
                        "recommended": f.method == choice,
                    }
                )
            for spec, why in refused.items():
                print(f"gradwire: {spec} on {count} hosts: {why}", file=sys.stderr)
    if as_json:
        print_json(rows)
    else:
        print(f"{known.source}: {known.numel / 1e6:.2f} M parameters, {known.timeline.compute_s * 1e3:.3g} ms a step "
              f"alone; collectives: {machine.source}")  # fmt: skip
        print_plan(rows)
        for place, reason in advice:
            print(f"{place}: {reason}")
    if figure is not None:
        from gradwire.report.scaling import draw_scaling

        draw_scaling(figure, [(name, f.method, f.world_size, f.worker_steps_per_s) for name, f in curves])
        print(f"figure: {figure}", file=sys.stderr)


def _link(text: str, latency_s: float) -> Link:
    rate = parse_rate(text)
    return Link(bandwidth_bytes_per_s=rate / 8 if rate else None, latency_s=latency_s)


def _rate(link: Link) -> str:
    return "measured " + format_rate(round(8 * (link.bandwidth_bytes_per_s or 0), -6))


def _profile(name: str, arguments: Sequence[str], data: str | None) -> Profile:
    if name.endswith(".py"):
        return profile_script(Path(name), arguments)
    if name.endswith(".json"):
        return Profile.read(Path(name))
    return profile_name(name, data)


def _check_calibration(path: Path | None, anew: bool) -> None:
    """Refuse to write over what is no calibration of ours, and to read what is not there."""
    if path is None:
        return
    if anew and path.suffix != ".json":
        raise UsageError(
            f"--calibrate writes a calibration to {path}, which is not named .json: leave --calibrate out to fit the"
            " costs to measured rows, or name a .json file"
        )
    if not anew and not path.is_file() and path.suffix == ".jsonl":
        raise UsageError(f"calibration {path} does not exist: measure rows with gradwire bench step --out {path}")


def _machine(path: Path | None, anew: bool) -> Machine:
    if path is not None and not anew:
        return machine_of_rows(path) if path.suffix == ".jsonl" else Machine.read(path)
    kept = path or default_path()
    if kept.exists() and not anew:
        return Machine.read(kept)
    print("calibrating this machine's collectives, once: about a minute", file=sys.stderr, flush=True)
    return measure_machine(kept, lambda line: print(f"  {line}", file=sys.stderr, flush=True))


def _probed() -> tuple[int, Link, int]:
    """Measure the group that torchrun started; gives rank, link and world size."""
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise UsageError("--probe measures a running group: start it with torchrun, on every machine")
    dist.init_process_group("gloo")
    try:
        return dist.get_rank(), gw.probe(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
