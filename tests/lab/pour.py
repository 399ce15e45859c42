"""Bytes over TCP: ``pour.py serve PORT CONNECTIONS`` swallows what comes; ``pour.py send ADDRESS PORT BYTES`` sends."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading


def serve(port: int, connections: int) -> None:
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        threads = []
        for _ in range(connections):
            connection, _ = server.accept()
            threads.append(threading.Thread(target=swallow, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()


def swallow(connection: socket.socket) -> None:
    with connection:
        while connection.recv(1 << 16):
            pass
        # So that the sender does not leave before all has come.
        connection.sendall(b".")


def send(address: str, port: int, count: int) -> None:
    with socket.create_connection((address, port)) as connection:
        print("connected", flush=True)
        sys.stdin.readline()
        while count > 0:
            count -= connection.send(bytes(min(count, 1 << 16)))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        with contextlib.suppress(BrokenPipeError):
            send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
