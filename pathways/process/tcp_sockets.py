"""The TCP sockets of a process, as the kernel shows them in /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import NamedTuple

_LISTENS = "0A"


class TcpSocket(NamedTuple):
    """One of IPv4."""

    address: str
    port: int
    peer: tuple[str, int]  # the other end; of one that listens, 0.0.0.0 and 0
    listens: bool


def tcp_sockets(pid: int) -> list[TcpSocket]:
    """Those of a process of this user; one that comes or goes meanwhile may be missing, and in rare cases another one.

    Raises:
        OSError: there is no such process.
    """
    own = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it was closed
            own.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    found = []
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as table:
        next(table)
        for row in table:
            _, local, peer, state, *rest = row.split()
            if f"socket:[{rest[5]}]" in own:
                found.append(TcpSocket(*_end(local), _end(peer), state == _LISTENS))
    return found


def _end(shown: str) -> tuple[str, int]:
    address, _, port = shown.partition(":")
    return socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder)), int(port, 16)
