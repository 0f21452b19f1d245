"""FAB-1, CERT-1: who gets into the tunnels of the fabric `link`, and where they lead. Over loopback addresses, where
the two machines of an island are this process; over namespaces in test_link_fabric.py.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from control_clusters import eventually

from pathways import errors
from pathways.agent.collective_tunnels import CollectiveTunnels, address_on_link
from pathways.host.main import tell_ports
from pathways.process.config import ClusterOptions, HostConfig
from pathways.protocol import agent_pb2 as pb
from pathways.trust import Authority, Port, Role, dial_answered

SECRET = "word"


class Island:
    """Host 0 on machine m0, and host 1 on m1, which listens. What is sent to it comes back."""

    def __init__(self, folder: pathlib.Path) -> None:
        authority = Authority.open_or_create(str(folder / "authority"))
        self.own = [authority.credentials(Role.HOST, f"m{at}") for at in (0, 1)]
        self.ports = [Port("127.0.0.1:0", own) for own in self.own]
        self.tunnels: list[CollectiveTunnels] = []
        self.paths: list[str] = []
        for at, (own, port) in enumerate(zip(self.own, self.ports, strict=True)):
            directory = folder / f"m{at}"
            directory.mkdir()
            tunnels = CollectiveTunnels(str(directory), own, port)  # type: ignore[arg-type]
            other = pb.Neighbours.Machine(name=f"m{1 - at}", fabric=self.ports[1 - at].address.endpoint, hosts=[1 - at])
            tunnels.set_neighbours(pb.Neighbours(number=1, secret=SECRET, others=[other]))
            self.tunnels.append(tunnels)
            self.paths.append(tunnels.begin(3))
            port.start()
        self.listener = socket.create_server((address_on_link(1), 0))
        self.host_port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as free:  # on m0 it is not that of m1, which is the same machine
            self.near = free.getsockname()[1]

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()

    def tell(self) -> None:
        """Both hosts do it."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            tell_ports(self.config(1), [free.getsockname()[1], self.host_port])
        tell_ports(self.config(0), [1, self.near])

    def config(self, host: int) -> HostConfig:
        return HostConfig(host, ClusterOptions(1, 2, 1), island=(0, 1), tell_ports=self.paths[host])

    def dial(self, **changes: Any) -> socket.socket:
        """As m0's agent does for host 0, which calls host 1."""
        said = {"secret": SECRET, "incarnation": 3, "host": 1, **changes}
        where = self.ports[1].address
        return dial_answered(where, self.own[0], "collective", expects=Role.HOST, machine="m1", **said)[0]

    def end_host(self) -> None:
        """Host 1 listens no more."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # who waits in `accept` would keep it
        self.listener.close()

    def close(self) -> None:
        for tunnels, port in zip(self.tunnels, self.ports, strict=True):
            tunnels.end()
            port.close()
        self.end_host()


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


@pytest.fixture
def island(tmp_path: pathlib.Path) -> Iterator[Island]:
    island = Island(tmp_path)
    yield island
    island.close()
    for tunnels in island.tunnels:
        eventually(lambda tunnels=tunnels: not tunnels._tunnels.open, "no tunnel is left")


def test_what_is_sent_arrives(island: Island) -> None:
    """Both ways at the same time, also more than a tunnel keeps."""
    island.tell()
    sent = random.Random(7).randbytes(12 << 20)
    with socket.create_connection((address_on_link(1), island.near), timeout=60) as host:
        sending = threading.Thread(target=host.sendall, args=(sent,))
        sending.start()
        came = bytearray()
        while len(came) < len(sent):
            came += host.recv(1 << 20)
        sending.join()
    assert bytes(came) == sent


def test_a_process_that_is_no_host_is_refused(island: Island, caplog: pytest.LogCaptureFixture) -> None:
    """It gets the end of the stream, and nothing comes to the host."""
    island.tell()
    calls = f"import socket; print(socket.create_connection({(address_on_link(1), island.near)}, 60).recv(8))"
    assert subprocess.run([sys.executable, "-c", calls], capture_output=True, text=True, check=True).stdout == "b''\n"
    assert "who calls host 1 from this machine is none of its hosts" in caplog.text
    with socket.create_connection((address_on_link(1), island.near), timeout=60) as host:
        host.sendall(b"still")
        assert host.recv(8) == b"still"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secret": "another"}, "m0 is no machine of this island"),
        ({"secret": ""}, "m0 is no machine of this island"),
        ({"incarnation": 2}, "does not listen here now"),
        ({"host": 0}, "does not listen here now"),
        ({"host": 7}, "does not listen here now"),
        ({"host": [1]}, "does not listen here now"),
        ({"host": "127.0.0.1:22"}, "does not listen here now"),
    ],
)
def test_what_another_machine_does_not_reach(island: Island, changes: dict[str, Any], why: str) -> None:
    island.tell()
    with island.dial() as connection:
        connection.sendall(b"there")
        assert connection.recv(8) == b"there"
    with pytest.raises(errors.PathwaysError, match=why):
        island.dial(**changes)


def test_before_and_after_a_group(island: Island) -> None:
    """Nobody is reached before the host has said its port, and when the group has ended."""
    with pytest.raises(errors.ConnectError, match="does not listen here now"):
        island.dial()
    island.tell()
    island.dial().close()
    island.tunnels[1].end()
    with pytest.raises(errors.PermissionDeniedError, match="no machine of this island"):
        island.dial()
    with pytest.raises(OSError, match="No such file"):
        tell_ports(island.config(1), [1, 2])


def test_two_agents_of_an_island_on_one_machine(island: Island) -> None:
    """There the address is taken, by the host itself. Its host hears why it cannot start."""
    with pytest.raises(
        errors.ConnectError, match=r"host 1, which is on machine m1, .* 127\.77\.0\.1:.* on one machine"
    ):
        tell_ports(island.config(0), [1, island.host_port])


def test_a_host_that_listens_no_more(island: Island) -> None:
    """Who calls it sees the end of the stream."""
    island.tell()
    island.end_host()
    with island.dial() as connection:
        assert connection.recv(1) == b""
