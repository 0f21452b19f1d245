"""Machines with addresses, files and processes of their own: a training over their network, and what happens to cables.

Without root, or where no namespaces can be made, these tests are skipped; test_machine_faults.py plays the same over
loopback addresses.

Map from label to test:
    LINK-1  test_cables, test_one_direction_is_cut, test_a_client_on_a_machine_of_its_own,
            test_a_cut_connection_is_heard_soon_after_it_is_mended
    OWN-1   test_a_client_on_a_machine_of_its_own
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from control_clusters import eventually
from namespace_controller import SECRET
from namespaces import Network, end, why_not

HERE = pathlib.Path(__file__).parent
PATHWAYS = [sys.executable, "-m", "pathways"]


def linux_version() -> tuple[int, int]:
    """Of the kernel, such as (6, 15)."""
    major, minor = platform.release().split(".")[:2]
    return int(major), int(re.sub(r"\D.*", "", minor))


pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Program:
    """`namespace_controller.py` on a machine."""

    def __init__(self, network: Network, machine: str) -> None:
        self.process = network.start(
            machine,
            [sys.executable, str(HERE / "namespace_controller.py")],
            {"PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: str) -> Any:
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)


class Controller(Program):
    """The program on the switch, and agents on the machines."""

    def __init__(self, network: Network, folder: pathlib.Path, machines: list[str]) -> None:
        super().__init__(network, "switch")
        self._network = network
        start = self.ask("start", network.address, str(folder), str(len(machines)))
        self._port, self._tokens, self._client_token = start["port"], start["tokens"], start["client_token"]
        self.agents = {name: self.join(name, island) for island, name in enumerate(machines)}

    def client_on(self, machine: str) -> Program:
        """A client on another machine."""
        program = Program(self._network, machine)
        program.ask("connect", self._port, self._client_token)
        return program

    def let_in_again(self, program: Program) -> None:
        """Connects the client again, with the certificate that it got before."""
        program.ask("connect", self._port, self._client_token)

    def join(self, name: str, island: int, on: str = "", **what: Any) -> Any:
        """`on`: the machine where it starts; the one of its name when not given."""
        command = [*PATHWAYS, "agent", self._port, "--name", name, "--island", str(island)]
        env = {"PATHWAYS_TOKEN": self._tokens.pop(), "JAX_PLATFORMS": "cpu"}
        return self._network.start(on or name, command, env, **what)


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


@pytest.mark.watchdog(300)
def test_a_client_on_a_machine_of_its_own(tmp_path: pathlib.Path) -> None:
    """It gets the same values as a client at home. Its cable may be pulled for 2 s; when it is pulled for longer, home
    frees what the client had, the client is told, and it can connect again."""
    with Network(["m1", "m2", "laptop"]) as network:
        dump = tmp_path / "wire.pcap"
        controller = Controller(network, tmp_path, ["m1", "m2"])
        controller.ask("wait", "2")
        at_home = controller.ask("train", "5")
        watcher = None
        if shutil.which("tcpdump") is not None:
            watch = ["tcpdump", "-i", "any", "-s", "0", "-U", "-w", str(dump)]
            watcher = network.start("switch", watch, stderr=subprocess.PIPE)
            time.sleep(1)
        laptop = controller.client_on("laptop")
        assert laptop.ask("train", "5") == at_home
        if watcher is not None:
            end(watcher)
            assert dump.stat().st_size > len(SECRET)
            assert SECRET[:16] not in dump.read_bytes()
        network.pull("laptop")
        time.sleep(2)
        network.plug("laptop")
        assert laptop.ask("train", "3")["loss"] <= at_home["loss"]
        for number, each in enumerate((controller, laptop)):  # no two machines share a clock
            trace = each.ask("trace", str(tmp_path / f"{number}.json"))
            print(trace)
            assert (trace["machines"], trace["computations"], trace["early"]) == (2, 15, 0)
            assert trace["seconds"] < 100
        assert "laptop" in controller.ask("clients")
        network.pull("laptop")
        waited = laptop.ask("gone")
        assert waited < 6, f"the client knew after {waited:.1f} s"
        print(f"the client knew after {waited:.1f} s")
        time.sleep(1)
        assert "laptop" not in controller.ask("clients")
        controller.ask("train", "2")
        network.plug("laptop")
        controller.let_in_again(laptop)
        assert laptop.ask("train", "5") == at_home


@pytest.mark.skipif(linux_version() < (6, 15), reason="before Linux 6.15, what is lost is sent again ever later")
def test_a_cut_connection_is_heard_soon_after_it_is_mended(network: Network) -> None:
    """While a line is cut, the kernel sends again at least about every second, also if much is under way."""
    script = [sys.executable, str(HERE / "cut_connection.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    port = network.start("switch", [*script, "listen"], **pipes).stdout.readline().strip()
    sender = network.start("m1", [*script, "send", network.address, port], **pipes)
    assert sender.stdout.readline() == "sending\n"
    network.cut("m1", "switch")
    sender.stdin.write("\n")
    sender.stdin.flush()
    times = [float(each) for each in sender.stdout.readline().split()]
    print(times)
    assert len(times) >= 5
    assert max(late - early for early, late in itertools.pairwise(times)) < 2


@pytest.mark.watchdog(300)
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("is_outgoing", [True, False], ids=["outgoing", "incoming"])
def test_one_direction_is_cut(network: Network, tmp_path: pathlib.Path, is_outgoing: bool) -> None:
    """What a firewall does that lets one direction through: the machine is lost within 5 s, whichever direction it is,
    and comes back by itself. Who uses the other machine notices nothing. A machine that cannot join is told why.
    """
    controller = Controller(network, tmp_path, ["m1", "m2"])
    controller.ask("wait", "2")
    controller.ask("train", "2")
    way = ("m2", "switch") if is_outgoing else ("switch", "m2")
    network.cut(*way)
    print(f"HostLostError after {controller.ask('lost'):.1f} s")
    # Whichever is quiet first, the session of its host or its link: in between, the controller asks for a new host.
    eventually(lambda: controller.ask("state") == ["up", "lost"], "the machine is lost")
    assert "the agent m2 of island 1 is lost: " in controller.ask("log")
    assert controller.ask("alone", "50") == 50
    if is_outgoing:
        late = controller.join("m3", 1, on="m2", stderr=subprocess.PIPE, text=True)
        assert "does not answer: is the machine up, and does a firewall let both directions" in late.stderr.read()
        assert late.wait() == 1
    network.mend(*way)
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
