"""Where a proxy listens, for a program of JAX: what JAX takes, and whether it would work."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from pathways import errors
from pathways._jaxlib import proxy_messages

INSECURE_VARIABLE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
_SCHEME = "grpc://"
_SERVICE = "xla.ifrt.proxy"
_SESSION_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
#: The most that a proxy may take to say its version.
_LOOK_S = 10.0


def is_of_this_machine(where: str) -> bool:
    """Whether nobody on another machine can call at HOST:PORT or unix:PATH."""
    if where.startswith("unix:"):
        return True
    host = where.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclasses.dataclass(frozen=True)
class ProxyTarget:
    """HOST:PORT or unix:PATH."""

    where: str

    @classmethod
    def parse(cls, address: str) -> ProxyTarget:
        """From what a user gives.

        Raises:
            ConnectError: it is no address of a proxy.
        """
        where = address.removeprefix(_SCHEME)
        if not re.fullmatch(r"unix:.+|[^/\s]+:[0-9]{1,5}", where):
            raise errors.ConnectError(
                f"expected the address of a proxy, like unix:/path or HOST:PORT, or of a cluster, like "
                f"pathways://HOST:PORT, got {address!r}"
            )
        return cls(where)

    @staticmethod
    def is_of_cluster(address: str) -> bool:
        """Whether it is the address of a cluster instead, as `pathways up` prints it."""
        path = address.removeprefix("unix:")
        is_folder = path != address and os.path.isdir(path)
        return is_folder or address.startswith("pathways://") or os.path.basename(path) == "control.sock"

    @property
    def text(self) -> str:
        """What JAX takes."""
        return _SCHEME + self.where

    @property
    def is_insecure(self) -> bool:
        """Whether JAX connects without TLS: to this machine, or because the user has said so."""
        return is_of_this_machine(self.where) or bool(os.environ.get(INSECURE_VARIABLE))

    def check(self) -> None:
        """Asks the proxy for the version that it would speak with this process's JAX, and begins a session and ends it.

        Raises:
            ConnectError: nobody listens there, or no proxy; or it refuses this program.
            UnsupportedVersionError: there is no such version.
        """
        message = proxy_messages.message
        request = message(f"{_SERVICE}.GrpcGetVersionRequest")()
        for limit, protocol, serdes in zip(
            (request.min_version, request.max_version), proxy_messages.PROTOCOLS, proxy_messages.serdes(), strict=True
        ):
            limit.protocol_version, limit.ifrt_serdes_version_number = protocol, serdes
        with self._channel() as channel:
            try:
                get_version = channel.unary_unary(f"/{_SERVICE}.GrpcIfrtService/GetVersion")
                answer = get_version(request.SerializeToString(), timeout=_LOOK_S)
            except grpc.RpcError as error:
                raise self._failure(error) from None
            self._begin(channel, message(f"{_SERVICE}.GrpcGetVersionResponse").FromString(answer).version)

    def _begin(self, channel: grpc.Channel, version: Any) -> None:
        """Begins a session and ends it. Raises ConnectError when the proxy refuses it."""
        first = proxy_messages.message(f"{_SERVICE}.IfrtRequest")()
        first.init_request.SetInParent()
        about = proxy_messages.message(f"{_SERVICE}.GrpcIfrtSessionMetadata")(version=version)
        parse = proxy_messages.message(f"{_SERVICE}.IfrtResponse").FromString
        over = threading.Event()

        def requests() -> Iterator[bytes]:
            yield first.SerializeToString()
            over.wait()

        session = channel.stream_stream(f"/{_SERVICE}.GrpcIfrtService/IfrtSession")(
            requests(), metadata=((_SESSION_KEY, about.SerializeToString()),), timeout=_LOOK_S
        )
        try:
            answer = next(session, None)
            if answer and parse(answer).response_metadata.status.code:
                next(session, None)  # why the session has ended
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # a proxy that is busy may still serve JAX
                raise errors.ConnectError(
                    f"the proxy at {self.where} refuses this program: {error.details()}"
                ) from None
        finally:
            over.set()
            session.cancel()

    def _channel(self) -> grpc.Channel:
        if self.is_insecure:
            return grpc.insecure_channel(self.where)
        return grpc.secure_channel(self.where, grpc.ssl_channel_credentials())

    def _failure(self, error: grpc.RpcError) -> errors.PathwaysError:
        code, said = error.code(), error.details()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return errors.UnsupportedVersionError(f"the proxy at {self.where} cannot serve this process's JAX: {said}")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return errors.ConnectError(
                f"no proxy answers at {self.where}: {said}. `pathways up --proxy WHERE` or `pathways proxy` starts one"
            )
        return errors.ConnectError(f"what listens at {self.where} is no proxy: {code.name}: {said}")
