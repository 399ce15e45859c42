"""The work of ``gradwire plan``, given its options."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradwire as gw
from gradwire.methods.accuracy import note_of
from gradwire.model.forecast import NOTHING, Forecast, Rehearsed, Scenario, forecast, recommend
from gradwire.model.machine import BBR, CUBIC, DEFAULT, LinkModel, Machine, timeout_s
from gradwire.model.probing import host_number
from gradwire.model.profile import Profile
from gradwire.tools.bench.models import MODELS
from gradwire.tools.bench.predict import default_path, machine_of_rows, measure_machine
from gradwire.tools.bench.profile import profile_name, profile_script, usual_options
from gradwire.tools.cli.options import PlanOptions, check_figure
from gradwire.tools.cli.show import print_json, print_plan
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.worker import make_group
from gradwire.tools.lab import parse_delay, parse_rate, parse_share
from gradwire.tools.lab.iproute import congestion_here
from gradwire.tools.report.verdict import rate_text, seconds_text

METHODS = ("bf16", "fp16", "terngrad", "coded")
HOSTS = (2, 4, 8)
BANDWIDTHS = ("100mbit", "1gbit", "10gbit")
FAR_S = 1e-3
"""Least delay for which it matters how TCP sends."""


def plan(options: PlanOptions) -> None:
    """Profile the model, calibrate the machine, and print predicted steps and advice.

    Raises:
        UsageError: options that do not go together.
    """
    arguments, ranks_per_host = options.arguments or [], options.gpus_per_host
    methods = _candidates(options.method or METHODS)
    _check_calibration(options.calibration, options.calibrate)
    if arguments and not options.profile.endswith(".py"):
        raise UsageError(
            f"{' '.join(arguments)}: words of their own are a script's arguments; to profile a task or a model, give"
            f" --profile {arguments[0]}"
        )
    if not 0 < options.calibration_limit < math.inf:
        raise UsageError(f"--calibration-limit {options.calibration_limit:g}: seconds above 0 are needed")
    if options.cores is not None and options.cores < 1:
        raise UsageError(
            f"--cores {options.cores}: at least 1 is needed; leave it out where no worker waits for a core"
        )
    if options.data is not None and (options.profile.endswith((".py", ".json")) or options.profile in MODELS):
        raise UsageError(f"--data is what a task reads, and {options.profile} is none: leave it out")
    check_figure(options.figure)
    delay_s, loss = parse_delay(options.delay), parse_share(options.loss)
    if loss >= 1:
        raise UsageError(f"--loss {options.loss}: below 100% is needed")
    congestion = _congestion(options.congestion)
    rates = options.bandwidth or BANDWIDTHS
    links = {_rate(link): link for link in (_link(text, delay_s, loss, congestion) for text in rates)}
    counts = list(options.hosts or HOSTS)
    if min(counts) < 1 or ranks_per_host < 1 or min(counts) * ranks_per_host < 2:
        raise UsageError("one worker exchanges nothing: give --hosts 2 or more, or --gpus-per-host")
    if options.figure is not None and (options.probe or len(set(counts)) < 2):
        raise UsageError("a curve needs two numbers of workers: give --hosts more than once, or leave --figure out")
    if options.probe:
        if options.bandwidth or options.hosts or ranks_per_host != 1 or delay_s or loss:
            raise UsageError(
                "--probe measures the group that runs: leave --hosts, --gpus-per-host, --bandwidth, --delay and --loss"
                " out"
            )
        answer = _probed(options)
        if answer is None:
            return
        machine, found, world_size = answer
        found = dataclasses.replace(found, congestion=congestion)
        ranks_per_host = found.ranks_per_host
        counts, links = [-(-world_size // ranks_per_host)], {f"measured {_rate(found)}": found}
        print(f"gradwire: {_found(found, world_size)}", file=sys.stderr)
        known = _profile(options.profile, arguments, options.data)
    else:
        # Profile first: a fault in a script then shows before a minute of calibration.
        known = _profile(options.profile, arguments, options.data)
        machine = _machine(options)
    options_of_task = usual_options(known.source)
    rehearsed: Rehearsed = {}
    rows: list[dict[str, Any]] = []
    curves: list[tuple[str, Forecast]] = []
    advice: list[tuple[str, str]] = []
    apart: dict[str, str] = {}
    reasons: set[str] = set()
    for name, link in links.items():
        for count in counts:
            setting = Scenario(
                hosts=count, ranks_per_host=ranks_per_host, cores=options.cores, link=link, measured=options.probe
            )
            forecasts, refused = forecast(known, methods, setting, machine, options_of_task, rehearsed=rehearsed)
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
                        "delay_s": link.latency_s,
                        "loss": link.loss,
                        "congestion": link.congestion,
                        **{key: value for key, value in dataclasses.asdict(f).items() if key != "apart"},
                        "recommended": f.method == choice,
                        "note": None if f.method == NOTHING else note_of(f.method),
                    }
                )
            for spec, why in refused.items():
                # Most do not depend on the bandwidth.
                if (said := f"{spec} on {count} hosts: {why}") not in reasons:
                    print(f"gradwire: {said}", file=sys.stderr)
                reasons.add(said)
            apart |= {f.method: f.apart for f in forecasts if f.apart is not None}
    furthest_s = max(link.latency_s for link in links.values())
    for said in _about_tcp(options.congestion, congestion, furthest_s, known.timeline.compute_s):
        print(f"gradwire: {said}", file=sys.stderr)
    for spec, why in apart.items():
        print(f"gradwire: {spec} is not recommended for its time: it {why}", file=sys.stderr)
    if options.as_json:
        print_json(rows)
    else:
        print(f"{known.source}: {known.numel / 1e6:.2f} M parameters, {seconds_text(known.timeline.compute_s)} a step "
              f"alone; collectives: {machine.source}")  # fmt: skip
        print_plan(rows)
        for place, reason in advice:
            print(f"{place}: {reason}")
        for spec in methods:
            note = note_of(spec)
            if note is not None and gw.method(spec).traits.remembers:
                print(f"{spec}: {note}")
    if options.figure is not None:
        from gradwire.tools.report.figures import draw_scaling

        draw_scaling(options.figure, [(name, f.method, f.world_size, f.worker_steps_per_s) for name, f in curves])
        print(f"figure: {options.figure}", file=sys.stderr)


def _candidates(specs: Sequence[str]) -> list[str]:
    """Return the methods to predict: of a method that chooses among others, such as ``auto``, its candidates."""
    found = [one for spec in specs for one in gw.method(spec).traits.tries or (spec,)]
    return list(dict.fromkeys(found))


def _link(text: str, delay_s: float, loss: float, congestion: str) -> LinkModel:
    rate = parse_rate(text)
    return LinkModel(
        bandwidth_bytes_per_s=rate / 8 if rate else None, latency_s=delay_s, loss=loss, congestion=congestion
    )


def _congestion(asked: str | None) -> str:
    """Return the congestion control to predict with: the one asked for, or this machine's, if it is predicted."""
    name = asked or congestion_here() or CUBIC
    if name == CUBIC or name.startswith(BBR):
        return name
    if asked:
        raise UsageError(f"--congestion {asked}: predictions know {CUBIC} and {BBR}")
    return CUBIC


def _keeps_windows() -> bool:
    """Return whether this machine's connections begin after a rest with the window that they had before."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text().strip() == "0"
    except OSError:
        return False


def _about_tcp(asked: str | None, congestion: str, delay_s: float, compute_s: float) -> Iterator[str]:
    """Yield what to know of a prediction for connections with such a delay, and rests as long as a step computes."""
    if delay_s < FAR_S:
        return
    here = congestion_here() or congestion
    if asked is None and here != congestion:
        yield f"TCP's congestion control here is {here}, which is predicted as {congestion}"
    elif asked is None and congestion != CUBIC:
        yield (
            f"TCP's congestion control is taken for {congestion}, this machine's, which decides how long links with "
            "delay take: for other hosts give --congestion"
        )
    if congestion == CUBIC and compute_s > timeout_s(delay_s) and (asked or not _keeps_windows()):
        yield (
            f"between steps connections rest for longer than TCP's timeout, {seconds_text(timeout_s(delay_s))}, after "
            "which CUBIC begins slowly again: this is not predicted, and net.ipv4.tcp_slow_start_after_idle=0 on every "
            "host avoids it"
        )


def _rate(link: LinkModel) -> str:
    rate = link.bandwidth_bytes_per_s
    return rate_text(None if rate is None else float(f"{8 * rate:.4g}"))


def _profile(name: str, arguments: Sequence[str], data: str | None) -> Profile:
    if name.endswith(".py"):
        return profile_script(Path(name), arguments)
    if name.endswith(".json"):
        return Profile.read(Path(name))
    return profile_name(name, data)


def _check_calibration(path: Path | None, anew: bool) -> None:
    """Refuse to overwrite a file that is not a calibration, and to read one that does not exist."""
    if path is None:
        return
    if anew and path.suffix != ".json":
        raise UsageError(
            f"--calibrate writes a calibration to {path}, which is not named .json: leave --calibrate out to fit the"
            " costs to measured rows, or name a .json file"
        )
    if not anew and not path.is_file() and path.suffix == ".jsonl":
        raise UsageError(f"calibration {path} does not exist: measure rows with gradwire bench step --out {path}")


def _machine(options: PlanOptions) -> Machine:
    path, anew, limit_s = options.calibration, options.calibrate, options.calibration_limit
    if path is not None and not anew:
        if path.suffix != ".jsonl":
            return Machine.read(path)
        return machine_of_rows(path, lambda line: print(f"gradwire: {path}: {line}", file=sys.stderr))
    kept = path or default_path()
    if kept.exists() and not anew:
        return Machine.read(kept)
    print(f"calibrating this machine's collectives, once: at most {seconds_text(limit_s)}", file=sys.stderr, flush=True)
    return measure_machine(kept, lambda line: print(f"  {line}", file=sys.stderr, flush=True), limit_s)


def _probed(options: PlanOptions) -> tuple[Machine, LinkModel, int] | None:
    """Measure the group that torchrun started; return machine, network link and world size on rank 0, else None."""
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise UsageError("--probe measures a running group: start it with torchrun, on every machine")
    make_group()
    try:
        ranks = _ranks_of_hosts()
        if len(set(ranks)) > 1:
            # One line, of rank 0.
            if dist.get_rank():
                return None
            raise UsageError(
                f"--probe: the hosts run {', '.join(map(str, ranks))} ranks, and a prediction is of hosts with equally"
                " many: start torchrun with the same --nproc-per-node on each, or give --hosts, --gpus-per-host and"
                " --bandwidth instead"
            )
        # The other ranks wait: the calibration on rank 0 decides what is subtracted from the measured times.
        machine = _machine(options) if dist.get_rank() == 0 else DEFAULT
        link, world_size = gw.probe(machine=machine, cores=options.cores), dist.get_world_size()
        return None if dist.get_rank() else (machine, link, world_size)
    finally:
        dist.destroy_process_group()


def _ranks_of_hosts() -> list[int]:
    """Return the number of ranks of each host of the group."""
    import torch
    import torch.distributed as dist

    hosts = [torch.empty(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(hosts, torch.tensor([host_number()], dtype=torch.float64))
    return list(Counter(float(host) for host in hosts).values())


def _found(link: LinkModel, world_size: int) -> str:
    if world_size <= link.ranks_per_host:
        return (
            f"all {world_size} workers are on one host: what was measured is its memory, not a link to another host;"
            " start the command on every host, or give --hosts and --bandwidth"
        )
    if link.bandwidth_bytes_per_s is None:
        return f"no link limited the probe; delay {link.latency_s * 1e3:.2g} ms one way"
    return f"probed: {_rate(link)} between hosts, delay {link.latency_s * 1e3:.2g} ms one way"
