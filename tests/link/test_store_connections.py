"""Connections to torch's store do not wait for name servers that never answer."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gradwire.link.membership import store_connections
from gradwire.link.membership.store_connections import brief_lookups, connect

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

UNKNOWN = ("::ffff:127.0.0.1", 80, 0, 0)
"""An address without a name in the machine's own table: torch connects to such a one wherever there is IPv6."""


class NameServer:
    """A name server that hears questions and gives no answer; that of this thread in a ``with`` block."""

    def __init__(self, attempts: int = 1) -> None:
        self._attempts = attempts
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setblocking(False)

    def __enter__(self) -> NameServer:
        resolver = store_connections._resolver()
        assert resolver is not None
        self._resolver = resolver
        # The address of the first one follows the number of them.
        at = ctypes.addressof(resolver) + store_connections._Resolver.nscount.offset + ctypes.sizeof(ctypes.c_int)
        self._address = (ctypes.c_ubyte * 16).from_address(at)
        self._before = bytes(self._address), resolver.retrans, resolver.retry, resolver.nscount
        port = self._socket.getsockname()[1]
        self._address[:] = bytes([socket.AF_INET, 0]) + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
        resolver.retrans, resolver.retry, resolver.nscount = 1, self._attempts, 1
        return self

    def __exit__(self, *_: object) -> None:
        self._address[:], self._resolver.retrans, self._resolver.retry, self._resolver.nscount = self._before
        self._socket.close()

    def asked(self) -> int:
        """Return how many questions have come."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(4096):
                count += 1
        return count


def look_up() -> None:
    with contextlib.suppress(OSError):
        socket.getnameinfo(UNKNOWN, 0)


def told_by(program: str) -> list[str]:
    """Return the words that a program prints. torch asks no more in a process in which an answer did not come."""
    path = [str(Path(__file__).parent), *sys.path]
    program = f"import sys; sys.path[:0] = {path!r}\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


CONNECTS = """
import torch.distributed as dist
from gradwire.link.membership.store_connections import another, connect
from test_store_connections import NameServer, look_up
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with NameServer(attempts=3) as names:
    store = connect("localhost", server.port, 10.0)
    further = another(store)
    further.set("key", "value")
    print(store.get("key").decode(), names.asked())
    look_up()
    print(names.asked())
"""


def test_a_silent_name_server_is_asked_once_and_by_the_program_itself_as_ever() -> None:
    word, asked, by_itself = told_by(CONNECTS)
    assert (word, int(by_itself)) == ("value", 3)
    assert int(asked) <= 1


def test_other_threads_ask_theirs_meanwhile() -> None:
    found: list[tuple[int, int, int]] = []

    def look() -> None:
        resolver = store_connections._resolver()
        assert resolver is not None
        found.append((resolver.retrans, resolver.retry, resolver.nscount))

    def look_elsewhere() -> None:
        looking = threading.Thread(target=look)
        looking.start()
        looking.join()

    look()
    look_elsewhere()
    with brief_lookups():
        look()
        look_elsewhere()
    look()
    usual, of_others, brief, of_others_meanwhile, afterwards = found
    assert usual == afterwards != brief
    assert of_others == of_others_meanwhile


def test_nobody_who_listens_and_a_name_that_is_unknown_are_errors_of_the_system() -> None:
    # As long as it is bound, nobody else comes to listen there.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for host in ("127.0.0.1", "no such host"):
            with pytest.raises(OSError):  # noqa: PT011 (its texts are the system's)
                connect(host, taken.getsockname()[1], 1.0)


FORGETS = """
from gradwire.link.membership.store_connections import forget_name_servers
from test_store_connections import NameServer, look_up
with NameServer() as names:
    look_up()
    forget_name_servers()
    print(names.asked())
    look_up()
    print(names.asked())
"""


def test_a_process_that_has_forgotten_its_name_servers_asks_none() -> None:
    assert told_by(FORGETS) == ["1", "0"]
