"""Connections to torch's store that wait for no silent name server.

torch's store has the name of whoever is at the other end of a connection looked up, at both ends, for its log. Whoever
connects waits for the answer, and while the server waits it serves nobody. Where a name server does not answer, as on
many a network that is cut off from others, the C library waits for ten seconds, longer than members wait for a
connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

RES_INIT = 1
"""Option of a resolver that has begun."""


def connect(host: str, port: int, timeout_s: float) -> Any:
    """Return a connection to a store.

    Raises:
        OSError: nobody listens there, or the name of the host is not known.
        RuntimeError, DistError: the store does not answer in time.
    """
    # torch would try for the whole time, and write twenty lines for each time that nobody listens.
    with socket.create_connection((host, port), timeout_s) as tried:
        address = str(tried.getpeername()[0])
    with brief_lookups():
        return dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )


def another(store: Any) -> Any:
    """Return a further connection to the same store.

    Raises:
        RuntimeError, DistError: the store does not answer in time.
    """
    with brief_lookups():
        return store.clone()


@contextlib.contextmanager
def brief_lookups() -> Iterator[None]:
    """Let this thread ask one name server, once, and wait for a second.

    After an answer that did not come, torch asks no more. C libraries other than glibc are left as they are.
    """
    resolver = _resolver()
    if resolver is None:
        yield
        return
    before = resolver.retrans, resolver.retry, resolver.nscount
    # Seconds to wait, attempts, and the number of servers.
    resolver.retrans, resolver.retry, resolver.nscount = 1, 1, min(resolver.nscount, 1)
    try:
        yield
    finally:
        resolver.retrans, resolver.retry, resolver.nscount = before


def forget_name_servers() -> None:
    """Let all threads of this process find names in this machine's own table alone, from now on."""
    libc = _glibc()
    if libc is not None:
        libc.__nss_configure_lookup(b"hosts", b"files")


class _Resolver(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state``, which each thread has of its own."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _resolver() -> _Resolver | None:
    """Return the state of this thread's resolver; None if the C library is another one."""
    libc = _glibc()
    # Before glibc 2.34 they are in a library of their own, which is not loaded.
    if libc is None or not hasattr(libc, "__res_init"):
        return None
    find = libc["__res_state"]
    find.restype = ctypes.POINTER(_Resolver)
    found: _Resolver = find().contents
    return found if found.options & RES_INIT or libc["__res_init"]() == 0 else None
