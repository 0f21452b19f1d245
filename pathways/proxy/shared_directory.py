"""Host buffers through a directory that the client and the proxy share: large puts on one machine.

A client with IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY writes a file, and names it by its handle. The
operator names the proxy's directory; nothing of a path comes from the client. The file is opened within the directory,
without following links, must be a plain file of the expected size, and is removed.

PROXY-5: handles of two clients are alike, so their files would be, too. So one client at a time uses the directory,
from its first file to its end; others are refused.
"""

from __future__ import annotations

import os
import stat
import threading

from pathways.proxy.errors import Code, Refused
from pathways.proxy.host_arrays import Bytes

#: The client's name of the file of a handle.
FILE_NAME = "lt_{handle}"


class SharedDirectory:
    """The directory of all clients of a proxy. Any thread may call."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` when there is no directory `path`."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._user: int | None = None

    def take(self, session: int, handle: int, size: int) -> Bytes:
        """The bytes of the file of `handle`, which is gone afterwards. Raises `Refused` for anything else."""
        with self._lock:
            if self._user not in (None, session):
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    "another client uses the proxy's shared directory; unset "
                    "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY in this one",
                )
            self._user = session
        try:
            return self._take(FILE_NAME.format(handle=handle), size)
        except FileNotFoundError:
            raise Refused(
                Code.NOT_FOUND,
                f"the proxy's shared directory has no file of host buffer {handle}; the client's "
                "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY must be the same directory",
            ) from None
        except OSError as error:
            raise Refused(Code.FAILED_PRECONDITION, f"the file of host buffer {handle}: {error.strerror}") from None

    def ended(self, session: int) -> None:
        """A session is over: if it used the directory, another one may."""
        with self._lock:
            if self._user == session:
                self._user = None

    def close(self) -> None:
        """Closes the directory."""
        os.close(self._descriptor)

    def _take(self, name: str, size: int) -> Bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise Refused(Code.INVALID_ARGUMENT, f"the file {name} is no plain file of {size} bytes")
            os.unlink(name, dir_fd=self._descriptor)
            # Read and not mapped: a client that shortens the file meanwhile would end the proxy by a signal.
            data = memoryview(bytearray(size))
            done = 0
            while done < size:
                count = os.readv(descriptor, [data[done:]])
                if not count:
                    raise Refused(Code.DATA_LOSS, f"the file {name} has become shorter while it was read")
                done += count
            return data
        finally:
            os.close(descriptor)
