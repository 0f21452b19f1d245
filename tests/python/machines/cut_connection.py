"""A connection whose line is cut while much is under way, by `test_machine_namespaces.py`.

listen              takes one caller, answers its first byte, and reads on
send HOST PORT      sends much to there; after a line on its standard input, sends more for 7 s; then says after how
                    many seconds the kernel sent again, each time
"""

from __future__ import annotations

import socket
import struct
import sys
import time

from pathways.transport import SILENCE_S
from pathways.transport.connection import Connection, ignoring
from pathways.transport.loop import Loop

SENT_AGAIN = struct.Struct("100xI")  # of `struct tcp_info`: packets that were sent again


def listen() -> None:
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        caller, _ = server.accept()
    with caller:
        caller.send(caller.recv(1))
        while caller.recv(1 << 16):
            pass


def send(host: str, port: str) -> None:
    loop = Loop()
    with socket.create_connection((host, int(port))) as sock:
        sock.send(b"x")
        sock.recv(1)
        sock.setblocking(False)
        connection = Connection(loop, sock, print, parse=ignoring(loop), silence_s=10 * SILENCE_S)
        connection.start()
        connection.send(memoryview(bytes(1 << 20)))
        print("sending", flush=True)
        sys.stdin.readline()
        connection.send(memoryview(bytes(1 << 20)))
        began, times, count = time.monotonic(), [], 0
        while (now := time.monotonic() - began) < 7:
            (again,) = SENT_AGAIN.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT_AGAIN.size))
            if again != count:
                times.append(round(now, 2))
            count = again
            time.sleep(0.02)
        print(*times, flush=True)
        connection.end()
    loop.close()


if __name__ == "__main__":
    {"listen": listen, "send": send}[sys.argv[1]](*sys.argv[2:])
