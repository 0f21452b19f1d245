"""What a transport of the IFRT proxy protocol calls: versions, sessions, host buffers. It knows no sockets.

A session lasts as long as its stream. Host buffers come and go by calls of their own, which name the session by its
number. The number is drawn by chance from 2^64, so one client cannot name another's buffers (PROXY-5).

Threading: any thread may call.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from pathways._jaxlib.proxy_messages import message
from pathways.proxy import versions
from pathways.proxy.attributes import attributes_of
from pathways.proxy.behind import Attribute, Devices
from pathways.proxy.errors import Code, Refused
from pathways.proxy.host_arrays import Bytes
from pathways.proxy.host_buffers import HostBuffers
from pathways.proxy.limits import Limits
from pathways.proxy.module_reader import ModuleReader
from pathways.proxy.session import Session
from pathways.proxy.shared_directory import SharedDirectory

PACKAGE = "xla.ifrt.proxy"
SERVICE = f"{PACKAGE}.GrpcIfrtService"


@dataclasses.dataclass(frozen=True)
class Client:
    """Who opens a session, as far as a transport knows."""

    peer: str  # the transport's name of the other end
    version: versions.Version
    initialization_data: Mapping[str, Attribute]  # what the user's program gave for the proxy: a name, a token
    identities: tuple[str, ...] = ()  # from the certificate, if there is one


@dataclasses.dataclass(frozen=True)
class BufferName:
    """Which host buffer of which session a call is about."""

    session: int
    handle: int
    size: int = 0


class Service:
    """All sessions of a proxy. `open_devices` connects a client to what lies behind the door; it may take a while, and
    raises what the client is told.
    """

    def __init__(
        self,
        open_devices: Callable[[Client], Devices],
        limits: Limits | None = None,
        shared_directory: SharedDirectory | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._open_devices = open_devices
        self._shared_directory = shared_directory
        self.reader = ModuleReader()
        self._lock = threading.Lock()
        self._sessions: dict[int, Session | None] = {}  # None: its devices are being opened

    def get_version(self, request: bytes) -> bytes:
        """Answers GetVersion. Raises `Refused` for a client without a version in common."""
        asked = _parsed("GrpcGetVersionRequest", request)
        version = versions.negotiate(asked.min_version, asked.max_version)
        response = message(f"{PACKAGE}.GrpcGetVersionResponse")()
        response.version.protocol_version = version.protocol
        response.version.ifrt_serdes_version_number = version.serdes
        return response.SerializeToString()

    def begin(
        self,
        metadata: bytes,
        peer: str,
        identities: tuple[str, ...],
        send: Callable[[bytes], None],
        post: Callable[[Callable[[], None]], None],
    ) -> Session:
        """Begins a session; `metadata` is a GrpcIfrtSessionMetadata. The caller ends it with `Session.end`. The others
        are those of `Session`. Raises `Refused`, or what `open_devices` raises.
        """
        said = _parsed("GrpcIfrtSessionMetadata", metadata)
        client = Client(peer, versions.check(said.version), attributes_of(said.initialization_data), identities)
        number = self._new_number()
        try:
            devices = self._open_devices(client)
            try:
                session = Session(number, devices, self.limits, self.reader, send, post, lambda: self._ended(number))
            except BaseException:
                devices.close()
                raise
        except BaseException:
            self._ended(number)
            raise
        with self._lock:
            self._sessions[number] = session
        return session

    def buffers_of(self, name: BufferName) -> HostBuffers:
        """The host buffers of a session. Raises `Refused` when there is no such session."""
        with self._lock:
            session = self._sessions.get(name.session)
        if session is None:
            raise Refused(Code.NOT_FOUND, f"there is no session {name.session}")
        return session.buffers

    def read_from_disk(self, name: BufferName) -> Bytes:
        """The bytes that a client left in the shared directory. Raises `Refused`."""
        if self._shared_directory is None:
            raise Refused(
                Code.FAILED_PRECONDITION,
                "this proxy has no shared directory; start it with one, or unset "
                "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY in the client",
            )
        return self._shared_directory.take(name.session, name.handle, name.size)

    @property
    def session_count(self) -> int:
        """Sessions that exist."""
        return len(self._sessions)

    def _new_number(self) -> int:
        with self._lock:
            if len(self._sessions) >= self.limits.sessions:
                raise Refused(
                    Code.RESOURCE_EXHAUSTED, f"this proxy has {self.limits.sessions} clients, which is its limit"
                )
            number = 0
            while not number or number in self._sessions:
                number = secrets.randbits(64)
            self._sessions[number] = None
            return number

    def _ended(self, number: int) -> None:
        with self._lock:
            self._sessions.pop(number, None)
        if self._shared_directory is not None:
            self._shared_directory.ended(number)


def name_in(kind: str, request: bytes) -> BufferName:
    """The buffer that a call names: a message of the package with session_id and handle. Raises `Refused`."""
    said = _parsed(kind, request)
    if kind == "GrpcHostBufferReadFromDiskRequest":
        said = said.metadata
    return BufferName(said.session_id, said.handle, getattr(said, "buffer_size", 0))


def _parsed(kind: str, data: bytes) -> Any:
    try:
        return message(f"{PACKAGE}.{kind}").FromString(data)
    except DecodeError:
        raise Refused(Code.INVALID_ARGUMENT, f"what came is no {kind}") from None
