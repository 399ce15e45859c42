"""The relay as its parent sees it: a process that delays, loses and counts the frames between hosts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from gradwire.tools.lab.impairments import Outage
from gradwire.tools.lab.iproute import Counters, LabError
from gradwire.tools.lab.topology import Topology
from gradwire.tools.processes import die_with_parent, killed_by, module_command

MOST_LATE_SHARE = 0.01
MOST_SATURATED_SHARE = 0.01
END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RelayReport:
    """What the relay has counted since it started. Bytes are those of frames from the Ethernet header on.

    Attributes:
        read_frames: Frames that hosts have sent; several segments of one connection may be one frame.
        written_frames: Frames that hosts have received.
        lost_frames: Frames dropped by loss.
        silenced_frames: Frames dropped by an outage.
        overflowed_frames: Frames dropped since they would have waited for a rate for more than 50 ms.
        overtaking_frames: Frames that overtook others.
        longest_wait_s: The longest that a frame waited for a rate.
        pending_frames: Frames on their way now.
        most_pending_frames: The most frames on their way at one time.
        no_room_frames: Frames dropped since too many were on their way: a limit of the relay.
        refused_frames: Frames that a host did not take, for instance since it was gone.
        stray_frames: Frames for no host, such as broadcasts.
        late_frames: Frames that left later than they were due by more than ``late_limit_s``.
        late_limit_s: 1 ms, or 5 % of the least delay of a host if that is longer.
        median_late_s: Median of the time from when a frame was due until it left, of all frames since the relay
            started, rounded up to a power of two microseconds.
        percentile_99_late_s: The 99th percentile of it, rounded likewise.
        most_late_s: The longest such time.
        idle_s: Time in which the relay waited for something to do.
        wall_s: Time since it started.
        saturated_s: Time in those tenths of a second in which it was idle for less than 5 %.
    """

    read_frames: int
    read_bytes: int
    written_frames: int
    written_bytes: int
    lost_frames: int
    lost_bytes: int
    silenced_frames: int
    silenced_bytes: int
    overflowed_frames: int
    overflowed_bytes: int
    overtaking_frames: int
    longest_wait_s: float
    pending_frames: int
    most_pending_frames: int
    no_room_frames: int
    refused_frames: int
    stray_frames: int
    late_frames: int
    late_limit_s: float
    median_late_s: float
    percentile_99_late_s: float
    most_late_s: float
    idle_s: float
    wall_s: float
    saturated_s: float

    def since(self, before: RelayReport) -> RelayReport:
        """Return the difference to an earlier report; times of lateness and highest values are those until now."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return RelayReport(**own | {name: own[name] - getattr(before, name) for name in self._sums()})

    @classmethod
    def together(cls, reports: Sequence[RelayReport]) -> RelayReport:
        """Return the report of several intervals: sums of counts and times, and the largest of other values."""
        names = {field.name for field in fields(cls)}
        return cls(**{n: (sum if n in cls._sums() else max)(getattr(r, n) for r in reports) for n in names})

    @classmethod
    def _sums(cls) -> set[str]:
        counts = {field.name for field in fields(cls) if field.name.endswith(("_frames", "_bytes"))}
        return counts - {"pending_frames", "most_pending_frames"} | {"idle_s", "wall_s", "saturated_s"}

    def limits(self) -> list[str]:
        """Return how the relay itself, not the links, limited what passed; an empty list if it did not."""
        found = []
        if self.no_room_frames:
            found.append(f"{self.no_room_frames} frames found no room")
        # Frames that no host took were late, too.
        left_frames = max(1, self.written_frames + self.refused_frames)
        if self.late_frames > MOST_LATE_SHARE * left_frames:
            share = 100 * self.late_frames / left_frames
            found.append(f"{share:.1f} % of the frames left more than {self.late_limit_s * 1e3:g} ms late")
        if self.saturated_s > MOST_SATURATED_SHARE * self.wall_s:
            found.append(f"it had no pause in {self.saturated_s:.1f} of {self.wall_s:.1f} s")
        return found

    def describe(self) -> str:
        """Return the report in one line."""
        dropped = {
            "lost": self.lost_frames,
            "silenced by outages": self.silenced_frames,
            "over the queue of a rate": self.overflowed_frames,
        }
        told = "".join(f", {count} {cause}" for cause, count in dropped.items() if count)
        limits = self.limits()
        return (
            f"network: {self.read_frames} frames, {self.read_bytes / 1e6:.1f} MB{told}; frames left"
            f" {self.median_late_s * 1e3:.3g} ms late at the median, {self.percentile_99_late_s * 1e3:.3g} ms at the"
            " 99th percentile"
        ) + (f"; the relay, not the links, was a limit: {', '.join(limits)}" if limits else "")


class Relay:
    """The relay of one lab.

    Args:
        topology: The cluster.
        namespaces: Paths of the hosts' namespaces, in which it makes their interfaces.
        own: Path of the namespace that it lives in.
        interface: Name of each host's interface.
        whole: Connections' segments may pass together, as with a network card that cuts and joins them.

    Raises:
        LabError: it did not start; the message says why.
    """

    def __init__(self, topology: Topology, namespaces: list[str], own: str, interface: str, whole: bool) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                module_command("gradwire.tools.lab.relay_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                # Ctrl-C ends what runs on the hosts first; the network stays until they have ended.
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            raise LabError(f"the relay between the hosts cannot be started: {error}") from error
        described = {"topology": topology.spec(), "namespaces": namespaces, "own": own, "interface": interface}
        self._ask({**described, "whole": whole})

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def set_rates(self, topology: Topology) -> None:
        """Change the rates at which hosts receive, and groups send and receive."""
        self._ask({"do": "rates", "topology": topology.spec()})

    def restart_outages(self, outages: Sequence[Outage] | None = None) -> None:
        """Let the outages, or others in their place, count from now."""
        specs = None if outages is None else [outage.spec() for outage in outages]
        self._ask({"do": "outages", "outages": specs})

    def check(self) -> None:
        """Raise LabError if the process has ended."""
        if self._process.poll() is not None:
            raise self._ended()

    def report(self) -> RelayReport:
        """Return the counters."""
        return RelayReport(**self._ask({"do": "report"}))

    def group_counters(self) -> list[Counters]:
        """Return the counters of every group's link to the others."""
        return [Counters(*row) for row in self._ask({"do": "groups"})["groups"]]

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process.stdin and process.stdout:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write((json.dumps(command) + "\n").encode())
                process.stdin.flush()
            answer = process.stdout.readline()
            if answer:
                found: dict[str, Any] = json.loads(answer)
                return found
        raise self._ended()

    def _ended(self) -> LabError:
        """Return the error that says why the process has ended."""
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"it {killed_by(code)}" if code < 0 else "it wrote nothing"
        return LabError(f"the relay between the hosts has ended: {lines[-1] if lines else how}")
