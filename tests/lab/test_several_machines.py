"""The commands of the page on several machines, on two emulated hosts, and the failures that it describes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from lab_help import NEEDS_LAB, program, start_lab

pytestmark = [*NEEDS_LAB, pytest.mark.repository, pytest.mark.ranks]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "several-machines.md").read_text()
COMMANDS = re.findall(r"^(?:torchrun|gradwire run) --nnodes .*$", PAGE, re.MULTILINE)
PLAIN = ROOT / "examples" / "digits.py"
SHORT = """
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=15))
"""


def on_two_hosts(command: str, shell: bool = False) -> tuple[int, str]:
    """Run a command of the page on each host, with the host's own number and the first one's address.

    Args:
        command: A line of the page.
        shell: Run it by a shell, which finds the program by PATH; all that it starts import anew.
    """
    words = command.replace("--node-rank 0", "--node-rank $RANK").replace("10.0.0.1", "$MASTER_ADDR")
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": found, "OMP_NUM_THREADS": "1"}
    runner = ["sh", "-c"] if shell else program("as_a_shell")
    process = start_lab("--hosts", 2, "--", *runner, words, env=environment)
    try:
        told = "".join(process.communicate(timeout=280))
    finally:
        process.kill()
    return process.returncode, told


def test_the_page_has_both_commands() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["torchrun", "gradwire"]


def test_torchrun_starts_the_tutorial_on_both_hosts(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / "tutorials" / "ddp.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "train.py").write_text("\n".join(blocks))
    code, told = on_two_hosts(COMMANDS[0].replace("train.py", str(tmp_path / "train.py")))
    assert code == 0, told
    assert "training accuracy 0.9" in told
    assert "times fewer" in told


def test_gradwire_run_leaves_the_script_as_it_is() -> None:
    # One worker a host: that hosts number several is the other command's test.
    one_each = COMMANDS[1].replace("per-node 2", "per-node 1")
    assert one_each != COMMANDS[1]
    code, told = on_two_hosts(one_each.replace("plain.py", f"{PLAIN} --steps 20"))
    assert code == 0, told
    assert "training accuracy" in told


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("lo", r"Gloo connectFullMesh failed with .*Connection refused, remote=\[127\.0\.0\.1\]"),
        ("eth7", "Unable to find address for: eth7"),
    ],
)
def test_a_wrong_interface_fails_as_the_page_says(interface: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHORT)
    command = COMMANDS[0].replace("train.py", str(tmp_path / "train.py")).replace("per-node 2", "per-node 1")
    code, told = on_two_hosts(f"GLOO_SOCKET_IFNAME={interface} {command}", shell=interface == "eth7")
    assert code != 0
    assert re.search(expected, told), told
    row = expected.replace(r"\[", "[").replace(r"\]", "]").replace(r"\.", ".").replace(".*", "... ")
    assert f"| `{row}` |" in PAGE
