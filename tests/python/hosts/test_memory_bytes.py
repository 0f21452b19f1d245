"""How much memory a process may use, by the files that the kernel shows in a container."""

from __future__ import annotations

import os
import pathlib

import pytest

from pathways.process.memory import memory_bytes

ALL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {}, ALL),
        ("0::/", {"memory.max": "max\n"}, ALL),
        ("0::/", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/a/b", {"memory.max": "max\n", "a/memory.max": "4096\n", "a/b/memory.max": "8192\n"}, 4096),
        ("0::/of/another/namespace", {"memory.max": "8192\n"}, 8192),
        ("0::/../..", {"memory.max": "8192\n"}, 8192),
        ("4:cpu,memory:/a\n1:cpu:/", {"memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:memory:/", {"memory/memory.limit_in_bytes": f"{1 << 62}\n"}, ALL),
        ("4:cpu:/a", {"memory/memory.limit_in_bytes": "4096\n"}, ALL),
    ],
)
def test_memory_bytes(tmp_path: pathlib.Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    proc, groups = tmp_path / "cgroup", tmp_path / "groups"
    proc.write_text(cgroup + "\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert memory_bytes(str(proc), str(groups)) == expected
    assert memory_bytes(str(tmp_path / "nothing"), str(groups)) == ALL
