"""The directories of clusters, with their sockets: finds those of live clusters, and removes those of dead ones.

`<tmp>/pathways-<uid>-<random>/` holds `control.sock`, `fds.sock`, the islands' sockets, `logs/` and `lock`. Where other
machines may join, it holds `authority/` as well, or a link to it (pathways/trust/authority.py). The cluster holds the
lock (flock) while it lives. Other processes take the lock only for a moment, to check it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time

from pathways import errors

# A Unix socket's path has at most 107 bytes; the longest names inside are `stream-<host>-<incarnation>.sock`.
_LONGEST_BASE = 52
# A directory younger than this, in seconds, may not have its lock yet.
_SETTLED_S = 30.0
_WAYS = ("session", "proxy")  # folders with sockets that lead into a cluster, where they are made
_AUTHORITY = "authority"
_AGENT = "agent-"


def _bases() -> list[str]:
    own = tempfile.gettempdir()
    return [own, "/tmp"] if own != "/tmp" else [own]


def new_directory(of_agent: bool = False) -> str:
    """A path for a new cluster's directory, or for that of a machine's agent. Makes nothing."""
    base = next(base for base in _bases() if len(os.fsencode(base)) <= _LONGEST_BASE or base == "/tmp")
    return os.path.join(base, f"pathways-{os.getuid()}-{_AGENT if of_agent else ''}{secrets.token_hex(4)}")


def live_clusters() -> list[str]:
    """Addresses of this user's live clusters, newest first."""
    clusters = [path for path in _candidates() if f"-{_AGENT}" not in os.path.basename(path)]
    found = [(os.stat(path).st_mtime, path) for path in clusters if _is_locked(path)]
    return [f"unix:{path}/control.sock" for _, path in sorted(found, reverse=True)]


def authority_folder(directory: str) -> str:
    """Where a cluster of this directory has its authority, or a link to the folder that it was told."""
    return os.path.join(directory, _AUTHORITY)


def authority_folders(address: str | None = None) -> list[str]:
    """Those of this user's live clusters that have one, newest first; of the cluster at `address` only, if given."""
    addresses = [each for each in live_clusters() if address in (None, "", each)]
    directories = [each.removeprefix("unix:").rpartition("/")[0] for each in addresses]
    return [folder for folder in map(authority_folder, directories) if os.path.isdir(folder)]


def state_folder() -> str:
    """Where this user's programs keep what must outlive them; made if it is not there.

    Raises:
        OptionError: it cannot be made, as where the home folder is read-only.
    """
    folder = _state_folder()
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as error:
        raise errors.OptionError(
            f"certificates are kept in {folder}, which cannot be made ({error.strerror}): set XDG_STATE_HOME to a "
            "folder that this user may write"
        ) from None
    return folder


def secret_folders() -> list[str]:
    """Folders of this user that are there now, and hold secrets or lead into a cluster: those of clusters and agents
    with their authorities, of sessions and proxies, and where certificates are kept.
    """
    directories = _candidates()
    ways = [each for base in _bases() for kind in _WAYS for each in glob.glob(f"{glob.escape(base)}/pathways-{kind}-*")]
    found = [*directories, *filter(_is_own, ways), *map(authority_folder, directories), _state_folder()]
    return sorted({os.path.realpath(path) for path in found if os.path.isdir(path)})


def sweep() -> None:
    """Removes the directories of dead clusters. One exists only when a cluster's supervisor was killed as well."""
    for path in _candidates():
        try:
            if time.time() - os.stat(path).st_mtime > _SETTLED_S and not _is_locked(path):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def _state_folder() -> str:
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "pathways")


def _candidates() -> list[str]:
    paths: list[str] = []
    for base in _bases():
        paths += filter(_is_own, glob.glob(os.path.join(glob.escape(base), f"pathways-{os.getuid()}-*")))
    return paths


def _is_own(path: str) -> bool:
    """Whether it is a folder of this user."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
