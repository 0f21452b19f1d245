"""Machines with good certificates whose agents and hosts are the test itself, which says what it likes for them."""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from hostile_cases import FalseAgent

from pathways.protocol import agent_pb2 as agent_pb
from pathways.protocol import control_pb2 as pb
from pathways.protocol import wire
from pathways.transport.loop import Loop
from pathways.transport.tunnels import TunnelServer
from pathways.trust import Credentials, dial

_PING = struct.Struct("<IHHIiq")

Answer = Callable[[pb.HostRequest], pb.HostReport | None]


def willing(request: pb.HostRequest) -> pb.HostReport | None:
    """Answers what an honest host that has nothing to do would answer."""
    match request.WhichOneof("what"):
        case "attach_client":
            return pb.HostReport(client_attached=pb.Error())
        case "replace_peers":
            return pb.HostReport(peers_replaced=pb.PeersReplaced())
        case "report_stats":
            return pb.HostReport(stats=pb.HostCounts())
    return None


class FalseMachine:
    """A machine of one host that has joined, and starts no host: a test says in its name what it likes."""

    def __init__(self, address: str, own: Credentials) -> None:
        self.agent = FalseAgent(address, own).complete()
        self.agent.read()
        self.over = threading.Event()  # the agent's session is
        self._reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._starts: queue.SimpleQueue[agent_pb.StartHost | None] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory(prefix="pwfh", dir="/tmp")
        self._loop = Loop()
        path = os.path.join(self._folder.name, "c.sock")
        self._tunnels = TunnelServer(self._loop, path, lambda: dial(address, own, "control"))
        self._channel = grpc.insecure_channel(f"unix:{path}", options=wire.LINKED_OPTIONS)
        threading.Thread(target=self._serve_agent, daemon=True).start()

    def _serve_agent(self) -> None:
        call = self._channel.stream_stream("/pathways.Agents/Session", _bytes_of, agent_pb.AgentRequest.FromString)
        with contextlib.suppress(grpc.RpcError):
            for request in call(
                iter(self._reports.get, None), metadata=wire.bearer(self.agent.welcome["session"]), wait_for_ready=True
            ):
                if request.HasField("start_host"):
                    self._starts.put(request.start_host)
        self.over.set()
        self._starts.put(None)

    def next_start(self) -> agent_pb.StartHost:
        """Waits for the next host that it is to start. Raises LookupError: its session is over."""
        if (start := self._starts.get()) is None:
            raise LookupError("the session is over")
        return start

    def say(self, report: agent_pb.AgentReport | bytes) -> None:
        """As its agent."""
        self._reports.put(report)

    def say_as_host(
        self, start: agent_pb.StartHost, reports: Iterator[pb.HostReport | bytes], timeout_s: float | None = None
    ) -> Iterator[pb.HostRequest]:
        """As the host that it was to start; returns what that one hears. Raises grpc.RpcError."""
        call = self._channel.stream_stream("/pathways.Hosts/Session", _bytes_of, pb.HostRequest.FromString)
        heard: Iterator[pb.HostRequest] = call(reports, metadata=wire.bearer(start.token), timeout=timeout_s)
        return heard

    def close(self) -> None:
        """Leaves."""
        self._reports.put(None)
        self._channel.close()
        self._tunnels.close()
        self.agent.close()
        self._loop.close()
        self._folder.cleanup()


def _bytes_of(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


class FalseHost(FalseMachine):
    """One whose hosts are there. `answer`: their answers to the controller's requests."""

    def __init__(self, address: str, own: Credentials, answer: Answer = willing) -> None:
        super().__init__(address, own)
        self.answer = answer
        self.reports: queue.SimpleQueue[pb.HostReport | None] = queue.SimpleQueue()
        self.number: int = self.agent.welcome["hosts"][0]
        for work in (self._ping, self._start):
            threading.Thread(target=work, daemon=True).start()

    def _ping(self) -> None:
        while not self.over.wait(1.0):
            with contextlib.suppress(OSError):
                self.agent.sending.sendall(_PING.pack(8, 7, 0, 0, 0, time.monotonic_ns()))

    def _start(self) -> None:
        with contextlib.suppress(LookupError):
            while True:
                threading.Thread(target=self._serve_host, args=(self.next_start(),), daemon=True).start()

    def _serve_host(self, start: agent_pb.StartHost) -> None:
        started = agent_pb.FarHostStarted(host=start.host, incarnation=start.incarnation, pid=1)
        self.say(agent_pb.AgentReport(started=started))
        self.reports.put(pb.HostReport(stage=pb.HostStage(stage=wire.Stage.HOST_READY)))
        with contextlib.suppress(grpc.RpcError):
            for request in self.say_as_host(start, iter(self.reports.get, None)):
                if (report := self.answer(request)) is not None:
                    report.request = request.request
                    self.reports.put(report)

    def close(self) -> None:
        self.reports.put(None)
        super().close()
