"""What replicas of a trial need, imported once by the server that forks them: modules, and kernels of some methods."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo

import gradwire as gw
from gradwire.kernels import pieces

METHODS = "GRADWIRE_TRIAL_METHODS"


def preload(methods: Sequence[str], modules: Sequence[str] = ()) -> None:
    """Let the server that forks processes import this module and others, and load the kernels of some methods."""
    for spec in methods:
        gw.warm_up(gw.method(spec))
    root = str(Path(__file__).resolve().parents[2])
    os.environ |= {METHODS: ";".join(methods), "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload([__name__, *modules])


if multiprocessing.current_process().name == "MainProcess" and METHODS in os.environ:
    torch.set_num_threads(1)
    # The first optimizer of a process imports torch._dynamo, which takes a second or two.
    NEEDED = (gw.join, gw.Link, gw.ElasticSampler, gw.Coordinator, torch._dynamo)
    pieces.warm_up()
    for loaded in filter(None, os.environ[METHODS].split(";")):
        gw.warm_up(gw.method(loaded))
