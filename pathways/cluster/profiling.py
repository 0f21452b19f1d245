"""The profile of a cluster, as a client holds it while the hosts record: `pw.profile` opens it and takes the parts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc
from google.protobuf.empty_pb2 import Empty

from pathways.protocol import control_pb2 as pb


class Profile(Protocol):
    """XLA's profiler, on the hosts of a cluster."""

    def begin_end(self) -> None:
        """Asks the hosts to end, and does not wait."""

    def finish(self, seconds: float) -> tuple[dict[int, bytes], list[str]]:
        """What came within so many seconds: by host an XSpace, compressed by gzip; and what is missing, for people."""


class NoHosts:
    """The `Profile` of an embedded cluster: its host is the client's own process."""

    def begin_end(self) -> None:
        """See `Profile`."""

    def finish(self, seconds: float) -> tuple[dict[int, bytes], list[str]]:
        """See `Profile`."""
        del seconds
        return {}, []


class RemoteProfile:
    """The `Profile` of a cluster in other processes."""

    def __init__(
        self, open_stream: Callable[[Iterator[Empty]], Any], translated: Callable[[grpc.RpcError], Exception]
    ) -> None:
        """Returns when all hosts record that answer. `open_stream(requests)` calls `Profile`.

        Raises:
            PermissionDeniedError: the client is a guest.
            TraceFileError: somebody profiles this cluster already.
        """
        self._out: queue.SimpleQueue[Empty | None] = queue.SimpleQueue()
        self._planes: dict[int, bytes] = {}
        self._remarks: list[str] = []
        self._stream = open_stream(iter(self._out.get, None))
        try:
            while self._add(next(self._stream)):
                pass
        except grpc.RpcError as error:
            self._out.put(None)
            raise translated(error) from None
        self._translated = translated
        self._reader = threading.Thread(target=self._read, name="pw-profile", daemon=True)
        self._reader.start()

    def begin_end(self) -> None:
        """See `Profile`."""
        self._out.put(None)

    def finish(self, seconds: float) -> tuple[dict[int, bytes], list[str]]:
        """See `Profile`."""
        self.begin_end()
        self._reader.join(seconds)
        if self._reader.is_alive():
            self._remarks.append(f"the controller has not sent all profiles within {seconds:.1f} s")
            self._stream.cancel()
        return dict(self._planes), list(dict.fromkeys(self._remarks))

    def _add(self, part: pb.ProfilePart) -> bool:
        """Takes in a part; False for the one that says that the profile is on."""
        if part.remark:
            self._remarks.append(part.remark)
        if part.planes:
            self._planes[part.host] = part.planes
        return part.host >= 0 or bool(part.remark)

    def _read(self) -> None:
        try:
            for part in self._stream:
                self._add(part)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                self._remarks.append(f"the profile ended early: {self._translated(error)}")
