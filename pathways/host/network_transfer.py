"""Network transfers between machines: one gRPC stream from each host to each host on another machine that it sends to.

A message is a sequence of chunks of outgoing transfers; transfer.proto defines it, csrc/executor/network_transfer.h
writes and reads it. When the stream is idle, a queued transfer goes at once. When it is busy, as many chunks as fit
into `MESSAGE_BYTES` share a message. Short outgoing transfers go before long ones. For each outgoing transfer the
receiver answers once: it is written completely, or why it never will be. When a stream breaks, all its unanswered
transfers have failed; the next outgoing transfer opens a new stream. HTTP/2 pings detect a dead peer: a host that is
silent for `wire.SILENCE_S` counts as gone.

`jax.experimental.transfer` is not used, for two reasons. It has no call to withdraw an offer, so what a sender offers
to a host that is then lost stays in the sender's memory for ever. And on CPU it moves large arrays more slowly
(benchmarks/results/transfer-*).

Where machines are real, streams are mutual TLS 1.3 (LINK-1) from host to host, unless the cluster was started without
encryption. The controller says where a host receives and which machine it is on, as `MACHINE@ADDRESS`; a transfer
counts only if it comes with the certificate of the sending host's machine (CERT-1). The machines of a `LocalCluster`
are modelled: there, streams use Unix sockets in the cluster's directory, which only its user can enter; see
`LocalCluster.machines`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc

from pathways import _core, errors
from pathways.protocol import transfer_pb2 as pb
from pathways.protocol import wire
from pathways.trust.credentials import Credentials
from pathways.trust.identity import Identity, Role, grpc_identity

MESSAGE_BYTES = 1 << 20
SHORT_BYTES = 64 << 10
# The stream of transfer.proto. Both ends give gRPC the serialised messages: see there how the payload travels.
_SERVICE = pb.DESCRIPTOR.services_by_name["Streams"]
_METHOD = _SERVICE.methods_by_name["Send"]


def _channel(credentials: str, address: str) -> Any:
    if not credentials:
        return grpc.insecure_channel(address, options=wire.FAR_OPTIONS)
    own = Credentials.load(credentials)  # again for each channel: the agent renews them
    return grpc.secure_channel(address, own.grpc_channel(), options=[*wire.FAR_OPTIONS, *own.grpc_options(Role.HOST)])


def _parsed(stream: str) -> tuple[str, str]:
    """The machine and the address of a stream. The machine is empty where machines are modelled."""
    machine, _, address = stream.rpartition("@")
    return machine, address


class _OwnCertificate:
    """The certificate that a host's server shows: the one in the file, which the agent renews.

    gRPC asks for it at each handshake, and frees its last one when it gets another one, even if a handshake on another
    thread is just about to use that (grpc/grpc#36693): a few hundred callers at once then crash the process. So it gets
    another one only when the file has changed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._shown: tuple[int, int, int] | None = None  # which file; guarded by the lock

    def if_changed(self) -> Any:
        """The configuration for gRPC if it is another one than the last time, else None."""
        with self._lock:
            status = os.stat(self._path)
            now = (status.st_ino, status.st_mtime_ns, status.st_size)
            if now == self._shown:
                return None
            own = Credentials.load(self._path)
            self._shown = now
        pair = (own.key.encode("ascii"), own.certificate.encode("ascii"))
        return grpc.ssl_server_certificate_configuration([pair], own.authority.encode("ascii"))


def _server_credentials(path: str) -> Any:
    certificate = _OwnCertificate(path)
    return grpc.dynamic_ssl_server_credentials(certificate.if_changed(), certificate.if_changed, True)


class Streams:
    """Both ends of one host's streams.

    The enqueue thread calls `send`, `expect` and `forget`; any thread may call `replace`.
    """

    def __init__(self, core: Any, address: str, far: Mapping[int, str], credentials: str = "") -> None:
        """Listens.

        Args:
            core: the native host.
            address: where it listens.
            far: where the hosts on other machines listen, as `MACHINE@ADDRESS`; "" for one that is lost now.
            credentials: the file of the machine's credentials; empty: streams are not encrypted.

        Raises:
            RuntimeError: cannot listen at the address.
        """
        self._core = core
        self._is_encrypted = bool(credentials)
        self._open_channel = functools.partial(_channel, credentials)
        self._machines = {peer: _parsed(there)[0] for peer, there in far.items()}  # of the hosts, by their names
        self._streams_out = {
            peer: _HostStream(core, _parsed(there)[1], self._open_channel) for peer, there in far.items()
        }
        self._waiting: dict[tuple[int, int, int], Any] = {}  # incoming transfers by order, node and sender
        for peer in far:
            core.set_far(peer)
        handler = grpc.stream_stream_rpc_method_handler(
            self._receive, response_serializer=pb.TransferEnd.SerializeToString
        )
        # A stream holds a thread as long as it lives. A successor's stream may come before its predecessor's is over,
        # so there are two threads per host.
        self._server = grpc.server(
            futures.ThreadPoolExecutor(2 * len(far), thread_name_prefix="pw-stream"),
            options=wire.FAR_OPTIONS,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE.full_name, {_METHOD.name: handler}),)
        )
        if credentials:
            self._server.add_secure_port(address, _server_credentials(credentials))
        else:
            self._server.add_insecure_port(address)
        self._server.start()

    def send(self, outgoing: Any) -> None:
        """Sends an outgoing transfer to its destination; calls `core.remote_send_done` at its end."""
        self._streams_out[outgoing.destination].send(outgoing)

    def expect(self, order: int, node: int, sources: Sequence[int], views: list[Any]) -> None:
        """Makes a receive wait for its sources on other machines. Call it before the receive is announced to them."""
        for source in sources:
            if source in self._streams_out:
                self._waiting[order, node, source] = _core.IncomingTransfer(views)

    def forget(self, order: int, node: int, sources: Sequence[int]) -> None:
        """Makes a receive wait no longer: a chunk that still comes for it is refused (FAR-1)."""
        for source in sources:
            self._waiting.pop((order, node, source), None)

    def replace(self, host: int, stream: str) -> None:
        """Ends the stream to a lost host; its successor is at `stream`, as `MACHINE@ADDRESS`."""
        if host in self._streams_out:
            self._streams_out[host].stop()
            self._machines[host], address = _parsed(stream)
            self._streams_out[host] = _HostStream(self._core, address, self._open_channel)

    def stop(self) -> None:
        """Ends all streams. Nobody is notified of the ends of their transfers any more."""
        for stream_out in self._streams_out.values():
            stream_out.stop()
        self._server.stop(None)

    def _receive(self, messages: Iterator[bytes], context: Any) -> Iterator[pb.TransferEnd]:
        try:
            delivery = self._delivery_for(grpc_identity(context)) if self._is_encrypted else self._delivery
            for message in messages:
                for order, node, host, error in _core.unpack(message, delivery):
                    self._waiting.pop((order, node, host), None)
                    yield pb.TransferEnd(order=order, node=node, error=error or "")
        except (errors.PermissionDeniedError, RuntimeError) as error:  # who may not send that, and what is no message
            print(f"a stream from {context.peer()} is refused: {error}", file=sys.stderr, flush=True)
            is_denied = isinstance(error, errors.PermissionDeniedError)
            code = grpc.StatusCode.PERMISSION_DENIED if is_denied else grpc.StatusCode.INVALID_ARGUMENT
            context.abort(code, str(error))

    def _delivery(self, order: int, node: int, host: int) -> Any:
        return self._waiting.get((order, node, host))

    def _delivery_for(self, sender: Identity) -> Callable[[int, int, int], Any]:
        """`_delivery` for the owner of a certificate, who sends for the hosts of its own machine only (CERT-1)."""
        if sender.role is not Role.HOST:
            raise errors.PermissionDeniedError(f"only hosts send transfers, and {sender} is none")

        def delivery(order: int, node: int, host: int) -> Any:
            if self._machines.get(host) != sender.name:
                raise errors.PermissionDeniedError(
                    f"machine {sender.name} sends a transfer of host {host}, which is not on that machine"
                )
            return self._delivery(order, node, host)

        return delivery


class _HostStream:
    """The sending end to one host: outgoing transfers that are queued, and those that the host has not answered yet."""

    def __init__(self, core: Any, address: str, open_channel: Callable[[str], Any]) -> None:
        self._core = core
        self._address = address
        self._open_channel = open_channel
        self._lock = threading.Condition()  # guards the fields below
        self._short: list[Any] = []
        self._long: list[Any] = []
        self._open: dict[tuple[int, int], Any] = {}  # not answered yet, by order and node
        self._stream: _Stream | None = None
        self._stopped = False

    def send(self, outgoing: Any) -> None:
        """Queues an outgoing transfer, and opens the stream if there is none."""
        with self._lock:
            if not self._stopped:
                (self._short if outgoing.nbytes <= SHORT_BYTES else self._long).append(outgoing)
                self._open[outgoing.order, outgoing.node] = outgoing
                if self._stream is None:
                    self._stream = _Stream(self, self._address, self._open_channel)
                self._lock.notify_all()
                return
        self._fail(outgoing, "the host is lost")

    def stop(self) -> None:
        """Ends the stream."""
        with self._lock:
            self._stopped = True
            stream = self._stream
            self._lock.notify_all()
        if stream is not None:
            stream.cancel()

    def next_message(self, stream: _Stream) -> bytes | None:
        """Waits until there is something to send, and returns the next message; None: this stream is over."""
        with self._lock:
            while not self._short and not self._long and self._stream is stream and not self._stopped:
                self._lock.wait()
            if self._stream is not stream or self._stopped:
                return None
            picked = [*self._short, *self._long]
        message = _core.pack(picked, MESSAGE_BYTES)
        with self._lock:
            self._short = [outgoing for outgoing in self._short if not outgoing.is_over]
            self._long = [outgoing for outgoing in self._long if not outgoing.is_over]
        return message

    def delivered(self, order: int, node: int, error: str | None) -> None:
        """Takes the other end's answer: how an outgoing transfer ended."""
        with self._lock:
            outgoing = self._open.pop((order, node), None)
        if outgoing is not None:
            self._core.remote_send_done(outgoing, error)

    def broken(self, stream: _Stream, why: str) -> None:
        """Fails all unanswered transfers of a stream that is over."""
        with self._lock:
            if self._stream is not stream:
                return
            self._stream = None
            lost = list(self._open.values())
            self._short, self._long = [], []
            self._open.clear()
            self._lock.notify_all()
        for outgoing in lost:
            self._fail(outgoing, why)

    def _fail(self, outgoing: Any, why: str) -> None:
        text = f"ComputationError: a transfer to host {outgoing.destination} failed, for its stream broke: {why}"
        self._core.remote_send_done(outgoing, text)


class _Stream:
    """One connection. gRPC's thread takes messages from the `_HostStream`; a thread of ours reads the answers."""

    def __init__(self, stream_out: _HostStream, address: str, open_channel: Callable[[str], Any]) -> None:
        self._stream_out = stream_out
        self._address = address
        self._open_channel = open_channel
        self._call: Any = None
        self._cancelled = False
        threading.Thread(target=self._run, name="pw-stream", daemon=True).start()

    def cancel(self) -> None:
        """Makes the thread end."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        why = "the host is lost"
        try:
            if self._address:
                with self._open_channel(self._address) as channel:
                    why = self._converse(channel)
        except Exception as error:  # every transfer that was sent must get an answer, so report any error
            why = f"{type(error).__name__}: {error}"
            print(f"a stream to {self._address} broke: {why}", file=sys.stderr, flush=True)
        self._stream_out.broken(self, why)

    def _converse(self, channel: Any) -> str:
        """Sends messages and reads answers until the stream is over. Returns why it ended."""
        messages = iter(lambda: self._stream_out.next_message(self), None)
        send_chunks = channel.stream_stream(
            f"/{_SERVICE.full_name}/{_METHOD.name}", response_deserializer=pb.TransferEnd.FromString
        )
        self._call = call = send_chunks(messages)
        if self._cancelled:
            call.cancel()
        try:
            for answer in call:
                self._stream_out.delivered(answer.order, answer.node, answer.error or None)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "the other end closed it"
