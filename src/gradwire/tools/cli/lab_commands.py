"""``gradwire run --lab``: torchrun on every host of an emulated cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.tools.cli.bootstrap import ENVIRONMENT, to_text
from gradwire.tools.cli.torchrun import command, compile_kernels
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.link_settings import LinkSettings
from gradwire.tools.lab import PORT, Topology, open_network, run_command

__all__ = ["run_on_lab"]

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
