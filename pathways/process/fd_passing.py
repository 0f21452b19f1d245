"""Small JSON messages with file descriptors beside them, over a Unix SOCK_SEQPACKET socket.

Two uses. One is the socket pair between the controller and a host. The other is the descriptor socket, on which the
controller gives a client its segments; when it closes, each side knows that the other side is gone. One message is one
packet, so it is never split and never merged. Received descriptors are close-on-exec and belong to the receiver.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

from pathways.process.supervisor import wait_readable

MAX_MESSAGE_BYTES = 64 * 1024
MAX_FDS = 8

Message = dict[str, Any]


class Closed(ConnectionError):
    """The other end is closed."""


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair, both ends close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(path: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """A listening socket at `path` that only this user can open."""
    server = socket.socket(socket.AF_UNIX, kind)
    old = os.umask(0o177)
    try:
        server.bind(path)
    finally:
        os.umask(old)
    server.listen(64)
    return server


def connect(path: str) -> socket.socket:
    """Connects to `listen(path)`.

    Raises:
        OSError: no process listens there.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.connect(path)
    except BaseException:
        client.close()
        raise
    return client


def send(connection: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Sends one message. The descriptors stay open here. A text under `message` that is too long is cut, not refused.

    Raises:
        Closed: the other end is closed.
        BlockingIOError: a non-blocking socket is full.
    """
    packet = json.dumps(message).encode()
    if len(packet) > MAX_MESSAGE_BYTES:
        text = str(message.get("message", ""))
        packet = json.dumps({**message, "message": text[: MAX_MESSAGE_BYTES // 8] + " ..."}).encode()
    try:
        socket.send_fds(connection, [packet], fds or [])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other end is closed") from error


def receive(connection: socket.socket, timeout_s: float | None = None) -> tuple[Message, list[int]]:
    """Waits for one message and its descriptors.

    Raises:
        Closed: the other end is closed.
        TimeoutError: no message came in `timeout_s` seconds.
        ValueError: the message or its descriptors were cut.
    """
    if timeout_s is not None and not wait_readable(connection.fileno(), timeout_s):
        raise TimeoutError(f"no message within {timeout_s:g} s")
    size = array.array("i").itemsize
    try:
        packet, ancillary, flags, _ = connection.recvmsg(
            MAX_MESSAGE_BYTES, socket.CMSG_LEN(MAX_FDS * size), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError as error:
        raise Closed("the other end is closed") from error
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % size])
            fds.extend(numbers)
    try:
        if not packet:
            raise Closed("the other end is closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a message on the descriptor socket was cut short")
        return json.loads(packet), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process id and user id of the process that opened the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid
