"""A living lab is never taken for a dead one, and a dead one is always found."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from gradwire.tools.lab.locks import Claim, dead_labs

CLAIM = """
import sys, time
from pathlib import Path
from gradwire.tools.lab.locks import Claim
claim = Claim(Path(sys.argv[1]))
print(claim.name, flush=True)
time.sleep(600)
"""
DEAD = "import sys; from pathlib import Path; from gradwire.tools.lab.locks import dead_labs; "
DEAD += "print(*dead_labs(Path(sys.argv[1])))"


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", CLAIM, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_living_lab_s_name_cannot_be_taken_and_a_dead_one_s_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "labs"
    assert list(dead_labs(folder)) == []
    process, name = start(folder)
    mine = Claim(folder)
    try:
        assert name != mine.name
        assert list(dead_labs(folder)) == []
        elsewhere = subprocess.run(
            [sys.executable, "-c", DEAD, str(folder)], capture_output=True, text=True, check=True
        )
        assert elsewhere.stdout.split() == []
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert list(dead_labs(folder)) == [name]
    assert list(dead_labs(folder)) == []
    mine.release()
    assert list(folder.iterdir()) == []


def test_a_child_that_outlives_its_lab_does_not_keep_it_alive(tmp_path: Path) -> None:
    code = CLAIM.replace(
        "time.sleep(600)", "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, child = (process.stdout.readline().strip() for _ in range(2))
    try:
        process.wait()
        assert list(dead_labs(tmp_path)) == [name]
    finally:
        subprocess.run(["kill", "-9", child], check=False)
        process.stdout.close()


def test_a_dead_lab_is_not_tidied_up_twice_at_once(tmp_path: Path) -> None:
    process, name = start(tmp_path)
    process.kill()
    process.communicate()
    for found in dead_labs(tmp_path):
        assert found == name
        assert list(dead_labs(tmp_path)) == []
