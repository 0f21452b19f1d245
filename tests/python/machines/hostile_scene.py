"""A cluster for those who mean harm: machines on which an innocent client trains, and a place for one more machine."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from typing import Any

import psutil
from chunks import chunk
from false_hosts import FalseMachine
from hostile_cases import Counts, Innocent, Log
from machines import MachineCluster
from stream_cases import StreamRefusedError, framed, say

from pathways import errors
from pathways.cluster.agent_launcher import AgentHandle
from pathways.host.stream_sockets import StreamAddress
from pathways.process.run_directory import authority_folder
from pathways.transport.loop import Loop
from pathways.transport.tunnels import TunnelServer
from pathways.trust import Authority, Credentials, Role, Tokens, dial, join


class Scene:
    """Three places, two of them taken by machines on which the innocent client trains."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.machines = MachineCluster(3, 1, 1, agents=2)
        self.port = self.machines.handle.port
        self.log = Log(self.machines.handle.address)
        self.tokens = Tokens(authority_folder(self.machines.handle.directory))
        self.client = self.machines.connect()
        self.innocent = Innocent(self.client)
        self.innocent.goes_on(5)
        self.counts = Counts()
        self.host = join(self.port, self.tokens.make(Role.HOST, 600), "evil")
        self.foreign = Authority.create(str(folder / "foreign")).credentials(Role.HOST, "m0")

    @functools.cached_property
    def secrets(self) -> dict[int, str]:
        """By host, the secret of its machine's streams: what each machine hears that has joined."""
        with contextlib.closing(FalseMachine(self.port, self.host)) as there:
            peers = there.next_start().peers
        return {peer.host: StreamAddress.parse(peer.stream).secret for peer in peers}

    def agent(self, name: str, token: str, **what: Any) -> None:
        """Starts a real agent, which must not be able to join."""
        shape = {"hosts": 1, "devices_per_host": 1, "platform": "cpu", **what}
        agent = AgentHandle(self.port, token, str(self.folder / f"{name}.pem"), name=name, **shape)
        with contextlib.closing(agent):
            agent.wait_joined(30)
        raise AssertionError("it has joined")

    def close(self) -> None:
        steps = self.innocent.check()
        print("\n" + self.counts.table(steps))
        self.client.close()
        self.machines.close()


def tunnel(scene: Scene, stack: contextlib.ExitStack, own: Credentials | None = None, purpose: str = "control") -> str:
    """The controller's gRPC server, as any machine reaches it; or another one, by other credentials."""
    path = str(scene.folder / f"{purpose}.sock")
    loop = Loop()
    server = TunnelServer(loop, path, lambda: dial(scene.port, own or scene.host, purpose))
    stack.callback(os.unlink, path)
    stack.callback(loop.close)
    stack.callback(server.close)
    return path


def stream_port(scene: Scene, host: int) -> str:
    """The address where a host receives transfers: the only one where its process listens, but for Unix sockets."""
    process = psutil.Process(scene.client.stats()["hosts"][host]["pid"])
    (port,) = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return f"127.0.0.1:{port}"


def stream_of(scene: Scene, host: int) -> str:
    """Where a host receives transfers, with its machine."""
    return f"{machine_of(scene, host)}@{stream_port(scene, host)}"


def machine_of(scene: Scene, host: int) -> str:
    return str(next(each["name"] for each in scene.client.stats()["machines"] if each["island"] == host))


def send(where: str, own: Credentials, sender: int, secret: str) -> Any:
    """Sends a transfer that nobody waits for, in the name of a host; returns what the receiver says."""
    piece = chunk(1 << 40, 1, sender, b"12345678")
    try:
        return say(where, own, [framed(piece)], secret)
    except (StreamRefusedError, errors.PermissionDeniedError) as error:
        return f"refused: {error}"
