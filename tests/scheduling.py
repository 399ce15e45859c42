"""The order in which runners of pytest-xdist take the files of tests.

Half of the suite's time is computing, in one process. The other half is waiting: for other processes to start, for
exchanges, for a time after which somebody counts as lost. pytest-xdist hands out the files with the most tests first.
These compute, so that both halves came one after the other, the second with idle processors. Here the first runner
takes files that compute and the other runners take files that wait, as long as there are any; each takes the longest
first, so that none is left to run alone at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = ("bench", "cli", "examples", "experiments", "integrations", "lab", "link", "publish", "site")
"""Folders of tests whose files mostly wait. Files of no folder do, too: they build and install the package."""

LONGEST = (
    "tests/test_wheel.py",
    "tests/link/test_membership_protocol.py",
    "tests/link/test_membership.py",
    "tests/link/test_every_method.py",
    "tests/experiments/test_workers.py",
    "tests/lab/test_several_machines.py",
    "tests/link/test_fsdp.py",
    "tests/link/test_devices.py",
    "tests/link/test_broken_transfers.py",
    "tests/link/test_fsdp_overlap.py",
    "tests/integrations/test_frameworks.py",
    "tests/link/test_failures.py",
    "tests/site/test_site.py",
    "tests/link/test_membership_far.py",
    "tests/examples/test_examples.py",
    "tests/methods/test_shared_properties.py",
    "tests/kernels/test_triton.py",
    "tests/exchange/test_protocols.py",
    "tests/kernels/test_storing.py",
)
"""Files that take over half a minute, the longest of each kind first. What is left out costs time, nothing else."""


def waits(file: str) -> bool:
    """Return whether a file of tests, by its path, is one of those that mostly wait."""
    folder = file.split("/")[1:-1]
    return not folder or folder[0] in WAITING


def next_file(tests: Mapping[str, int], computing: bool) -> str:
    """Return the file that a runner takes next: the longest of its kind, or of all if none of its kind is left.

    Args:
        tests: Number of tests in each file that no runner has taken. It decides among the files that are not in
            :data:`LONGEST`.
        computing: Whether the runner takes files that compute.
    """
    left = [file for file in tests if waits(file) != computing] or list(tests)
    rank = {file: place for place, file in enumerate(LONGEST)}
    return min(left, key=lambda file: (rank.get(file, len(rank)), -tests[file], file))


class SideBySide(LoadFileScheduling):
    """Hand out whole files, those that compute to the first runner and those that wait to the others."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        tests = {file: len(found) for file, found in self.workqueue.items()}
        self.workqueue.move_to_end(next_file(tests, node.gateway.id == "gw0"), last=False)
        super()._assign_work_unit(node)
