"""The loopback interface of a network namespace of the script's own, and what it has counted."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

__all__ = ["interface_bytes", "isolate"]


def isolate() -> None:
    """Start this script again in a network namespace of its own."""
    if os.environ.get("GRADWIRE_ISOLATED"):
        raise_loopback()
        return
    if shutil.which("unshare") is None:
        sys.exit("unshare is missing: install util-linux")
    environment = dict(os.environ, GRADWIRE_ISOLATED="1", GLOO_SOCKET_IFNAME="lo")
    flags = "-n" if os.geteuid() == 0 else "-rn"
    sys.exit(subprocess.run(["unshare", flags, sys.executable, *sys.argv], env=environment, check=False).returncode)


def raise_loopback() -> None:
    """Bring the namespace's loopback interface up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh22x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(handle, 0x8914, request)


def interface_bytes() -> int:
    """Return the bytes that left through the loopback interface since the namespace began."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
