"""gRPC's server around the service: it moves bytes between connections and sessions, and knows no request.

It is thin, so that another transport can take its place. All calls run on one loop of asyncio, on a thread of its own,
which never waits for anything but sockets: sessions have threads of their own, and clusters are connected to by others.

Flow (PROXY-4): a session's stream is read while less than `Limits.requests` of its requests are without a reply that
the client has read, and its requests are handled while less than `Limits.unread_bytes` of replies are waiting. So a
client that sends much, or never reads, stops by itself.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Code, Refused, refusal_of
from pathways.proxy.limits import Limits
from pathways.proxy.service import PACKAGE, SERVICE, BufferName, Service, name_in
from pathways.proxy.session import Session

log = logging.getLogger(__name__)

SESSION_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_KEY = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
CHUNK_BYTES = 1 << 20
#: gRPC's names of codes.
STATUS = {status.value[0]: status for status in grpc.StatusCode}
#: Calls of one connection at a time. A stock client brings each host buffer by a call, of which many wait for room.
#: What the next request needs must not wait behind them.
STREAMS = 1 << 14
CLOSE_S = 5.0
#: A client that does not answer a ping for so long is gone. gRPC's own threads answer.
PING_MS, PING_ANSWER_MS = 30_000, 60_000


class Server:
    """A gRPC server on `addresses`, such as "127.0.0.1:0" or "unix:/path"."""

    def __init__(
        self,
        service: Service,
        addresses: Sequence[str],
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Listens when it returns. Raises `OSError` when an address cannot be had."""
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._openers = concurrent.futures.ThreadPoolExecutor(8, "pw-proxy-open")
        self._thread = threading.Thread(target=self._loop.run_forever, name="pw-proxy", daemon=True)
        self._thread.start()
        self.ports: list[int] = self._run(self._start(addresses, credentials))

    def close(self) -> None:
        """Ends all sessions and stops listening."""
        self._run(self._server.stop(0))
        self._service.close(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._openers.shutdown(wait=False)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # On the loop:

    async def _start(self, addresses: Sequence[str], credentials: grpc.ServerCredentials | None) -> list[int]:
        limit = self._service.limits.request_bytes
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", STREAMS),
            ("grpc.max_metadata_size", 1 << 16),
            ("grpc.so_reuseport", 0),
            # A client on a machine that is gone does not say so.
            ("grpc.keepalive_time_ms", PING_MS),
            ("grpc.keepalive_timeout_ms", PING_ANSWER_MS),
        ]
        self._server = grpc.aio.server(options=options)
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            "GetVersion": unary(self._get_version),
            "IfrtSession": stream(self._session),
            "HostBufferStore": grpc.stream_unary_rpc_method_handler(self._store),
            "HostBufferLookup": grpc.unary_stream_rpc_method_handler(self._look_up),
            "HostBufferDelete": unary(self._delete),
            "HostBufferReadFromDisk": unary(self._read_from_disk),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        ports = []
        for address in addresses:
            try:
                port = (
                    self._server.add_secure_port(address, credentials)
                    if credentials
                    else self._server.add_insecure_port(address)
                )
            except RuntimeError as error:
                raise OSError(f"the proxy cannot listen on {address}: {error}") from error
            ports.append(port)
        await self._server.start()
        return ports

    async def _get_version(self, request: bytes, context: Any) -> bytes:
        try:
            return self._service.get_version(request)
        except Exception as error:
            return await _abort(context, error)

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Reads requests here, and writes replies in a task beside."""
        stream = _Stream(self._loop, context, self._service.limits)
        peer = context.peer()
        try:
            metadata = _metadata(context, SESSION_KEY)
            begin = functools.partial(self._service.begin, metadata, peer, _identities(context))
            stream_ends = (stream.send, stream.ended, stream.may_go_on)
            session = await _begun(self._loop.run_in_executor(self._openers, begin, *stream_ends))
        except Exception as error:
            await _abort(context, error)
        log.info("session %x of %s begins", session.number, peer)
        reading = asyncio.create_task(stream.read(requests, session))
        writing = asyncio.create_task(stream.write())
        try:
            await asyncio.wait((reading, stream.over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.end()
            reading.cancel()
            writing.cancel()
            log.info("session %x of %s ends", session.number, peer)
        wrong = await stream.over
        if wrong is not None:
            await _abort(context, wrong)

    async def _store(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Bytes of an array come, in parts."""
        try:
            name = name_in("GrpcHostBufferStoreMetadata", _metadata(context, STORE_KEY))
            buffers = self._service.buffers_of(name)
            await self._reserve(name)
            try:
                buffers.put(name.handle, await _received(requests, name.size))
            except BaseException:
                buffers.release(name.handle)
                raise
        except Exception as error:
            await _abort(context, error)
        return b""

    async def _read_from_disk(self, request: bytes, context: Any) -> bytes:
        """Bytes of an array lie in the shared directory."""
        try:
            name = name_in("GrpcHostBufferReadFromDiskRequest", request)
            buffers = self._service.buffers_of(name)
            await self._reserve(name)
            try:
                data = await self._loop.run_in_executor(None, self._service.read_from_disk, name)
                buffers.put(name.handle, data)
            except BaseException:
                buffers.release(name.handle)
                raise
        except Exception as error:
            await _abort(context, error)
        return b""

    async def _look_up(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """The client fetches what was read."""
        response = message(f"{PACKAGE}.GrpcHostBufferLookupResponse")
        try:
            name = name_in("GrpcHostBufferLookupRequest", request)
            data = memoryview(self._service.buffers_of(name).look_up(name.handle))
        except Exception as error:
            await _abort(context, error)
        for start in range(0, len(data) or 1, CHUNK_BYTES):
            yield response(data=bytes(data[start : start + CHUNK_BYTES])).SerializeToString()

    async def _delete(self, request: bytes, context: Any) -> bytes:
        """The client needs a host buffer no more."""
        try:
            name = name_in("GrpcHostBufferDeleteRequest", request)
            self._service.buffers_of(name).release(name.handle)
        except Exception as error:
            await _abort(context, error)
        return b""

    async def _reserve(self, name: BufferName) -> None:
        """Waits until there is room for a host buffer. Raises `Refused`."""
        told: asyncio.Future[Refused | None] = self._loop.create_future()
        buffers = self._service.buffers_of(name)

        def then(wrong: Refused | None) -> None:
            _call_on(self._loop, _settle, told, wrong)

        buffers.reserve(name.handle, name.size, then)
        try:
            wrong = await told
        except asyncio.CancelledError:
            buffers.release(name.handle)
            raise
        if wrong is not None:
            raise wrong


class _Stream:
    """The stream of one session: requests in, replies out. `send` and `ended` are called by any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Any, limits: Limits) -> None:
        self._loop, self._context, self._limits = loop, context, limits
        self._replies: collections.deque[bytes] = collections.deque()
        self._has_replies, self._has_room = asyncio.Event(), asyncio.Event()
        self._under_way = 0  # requests without a reply that the client has taken
        self._lock = threading.Lock()
        self._unread_bytes = 0  # of replies
        self.may_go_on = threading.Event()  # the session handles requests
        self.may_go_on.set()
        self._is_told = False  # the loop will look for replies
        self.over: asyncio.Future[Refused | None] = loop.create_future()

    def send(self, reply: bytes) -> None:
        """The next reply. Several that come together wake the loop once."""
        with self._lock:
            self._unread_bytes += len(reply)
            if self._unread_bytes > self._limits.unread_bytes:
                self.may_go_on.clear()
        self._replies.append(reply)
        if not self._is_told:
            self._is_told = True
            _call_on(self._loop, self._has_replies.set)

    def ended(self, wrong: Refused | None) -> None:
        """The session has ended."""
        _call_on(self._loop, _settle, self.over, wrong)

    async def read(self, requests: AsyncIterator[bytes], session: Session) -> None:
        """Gives requests to the session."""
        async for request in requests:
            self._under_way += 1
            session.receive(request)
            while self._under_way >= self._limits.requests:
                self._has_room.clear()
                await self._has_room.wait()

    async def write(self) -> None:
        """Writes replies; waits while the client does not read."""
        while True:
            await self._has_replies.wait()
            self._has_replies.clear()
            self._is_told = False
            while self._replies:
                reply = self._replies.popleft()
                await self._context.write(reply)
                with self._lock:
                    self._unread_bytes -= len(reply)
                    if self._unread_bytes <= self._limits.unread_bytes:
                        self.may_go_on.set()
                self._under_way -= 1
                if self._under_way < self._limits.requests:
                    self._has_room.set()


async def _received(requests: AsyncIterator[bytes], size: int) -> bytes | bytearray:
    """The bytes of a host buffer. Raises `Refused` when they are not `size`."""
    parse = message(f"{PACKAGE}.GrpcHostBufferStoreRequest").FromString
    data, filled = bytearray(), 0
    async for request in requests:
        part = parse(request).data
        filled += len(part)
        if filled > size:
            break
        if filled == size and not data:
            return bytes(part)
        data += part
    if filled != size:
        raise Refused(Code.DATA_LOSS, f"{size} bytes were announced for a host buffer, but {filled} came")
    return data


async def _begun(opening: asyncio.Future[Session]) -> Session:
    """The session that is being opened. If the client goes away meanwhile, it ends as soon as it is there."""
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_end_if_begun)
        raise


def _end_if_begun(opening: asyncio.Future[Session]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().end()


async def _abort(context: Any, error: BaseException) -> NoReturn:
    """Ends a call with an error."""
    refusal = refusal_of(error)
    if not isinstance(error, Refused):
        log.warning("a call of %s failed", context.peer(), exc_info=error)
    await context.abort(STATUS[int(refusal.code)], refusal.text[:4096])
    raise AssertionError("abort raises")


def _metadata(context: Any, key: str) -> bytes:
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return bytes(value)
    raise Refused(Code.INVALID_ARGUMENT, f"the call has no metadata {key}")


def _identities(context: Any) -> tuple[str, ...]:
    return tuple(one.decode(errors="replace") for one in context.peer_identities() or ())


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _call_on(loop: asyncio.AbstractEventLoop, work: Callable[..., object], *arguments: Any) -> None:
    """Lets the loop call `work`, unless it is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(work, *arguments)
