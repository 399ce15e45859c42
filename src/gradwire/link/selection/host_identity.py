"""Which ranks share a host, and with it a link."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

__all__ = ["host_number"]


def host_number() -> float:
    """Return a number that processes share where they share network interfaces, exact as a float.

    On Linux that is a network namespace of one boot of one machine, so that each container or emulated host counts as
    one; elsewhere the host's name tells.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        name = f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        name = socket.gethostname()
    return float(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big"))
