"""How much memory there is. Only files of the kernel are read."""

from __future__ import annotations

import contextlib
import os
import pathlib


def memory_bytes(proc: str = "/proc/self/cgroup", groups: str = "/sys/fs/cgroup") -> int:
    """Bytes of memory that this process, and what it starts, may use: all of the machine's, or less in a container.

    Args:
        proc: says in which control groups it is.
        groups: where these are mounted.
    """
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        for line in pathlib.Path(proc).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                found = min(found, _limit(pathlib.Path(groups), path, "memory.max", found))
            elif "memory" in controllers.split(","):
                found = min(found, _limit(pathlib.Path(groups, "memory"), path, "memory.limit_in_bytes", found))
    return found


def _limit(root: pathlib.Path, path: str, name: str, most: int) -> int:
    """The least limit of a group and those around it. In a container, the path may be that of another namespace."""
    group = root / path.lstrip("/")
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # it has no such file, or no limit
            most = min(most, int((each / name).read_text()))
        if each == root:
            break
    return most
