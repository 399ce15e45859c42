"""What transports do beside carrying operations: numbering, rooms that nobody fills, ends, timeouts."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.exchange.drivers import TorchGroup
from gradwire.exchange.drivers.devices import HostDevice
from gradwire.exchange.drivers.transports import GlooTransport, NCCLTransport, StagedTransport, Transport
from gradwire.exchange.drivers.transports.base import Turn
from gradwire.exchange.ops import AllToAll, Op, Reduce, SendRecv

WAIT = timedelta(seconds=10)


def test_reductions_of_the_same_values_are_told_apart() -> None:
    """So that a message of an earlier reduction is not taken for one of this."""
    transport, sealed = GlooTransport(dist.HashStore(), 0, 1, WAIT), list[list[int]]()
    gather = transport._gather

    def noted(send: torch.Tensor, recv: torch.Tensor, job: str | None) -> torch.Tensor:
        sealed.append(send.tolist())
        return gather(send, recv, job)

    transport._gather = noted  # type: ignore[method-assign]
    for _ in range(2):
        assert transport.execute(Reduce(torch.ones(3), "max"), nullcontext).tolist() == [1.0] * 3
    first, second = sealed
    assert first != second
    # Three values, and behind them what tells the number.
    assert first[:12] == second[:12]


class Still(Transport):
    """Sends and receives nothing."""

    rank, world_size = 0, 3

    def execute(self, op: Op, turn: Turn, job: str | None = None) -> torch.Tensor:
        assert isinstance(op, SendRecv)
        return op.recv

    def end_job(self) -> None:
        """Prepare nothing."""

    def close(self, broken: bool) -> None:
        """End nothing."""


class Apart(HostDevice):
    """A device that holds all payloads, and whose page-locked rooms hold something else at first."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, 7)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


def test_a_transport_that_says_nothing_of_it_does_not_start_operations() -> None:
    """A lane asks no other for it, so that the two defaults must agree."""
    silent = (Still(), StagedTransport(Still(), Apart()), NCCLTransport(None, Still(), Apart()))
    assert not any(transport.starts for transport in silent)
    for transport in silent:
        with pytest.raises(TypeError, match="needs buffers of the lane"):
            transport.start(AllToAll(torch.zeros(3, 1), torch.zeros(3, 1)))


@pytest.mark.parametrize(("source", "left"), [(None, [1, 1]), (2, [7, 7])])
def test_a_room_that_nobody_fills_stays_as_it_was(source: int | None, left: list[int]) -> None:
    room = torch.ones(2, dtype=torch.uint8)
    staged = StagedTransport(Still(), Apart())
    assert staged.execute(SendRecv(torch.zeros(2, dtype=torch.uint8), room, 1, source), nullcontext).tolist() == left
    assert room.tolist() == left


@pytest.mark.parametrize(("broken", "ended"), [(True, "abort"), (False, "shutdown")])
def test_broken_connections_are_not_waited_for(broken: bool, ended: str) -> None:
    calls = list[str]()

    class Backend:
        def __getattr__(self, name: str) -> Any:
            return lambda: calls.append(name)

    NCCLTransport(Backend(), Still(), HostDevice()).close(broken)
    assert calls == [ended]


@pytest.mark.parametrize(
    ("backends", "bound", "preferred", "expected"),
    [
        ("cpu:gloo,cuda:nccl", None, "cuda:1", "cpu"),
        ("cuda:nccl", None, "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:2", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:2", "cpu", "cuda:2"),
        ("cuda:nccl", None, "cpu", "cuda:0"),
    ],
)
def test_tables_travel_from_the_gpu_of_the_parameters_whichever_is_current(
    backends: str, bound: str | None, preferred: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        bound_device_id = None if bound is None else torch.device(bound)

        def rank(self) -> int:
            return 0

    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group = TorchGroup(Group())  # type: ignore[arg-type]
    group.prefer(torch.device(preferred))
    assert str(group.device) == expected


@pytest.mark.parametrize(("backends", "kind"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda")])
def test_a_timeout_is_that_of_a_backend_that_the_group_has(
    backends: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    class Group:
        def rank(self) -> int:
            return 0

        def _get_backend(self, device: torch.device) -> Any:
            asked.append(device.type)
            options = type("Options", (), {"_timeout": WAIT})
            return type("Backend", (), {"options": options})

    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    assert TorchGroup(Group()).timeout == WAIT  # type: ignore[arg-type]
    assert asked == [kind]
