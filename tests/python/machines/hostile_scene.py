"""A cluster for those who mean harm: machines on which an innocent client trains, and a place for one more machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
from chunks import chunk
from hostile_cases import Counts, FalseAgent, Innocent, Log
from machines import MachineCluster
from stream_cases import StreamRefusedError, framed, say

from pathways import errors
from pathways.cluster.agent_launcher import AgentHandle
from pathways.host.stream_sockets import StreamAddress
from pathways.process.run_directory import authority_folder
from pathways.protocol import agent_pb2 as pb_agent
from pathways.protocol import wire
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
        with joined(self) as there:
            return {peer.host: StreamAddress.parse(peer.stream).secret for peer in there.started.peers}

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


def tunnel(scene: Scene, stack: contextlib.ExitStack) -> str:
    """The controller's gRPC server, as any machine reaches it."""
    path = str(scene.folder / "t.sock")
    loop = Loop()
    server = TunnelServer(loop, path, lambda: dial(scene.port, scene.host, "control"))
    stack.callback(os.unlink, path)
    stack.callback(server.close)
    return path


@dataclasses.dataclass
class Joined:
    """A machine that has joined."""

    agent: FalseAgent
    started: pb_agent.StartHost  # its host, and all others
    _channel: grpc.Channel
    _reports: queue.SimpleQueue[bytes | None]
    over: threading.Event  # its session is

    def say(self, report: bytes) -> None:
        """As its agent."""
        self._reports.put(report)

    def say_as_host(self, reports: Iterator[bytes]) -> None:
        """As its host, until the session is over. Raises grpc.RpcError."""
        call = self._channel.stream_stream("/pathways.Hosts/Session")
        for _ in call(reports, metadata=wire.bearer(self.started.token), timeout=10):
            pass


@contextlib.contextmanager
def joined(scene: Scene) -> Iterator[Joined]:
    """A machine that has joined, with what its agent hears."""
    reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    over = threading.Event()

    def hear(session: Iterator[bytes]) -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in session:
                pass
        over.set()

    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(contextlib.closing(FalseAgent(scene.port, scene.host).complete()))
        agent.read()
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{tunnel(scene, stack)}"))
        stack.callback(reports.put, None)
        call = channel.stream_stream("/pathways.Agents/Session")
        session = call(iter(reports.get, None), metadata=wire.bearer(agent.welcome["session"]))
        heard = map(pb_agent.AgentRequest.FromString, session)
        started = next(each.start_host for each in heard if each.HasField("start_host"))
        threading.Thread(target=hear, args=(session,), daemon=True).start()
        yield Joined(agent, started, channel, reports, over)


def stream_port(scene: Scene, host: int) -> str:
    """The address where a host receives transfers: the only one where its process listens, but for Unix sockets."""
    process = psutil.Process(scene.client.stats()["hosts"][host]["pid"])
    (port,) = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return f"127.0.0.1:{port}"


def machine_of(scene: Scene, host: int) -> str:
    return str(next(each["name"] for each in scene.client.stats()["machines"] if each["island"] == host))


def send(where: str, own: Credentials, sender: int, secret: str) -> Any:
    """Sends a transfer that nobody waits for, in the name of a host; returns what the receiver says."""
    piece = chunk(1 << 40, 1, sender, b"12345678")
    try:
        return say(where, own, [framed(piece)], secret)
    except (StreamRefusedError, errors.PermissionDeniedError) as error:
        return f"refused: {error}"
