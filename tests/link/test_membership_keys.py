"""Members whose messages somebody alters or forges: refused by name, and the training goes on with the same bits."""

from __future__ import annotations

import gc
import socket
import threading
import zlib
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from crew import crew
from gradwire.link.membership.epoch_group import EpochGroup
from gradwire.link.peers.addresses import Address
from gradwire.link.peers.connections import _HELLO, _MAGIC, Connections

pytestmark = pytest.mark.ranks

STEPS = 8
FORGED = (2, 5)


def forge_rounds(link: gw.Link) -> None:
    """Put somebody on the way of what this process sends, who alters payloads and knows all but the secret.

    Checksums fit what he has altered.
    """
    from gradwire.exchange.drivers.transports.gloo import GlooTransport
    from gradwire.exchange.wire import HEADER_BYTES, pretend_senders

    usual, done = GlooTransport._send, set[int]()

    def send(self: GlooTransport, row: torch.Tensor, to: int, slot: Any) -> Any:
        payload = row.dtype == torch.uint8 and row.numel() > HEADER_BYTES and row[:2].tolist() == list(b"GW")
        if payload and link.round in FORGED and link.round not in done:
            done.add(link.round)
            row = row.clone()
            row[-1 - row.numel() // 4] ^= 0x55
            pretend_senders(row[None], first=self.rank)
        return usual(self, row, to, slot)

    GlooTransport._send = send  # type: ignore[method-assign]


def train(address: str, secret: str, name: str, pipe: Connection, keyed: bool, hostile: bool, least: int) -> Any:
    torch.manual_seed(0)
    module = nn.Linear(60, 50)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    times = {"silence_s": 30.0, "grace_s": 30.0, "patience_s": 60.0}
    with gw.join(address, secret=secret, name=name, least=least, keyed=keyed, **times) as membership:
        link = gw.Link(module.named_parameters(), "terngrad", group=membership, optimizer=optimizer, min_numel=0)
        if hostile:
            forge_rounds(link)
        while link.round < STEPS:
            draw = torch.Generator().manual_seed(100 * link.round + membership.rank)
            optimizer.zero_grad()
            module(torch.randn(8, 60, generator=draw)).square().mean().backward()
            link.reduce_()
            optimizer.step()
            flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
            pipe.send(("step", link.round, zlib.crc32(flat.numpy().data)))
        gc.collect()
        groups = sum(isinstance(found, EpochGroup) for found in gc.get_objects())
        told = {**link.diagnostics()["membership"], "groups": groups}
        # Nobody leaves, and so begins another epoch for the others, before all have counted.
        link.reduce_()
        return told


def trained(keyed: bool, hostile: bool) -> tuple[list[dict[int, int]], list[dict[str, int]]]:
    """Return the digests of three workers' parameters by round, and what they have counted."""
    with crew() as workers:
        three = [workers.start(name, train, keyed, hostile and name == "a", 3) for name in "abc"]
        told = [worker.end() for worker in three]
        return [worker.steps for worker in three], told


def test_an_altered_payload_is_refused_and_the_training_goes_on_as_if_nothing_had_happened() -> None:
    # The data of a round depend on ranks alone, not on which worker has which.
    due, told = trained(keyed=True, hostile=False)
    assert due[0] == due[1] == due[2]
    assert set(due[0]) == set(range(1, STEPS + 1))
    assert sum(one["payloads_refused"] + one["broken_rounds"] for one in told) == 0
    found, told = trained(keyed=True, hostile=True)
    assert found == due
    assert sum(one["payloads_refused"] for one in told) >= len(FORGED)
    assert all(one["broken_rounds"] >= len(FORGED) for one in told)
    assert all(one["digests_differed"] == one["lost"] == 0 for one in told)
    # Of epochs that broke nothing is left, such as connections to the store.
    assert [one["groups"] for one in told] == [1] * 3


def test_without_a_key_bits_are_the_same_and_a_payload_whose_checksum_fits_is_taken() -> None:
    due, _ = trained(keyed=False, hostile=False)
    assert due == trained(keyed=True, hostile=False)[0]
    found, told = trained(keyed=False, hostile=True)
    assert sum(one["payloads_refused"] + one["broken_rounds"] for one in told) == 0
    assert found != due


def test_a_worker_with_another_setting_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[str] = []

    def ask(address: str, secret: str) -> None:
        parameter = nn.Parameter(torch.zeros(10))
        with gw.join(address, secret=secret, name="other", keyed=False, patience_s=4.0) as membership:
            try:
                gw.Link([parameter], "terngrad", group=membership)
            except gw.ExchangeError as error:
                refused.append(str(error))

    with crew() as workers:
        address, parameter = f"127.0.0.1:{workers.port}", nn.Parameter(torch.zeros(10))
        with gw.join(address, secret=workers.secret, name="first", signals=()) as membership:
            link = gw.Link([parameter], "terngrad", group=membership)
            asking = threading.Thread(target=ask, args=(address, workers.secret))
            asking.start()
            while asking.is_alive():
                parameter.grad = torch.ones(10)
                link.reduce_()
                asking.join(0.05)
            assert membership.world_size == 1
    assert "no member took this worker (other) in" in refused[0]
    assert "other asked to come in, and has another version" in caplog.text


def test_who_reads_the_store_cannot_pass_for_a_member_at_another_ones_port() -> None:
    heard: list[int] = []
    store = dist.HashStore()
    lower = Connections(store, 0, 2, lambda rank, _: heard.append(rank), lambda *_: None, int, int, b"key of the epoch")
    try:
        address = Address.read(bytes(store.get("gradwire/peers/0")))
        hello = _HELLO.pack(_MAGIC, 1)
        for key, taken in ((b"", False), (b"another key", False), (b"key of the epoch", True)):
            with socket.create_connection((address.host, address.port), 10) as stranger:
                stranger.sendall(hello + address.proof(hello, key))
                stranger.settimeout(10)
                assert bool(stranger.recv(100)) == taken
        assert heard == []
    finally:
        lower.close()
