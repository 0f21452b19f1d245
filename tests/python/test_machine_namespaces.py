"""Machines with addresses, files and processes of their own: a training over their network, and what happens to cables.

Without root, or where no namespaces can be made, these tests are skipped; test_machine_faults.py plays the same over
loopback addresses.

Map from label to test:
    LINK-1  test_cables
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from namespace_controller import SECRET
from namespaces import Network, end, why_not

HERE = pathlib.Path(__file__).parent
PATHWAYS = [sys.executable, "-m", "pathways"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Controller:
    """`namespace_controller.py` on the switch, and agents on the machines."""

    def __init__(self, network: Network, folder: pathlib.Path, machines: list[str]) -> None:
        self._network = network
        self.process = network.start(
            "switch",
            [sys.executable, str(HERE / "namespace_controller.py")],
            {"PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        start = self.ask("start", network.address, str(folder), str(len(machines)))
        self._port, self._tokens = start["port"], start["tokens"]
        self.agents = {name: self.join(name, island) for island, name in enumerate(machines)}

    def ask(self, *words: str) -> Any:
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the controller's program has ended"
        return json.loads(line)

    def join(self, name: str, island: int) -> Any:
        command = [*PATHWAYS, "agent", self._port, "--name", name, "--island", str(island)]
        env = {"PATHWAYS_TOKEN": self._tokens.pop(), "JAX_PLATFORMS": "cpu"}
        return self._network.start(name, command, env)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["m1", "m2"]) as network:
        yield network


@pytest.mark.skipif(shutil.which("tcpdump") is None, reason="looking at the wire needs tcpdump")
def test_nobody_reads_the_wire(network: Network, tmp_path: pathlib.Path) -> None:
    """No byte of a known payload crosses in clear, though it goes from client to host and from host to host."""
    dump = tmp_path / "wire.pcap"
    watcher = network.start(
        "switch", ["tcpdump", "-i", "any", "-s", "0", "-U", "-w", str(dump)], stderr=subprocess.PIPE
    )
    controller = Controller(network, tmp_path, ["m1", "m2"])
    controller.ask("wait", "2")
    trained = controller.ask("train", "5")
    assert 0 < trained["loss"] < 1
    time.sleep(0.5)
    end(watcher)
    seen = dump.read_bytes()
    assert len(seen) > len(SECRET), "something crossed"
    assert SECRET[:16] not in seen
    assert b"a known" not in seen


@pytest.mark.watchdog(300)
def test_cables(network: Network, tmp_path: pathlib.Path) -> None:
    """A cable that is pulled for 2 s loses nothing. One that is pulled for longer loses the machine within 5 s, as
    HostLostError; and the machine comes back by itself."""
    controller = Controller(network, tmp_path, ["m1", "m2"])
    controller.ask("wait", "2")
    before = controller.ask("train", "3")
    network.pull("m2")
    time.sleep(2)
    network.plug("m2")
    after = controller.ask("train", "3")
    assert after["loss"] <= before["loss"]
    assert controller.ask("state") == ["up", "up"]
    network.pull("m2")
    waited = controller.ask("lost")
    print(f"HostLostError after {waited:.1f} s")
    assert controller.ask("state")[1] != "up"
    network.plug("m2")
    print(f"back after {controller.ask('wait', '2'):.1f} s")
    controller.ask("train", "2")


def test_nothing_is_left(network: Network, tmp_path: pathlib.Path) -> None:
    """When the controller is killed, the agents end their hosts, and wait for another one."""
    controller = Controller(network, tmp_path, ["m1", "m2"])
    controller.ask("wait", "2")
    controller.process.kill()
    controller.process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _hosts():
        time.sleep(0.1)
    assert not _hosts()


def _hosts() -> list[int]:
    """Host processes in the namespaces of this test: those whose cluster's directory is not of this machine."""
    import psutil

    own = os.stat("/proc/self/ns/pid").st_ino
    found = []
    for process in psutil.process_iter():
        try:
            elsewhere = os.stat(f"/proc/{process.pid}/ns/pid").st_ino != own
            if elsewhere and process.name().startswith("pathways-host"):
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found
