"""Addresses of ranks, which each rank writes into the group's store for the others."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from gradwire.errors import PayloadError

PROOF_BYTES = 32
_FORM = re.compile(rb"([0-9A-Za-z.:%_-]{1,253}) ([0-9]{1,5}) ([0-9a-f]{32})")


@dataclass(frozen=True)
class Address:
    """The address at which a rank listens, with a secret by which a peer proves that it has read the store.

    Attributes:
        host: Host name or IP address.
        port: TCP port.
        secret: 32 hexadecimal digits, drawn by the rank.
    """

    host: str
    port: int
    secret: str

    def to_bytes(self) -> bytes:
        """Return the address as bytes for the store."""
        return f"{self.host} {self.port} {self.secret}".encode()

    @staticmethod
    def read(value: bytes) -> Address:
        """Read the address that another rank wrote into the store.

        Raises:
            PayloadError: the value is not an address.
        """
        found = _FORM.fullmatch(value[:512])
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise PayloadError("what the store holds is not the address of a rank")
        return Address(found[1].decode(), int(found[2]), found[3].decode())

    def proof(self, said: bytes, key: bytes = b"") -> bytes:
        """Return a proof, sent after ``said``, that the sender knows the secret, and the ranks' key if they have one.

        Neither is ever sent.
        """
        return hmac.digest(bytes.fromhex(self.secret) + key, said, "sha256")


def listening(store: Any) -> tuple[socket.socket, Address]:
    """Listen at an address that the other ranks can reach, and return the socket and the address.

    It is the address from which this machine reaches the host of the store, which every rank reaches. Ranks on the host
    of the store give its name. Without such a host, it is the address of this machine's name, or the loopback
    interface.

    Raises:
        OSError: no socket can listen.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", ""))
    own = _towards(host) if host else _of_this_machine()
    if host and _is_loopback(own) and not (host == "localhost" or _is_loopback(host)):
        # The host is this machine, and others resolve its name to another interface: store the name.
        bound, told = "0.0.0.0", host
    else:
        bound = told = own
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.bind((bound, 0))
        made.listen(128)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made, Address(told, made.getsockname()[1], secrets.token_hex(16))


def _towards(host: str) -> str:
    """Return the address of this machine on the way to a host; sends nothing."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _of_this_machine() -> str:
    try:
        return _towards(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
