"""An island over two machines with networks of their own, by `--fabric link` and by a plain one.

Map from label to test:
    FAB-1   test_what_the_wires_show, test_a_cable_is_pulled
    CERT-1  test_a_stranger_on_a_machine
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from control_clusters import eventually
from link_fabric_client import PAYLOAD
from namespace_cluster import NamespaceCluster
from namespaces import Network, end, why_not

from pathways.process.tcp_sockets import tcp_sockets
from pathways.trust import Role

HERE = pathlib.Path(__file__).parent
SIZES = (1, 1000, (1 << 20) + 7, 4 << 20)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Island:
    """One of two machines with two hosts each, and a client on a third machine."""

    def __init__(self, network: Network, fabric: str) -> None:
        """`fabric`: `link`, or a plain one: the network of `Network.add_fabric`."""
        self._network = network
        self._fabric = fabric
        self.cluster = NamespaceCluster(network, 1, 4, 1, machines_per_island=2, agents=0)
        self.agents = {machine: self.join(machine) for machine in ("m0", "m1")}
        self._client = network.start(
            "laptop",
            [sys.executable, str(HERE / "link_fabric_client.py")],
            {"PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("connect", self.cluster.port, self.cluster.token(Role.CLIENT))

    def join(self, machine: str) -> Any:
        where = "link" if self._fabric == "link" else self._network.fabric_of(machine)
        return self.cluster.start_agent(machine, "0", where)

    def ask(self, *words: str) -> Any:
        self._client.stdin.write(" ".join(words) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def status(self) -> str:
        """What an operator is shown, on the client's machine."""
        env = {"PATHWAYS_TOKEN": self.cluster.token(Role.OPERATOR), "COLUMNS": "250"}
        command = [sys.executable, "-m", "pathways", "status", self.cluster.port]
        shown = self._network.start("laptop", command, env, stdout=subprocess.PIPE, text=True)
        return str(shown.communicate(timeout=60)[0])

    def agent(self, machine: str) -> psutil.Process:
        """The agent's own process."""
        found = psutil.Process(self.agents[machine].pid).children(recursive=True)
        return next(each for each in found if "pathways.agent.main" in each.cmdline())

    def close(self) -> None:
        """Ends the client and the cluster."""
        end(self._client)
        self.cluster.close()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["laptop", "m0", "m1", "m2"]) as network:
        network.add_fabric()
        yield network


@contextlib.contextmanager
def watched(network: Network, cables: tuple[str, ...], folder: pathlib.Path) -> Iterator[dict[str, pathlib.Path]]:
    """Writes what goes over these cables into files."""
    files = {cable: folder / f"{cable}.pcap" for cable in cables}
    watchers = [
        network.start("switch", ["tcpdump", "-i", cable, "-s", "0", "-B", "32768", "-U", "-w", str(file)])
        for cable, file in files.items()
    ]
    eventually(lambda: all(file.exists() for file in files.values()), "tcpdump listens")
    yield files
    time.sleep(0.5)
    for watcher in watchers:
        end(watcher)


def all_right(island: Island, size: int) -> None:
    assert island.ask("gather", str(size)) == {"gathered": True, "summed": True, "turned": True}


@pytest.mark.skipif(shutil.which("tcpdump") is None, reason="looking at the wires needs tcpdump")
@pytest.mark.watchdog(300)
@pytest.mark.parametrize("fabric", ["link", "plain"])
def test_what_the_wires_show(network: Network, tmp_path: pathlib.Path, fabric: str) -> None:
    """What the machines gather is seen on no wire with `link`; else on that of the network that was named, alone."""
    with (
        watched(network, ("m0", "m0-fabric"), tmp_path) as files,
        contextlib.closing(Island(network, fabric)) as island,
    ):
        for size in SIZES:
            all_right(island, size)
        shown = island.status()
    assert ("link, TLS 1.3" if fabric == "link" else f"{network.fabric_of('m0')}, not encrypted") in shown
    seen = {cable: file.read_bytes() for cable, file in files.items()}
    busy, idle = ("m0", "m0-fabric") if fabric == "link" else ("m0-fabric", "m0")
    assert len(seen[busy]) > 2 * SIZES[-1], "it went there"
    assert seen[idle].count(PAYLOAD) == 0
    assert (seen[busy].count(PAYLOAD) > 1000) == (fabric == "plain")
    if fabric == "link":
        assert len(seen[idle]) < 1 << 16


@pytest.mark.watchdog(300)
def test_a_cable_is_pulled(network: Network) -> None:
    """For two seconds: nothing is lost. For longer, or when the agent ends: the island waits for a machine, and
    is right again when that one is back, or another one there."""
    with contextlib.closing(Island(network, "link")) as island:
        assert island.ask("machines") == {"m0": "link", "m1": "link"}
        all_right(island, 1000)
        network.pull("m1")
        time.sleep(2)
        network.plug("m1")
        all_right(island, 1 << 20)
        network.pull("m1")
        assert "m1" in island.ask("lost")
        network.plug("m1")
        assert island.ask("back")
        all_right(island, 1 << 20)
        end(island.agents["m1"])
        eventually(lambda: island.ask("machines") == {"m0": "link"}, "the machine has left")
        island.agents["m2"] = island.join("m2")
        assert island.ask("back")
        all_right(island, 1 << 20)


def listening_at(process: psutil.Process) -> list[tuple[str, int]]:
    """Where processes of its machine listen, by IPv4."""
    found = []
    for row in pathlib.Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
        where, state = row.split()[1], row.split()[3]
        if state == "0A":
            found.append((socket.inet_ntoa(bytes.fromhex(where[:8])[::-1]), int(where[9:], 16)))
    return sorted(found)


@pytest.mark.watchdog(300)
def test_a_stranger_on_a_machine(network: Network) -> None:
    """A process of the machine gets into no tunnel, and the island goes on. No port of the collectives is open to
    other machines."""
    with contextlib.closing(Island(network, "link")) as island:
        all_right(island, 1000)
        agent = island.agent("m0")
        found = listening_at(agent)
        assert [where for where, _ in found] == ["127.77.0.0", "127.77.0.1", "127.77.0.2", "127.77.0.3"]
        # The agent listens for the other machine's hosts: the first or the last two, by who joined first.
        where = next(each for each in tcp_sockets(agent.pid) if each.listens and each.address.startswith("127.77."))
        call = f"import socket; print(socket.create_connection(({where.address!r}, {where.port}), 30).recv(8))"
        said = network.start("m0", [sys.executable, "-c", call], stdout=subprocess.PIPE, text=True).communicate()[0]
        assert said == "b''\n"
        log = pathlib.Path(f"/proc/{agent.pid}/fd/2").read_text()
        host = where.address[-1]
        assert f"a tunnel could not be opened: who calls host {host} from this machine is none of its hosts" in log
        all_right(island, 1000)
