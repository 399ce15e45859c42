"""``gradwire plan``: the performance model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.tools.cli import options as o
from gradwire.tools.cli.show import handled

MODEL, CLUSTER = "Model", "Cluster"


def plan(
    profile: Annotated[
        str,
        typer.Option(
            "--profile", metavar="WHAT", help="A task, a model of bench step, or a .py script", rich_help_panel=MODEL
        ),
    ] = "digits",
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's, behind --")] = None,
    data: o.Data = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", metavar="SPEC", help=f"{o.METHOD_HELP}. Repeatable")
    ] = None,
    hosts: Annotated[list[int] | None, typer.Option(help="Computers; repeatable", rich_help_panel=CLUSTER)] = None,
    gpus_per_host: Annotated[
        int, typer.Option("--gpus-per-host", help="Workers on each, sharing its link", rich_help_panel=CLUSTER)
    ] = 1,
    cores: Annotated[
        int | None,
        typer.Option(help="Of each host, where workers compute on them; else none waits", rich_help_panel=CLUSTER),
    ] = None,
    bandwidth: Annotated[
        list[str] | None, typer.Option(help="Between hosts; repeatable", rich_help_panel=CLUSTER)
    ] = None,
    latency: Annotated[str, typer.Option(help="Of a message, beside this machine's own", rich_help_panel=CLUSTER)] = (
        "0ms"
    ),
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Under torchrun: measure the link of its group", rich_help_panel=CLUSTER),
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of collectives; else this machine's, made when first needed")
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Calibrate this machine anew")] = False,
    calibration_limit: Annotated[
        float,
        typer.Option(
            "--calibration-limit", metavar="SECONDS", help="Calibrating may take so long; what is there by then is used"
        ),
    ] = 60.0,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Throughput against workers, PNG or SVG")] = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Predict step time by method, say what bounds it, and what to do; the answer may be "do nothing".

    The model's backward timeline and the methods' codecs are timed here; bytes and rounds are those of the methods' own
    protocols. The interval holds 80 % of the measured steps by which the machine was calibrated.

    Example: [cyan]gradwire plan --profile train.py --hosts 4 --hosts 16 --bandwidth 1gbit[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import plan_command

        plan_command.plan(
            profile=profile,
            arguments=arguments or [],
            data=data,
            methods=method,
            hosts=hosts,
            ranks_per_host=gpus_per_host,
            cores=cores,
            bandwidths=bandwidth,
            latency=latency,
            probe=probe,
            calibration=calibration,
            calibrate=calibrate,
            calibration_limit_s=calibration_limit,
            figure=figure,
            as_json=as_json,
        )
