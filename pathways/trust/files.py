"""Files that only their owner may read, replaced as a whole, and a lock between processes. Any thread may call.

CERT-2 (silent): what is secret lies in files of mode 0600, in folders of mode 0700, and in no text of an error or log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator

from pathways import errors


def make_private_folder(folder: str) -> None:
    """Makes the folder with mode 0700, or checks the one that is there, which holds no secrets yet.

    Raises:
        PermissionDeniedError: others may read it, or it is another user's.
        OptionError: it can neither be made nor opened.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
        os.mkdir(folder, 0o700)
    except FileExistsError:
        status = _status_of_folder(folder)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            raise errors.PermissionDeniedError(
                f"secrets of the cluster cannot lie in {folder}, which others may open (user {status.st_uid}, mode "
                f"{mode:o}): name a folder that is not there yet, or one that only user {os.geteuid()} may open"
            ) from None
    except OSError as error:
        raise errors.OptionError(f"the folder {folder} cannot be made: {error.strerror}") from error


def check_private_folder(folder: str) -> None:
    """Raises:
    PermissionDeniedError: others may read the folder, or it is another user's.
    OptionError: it is not there.
    """
    _check_private(folder, _status_of_folder(folder), "700")


def _status_of_folder(folder: str) -> os.stat_result:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise errors.OptionError(f"the folder {folder} cannot be opened: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise errors.OptionError(f"{folder} is no folder")
    return status


def read_private(path: str) -> bytes:
    """The bytes of a file that only this user may read.

    Raises:
        PermissionDeniedError: others may read it, or it is another user's.
        OSError: it is not there, or cannot be read.
    """
    with open(path, "rb") as file:
        _check_private(path, os.fstat(file.fileno()), "600")
        return file.read()


def _check_private(path: str, status: os.stat_result, mode: str) -> None:
    if status.st_uid != os.geteuid():
        raise errors.PermissionDeniedError(
            f"{path} belongs to user {status.st_uid}, and secrets are read from files of user {os.geteuid()} only"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise errors.PermissionDeniedError(
            f"others may open {path} (mode {stat.S_IMODE(status.st_mode):o}), which holds secrets of the cluster: "
            f"see who has read it, then `chmod {mode} {path}`"
        )


def check_writable(path: str) -> None:
    """Raises OptionError if `write_private(path)` could not make a file in that folder now."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="."):
            pass
    except OSError as error:
        raise errors.OptionError(f"{path} cannot be written: {error.strerror}") from None


def write_private(path: str, content: bytes) -> None:
    """Replaces a file as a whole: a reader finds the old bytes or the new ones, also after a crash. Mode 0600."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def write_hideable(path: str, content: bytes) -> None:
    """As `write_private`, into a folder `path` + ".d" of its own, to which `path` is a link.

    Who hides a file from a process hides it only until it is replaced: a folder is hidden for good
    (`pathways/process/confinement.py`).
    """
    folder, name = hideable_folder(path), os.path.basename(path)
    make_private_folder(folder)
    write_private(os.path.join(folder, name), content)
    target = os.path.join(os.path.basename(folder), name)
    if not os.path.islink(path) or os.readlink(path) != target:
        temporary = os.path.join(folder, f".{secrets.token_hex(4)}")
        os.symlink(target, temporary)
        os.replace(temporary, path)


def hideable_folder(path: str) -> str:
    """Where `write_hideable` writes."""
    return os.path.abspath(path) + ".d"


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # Some file systems cannot; the file itself is written.
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Holds the lock file `path`, alone among all threads and processes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
