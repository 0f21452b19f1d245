"""What the README's commands need: where GoogleTest comes from, and a machine that has only what the README names."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

BIN = pathlib.Path(sys.executable).parent
CONFIG = "set(GTest_VERSION 9.9)\nadd_library(GTest::gtest INTERFACE IMPORTED)\n"


def script(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def configure(root: pathlib.Path, tmp_path: pathlib.Path) -> Callable[..., str]:
    """Lets CMake look for GoogleTest on the given roads; returns its output, with each run of white space as one."""
    if not (BIN / "cmake").exists():
        pytest.skip("cmake is not in this environment: install the extra `cmake`")
    (tmp_path / "project").mkdir()
    (tmp_path / "project/CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24...4.0)\nproject(t LANGUAGES NONE)\n"
        f'include("{root}/tests/cpp/googletest.cmake")\n'
    )

    def run(roads: str, *options: str) -> str:
        command = [str(BIN / "cmake"), "-S", "project", "-B", "build", f"-DPATHWAYS_GOOGLETEST={roads}", *options]
        environment = {
            **os.environ,
            "VIRTUAL_ENV": str(tmp_path / "venv"),
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        }
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=100)
        return " ".join((done.stdout + done.stderr).split())

    return run


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="not a Debian")
def test_debians_package_is_unpacked_into_the_environment(
    configure: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    package = tmp_path / "package"
    for path, text in {
        "DEBIAN/control": "Package: libgtest-dev\nVersion: 9.9\nArchitecture: all\nMaintainer: me\nDescription: x\n",
        "usr/lib/cmake/GTest/GTestConfig.cmake": CONFIG,
    }.items():
        (package / path).parent.mkdir(parents=True)
        (package / path).write_text(text)
    subprocess.run(["dpkg-deb", "--build", str(package), str(tmp_path / "libgtest-dev_9.9_all.deb")], check=True)
    # A machine without lists of packages: only after `update` the package is found.
    script(
        tmp_path / "bin/apt-get",
        f'case "$*" in *update*) touch {tmp_path}/updated ;; *) test -e {tmp_path}/updated || exit 100\n'
        f"echo once >> {tmp_path}/downloads; cp {tmp_path}/libgtest-dev_9.9_all.deb . ;; esac",
    )
    line = f"GoogleTest: 9.9, the package libgtest-dev, unpacked into {tmp_path}/venv/googletest"
    assert line in configure("package;release")
    assert line in configure("package;release")
    assert (tmp_path / "downloads").read_text() == "once\n"
    assert os.listdir(tmp_path / "venv") == ["googletest"]


def test_what_to_install_is_said_when_no_road_leads_to_googletest(
    configure: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    script(tmp_path / "bin/apt-get", "echo 'E: no network' >&2; exit 100")
    other = tmp_path / "other.tar.gz"
    other.write_text("not GoogleTest")
    said = configure("package;release", f"-DPATHWAYS_GOOGLETEST_URL={other.as_uri()}")
    assert "The native tests need GoogleTest, which is not to be had here" in said
    if shutil.which("dpkg-deb"):
        assert "apt-get could not download libgtest-dev: E: no network" in said
    assert "another file than the release" in said
    assert "Install it: libgtest-dev (Debian, Ubuntu)" in said and "PATHWAYS_GOOGLETEST=FOLDER" in said
    said = configure("release", f"-DPATHWAYS_GOOGLETEST_URL={(tmp_path / 'nowhere').as_uri()}")
    assert "nowhere: " in said and "Install it: libgtest-dev" in said


def test_googletest_comes_from_a_folder_of_sources(configure: Callable[..., str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/CMakeLists.txt").write_text(
        "add_library(gtest INTERFACE)\nadd_library(GTest::gtest ALIAS gtest)\n"
    )
    assert f"GoogleTest: the sources in {tmp_path}/sources" in configure(f"{tmp_path}/sources")
    assert "expected a list of system, package, release and folders, got nowhere" in configure("nowhere")


def bare(root: pathlib.Path, *arguments: str, **variables: str) -> str:
    command = [sys.executable, str(root / "scripts/bare_machine.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, text=True, capture_output=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="not a Debian")
def test_a_bare_machine_has_what_the_readme_names_and_nothing_else(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script(tmp_path / "ours", "echo an installed tool")
    look = "for t in ours git clang++ ccache cmake ninja c++ make; do command -v $t >/dev/null && echo has:$t; done; "
    look += 'echo "$CXX|$CMAKE_CXX_COMPILER_LAUNCHER|$VIRTUAL_ENV|"; "$PYTHON" -c "print(7 * 6)"; cat kept'
    (tmp_path / "kept").write_text("a file of the user\n")
    there = {tool for tool in ("c++", "make") if shutil.which(tool)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    for options, tools in (([], there), (["--no-compiler"], set())):
        command = [*options, "sh", "-c", f"cd {tmp_path}; {look}"]
        said = bare(root, *command, PATH=path, CXX="clang++", CMAKE_CXX_COMPILER_LAUNCHER="ccache").splitlines()
        assert {line.removeprefix("has:") for line in said if line.startswith("has:")} == tools
        assert said[-3:] == ["|||", "42", "a file of the user"]
        assert said[0].startswith("[bare] ") and "commands are" in said[0]
    assert {tool for tool in ("c++", "make") if shutil.which(tool)} == there  # nothing is hidden from others
