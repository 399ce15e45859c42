"""The work of ``gradwire train --join`` and ``gradwire run --join``: workers that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gradwire.errors import HyperparameterError
from gradwire.tools.cli.secret_file import secret_in
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.processes import die_with_parent, killed_by

if TYPE_CHECKING:
    from gradwire.tools.experiments.config import RunConfig

JOIN, SECRET = "GRADWIRE_JOIN", "GRADWIRE_SECRET"
"""Variables that ``gw.join()`` reads."""

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
DEFAULTS = {"OMP_NUM_THREADS": "1", LOG_LEVEL: "ERROR"}
"""Variables that a script has unless they are set. Of each connection that ends, torch warns by a page of frames."""

RESTARTS = 3
"""Default number of restarts."""

STEADY_S = 60.0
"""A script that ran for so long had begun well: restarts before it do not count."""


def silence_torch() -> None:
    """Turn off torch's warnings in this process unless its variable is set; torch must not have been imported."""
    os.environ.setdefault(LOG_LEVEL, DEFAULTS[LOG_LEVEL])


def secret_for(secret_file: Path | None) -> str:
    """Return the secret in a file, or in the environment.

    Raises:
        HyperparameterError: there is none.
    """
    if secret_file is not None:
        return secret_in(secret_file)
    if SECRET not in os.environ:
        raise HyperparameterError(f"no secret: give --secret-file, or set {SECRET}, as `gradwire coordinate` says")
    return os.environ[SECRET]


def train(
    config: RunConfig, address: str, secret_file: Path | None, out: Path | None, *, overwrite: bool,
    stop_after: int | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Train as a member, then print the run's row of the table."""
    from gradwire.tools.cli.commands import Progressing, print_run
    from gradwire.tools.experiments.member import train_as_member

    with Progressing(debug) as progress:
        folder = train_as_member(
            config, progress, address, secret_for(secret_file), folder=out, overwrite=overwrite, stop_after=stop_after
        )
    print_run(folder, as_json=as_json)


def resume(
    folder: Path, address: str, secret_file: Path | None, *, stop_after: int | None, as_json: bool, debug: bool
) -> None:
    """Join again with a member's run folder, then print its row of the table."""
    from gradwire.tools.cli.commands import Progressing, print_run
    from gradwire.tools.experiments.member import resume_as_member

    with Progressing(debug) as progress:
        resume_as_member(folder, progress, address, secret_for(secret_file), stop_after=stop_after)
    print_run(folder, as_json=as_json)


def run(
    address: str, secret_file: Path | None, script: Path, arguments: Sequence[str], max_restarts: str | None
) -> int:
    """Run a script that calls ``gw.join()``; start it again when it fails. Return its exit code.

    Args:
        max_restarts: Largest number of restarts in a row, as text; None: :data:`RESTARTS`.

    Raises:
        UsageError: the script does not exist, or ``max_restarts`` is not a number.
        HyperparameterError: there is no secret, or its file holds none.
        GradwireError: the file of the secret cannot be read.
    """
    if not script.is_file():
        raise UsageError(f"script {script} does not exist")
    if max_restarts is not None and not max_restarts.isdecimal():
        raise UsageError(f"--max-restarts {max_restarts}: a number from 0 on is needed")
    told = {**DEFAULTS, **os.environ, JOIN: address, SECRET: secret_for(secret_file)}
    restarts = RESTARTS if max_restarts is None else int(max_restarts)
    return keep_running([sys.executable, str(script), *arguments], told, restarts)


def keep_running(words: Sequence[str], environment: Mapping[str, str], restarts: int) -> int:
    """Run a command; run it again when it fails, at most so often in a row. Return its exit code.

    SIGTERM, SIGINT and, unless ignored (nohup), SIGHUP are passed on, and end it for good.
    """
    process: subprocess.Popen[bytes] | None = None
    ended_by: list[int] = []
    kept: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)
        if process is not None and process.poll() is None:
            process.send_signal(number)
        else:
            kept.append(number)

    wanted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in wanted}
    failures = 0
    try:
        while True:
            began_s = time.monotonic()
            # In a session of its own no signal of a terminal reaches it beside the one that is passed on.
            process = subprocess.Popen(
                words, env=environment, start_new_session=True, preexec_fn=_child_of(os.getpid())
            )
            # Signals that came while no process was known. Each is sent once: a member ends at once by a second one.
            while kept:
                process.send_signal(kept.pop(0))
            code = process.wait()
            if code == 0 or ended_by:
                return 128 - code if code < 0 else code
            failures = 1 if time.monotonic() - began_s > STEADY_S else failures + 1
            how = killed_by(code) if code < 0 else f"ended with exit code {code}"
            if failures > restarts:
                print(f"gradwire: the script {how}, after {restarts} restarts", file=sys.stderr, flush=True)
                return 128 - code if code < 0 else code
            print(f"gradwire: the script {how}: starting it again", file=sys.stderr, flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child_of(parent: int) -> Callable[[], None] | None:
    """Return what a child does before it runs, so that it ends with this process."""
    return partial(die_with_parent, parent) if sys.platform == "linux" else None
