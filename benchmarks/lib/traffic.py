"""What hosts do to measure a network: ``python benchmarks/lib/traffic.py ROLE ...``; it imports nothing that is slow.

serve CONNECTIONS         take what comes over connections; print bytes and time at each line of standard input
send ADDRESS CONNECTIONS  send over connections without end
answer                    answer datagrams
ping ADDRESS COUNT        print the seconds of each answer; lost ones are left out
confirm SIZE              take messages of SIZE bytes over one connection, and answer each with a byte
message ADDRESS SIZE SECONDS PAUSE FIRST
                          send messages of FIRST bytes in all at once, then some of SIZE bytes one after the other, with
                          a pause of so many seconds after each answer; print the seconds from the first byte of each to
                          its answer
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

PORT = 7400


def serve(connections: int) -> None:
    """Take what comes over some connections; say how much it was at each line of standard input."""
    taken = [0] * connections

    def take(number: int, connection: socket.socket) -> None:
        buffer = bytearray(1 << 18)
        while count := connection.recv_into(buffer):
            taken[number] += count

    with socket.create_server(("", PORT), backlog=connections) as server:
        print("ready", flush=True)
        for number in range(connections):
            threading.Thread(target=take, args=(number, server.accept()[0]), daemon=True).start()
    for _ in sys.stdin:
        print(sum(taken), time.monotonic(), flush=True)


def send(address: str, connections: int) -> None:
    """Send over some connections without end."""

    def pour() -> None:
        with socket.create_connection((address, PORT)) as connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(bytes(1 << 18))

    threads = [threading.Thread(target=pour) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def answer() -> None:
    """Answer datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", PORT))
        print("ready", flush=True)
        while True:
            server.sendto(*server.recvfrom(2048))


def ping(address: str, count: int) -> None:
    """Print the seconds of each round trip; lost ones are left out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((address, PORT))
        asker.settimeout(1.0)
        for number in range(count):
            began = time.perf_counter()
            asker.send(b"%d" % number)
            with contextlib.suppress(TimeoutError):
                while asker.recv(2048) != b"%d" % number:
                    pass
                print(time.perf_counter() - began)


def confirm(size: int) -> None:
    """Take messages of ``size`` bytes over one connection, and answer each with a byte."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        connection = server.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer, taken = bytearray(1 << 18), 0
        while count := connection.recv_into(buffer):
            taken += count
            while taken >= size:
                taken -= size
                connection.send(b".")


def message(address: str, size: int, seconds: float, pause_s: float, first: int) -> None:
    """Send messages for so many seconds, at least eight, and print how long each took until its answer.

    Those of ``first`` bytes in all, which are sent at once before, are not counted.
    """
    content = bytes(size)
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(content * (at_once := -(-first // size)))
        while at_once:
            at_once -= len(connection.recv(at_once))
        until, number = time.perf_counter() + seconds, 0
        while number < 8 or time.perf_counter() < until:
            began = time.perf_counter()
            connection.sendall(content)
            if not connection.recv(1):
                return
            print(time.perf_counter() - began, flush=True)
            time.sleep(pause_s)
            number += 1


def main() -> None:
    """Play the role that the words name."""
    role, *words = sys.argv[1:]
    if role == "serve":
        serve(int(words[0]))
    elif role == "send":
        send(words[0], int(words[1]))
    elif role == "answer":
        answer()
    elif role == "confirm":
        confirm(int(words[0]))
    elif role == "message":
        message(words[0], int(words[1]), float(words[2]), float(words[3]), int(words[4]))
    else:
        ping(words[0], int(words[1]))


if __name__ == "__main__":
    main()
