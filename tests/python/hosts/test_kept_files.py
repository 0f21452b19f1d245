"""Files that outlive a cluster. KEPT-1 (whole), KEPT-2 (bounded)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pathways import errors
from pathways.host import kept_executables
from pathways.process.kept_files import KeptFiles

MIB = 1 << 20


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_value_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    kept = KeptFiles(str(tmp_path / "root"), "a", MIB)
    assert kept.get("key") is None
    assert kept.put("key", b"value" * 1000)
    assert KeptFiles(str(tmp_path / "root"), "a", MIB).get("key") == b"value" * 1000
    assert KeptFiles(str(tmp_path / "root"), "b", MIB).get("key") is None
    for damage in (lambda content: content[:-1], lambda content: b"", lambda content: content[:-1] + b"?"):
        (path,) = files_below(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert kept.get("key") is None
        assert not files_below(tmp_path)
        assert kept.put("key", b"value" * 1000)
    assert kept.put("key", b"another")
    assert kept.get("key") == b"another"


def test_the_files_of_all_folders_stay_within_the_limit_and_what_was_used_last_stays(tmp_path: Path) -> None:
    old = KeptFiles(str(tmp_path), "old", MIB)
    for number in range(10):
        assert old.put(str(number), bytes(64 << 10))
    new = KeptFiles(str(tmp_path), "new", MIB)
    for number, path in enumerate(sorted(files_below(tmp_path), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (number, number))
    assert old.get("0") is not None  # the oldest is used
    for number in range(100):
        assert new.put(str(number), bytes(64 << 10))
        assert sum(path.stat().st_size for path in files_below(tmp_path)) <= MIB
        assert number > 5 or old.get("0") is not None
    assert new.get("99") is not None
    assert old.get("1") is None
    assert not new.put("too big", bytes(2 * MIB))
    assert new.get("too big") is None


def test_several_users_at_once_see_whole_values(tmp_path: Path) -> None:
    def use(seed: int) -> None:
        kept = KeptFiles(str(tmp_path), "a", MIB)
        for turn in range(200):
            key = str((seed + turn) % 40)
            found = kept.get(key)
            if found not in (None, key.encode() * (16 << 10)):
                wrong.append(key)
            kept.put(key, key.encode() * (16 << 10))

    wrong: list[str] = []
    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(0, 40, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [path for path in files_below(tmp_path) if path.name.startswith(".")]


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        KeptFiles(str(tmp_path / "open"), "a", MIB)


def test_a_file_system_that_refuses_keeps_nothing(tmp_path: Path) -> None:
    kept = KeptFiles(str(tmp_path), "a", MIB)
    (tmp_path / "a").rmdir()
    assert not kept.put("key", b"value")
    assert kept.get("key") is None


def test_the_folder_follows_the_users_settings() -> None:
    assert kept_executables.root({"XDG_CACHE_HOME": "/there"}) == "/there/pathways/executables"
    with pytest.raises(FileNotFoundError, match="XDG_CACHE_HOME"):
        kept_executables.root({"XDG_CACHE_HOME": "no/absolute/path"})
    with pytest.raises(errors.OptionError, match="PATHWAYS_COMPILE_CACHE is 'much'; expected a number of bytes"):
        kept_executables.keep([], {"PATHWAYS_COMPILE_CACHE": "much"})
