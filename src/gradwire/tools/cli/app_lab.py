"""``gradwire run --lab``: torchrun on every host of an emulated cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradwire.tools.cli import options as o
from gradwire.tools.cli.bootstrap import ENVIRONMENT, to_text
from gradwire.tools.cli.show import handled
from gradwire.tools.cli.torchrun import command, compile_kernels
from gradwire.tools.experiments.config import LinkSettings
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.lab import PORT, Topology, open_network, run_command

OF_THE_LAB = ("nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
"""Flags of torchrun whose values the emulated cluster gives."""


def run_on_lab(
    lab: str,
    settings: LinkSettings,
    flags: Mapping[str, str | None],
    standalone: bool,
    script: Path,
    arguments: Sequence[str],
) -> None:
    """Run a script under one torchrun a host.

    Raises:
        UsageError: a flag that the emulated cluster sets, no such script, or only one process.
        BackendError: no emulated cluster can be built here.
        LabError: the kernel refused it, or torchrun failed on a host.
    """
    wrong = [f"--{flag}" for flag in OF_THE_LAB if flags.get(flag) is not None] + ["--standalone"] * standalone
    if wrong:
        raise UsageError(f"--lab names the machines and how they meet: leave {', '.join(wrong)} out")
    topology = Topology.parse(lab)

    def words(host: int, address: str) -> list[str]:
        own = {"nnodes": str(topology.hosts), "node-rank": str(host), "master-addr": address, "master-port": str(PORT)}
        return command({**flags, **own}, False, script, arguments)

    words(0, "")
    compile_kernels(settings.method)
    with open_network(topology) as network:
        run_command(network, lambda host: words(host, network.address(0)), {ENVIRONMENT: to_text(settings)})


def lab(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What each host runs, behind --")],
    hosts: Annotated[int, typer.Option(help="Network namespaces, each with its own link")] = 4,
    bandwidth: Annotated[str, typer.Option(help="Of every link, both ways: 100mbit, 1gbit, unlimited")] = "unlimited",
    asymmetric: Annotated[
        str | None, typer.Option(metavar="RATE", help="What a host may send, where it differs from --bandwidth")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="N=RATE", help="One host's own link: 2=10mbit, or 2=10mbit:100mbit (sends:receives)"),
    ] = None,
    groups: Annotated[int, typer.Option(help="Switches that the hosts are spread over")] = 1,
    between: Annotated[str | None, typer.Option(metavar="RATE", help="Of each group's link to the others")] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="MS", help="One way, such as 5ms; needs the kernel's netem")
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Run a command once on each host of an emulated cluster: Linux, root, iproute2.

    Each host is a network namespace on a bridge, with its link limited both ways. The command finds RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT and Gloo's interface set as torchrun would set them.

    Example: [cyan]sudo env "PATH=$PATH" gradwire lab --hosts 4 --bandwidth 100mbit -- python train.py[/cyan]
    """
    with handled(debug):
        from gradwire.errors import HyperparameterError
        from gradwire.tools.lab import Topology, open_network, run_command

        parts = [f"hosts={hosts}", f"bandwidth={bandwidth}", f"groups={groups}"]
        given = {"asymmetric": asymmetric, "between": between, "delay": delay}
        parts += [f"{key}={value}" for key, value in given.items() if value is not None]
        parts += [f"host{item}" for item in host or []]
        for part in parts:
            if "," in part:
                raise HyperparameterError(f"{part!r}: one value is needed; give each setting by an option of its own")
        with open_network(Topology.parse(",".join(parts))) as network:
            run_command(network, command)
