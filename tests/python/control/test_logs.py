"""`pathways logs`: the log of each process, on a cluster of doubles and from the machines of agents.

Who may not read them: `test_control_plane.py` (TRUST-1).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result
from control_clusters import assert_gone, eventually
from machines import MachineCluster

import pathways as pw
from pathways import cli, errors
from pathways.cli.logs import _CONTROL
from pathways.cluster import operator
from pathways.cluster.launcher import CLOSE_GRACE_S, LocalClusterHandle
from pathways.controller import log_sources
from pathways.process import log_files
from pathways.protocol import agent_pb2


def logs(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["logs", *map(str, arguments)])


def text(*arguments: object) -> str:
    shown = logs(*arguments)
    assert shown.exit_code == 0, shown.output
    return shown.stdout


# A log has a bound, and so has what is kept of it.


def test_a_log_that_is_too_long_begins_anew_and_keeps_its_end(tmp_path: pathlib.Path) -> None:
    """LOG-1, with a writer that knows nothing of it."""
    (tmp_path / "logs").mkdir()
    path = log_files.host_log(str(tmp_path), 0, 0)
    with log_files.create(path) as log:
        line = b"x" * 1023 + b"\n"
        for number in range(log_files.MOST_LOG // 1024):
            log.write(b"%8d" % number + line[8:])
        log.flush()
        log_files.shorten(str(tmp_path))
        assert os.path.getsize(path) == log_files.MOST_LOG, "it is not too long yet"
        log.write(line * 3 + b"last\n")
        log.flush()
        log_files.shorten(str(tmp_path))
        log.write(b"behind\n")
        log.flush()
    anew = pathlib.Path(path).read_bytes()
    assert anew.startswith(b"... this log was 32 MiB long") and anew.endswith(b"\nbehind\n") and len(anew) < 1000
    kept = pathlib.Path(f"{path}.1").read_bytes()
    assert len(kept) == log_files.KEPT and kept.endswith(b"x\nlast\n")
    assert log_files.incarnations(str(tmp_path), 0) == [0]
    assert log_files.read_piece(path, log_files.MOST_LOG, 0).data == anew, "a reader begins anew as well"


@pytest.mark.slow
def test_a_client_that_prints_without_end_fills_no_disk() -> None:
    """LOG-1 for what a client's own function prints on a host of another machine."""
    with MachineCluster(1, devices_per_host=1) as machines, machines.connect() as cluster:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(1)

        def print_much(x: np.ndarray) -> np.ndarray:
            for _ in range(60 << 10):
                print("x" * 1023)
            sys.stdout.flush()
            return x

        call = pw.jit(lambda x: pw.host_callback(print_much, jax.ShapeDtypeStruct((), np.float32), x), devices=slice_)
        host = cluster.stats()["hosts"][0]["pid"]
        folder = pathlib.Path(f"/proc/{host}/fd/1").readlink().parent
        for _ in range(3):  # 60 MiB each
            assert float(call(np.float32(2))) == 2
            # What came behind the last look may stay.
            eventually(lambda: _size(folder) <= log_files.MOST_LOG + log_files.KEPT + (1 << 20), "the logs are short")


def test_a_cluster_whose_logs_have_no_room_ends_in_order(own: LocalClusterHandle) -> None:
    """What a log on a full disk has no room for is lost, and nothing else. Here the kernel bounds files instead."""
    for name, pid in own.pids().items():
        if name != "supervisor":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    began = time.monotonic()
    own.close()
    assert time.monotonic() - began < CLOSE_GRACE_S  # else it was killed
    assert_gone(own)


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# The pieces of a file.


def pieces(path: pathlib.Path, offset: int, lines: int) -> bytes:
    """All that is there, piece by piece."""
    data = b""
    while (piece := log_files.read_piece(str(path), offset, lines)).data:
        assert len(piece.data) <= log_files.MOST_BYTES and piece.end <= piece.size
        data += piece.data
        offset = piece.end
    return data


@pytest.mark.parametrize("has_end", [True, False])
def test_the_last_lines_are_those_that_python_would_split(tmp_path: pathlib.Path, has_end: bool) -> None:
    """Lines of all lengths, around the length of a block too; the seed is printed."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    longest = [0, 1, 3, 100, log_files.MOST_BYTES - 1, log_files.MOST_BYTES, log_files.MOST_BYTES + 1]
    path = tmp_path / "log"
    for _ in range(100):
        lines = [b"x" * generator.choice(longest) + b"\n" for _ in range(generator.randrange(8))]
        if not has_end and lines:
            lines[-1] = lines[-1][:-1] or b"y"
        path.write_bytes(b"".join(lines))
        for count in range(len(lines) + 2):
            expected = b"".join(lines[len(lines) - count :] if count <= len(lines) else lines)
            assert pieces(path, -1, count) == expected


def test_a_log_that_was_begun_anew_is_read_from_its_beginning(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    assert log_files.read_piece(str(path), -1, 1) == log_files.LogPiece(b"two\n", 8, 8)
    path.write_bytes(b"new\n")
    assert log_files.read_piece(str(path), 8, 0) == log_files.LogPiece(b"new\n", 4, 4)


def test_a_terminal_obeys_nothing_in_a_log() -> None:
    assert _CONTROL.sub(b"?", b"\x1b[2J\ta\r\n\x07\xc2\x9b\xc3\xa9") == b"?[2J\ta\r\n??\xc3\xa9"


# Processes of one machine.


def test_the_logs_of_a_local_cluster(own: LocalClusterHandle) -> None:
    address = own.address
    assert "\nfake host 0 starts\n" in text("0", address) and "host 1" not in text("0", address)
    assert "\nfake host 1 starts\n" in text("1", address)
    pathlib.Path(log_files.host_log(own.directory, 1, 0)).write_bytes(b"".join(b"%d\n" % n for n in range(100_000)))
    assert text("1", address, "--lines", 2) == "99998\n99999\n"
    assert text("1", address, "--lines", 0) == ""
    assert text("1", address, "--lines", 90_000).splitlines() == [str(n) for n in range(10_000, 100_000)]
    with open(log_files.own_log(own.directory), "ab") as log:
        log.write(b"said by the controller\n")
    assert text("controller", address, "--lines", 1) == "said by the controller\n"


def test_what_is_not_there(own: LocalClusterHandle) -> None:
    for arguments, words in (
        (["2"], "no host 2: the cluster has hosts 0..1"),
        (["m1"], "no machine can join this cluster: its hosts are all on the controller's machine"),
        (["agent:0"], "no machine can join this cluster"),
        (["0", "--restart", "3"], "no log of host 0 after 3 restarts where the host is; there are .* restarts: 0$"),
        (["controller", "--restart", "1"], "only a host is started again"),
        (["0", "--lines", "-1"], "not in the range"),
    ):
        shown = logs(arguments[0], own.address, *arguments[1:])
        assert shown.exit_code != 0 and re.search(words, shown.output.strip()), shown.output


def test_no_cluster() -> None:
    shown = logs("0", "unix:/tmp/nowhere/control.sock")
    assert shown.exit_code == 1 and "no cluster listens at unix:/tmp/nowhere/control.sock" in shown.output


class Follower:
    """Follows a log in a thread, as `pathways logs --follow` does."""

    def __init__(self, address: str, what: int | str | None) -> None:
        self.said: list[tuple[int, bytes]] = []
        self.failure: Exception | None = None
        self._parts = operator.logs(address, what, lines=1, follow=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for part in self._parts:
                self.said.append((part.restart, part.text))
        except errors.PathwaysError as error:
            self.failure = error

    def text(self, restart: int = 0) -> bytes:
        return b"".join(text for number, text in self.said if number == restart)

    def join(self) -> Exception | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.failure


def test_a_log_is_followed_into_the_next_start_of_its_host(own: LocalClusterHandle) -> None:
    follower = Follower(own.address, 0)
    eventually(lambda: follower.text().endswith(b"host 0 has its devices, 0\n"), "its last line")
    with open(log_files.host_log(own.directory, 0, 0), "ab") as log:
        log.write(b"one more")
    eventually(lambda: follower.text().endswith(b"has its devices, 0\none more"), "what is written then")
    os.kill(own.pids()["host 0"], signal.SIGKILL)
    eventually(lambda: b"\nfake host 0 starts\n" in follower.text(1), "the next log", 30)
    before = text("0", own.address, "--restart", 0)
    assert "\nfake host 0 starts\n" in before and before.endswith("\none more")
    assert "\nfake host 0 starts\n" in text("0", own.address) and "more" not in text("0", own.address)
    own.control.shutdown()
    failure = follower.join()
    assert isinstance(failure, errors.PathwaysError) and "closed" in str(failure)


def test_ctrl_c_ends_following(own: LocalClusterHandle) -> None:
    command = [sys.executable, "-c", "from pathways.cli import main; main()", "logs", "0", own.address, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "INFO host 0 begins: start 0" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""


# Processes of other machines.


@pytest.fixture
def machines() -> Iterator[MachineCluster]:
    with MachineCluster(2, 1, 1, agents=1) as cluster:
        yield cluster


@pytest.mark.slow
def test_the_logs_of_machines(machines: MachineCluster) -> None:
    """The agent holds them, and is asked. A host's earlier logs are there until the agent ends."""
    address = machines.handle.address
    with machines.connect() as cluster:
        (directory,) = agent_directories(machines)
        host_log = pathlib.Path(log_files.host_log(directory, 0, 0))
        host_log.write_bytes(host_log.read_bytes() + b"a line of the host\n")
        assert text("0", address, "--lines", 1) == "a line of the host\n"
        assert text("0", address) == host_log.read_text()
        with open(log_files.own_log(directory), "ab") as log:
            log.write(b"a line of the agent\n")
        assert text("m0", address, "--lines", 1) == text("agent:m0", address, "--lines", 1) == "a line of the agent\n"
        assert "the agent m0 has joined as island 0" in text("controller", address)
        for arguments, words in (
            (["1"], "host 1 has no log: island 1 has not started as yet"),
            (["m7"], "no machine 'm7' has joined this cluster; there are: m0"),
            (["0", "--restart", "5"], "no log of host 0 after 5 restarts where the host is; .* restarts: 0"),
        ):
            shown = logs(arguments[0], address, *arguments[1:])
            assert shown.exit_code == 1 and re.search(words, shown.output), shown.output

        follower, of_agent = Follower(address, 0), Follower(address, "m0")
        eventually(lambda: follower.text() == b"a line of the host\n", "the last line")
        os.kill(cluster.stats()["hosts"][0]["pid"], signal.SIGKILL)
        eventually(lambda: cluster.stats()["hosts"][0]["restarts"] == 1, "the host is started again", 60)
        assert text("0", address, "--restart", 0).endswith("a line of the host\n")
        pathlib.Path(log_files.host_log(directory, 0, 1)).write_bytes(b"the second start\n")
        eventually(lambda: b"the second start\n" in follower.text(1), "the log after a restart", 60)
        eventually(lambda: cluster.stats()["hosts"][0]["state"] == "up", "the host is back", 60)

        machines.agents["m0"].close()
        eventually(lambda: cluster.stats()["hosts"][0]["state"] == "lost", "the machine is lost", 20)
        assert re.search("machine (that|m0) is lost", str(follower.join()))  # before it asked again, or while it did
        assert "machine m0 is lost: " in str(of_agent.join())
        shown = logs("0", address)
        assert shown.exit_code == 1 and "on a machine that is lost" in shown.output and "m0" in shown.output
        with contextlib.closing(operator.logs(address, None, lines=3)) as parts:
            assert b"the agent m0 of island 0 is lost" in b"".join(part.text for part in parts)
        seen = CliRunner().invoke(cli.main, ["status", address]).stdout
        assert re.search(r"^ m0 +0 +0 .*lost", seen, re.MULTILINE), "it has its name until its agent is back"
        assert "machine m0 is lost" in logs("m0", address).output


def agent_directories(machines: MachineCluster) -> list[str]:
    """The directories of the agents."""
    found = []
    for agent in machines.agents.values():
        supervisor = psutil.Process(agent._supervised.supervisor_pid)
        found.append(re.search(r'"directory": "([^"]+)"', " ".join(supervisor.cmdline()))[1])  # type: ignore[index]
    return found


def test_nobody_waits_for_the_log_of_a_machine_that_is_lost() -> None:
    """Neither who waits already, nor who comes later; an answer to nobody is dropped."""

    async def play() -> None:
        asked: list[agent_pb2.AgentRequest] = []
        logs_there = log_sources.LogsThere("m0", asked.append)
        waiting = asyncio.ensure_future(logs_there.piece(0, 1, -1, 5))
        while not asked:
            await asyncio.sleep(0)
        logs_there.answered(agent_pb2.LogPiece(request=77, data=b"x"))
        logs_there.lost("its link broke")
        logs_there.answered(agent_pb2.LogPiece(request=asked[0].read_log.request, data=b"late"))
        for each in (waiting, logs_there.piece(0, 1, -1, 5)):
            with pytest.raises(errors.ConnectError, match="machine m0 is lost: its link broke"):
                await each
        assert len(asked) == 1

    asyncio.run(play())
