"""The work of ``gradwire run``: start torchrun with a script wrapped by :mod:`gradwire.tools.cli.bootstrap`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gradwire.tools.cli.bootstrap import ENVIRONMENT, to_text
from gradwire.tools.experiments.config import LinkSettings
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.lab import PORT, Topology, open_network, run_command
from gradwire.tools.processes import module_command

NUMBER = r"\d+"
FORMS = {
    "nproc-per-node": (r"[1-9]\d*|auto|cpu|gpu|xpu", "a number of workers, such as 4"),
    "nnodes": (r"[1-9]\d*(:[1-9]\d*)?", "a number of machines, such as 2"),
    "node-rank": (NUMBER, "a number from 0 on"),
    "master-port": (NUMBER, "the number of a port"),
    "max-restarts": (NUMBER, "a number from 0 on"),
}
"""Flags that torchrun checks with a traceback only: the pattern of each value, and its description."""

SET_BY_LAB = ("nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
"""Flags of torchrun that the emulated cluster sets."""


def command(flags: Mapping[str, str | None], standalone: bool, script: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts the workers; flags that are None keep torchrun's default.

    Raises:
        UsageError: the script does not exist, a flag has a wrong value, or only one process would run.
    """
    if not script.is_file():
        raise UsageError(f"script {script} does not exist")
    given = {flag: value for flag, value in flags.items() if value is not None}
    for flag, (form, wanted) in FORMS.items():
        if flag in given and not re.fullmatch(form, given[flag]):
            raise UsageError(f"--{flag} {given[flag]}: {wanted} is needed")
    if given.get("nproc-per-node", "1") == "1" and given.get("nnodes", "1") == "1":
        raise UsageError("one process exchanges nothing: give --nproc-per-node 2 or more, or --nnodes")
    rendezvous = {"nnodes", "master-addr", "master-port", "rdzv-endpoint", "rdzv-backend"}
    alone = standalone or not rendezvous & given.keys()
    python, *words = module_command("gradwire.tools.cli.bootstrap")
    return [
        *module_command("gradwire.tools.cli.launcher"),
        *(["--standalone"] if alone else []),
        *(f"--{flag}={value}" for flag, value in given.items()),
        # torchrun itself would start a module with ``-m`` alone; like it, do not buffer what workers print.
        *("--no-python", python, "-u", *words, str(script), *arguments),
    ]


def compile_kernels(method: str) -> None:
    """Compile a method's kernels before workers start, and say so if it takes long."""
    import gradwire as gw

    seconds = gw.warm_up(method)
    if seconds > 0.5:
        print(f"compiling kernels, once per machine: {seconds:.1f} s", file=sys.stderr, flush=True)


def replace_process(settings: LinkSettings, words: Sequence[str]) -> NoReturn:
    """Compile the method's kernels, then replace this process by the launcher, which handles signals and exit codes."""
    from gradwire.tools.experiments.launch import loopback

    compile_kernels(settings.method)
    local = loopback() if "--standalone" in words else {}
    defaults = {"OMP_NUM_THREADS": "1", **local}
    environment = {**defaults, **os.environ, ENVIRONMENT: to_text(settings)}
    os.execve(words[0], list(words), environment)


def run_on_lab(
    lab: str,
    settings: LinkSettings,
    flags: Mapping[str, str | None],
    standalone: bool,
    script: Path,
    arguments: Sequence[str],
) -> None:
    """Run a script under one torchrun on each host of an emulated cluster.

    Raises:
        UsageError: a flag is given that the emulated cluster sets, or :func:`command` refuses the command.
        BackendError: no emulated cluster can be built here.
        LabError: the kernel refused it, or torchrun failed on a host.
    """
    wrong = [f"--{flag}" for flag in SET_BY_LAB if flags.get(flag) is not None] + ["--standalone"] * standalone
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
