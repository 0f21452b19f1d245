"""The `pathways` command, with doubles inside: `up` stays until it is told to end, `status` shows what runs."""

from __future__ import annotations

import collections
import errno
import importlib.metadata
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import rich.console
from click.testing import CliRunner

import pathways as pw
from pathways import cli
from pathways.cli.text import SIZE, of_others
from pathways.cluster import operator
from pathways.process import run_directory

HERE = pathlib.Path(__file__).parents[1]  # of the doubles
UP = """
import functools, sys
import control_doubles
from pathways.cluster import launcher
launcher.start_local_cluster = functools.partial(launcher.start_local_cluster, **control_doubles.OPTIONS)
from pathways.cli import main
main(sys.argv[1:], prog_name="pathways")
"""


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Clusters of this test only: they are found in a folder of its own, whose name is short enough for a socket's."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:
        monkeypatch.setattr(run_directory, "_bases", lambda: [folder])
        yield {**os.environ, "PYTHONPATH": paths, "TMPDIR": folder}


@pytest.fixture
def up(environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`pathways up` of one island of two hosts."""
    arguments = ["up", "--hosts-per-island", "2", "--devices-per-host", "3", "--platform", "cpu"]
    with subprocess.Popen(
        [sys.executable, "-c", UP, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_its_address_and_ends_in_order(
    up: subprocess.Popen[str], environ: dict[str, str], end: signal.Signals
) -> None:
    assert up.stdout is not None and up.stderr is not None
    address = up.stdout.readline().strip()
    assert address.startswith(f"unix:{environ['TMPDIR']}/pathways-") and run_directory.live_clusters() == [address]
    for arguments in (["status"], ["status", address]):
        shown = CliRunner().invoke(cli.main, arguments)
        assert shown.exit_code == 0, shown.output
        assert "1 island x 2 hosts x 3 cpu devices" in shown.output and "started the cluster" in shown.output
        assert "0-2" in shown.output and "3-5" in shown.output
        lines = [line.split() for line in shown.output.splitlines()]
        for number in range(6):  # MEM-1: of both hosts, by device, then by owner and program
            assert [str(number), str(number // 3), "1", "MiB", "3", "MiB", "1.0", "GiB"] in lines, shown.output
        client = next(line[0] for line in lines if line[-3:] == ["started", "the", "cluster"])
        holders = [line[1:] for line in lines if line[:1] == [client] and line[-1] in ("MiB", "KiB")][-3:]
        assert holders == [
            ["train", "4", "MiB", "14", "MiB"],
            ["put", "there", "10", "KiB", "12", "KiB"],
            ["a", "program", "that", "is", "gone", "0", "B", "2", "KiB"],
        ]
        assert "never ran" not in shown.output
    up.send_signal(end)
    assert up.wait(30) == 0
    assert "ending the cluster" in up.stderr.read()
    assert os.listdir(environ["TMPDIR"]) == []


@pytest.fixture
def another(environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`pathways up` of one host, with sizes."""
    root = os.path.join(environ["TMPDIR"], "{client}")
    sizes = ["--device-memory", "1GiB", "--transfer-memory", "64MiB", "--checkpoint-root", root]
    with subprocess.Popen(
        [sys.executable, "-c", UP, "up", "--platform", "cpu", *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    ) as process:
        yield process
        process.kill()


def test_several_clusters_are_listed(up: subprocess.Popen[str], another: subprocess.Popen[str]) -> None:
    assert up.stdout is not None and another.stdout is not None
    first, second = up.stdout.readline().strip(), another.stdout.readline().strip()
    shown = CliRunner().invoke(cli.main, ["status"])
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line for line in shown.output.splitlines() if "unix:" in line}
    assert set(lines) == {first, second}
    assert "2 hosts x 3 cpu devices" in lines[first] and "1 host x 1 cpu device" in lines[second]
    assert "`pathways status ADDRESS` shows one" in shown.output
    every = json.loads(CliRunner().invoke(cli.main, ["status", "--json"]).output)["clusters"]
    assert {each["address"] for each in every} == {first, second}
    (one,) = json.loads(CliRunner().invoke(cli.main, ["status", "--json", second]).output)["clusters"]
    assert one["address"] == second and one["topology"]["devices_per_host"] == 1
    assert [host["host"] for host in one["hosts"]] == [0] and len(one["clients"]) == 1


def test_suspend_and_resume_say_what_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "suspend", lambda address, client, to_disk: 3 << 20)
    monkeypatch.setattr(operator, "resume", lambda address, client: 3 << 20)
    shown = CliRunner().invoke(cli.main, ["suspend", "unix:/x", "7"])
    assert "client 7 is suspended; 3 MiB left the devices" in shown.output, shown.output
    assert "`pathways resume 7 unix:/x`" in shown.output
    shown = CliRunner().invoke(cli.main, ["resume", "unix:/x", "7"])
    assert "client 7 is not suspended any more; 3 MiB came back" in shown.output, shown.output


def test_commands_take_the_address_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(operator, "suspend", lambda *asking, to_disk: asked.append(asking) or 0)
    monkeypatch.setattr(operator, "limit", lambda *asking: asked.append(asking) or collections.defaultdict(int))
    monkeypatch.setenv("PATHWAYS_ADDRESS", "unix:/y")
    for arguments in (["suspend", "7"], ["suspend", "7", "unix:/x"], ["suspend", "unix:/x", "7"]):
        assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    assert CliRunner().invoke(cli.main, ["limit", "7", "--weight", "2"]).exit_code == 0
    assert asked == [("unix:/y", 7), ("unix:/x", 7), ("unix:/x", 7), ("unix:/y", 7, {"weight": 2.0})]
    for words in (["7", "8"], ["unix:/x"], ["unix:/x", "unix:/y", "7"]):
        for command in ("suspend", "resume", "limit"):
            refused = CliRunner().invoke(cli.main, [command, *words])
            assert refused.exit_code == 2 and "expected CLIENT [ADDRESS]" in refused.output
    for command in (["top", "--once"], ["trace", "--out", os.devnull], ["status"], ["resume", "7"]):
        refused = CliRunner().invoke(cli.main, command)
        assert refused.exit_code == 1 and "no cluster listens at unix:/y" in refused.output, refused.output


def test_a_cluster_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def denied(path: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("pathways.cluster.address.os.stat", denied)
    refused = CliRunner().invoke(cli.main, ["status", f"unix:{tmp_path}/control.sock"])
    assert refused.exit_code == 1 and "permission denied: only the user who started the cluster" in refused.output


def test_an_agent_of_a_wrong_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATHWAYS_TOKEN", raising=False)
    refused = CliRunner().invoke(cli.main, ["agent", "nope"])
    assert refused.exit_code == 1 and "'nope' has no port" in refused.output


def test_version() -> None:
    shown = CliRunner().invoke(cli.main, ["--version"])
    versions = [pw.__version__, *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))]
    assert shown.exit_code == 0
    assert shown.output == "pathways {} (jax {}, jaxlib {})\n".format(*versions)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("1GiB", 1 << 30), ("1g", 1 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("7TiB", 7 << 40)],
)
def test_sizes(text: str, count: int) -> None:
    assert SIZE.convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "-1", "0", "GiB", "1XB", "1e9", "0.1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    shown = CliRunner().invoke(cli.main, ["up", "--device-memory", text])
    assert shown.exit_code == 2 and "--device-memory" in shown.output and "1GiB" in shown.output


def test_a_table_in_a_pipe_is_not_cut() -> None:
    code = """
from rich.table import Table
from pathways.process.console import standard_output
table = Table("a", "b")
table.add_row("x" * 150, "y" * 150)
standard_output().print(table)
"""
    environ = {**os.environ, "COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert "x" * 150 in done.stdout and "y" * 150 in done.stdout, done.stdout + done.stderr


def test_up_says_what_went_wrong(environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UP, "up", "--platform", "cpu"],
        capture_output=True,
        text=True,
        env={**environ, "FAKE_HOST_0": "exit"},
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "Error: the cluster did not start: host 0" in done.stderr and "the last thing it said" in done.stderr
    assert "Traceback" not in done.stderr and os.listdir(environ["TMPDIR"]) == []


def test_status_of_nothing(environ: dict[str, str]) -> None:
    shown = CliRunner().invoke(cli.main, ["status"])
    assert shown.exit_code == 1 and "`pathways up` starts one" in shown.output
    shown = CliRunner().invoke(cli.main, ["status", "nonsense"])
    assert shown.exit_code == 1 and "expected an address like unix:/path/control.sock, got 'nonsense'" in shown.output


def test_bad_sizes_are_refused_by_name() -> None:
    shown = CliRunner().invoke(cli.main, ["up", "--islands", "0"])
    assert shown.exit_code == 2 and "--islands" in shown.output


def test_help_lists_every_command_without_importing_it() -> None:
    shown = CliRunner().invoke(cli.main, ["--help"])
    assert shown.exit_code == 0
    for command in ("up", "status", "bench"):
        assert f"\n  {command}" in shown.output


def test_a_terminal_obeys_no_text_of_a_client() -> None:
    """A program, a client or a variable may be called anything."""
    shown = io.StringIO()
    rich.console.Console(file=shown, force_terminal=True, color_system=None).print(of_others("[/]\x1b]0;x\x07 [red]"))
    assert shown.getvalue() == "[/]?]0;x? [red]\n"
