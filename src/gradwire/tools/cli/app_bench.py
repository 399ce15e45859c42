"""``gradwire bench``: measured tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.tools.cli import options as o
from gradwire.tools.cli.show import handled

bench = typer.Typer(no_args_is_help=True, help="Measured tables: training steps, and kernels against memcpy.")


@bench.command()
def step(
    model: Annotated[list[str] | None, typer.Option(help="mlp, resnet, transformer, lenet; repeatable")] = None,
    hosts: Annotated[list[int] | None, typer.Option(help="Emulated hosts; repeatable (2, 4, 8)")] = None,
    bandwidth: Annotated[
        list[str] | None, typer.Option(help="Repeatable (50mbit, 100mbit, 1gbit, 5gbit, unlimited)")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="compute, 'ddp fp32', 'ddp fp16', 'ddp powersgd', 'gradwire SPEC'; repeatable"),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="One cluster instead of the grid, such as hosts=4,bandwidth=100mbit"),
    ] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="No emulated cluster, no limits, no root")] = False,
    compute: Annotated[
        str,
        typer.Option(
            metavar="real|sleep|cuda",
            help="sleep: workers sleep as long as one alone computes, so that only exchanges use the cores; "
            "cuda: they compute on this machine's GPUs",
        ),
    ] = "real",
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="For each exchange in each cell, about")] = 3.0,
    cell_budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For each cell, all its exchanges together, about; instead of --budget"),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="JSON lines; what it holds is not measured again")
    ] = Path("step.jsonl"),
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Speed-ups against bandwidth, PNG or SVG")] = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Measure training steps: models by hosts by bandwidths by exchanges, taking turns within a cell.

    On one machine the workers' passes compete with the exchange for the cores, which a cluster does not do; with
    --compute sleep, DDP gets the same gradients at the times measured for one worker alone.

    Resumes where it was stopped. Fails if the interfaces' bytes differ by more than 5 % from the library's.

    Example: [cyan]sudo env "PATH=$PATH" gradwire bench step --model mlp --hosts 4 --bandwidth 100mbit[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import bench_commands

        bench_commands.step(
            models=model,
            hosts=hosts,
            bandwidths=bandwidth,
            variants=variant,
            lab=lab,
            loopback=loopback,
            compute=compute,
            budget_s=budget,
            cell_budget_s=cell_budget,
            out=out,
            figure=figure,
            as_json=as_json,
        )


@bench.command()
def timeline(
    model: Annotated[str, typer.Option(help="mlp, resnet, transformer, lenet")] = "mlp",
    lab: Annotated[
        str, typer.Option(metavar="SPEC", help="The cluster; with --loopback its number of hosts alone counts")
    ] = "hosts=4,bandwidth=100mbit",
    loopback: Annotated[bool, typer.Option("--loopback", help="No emulated cluster, no limits, no root")] = False,
    method: Annotated[str, typer.Option("--method", "-m", metavar="SPEC", help=o.METHOD_HELP)] = "terngrad",
    compute: Annotated[str, typer.Option(metavar="real|sleep", help="As for bench step")] = "sleep",
    steps: Annotated[int, typer.Option(help="To be recorded, after a few that are not")] = 3,
    rank: Annotated[int, typer.Option(help="Whose last step the figure shows")] = 0,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="All ranks' spans, for Perfetto or Chrome's tracing page"),
    ] = Path("timeline.json"),
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="One rank's lanes, PNG or SVG")] = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Record what each lane does in a step: encode, wait for its turn, send, decode; and where the link is idle.

    Example: [cyan]sudo env "PATH=$PATH" gradwire bench timeline --method coded --figure coded.png[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import bench_commands

        bench_commands.timeline(
            model=model,
            lab=lab,
            loopback=loopback,
            method=method,
            compute=compute,
            steps=steps,
            rank=rank,
            out=out,
            figure=figure,
            as_json=as_json,
        )


@bench.command()
def kernels(
    elements: Annotated[int, typer.Option(help="Of the large vectors")] = 20_000_000,
    repetitions: Annotated[int, typer.Option(help="Of each kernel")] = 15,
    backend: Annotated[str, typer.Option(help="auto, cpu, cpu-plain, reference")] = "auto",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="cuda: compare Triton's kernels with the reference there first")
    ] = "cpu",
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Measure the kernels on one thread, or on the GPU, each between two memcpys of the same run.

    Example: [cyan]gradwire bench kernels --json > kernels.json[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import bench_commands

        bench_commands.kernels(elements, repetitions, backend, device, as_json=as_json)
