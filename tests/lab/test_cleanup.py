"""However a lab ends, its namespaces and all that ran in them go; those of others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_help import NEEDS_LAB, lab_of, on_host, program, spaces, start_lab
from run_help import alive, wait_for

from gradwire.tools.lab import LabError, Network, Topology, environment, open_network, run_command

pytestmark = NEEDS_LAB

WAIT_S = 60
"""What the harness bounds; nothing here takes that long."""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """A lab of two hosts that would run long: its process, its name, and four processes, two of them grandchildren."""
    process = start_lab("--hosts", 2, "--", *program("hold", tmp_path))
    try:
        wait_for(lambda: process.poll() is not None or len(list(tmp_path.glob("pids-*"))) == 2, WAIT_S, "both hosts")
        pids = [int(pid) for path in sorted(tmp_path.glob("pids-*")) for pid in path.read_text().split()]
        assert len(pids) == 4
        yield process, lab_of(pids[0]), pids
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_lab_that_is_told_to_end_leaves_nothing(
    held: tuple[subprocess.Popen[str], str, list[int]], number: signal.Signals, code: int
) -> None:
    process, name, pids = held
    assert all(lab_of(pid) == name for pid in pids)
    process.send_signal(number)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert "Traceback" not in told
    assert spaces(name) == []
    assert not any(map(alive, pids))


def test_a_killed_lab_is_removed_by_the_next_and_a_living_one_is_not(
    held: tuple[subprocess.Popen[str], str, list[int]],
) -> None:
    process, name, pids = held
    with open_network(Topology(hosts=2)) as living:
        neighbour = on_host(living, 1, ["sleep", "600"])
        process.kill()
        process.communicate()
        wait_for(lambda: not alive(pids[0]) and not alive(pids[2]), WAIT_S, "the commands to die with their lab")

        def gone() -> bool:
            # Another test's lab may be tidying up at this moment: then it is that one's work.
            with open_network(Topology(hosts=1)):
                return spaces(name) == [] and not any(map(alive, pids))

        wait_for(gone, WAIT_S, "the dead lab to go")
        assert neighbour.poll() is None
        assert len(spaces(living.name)) == 3
        neighbour.kill()
        neighbour.communicate()
    assert spaces(living.name) == []


def test_an_error_in_the_body_removes_the_lab_and_goes_on() -> None:
    found = []

    def fail() -> None:
        with open_network(Topology(hosts=2)) as lab:
            found.append((lab.name, on_host(lab, 0, ["sleep", "600"])))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    ((name, process),) = found
    assert spaces(name) == []
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def code_on(host: int, code: str) -> list[str]:
    """Return a command that does something on one host, and waits on the others."""
    wait = f"import os, time, signal\nif os.environ['RANK'] != '{host}': time.sleep(600)\n"
    return [sys.executable, "-c", wait + code]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "the command on host 1 ended with code 3; all hosts are ended"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the command on host 1 was killed by SIGKILL; all hosts are ended"),
    ],
)
def test_a_failing_command_ends_all_hosts_and_is_named(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.tools.lab.command.GRACE_S", 0.2)
    with open_network(Topology(hosts=3)) as lab:
        with pytest.raises(LabError, match=message):
            run_command(lab, code_on(1, code))
        for host in range(3):
            listed = subprocess.run(
                ["ip", "netns", "pids", lab.namespace(host)], capture_output=True, text=True, check=True
            )
            assert listed.stdout == ""
    assert spaces(lab.name) == []


def test_a_command_that_does_not_exist_is_named() -> None:
    done = start_lab("--hosts", 2, "--", "no-such-command")
    _, told = done.communicate(timeout=WAIT_S)
    assert done.returncode == 1
    assert told.splitlines()[-1].startswith("gradwire: the command on host ")


def test_what_hosts_write_is_passed_on_line_by_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code = "import os, sys; print('one'); print('two ' + os.environ['RANK'], end=''); print('bad', file=sys.stderr)"
    with open_network(Topology(hosts=2)) as lab:
        run_command(lab, [sys.executable, "-c", code])
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == [b"h0: one", b"h0: two 0", b"h1: one", b"h1: two 1"]
    assert sorted(err.splitlines()) == [b"h0: bad", b"h1: bad"]


def test_each_host_may_have_words_and_variables_of_its_own(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code = "import os, sys; print(sys.argv[1], os.environ['EXTRA'], os.environ['RANK'])"
    with open_network(Topology(hosts=2)) as lab:
        run_command(lab, lambda host: [sys.executable, "-c", code, f"word{host}"], {"EXTRA": "more"})
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"h0: word0 more 0", b"h1: word1 more 1"]


def test_the_environment_is_torchruns() -> None:
    found = environment(Network("gwtest", Topology(hosts=3)), 2)
    assert found["RANK"] == found["GROUP_RANK"] == "2"
    assert found["WORLD_SIZE"] == found["GROUP_WORLD_SIZE"] == "3"
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")
    assert 0 < int(found["MASTER_PORT"]) < 65536


@pytest.mark.ranks
def test_a_script_for_torchrun_finds_its_group() -> None:
    lab = start_lab("--hosts", 3, "--bandwidth", "1gbit", "--", *program("add_up"), env={**os.environ, "RANK": "7"})
    out, told = lab.communicate(timeout=WAIT_S)
    assert lab.returncode == 0, told
    assert sorted(out.splitlines()) == [f"h{rank}: rank {rank} of 3, eth0: 111" for rank in range(3)]
