"""Files that outlive a cluster: bytes by key in folders of one root, which together take at most so many bytes.

A host keeps its executables here (`pathways/host/kept_executables.py`). Several processes, also of several machines
with one home folder, use a root at the same time without a lock: a file gets its name when it is whole, and each file
has a checksum. What was used last stays: reading a file marks it. Any thread may call any method.

- KEPT-1 (whole): `get` gives the bytes that some `put` was given for this key, or None.
- KEPT-2 (bounded): after a `put`, the files of the root take at most `limit` bytes, plus what others put meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time

_NEW = ".new-"  # a file that is being written
_ABANDONED_S = 3600.0
#: What a file counts at least, so that there are not too many to look at.
_LEAST_BYTES = 16 << 10
#: A full root is made so much smaller than its limit, because each time all files are looked at.
_ROOM = 0.1


class KeptFiles:
    """The files of one folder below a root."""

    def __init__(self, root: str, folder: str, limit: int) -> None:
        """Makes the folders, for this user alone.

        Raises:
            OSError: they cannot be made, or others may write there: then the files could be anybody's.
        """
        self._root = root
        self._folder = os.path.join(root, folder)
        self._limit = limit
        os.makedirs(root, 0o700, exist_ok=True)
        os.makedirs(self._folder, 0o700, exist_ok=True)
        for path in (root, self._folder):
            status = os.stat(path)
            if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(f"{path} belongs to another user, or others may write there")
        self._free = 0  # about what may be put before all files are counted again

    def get(self, key: str) -> bytes | None:
        """The bytes of this key, if they are there and whole."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                content = file.read()
            os.utime(path)
        except OSError:
            return None
        checksum, value = content[:32], content[32:]
        if checksum == hashlib.sha256(value).digest():
            return value
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None

    def put(self, key: str, value: bytes) -> bool:
        """Keeps the bytes under this key. False: they are more than the limit, or the file system refused."""
        counted = max(len(value), _LEAST_BYTES)
        if counted > self._limit:
            return False
        try:
            fd, new = tempfile.mkstemp(prefix=_NEW, dir=self._folder)
        except OSError:
            return False
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(hashlib.sha256(value).digest())
                file.write(value)
            os.replace(new, self._path(key))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new)
            return False
        self._free -= counted
        if self._free < 0:
            self._free = self._trim()
        return True

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, hashlib.sha256(key.encode()).hexdigest())

    def _trim(self) -> int:
        """Removes what was not used for longest, if the root is over its limit. What may be put until the next call:
        a part of what is free, because others put files, too.
        """
        found, total = [], 0
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                if name.startswith(_NEW):
                    if time.time() - status.st_mtime > _ABANDONED_S:
                        _remove(path)
                    continue
                nbytes = max(status.st_size, _LEAST_BYTES)
                total += nbytes
                found.append((status.st_mtime_ns, nbytes, path))
        if total > self._limit:
            for _, nbytes, path in sorted(found):
                _remove(path)
                total -= nbytes
                if total <= self._limit * (1 - _ROOM):
                    break
        return (self._limit - total) // 4


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
