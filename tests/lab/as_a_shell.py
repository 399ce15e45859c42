"""Become the program of a command line, as a shell does: ``as_a_shell.py "NAME=value torchrun --node-rank $RANK"``.

torchrun and gradwire run as modules, and so may be forks: see ``tests/interpreters.py``.
"""

from __future__ import annotations

import os
import shlex
import sys

MODULES = {"torchrun": "torch.distributed.run", "gradwire": "gradwire.tools.cli.main"}

words, environment = shlex.split(os.path.expandvars(sys.argv[1])), dict(os.environ)
while "=" in words[0]:
    name, _, environment[name] = words.pop(0).partition("=")
os.execve(sys.executable, [sys.executable, "-m", MODULES[words[0]], *words[1:]], environment)
