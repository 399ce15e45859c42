"""Datagrams that are answered: ``echo.py serve PORT`` answers; ``echo.py ask ADDRESS PORT COUNT SECONDS`` asks.

It prints the milliseconds of each answer, those that came until all had, or no more came for so many seconds.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

FORCED_BUFFER = 33
"""SO_RCVBUFFORCE of Linux: a receive buffer above the limit of others, for root."""


def opened() -> socket.socket:
    """Return a socket that keeps what comes while its program is held up."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, FORCED_BUFFER, 1 << 22)
    return made


def serve(port: int) -> None:
    with opened() as server:
        server.bind(("", port))
        print("ready", flush=True)
        while True:
            server.sendto(*server.recvfrom(2048))


def ask(address: str, port: int, count: int, patience_s: float) -> None:
    with opened() as asker:
        asker.connect((address, port))
        sent: dict[bytes, float] = {}
        found: list[float] = []

        def take(wait_s: float) -> None:
            asker.settimeout(wait_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                while len(found) < count:
                    answer = asker.recv(2048)
                    found.append(time.perf_counter() - sent[answer])
            # A datagram is sent however long the queue is full.
            asker.settimeout(None)

        for number in range(count):
            word = b"%d" % number
            sent[word] = time.perf_counter()
            asker.send(word)
            if number % 20 == 19:
                # So that no socket's queue is filled.
                take(0.001)
        take(patience_s)
        print(*(f"{1e3 * seconds:.6f}" for seconds in found))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
