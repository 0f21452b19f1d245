"""Bare connections between two processes over loopback: sockets (TLS 1.3 with mutual certificates, or TCP) and gRPC.

Both ends speak the same small protocol. A connection begins with how many bytes a message has, and how many its answer
has; then come messages, and for each of them its answer. So a message carries nothing but its bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from pathways.bench import processes
from pathways.trust import Authority, Credentials, Role
from pathways.trust.identity import server_name

SOCKETS = ("tls", "tcp")
KINDS = (*SOCKETS, "grpc")
_HEAD = struct.Struct("<QQ")
_PATIENCE_S = 60.0
_METHOD = ("pathways.bench.Bare", "Move")
#: gRPC's messages have at most so many bytes, as those of `pathways/host/network_transfer.py`.
_PART_BYTES = 1 << 20
_GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _read(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`. False: the connection ended before."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if count == 0:
            return False
        at += count
    return True


class Peer:
    """The receiving end. `listen` says where to connect."""

    def listen(self, kind: str, credentials: str) -> int:
        """Takes connections of `kind` from now on, on the returned port. `credentials`: a file of `Credentials`."""
        own = Credentials.load(credentials)
        if kind == "grpc":
            return self._serve_grpc(own)
        context = own.server_context() if kind == "tls" else None
        listener = socket.create_server(("127.0.0.1", 0))

        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if context is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                _answer(stack.enter_context(connection))

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    def _serve_grpc(self, own: Credentials) -> int:
        import grpc

        def move(messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
            whole, back = _HEAD.unpack(next(messages))
            left = whole
            for message in messages:
                left -= len(message)
                if left == 0:
                    yield bytes(back)
                    left = whole

        handlers = {_METHOD[1]: grpc.stream_stream_rpc_method_handler(move)}
        credentials = grpc.ssl_server_credentials([_grpc_pair(own)], own.authority.encode(), True)
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=_GRPC_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METHOD[0], handlers),))
        port = int(self._server.add_secure_port("127.0.0.1:0", credentials))
        self._server.start()
        return port


def _grpc_pair(own: Credentials) -> tuple[bytes, bytes]:
    return own.key.encode(), own.certificate.encode()


def _answer(connection: socket.socket) -> None:
    head = memoryview(bytearray(_HEAD.size))
    if not _read(connection, head):
        return
    whole, back = _HEAD.unpack(head)
    message, answer = memoryview(bytearray(whole)), bytes(back)
    while _read(connection, message):
        connection.sendall(answer)


class _SocketStream:
    """One connection that sends `message` again and again."""

    def __init__(self, connection: socket.socket, message: memoryview, back: int) -> None:
        self._connection = connection
        self._message = message
        self._answer = memoryview(bytearray(back))
        connection.sendall(_HEAD.pack(len(message), back))

    def move(self, count: int) -> None:
        """Sends `count` messages, one behind the other, and returns when all are answered."""
        for _ in range(count):
            self._connection.sendall(self._message)
        for _ in range(count):
            if not _read(self._connection, self._answer):
                raise ConnectionError("the other end closed the connection")

    def close(self) -> None:
        self._connection.close()


class _GrpcStream:
    """The same on one call of gRPC, in messages of at most `_PART_BYTES`."""

    def __init__(self, channel: Any, message: memoryview, back: int) -> None:
        self._message = message
        self._parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._parts.put(_HEAD.pack(len(message), back))
        self._answers = channel.stream_stream(f"/{_METHOD[0]}/{_METHOD[1]}")(iter(self._parts.get, None))
        self._channel = channel

    def move(self, count: int) -> None:
        for _ in range(count):
            for at in range(0, len(self._message), _PART_BYTES):
                self._parts.put(bytes(self._message[at : at + _PART_BYTES]))  # gRPC takes nothing but bytes
        for _ in range(count):
            next(self._answers)

    def close(self) -> None:
        self._parts.put(None)
        self._channel.close()


class Bare:
    """The sending end, and the owner of its peer's process."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Starts the peer, and makes certificates for both ends."""
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pathways-bench-"))
        authority = Authority.create(os.path.join(folder, "authority"))
        theirs = os.path.join(folder, "peer.pem")
        authority.credentials(Role.HOST, "peer").save(theirs)
        self._own = authority.credentials(Role.HOST, "bench")
        peer = processes.Child("benchmarks.rivals.bare:Peer")
        self._stack.callback(peer.end)
        self._port = peer.ask("listen", self._kind, theirs, timeout=_PATIENCE_S)

    @contextlib.contextmanager
    def streams(self, count: int, nbytes: int, back: int) -> Iterator[Callable[[int], None]]:
        """Opens `count` streams that share messages of `nbytes` equally; each part is answered with `back` bytes.

        The value moves as many messages as it is told.
        """
        message = memoryview(os.urandom(nbytes))
        ends = [nbytes * number // count for number in range(count + 1)]
        opened = [self._open(message[a:b], back) for a, b in itertools.pairwise(ends)]
        try:
            if count == 1:
                yield opened[0].move
                return
            with futures.ThreadPoolExecutor(count) as pool:
                yield lambda messages: _all(pool, opened, messages)
        finally:
            for stream in opened:
                stream.close()

    def _open(self, message: memoryview, back: int) -> Any:
        if self._kind == "grpc":
            import grpc

            credentials = grpc.ssl_channel_credentials(self._own.authority.encode(), *_grpc_pair(self._own))
            role = server_name(Role.HOST)  # by which the peer is checked, instead of by its host name
            options = [*_GRPC_OPTIONS, ("grpc.ssl_target_name_override", role), ("grpc.default_authority", role)]
            channel = grpc.secure_channel(f"127.0.0.1:{self._port}", credentials, options=options)
            return _GrpcStream(channel, message, back)
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._kind == "tls":
            connection = self._own.client_context().wrap_socket(connection, server_hostname=server_name(Role.HOST))
        return _SocketStream(connection, message, back)

    def stop(self) -> None:
        """Ends the peer."""
        self._stack.close()


def _all(pool: futures.Executor, streams: list[Any], count: int) -> None:
    for done in [pool.submit(stream.move, count) for stream in streams]:
        done.result()
