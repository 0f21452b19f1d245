"""The scripts behind `make`: what they decide, without what they build."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import types

import pytest


def load(root: pathlib.Path, name: str, suffix: str = ".py") -> types.ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(root / "scripts" / f"{name}{suffix}"))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("symbol", "ours"),
    [
        ("pathways::FutureTable::allocate(unsigned int, pathways::Handle*)", True),
        ("typeinfo name for pathways::Error", True),
        ("non-virtual thunk to pathways::Host::run()", True),
        ("guard variable for pathways::spin()::once", True),
        ("std::vector<int, std::allocator<int> > pathways::sort<int>(std::vector<int, std::allocator<int> >)", True),
        ("pathways::Lane* std::copy<pathways::Lane const*, pathways::Lane*>(pathways::Lane const*)", False),
        ("void std::vector<pathways::Run>::_M_realloc_insert<pathways::Run>(pathways::Run&&)", False),
        ("vtable for std::thread::_State_impl<pathways::Host>", False),
        ("main", False),
    ],
)
def test_the_wheel_check_tells_our_symbols_from_others(root: pathlib.Path, symbol: str, ours: bool) -> None:
    assert load(root, "check_wheel")._is_ours(symbol) is ours


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("nm")), reason="needs a C++ compiler and nm")
def test_the_wheel_check_sees_what_a_library_exports(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source, library = tmp_path / "a.cc", tmp_path / "a.so"
    source.write_text("namespace pathways { int f() { return 1; } }\nint stray() { return 2; }\n")
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    assert load(root, "check_wheel").foreign_symbols(library) == ["stray()"]


def test_requirements_are_those_of_pyproject(root: pathlib.Path) -> None:
    command = [sys.executable, str(root / "scripts/requirements.py"), "demo"]
    listed = subprocess.run(command, check=True, text=True, capture_output=True).stdout.splitlines()
    assert len(listed) == len(set(listed))
    assert any(line.startswith("scikit-build-core") for line in listed)
    assert any(line.startswith("jax>=") for line in listed)
    assert any(line.startswith("optax") for line in listed)
    assert not any(line.startswith("pytest") for line in listed)


def test_bootstrap_says_which_python_is_needed(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 'is Python 3.9, and 3.11 or newer is needed'\n")
    old.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(old)}
    command = [str(root / "scripts/bootstrap"), "venv", str(tmp_path / "venv")]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode != 0
    assert "3.11 or newer is needed" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("csrc/a/a.h", "enum class NoteKind { kPut };", 1),
        ("csrc/a/a.h", "// a command, and the notes\n// of it: a parcel", 2),
        ("pathways/api/a.py", "the janitor reads the obituary", 2),
        ("pathways/api/a.py", "error.add_note('a note for people')", 0),
        ("csrc/sync/doorbell.h", "a parked thread", 0),
        ("csrc/a/a.h", "a place in the order", 0),
        ("csrc/a/a.h", "if (is_far(host)) far_[host] = FarHeader{};  // a far host", 4),
        ("csrc/a/a.h", "bool is_far_ahead();  // as far as it goes", 0),
        ("csrc/link/a.h", "FarBlocks far;", 0),
    ],
)
def test_the_list_of_old_words_finds_them(root: pathlib.Path, file: str, text: str, found: int) -> None:
    assert len(load(root, "words").hits(file, text)) == found


LOG = """\
PATHWAYS_SAMPLE=17 PATHWAYS_SHARE=1
=========== 2 failed, 30 passed, 1 skipped, 4 warnings in 61.20s (0:01:01) ===========
PATHWAYS_TEST_SEED=5
PATHWAYS_TEST_SEED=6
96% tests passed, 1 tests failed out of 29
100% tests passed out of 6
12 passed, 1 error in 0.85s
03:45:10 24 cuts, 3 of them wrong: ['far3', 'far4', 'machine2']
04:45:10 12 cells, 1 of them wrong, 2 not over, 0 lines about lost links
"""


def test_nightly_counts_what_each_run_of_tests_says(root: pathlib.Path) -> None:
    nightly = load(root, "nightly", "")
    assert nightly.counts(LOG) == (30 + 28 + 6 + 12 + 21 + 9, 2 + 1 + 1 + 3 + 1, 1 + 2)
    assert nightly.counts("nothing was run\n") == (0, 0, 0)
    assert nightly.seeds(LOG) == "PATHWAYS_SAMPLE 17; PATHWAYS_TEST_SEED 5 6"


def test_nightly_keeps_the_rows_of_stages_that_it_does_not_play(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nightly = load(root, "nightly", "")
    monkeypatch.setattr(nightly, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(nightly, "LOGS", root / "build/nightly-test")
    stages = {"good": ({}, ["echo", "3 passed in 1.0s"]), "bad": ({"CODE": "3"}, ["sh", "-c", "exit $CODE"])}
    monkeypatch.setattr(nightly, "STAGES", stages)
    monkeypatch.setattr(nightly, "commit", lambda: "v1")  # git is not everywhere
    monkeypatch.setattr(sys, "argv", ["nightly"])
    assert nightly.main() == 1
    first = nightly.rows()
    assert " | 3 | 0 | 0 | " in first["good"] and " | 0 | exit 3 | 0 | " in first["bad"]
    monkeypatch.setattr(sys, "argv", ["nightly", "good"])
    assert nightly.main() == 0
    assert nightly.rows()["bad"] == first["bad"]
    monkeypatch.setattr(sys, "argv", ["nightly", "other"])
    with pytest.raises(SystemExit):
        nightly.main()
    assert "expected stages of good, bad; got other" in capsys.readouterr().err
    shutil.rmtree(root / "build/nightly-test")


@pytest.mark.slow
def test_the_check_of_a_platform_passes_on_cpu(root: pathlib.Path) -> None:
    names = ["devices", "quirk-memory", "quirk-scalar", "transfers", "branches"]  # each starts processes of its own
    command = [sys.executable, str(root / "scripts/gpu_check"), "--platform", "cpu", *names]
    done = subprocess.run(command, text=True, capture_output=True)
    verdicts = [line.split(" | ")[1] for line in done.stdout.splitlines()[2:]]
    assert done.returncode == 0 and verdicts == ["ok"] * len(names), done.stdout + done.stderr


def test_the_check_of_a_platform_says_what_differs_fails_or_hangs(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_check = load(root, "gpu_check", "")
    said = {"good": "ok\tfine", "other": "differs\tnot so", "few": "skipped\tone device", "bad": "", "long": None}

    def play(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        text = said[command[command.index("--here") + 1]]
        if text is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0 if text else 1, text, "a\nb\nc\nValueError: wrong | value")

    monkeypatch.setattr(gpu_check.subprocess, "run", play)
    monkeypatch.setattr(gpu_check, "CHECKS", dict.fromkeys(said))
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 1
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["ok", "differs", "skipped", "failed", "failed"]
    assert rows[3][3] == "b / c / ValueError: wrong / value |" and rows[4][3] == "not over after 75 s |"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "good", "few"])
    assert gpu_check.main() == 0
    monkeypatch.setattr(sys, "argv", ["gpu_check", "none"])
    with pytest.raises(SystemExit):
        gpu_check.main()


def test_lint_knows_what_unity_files_compile(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    unity = tmp_path / "core.dir/Unity/unity_plan_cxx.cxx"
    unity.parent.mkdir(parents=True)
    unity.write_text('/* generated */\n#include "csrc/plan/a.cc"\n#include "/elsewhere/b.cc"\n')
    entries = [
        {"file": str(unity), "command": "c++ -DONE -c unity"},
        {"file": "/elsewhere/c.cc", "command": "c++ -DTWO -c c.cc"},
        {"file": "/elsewhere/b.cc", "command": "c++ -DTHREE -c b.cc"},
    ]
    commands = tmp_path / "compile_commands.json"
    commands.write_text(json.dumps(entries))
    found = load(root, "lint").compiled_files(commands)
    assert {name: command[1] for name, command in found.items()} == {
        str(root / "csrc/plan/a.cc"): "-DONE",
        "/elsewhere/b.cc": "-DONE",
        "/elsewhere/c.cc": "-DTWO",
    }
