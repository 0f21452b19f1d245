"""The lines of logs: time, level, process, client and run, as text and as JSON; and a disk that is full (LOG-1)."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from control_clusters import eventually

import pathways as pw
from pathways import cli, errors
from pathways.process import log_lines

#: What begins a line.
BEGIN = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) "
PROGRAM = """
import logging, sys, threading, warnings
from pathways.process import log_lines
log_lines.begin("host 3")
log = logging.getLogger("pathways.somewhere")
log.info("about %s", "nothing")
log.debug("in detail")
log.warning("two\\nlines", extra={"client": 4, "run": 17})
logging.getLogger("else").info("of another library")
print("printed", "100 %s")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
warnings.warn("beware")
thread = threading.Thread(target=lambda: [][1], name="one")
thread.start(); thread.join()
raise SystemError("the end")
"""


def said(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        stdout=-1,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 1
    return done.stdout


def test_lines_for_people() -> None:
    text = said()
    first, *rest = text.splitlines()
    assert re.fullmatch(BEGIN + "host 3 about nothing", first)
    written = datetime.datetime.fromisoformat(first.split()[0])
    assert abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 600
    assert re.search(BEGIN + r"host 3 \[client 4, run 17\] two\nlines$", text, re.MULTILINE)
    assert "printed 100 %s" in rest, "what a process prints stays as it is"
    assert re.search(BEGIN + r"host 3 it failed\nTraceback[^Z]*\nZeroDivisionError: ", text, re.MULTILINE)
    assert re.search(BEGIN + r"host 3 .*UserWarning: beware", text, re.MULTILINE)
    for error in ("IndexError", "SystemError"):
        assert re.search(BEGIN + rf"host 3 an error that nobody handles\nTraceback[^Z]*\n{error}", text, re.MULTILINE)
    assert "in detail" not in text and "of another library" not in text


def test_lines_for_programs() -> None:
    entries = [json.loads(line) for line in said(PATHWAYS_LOG_FORMAT="json").splitlines()]
    assert all({"time", "level", "process", "pid", "message"} <= set(entry) for entry in entries)
    assert {entry["process"] for entry in entries} == {"host 3"}
    by_text = {entry["message"]: entry for entry in entries}
    assert by_text["about nothing"]["level"] == "info" and "client" not in by_text["about nothing"]
    two = by_text["two\nlines"]
    assert (two["level"], two["client"], two["run"], two["logger"]) == ("warning", 4, 17, "pathways.somewhere")
    assert by_text["printed 100 %s"]["logger"] == "stdout"
    assert "ZeroDivisionError" in by_text["it failed"]["traceback"]
    assert sum("traceback" in entry for entry in entries) == 3


def test_levels() -> None:
    assert "host 3 in detail" in said(PATHWAYS_LOG_LEVEL="debug")
    text = said(PATHWAYS_LOG_LEVEL="error")
    assert "about nothing" not in text and "two" not in text and "it failed" in text


@pytest.mark.parametrize(("name", "value"), [("PATHWAYS_LOG_LEVEL", "loud"), ("PATHWAYS_LOG_FORMAT", "xml")])
def test_a_variable_without_meaning(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(errors.OptionError, match=f"{name}={value}: expected one of"):
        pw.connect(pw.LocalCluster())
    for command in (["proxy", "unix:/nowhere"],):
        assert f"{name}={value}: expected one of" in CliRunner().invoke(cli.main, command).output
    refused = CliRunner().invoke(cli.main, ["up", "--log-level", "loud"])
    assert refused.exit_code == 2 and "'loud' is not one of" in refused.output


def test_a_cluster_writes_what_its_program_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its processes each says when it begins; the controller, which clients come and go, and what is lost."""
    monkeypatch.setenv("PATHWAYS_LOG_FORMAT", "json")
    with pw.connect(pw.LocalCluster(islands=2)) as cluster:
        with pw.connect(cluster.address, name="a guest") as guest:
            number = guest.client_id
        os.kill(cluster.stats()["hosts"][1]["pid"], 9)
        eventually(lambda: cluster.stats()["hosts"][1]["restarts"] == 1, "the host is started again", 60)
        eventually(lambda: cluster.stats()["hosts"][1]["state"] == "up", "the host is back", 60)
        eventually(lambda: "has left" in str(entries("controller", cluster.address)), "the guest has left")
        of_controller = entries("controller", cluster.address)
        of_host = entries("1", cluster.address)
    assert {entry["process"] for entry in of_controller} == {"controller"}
    of_guest = [entry["message"] for entry in of_controller if entry.get("client") == number]
    assert len(of_guest) == 2 and "'a guest'" in of_guest[0] and of_guest[1] == "has left"
    lost = [entry for entry in of_controller if "island 1 is lost: host 1" in entry["message"]]
    assert len(lost) == 1 and lost[0]["level"] == "warning" and "killed by SIGKILL" in lost[0]["message"]
    assert any(entry["message"] == "island 1 is back, start 1" for entry in of_controller)
    assert of_controller[0]["message"].startswith("begins: pathways ")
    assert of_host[0]["process"] == "host 1" and of_host[0]["message"].startswith("begins: start 1, process ")


def entries(what: str, address: str) -> list[dict[str, Any]]:
    shown = CliRunner().invoke(cli.main, ["logs", what, address])
    assert shown.exit_code == 0, shown.output
    return [json.loads(line) for line in shown.stdout.splitlines()]


# A disk that is full.


@pytest.fixture
def small_disk() -> Iterator[pathlib.Path]:
    """A file system of 1 MiB, with a name that leaves room for those of sockets."""
    tmp_path = pathlib.Path(tempfile.mkdtemp(prefix="pw", dir="/tmp"))
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", tmp_path]).returncode:
        tmp_path.rmdir()
        pytest.skip("a file system can be mounted by root only")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
        tmp_path.rmdir()


def fill(folder: pathlib.Path) -> pathlib.Path:
    """Leaves no room, nor in the last pages of logs that are there. Returns a file which has nearly all of it."""
    ballast = folder / "ballast"
    for path, block in [(ballast, b"x" * 4096), *((log, b"\n") for log in folder.rglob("*.log"))]:
        with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(block) == len(block):
                pass
    return ballast


LOSES = """
import logging, os, sys
from pathways.process import log_lines
log_lines.begin("host 3")
log = logging.getLogger("pathways")
log.info("before")
os.write(3, b"1")
os.read(4, 1)
for number in range(1000):
    log.info("lost %d", number)
    print("printed")
os.write(3, b"2")
os.read(4, 1)
log.info("behind")
log.info("last")
"""


def test_lines_that_a_full_disk_has_no_room_for_are_counted(small_disk: pathlib.Path) -> None:
    told, tells = os.pipe()
    goes, go = os.pipe()
    path = small_disk / "log.log"
    with open(path, "ab") as log:
        script = LOSES.replace("os.write(3,", f"os.write({tells},").replace("os.read(4,", f"os.read({goes},")
        process = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log, pass_fds=(tells, goes))
    try:
        assert os.read(told, 1) == b"1"
        ballast = fill(small_disk)
        os.write(go, b"x")
        assert os.read(told, 1) == b"2", "who logs goes on"
        ballast.unlink()
        os.write(go, b"x")
        assert process.wait(60) == 0
    finally:
        process.kill()
        for fd in (told, tells, goes, go):
            os.close(fd)
    lines = list(filter(None, path.read_text().splitlines()))
    assert lines[0].endswith(" host 3 before")
    there = sum(("lost " in line and "of this log" not in line) or line == "printed" for line in lines)
    notices = [line for line in lines if "of this log were lost" in line]
    assert len(notices) == 1, lines
    lost = re.fullmatch(BEGIN + r"host 3 (\d+) lines of this log were lost: No space left on device", notices[0])
    assert lost and 2000 - there <= int(lost[2]) <= 2000, "a line that was torn counts as lost"
    assert lines[lines.index(notices[0]) + 1].endswith(" behind") and lines[-1].endswith(" last")


@pytest.mark.slow
def test_a_cluster_goes_on_where_its_disk_is_full(small_disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes, loses a host and starts it again, and takes new clients. Its controller says later what was lost."""
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pw.connect(pw.LocalCluster(islands=2)) as cluster:
        assert str(small_disk) in cluster.address
        devices = pw.make_virtual_device_set(cluster)
        twice = [pw.jit(lambda x: x * 2, devices=devices.add_slice(1, island=island)) for island in range(2)]
        assert [float(np.asarray(call(np.float32(2)))) for call in twice] == [4, 4]
        ballast = fill(small_disk)
        os.kill(cluster.stats()["hosts"][1]["pid"], 9)
        eventually(lambda: cluster.stats()["hosts"][1]["restarts"] == 1, "the host is started again", 60)
        eventually(lambda: cluster.stats()["hosts"][1]["state"] == "up", "the host is back", 60)
        with pw.connect(cluster.address) as guest:
            more = pw.make_virtual_device_set(guest).add_slice(1, island=1)
            assert float(np.asarray(pw.jit(lambda x: x + 3, devices=more)(np.float32(2)))) == 5
        assert [float(np.asarray(call(np.float32(3)))) for call in twice] == [6, 6]
        shown = CliRunner().invoke(cli.main, ["logs", "controller", cluster.address])
        assert shown.exit_code == 0 and "island 1 is back, start 1" not in shown.stdout
        ballast.unlink()
        pw.connect(cluster.address, name="another").close()
        text = CliRunner().invoke(cli.main, ["logs", "controller", cluster.address]).stdout
    assert len(re.findall(r"controller \d+ lines of this log were lost: No space left on device", text)) == 1, text
    assert text.index("of this log were lost") < text.index("'another'")


def test_variables_are_those_that_pages_name(root: pathlib.Path) -> None:
    page = (root / "docs/observing.md").read_text(encoding="utf-8")
    assert all(name in page for name in (log_lines.LEVEL_VARIABLE, log_lines.FORMAT_VARIABLE, "--log-level"))
