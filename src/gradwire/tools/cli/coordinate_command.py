"""The command ``gradwire coordinate``."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import gradwire as gw
from gradwire.tools.cli.secret_file import secret_of
from gradwire.tools.cli.show import print_json


def coordinate(listen: str, secret_file: Path | None, state: Path | None, *, as_json: bool) -> None:
    """Keep the store of a membership until the process is told to end."""
    secret = None if secret_file is None else secret_of(secret_file)
    made = gw.Coordinator(listen, secret=secret, state=state, finds_names=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _closing(made))
    address = reached_at(listen, made.port)
    begun = 0 if made.epoch is None else made.epoch.number
    if as_json:
        told = {"secret": made.secret, "secret_file": None}
        if secret_file is not None:
            told = {"secret": None, "secret_file": str(secret_file)}
        print_json([{"address": address, "port": made.port, **told, "epoch": begun}])
        # A program may wait for it at the other end of a pipe, and this process does not end.
        sys.stdout.flush()
    else:
        if begun:
            print(f"gradwire: going on after epoch {begun}", flush=True)
        variable = f"GRADWIRE_SECRET={made.secret} "
        given, option = (
            (variable, "") if secret_file is None else ("", f" --secret-file {shlex.quote(str(secret_file))}")
        )
        print("gradwire: workers join by one of these, on any machine that reaches this one", flush=True)
        print(f"  {given}gradwire train digits --join {address}{option}", flush=True)
        print(f"  {given}gradwire run --join {address}{option} script.py", flush=True)
        print(f"  {given}python script.py  # with gw.join({address!r})", flush=True)
    made.serve()


def reached_at(listen: str, port: int) -> str:
    """Return the address by which workers reach a coordinator: the one given, or this machine's name."""
    host = listen.rpartition(":")[0] if ":" in listen else listen
    return f"{socket.gethostname() if host in ('', '0.0.0.0', '[::]') else host}:{port}"


def _closing(coordinator: gw.Coordinator) -> Callable[[int, FrameType | None], None]:
    def close(number: int, frame: FrameType | None) -> None:
        coordinator.close()

    return close
