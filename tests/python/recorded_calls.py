"""What gRPC's own client sends for a call, byte by byte, for tests that change it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from pathways.protocol import wire


def recorded(method: str, messages: list[bytes]) -> bytes:
    """What gRPC's own client sends for a call, by a server that takes anything."""

    def answer(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for _ in incoming:
            yield b""

    service, name = method.split("/")[1:]
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send_over(source: socket.socket, target: socket.socket, keep: bytearray) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    keep += data
                    target.sendall(data)

        def relay() -> None:
            near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
            with near, far:
                threading.Thread(target=send_over, args=(far, near, bytearray()), daemon=True).start()
                send_over(near, far, said)

        thread = threading.Thread(target=relay)
        thread.start()
        with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}", options=wire.FAR_OPTIONS) as channel:
            list(channel.stream_stream(method)(iter(messages), metadata=wire.bearer("0" * 32), timeout=20))
        thread.join()
    server.stop(None)
    assert b"PRI * HTTP/2.0" in said
    return bytes(said)
