"""What the tests of emulated clusters share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_help import wait_for

from gradwire.tools.lab import Network, missing

PROBLEM = missing()
NEEDS_LAB = [pytest.mark.lab, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]
HERE = Path(__file__).parent


def program(name: str, *words: object) -> list[str]:
    """Return the command for a program beside this file."""
    return [sys.executable, str(HERE / f"{name}.py"), *map(str, words)]


def on_host(network: Network, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command on a host, and see it there: before it has entered, a lab that ends does not find it."""
    words = [*network.enter(host), *command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    wait_for(lambda: process.poll() is not None or lab_of(process.pid) == network.name, 60, "the command to enter")
    return process


def limit(namespace: str, device: str) -> float | None:
    """Return the rate in bits per second to which an interface is limited, None where it is not."""
    words = ["tc", "-n", namespace, "-j", "qdisc", "show", "dev", device]
    listed = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return next((8 * float(q["options"]["rate"]) for q in listed if q["kind"] == "tbf"), None)


def spaces(name: str) -> list[str]:
    """Return the namespaces of a lab."""
    listed = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [entry["name"] for entry in json.loads(listed or "[]") if entry["name"].startswith(f"{name}-")]


def lab_of(process: int) -> str:
    """Return the name of the lab that a process runs in, "" where it runs in none or no longer."""
    words = ["ip", "netns", "identify", str(process)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip().rpartition("-")[0]


def start_lab(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start ``gradwire lab``."""
    command = [sys.executable, "-m", "gradwire.tools.cli.main", "lab", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
