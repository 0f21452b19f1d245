"""A machine with a good certificate whose hosts are the test itself: it says what it likes in their sessions."""

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
from pathways.protocol import agent_pb2_grpc as agent_rpc
from pathways.protocol import control_pb2 as pb
from pathways.protocol import control_pb2_grpc as rpc
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


class FalseHost:
    """One host on a machine of its own, which has joined. `answer`: its answers to the controller's requests."""

    def __init__(self, address: str, own: Credentials, answer: Answer = willing) -> None:
        self.answer = answer
        self.agent = FalseAgent(address, own).complete()
        self.agent.read()
        self.reports: queue.SimpleQueue[pb.HostReport | None] = queue.SimpleQueue()
        self.asked: list[pb.HostRequest] = []
        self.number: int = self.agent.welcome["hosts"][0]
        self._agent_reports: queue.SimpleQueue[agent_pb.AgentReport | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="pwfh", dir="/tmp")
        self._loop = Loop()
        path = os.path.join(self._folder.name, "c.sock")
        self._tunnels = TunnelServer(self._loop, path, lambda: dial(address, own, "control"))
        self._channel = grpc.insecure_channel(f"unix:{path}", options=wire.LINKED_OPTIONS)
        for work in (self._ping, self._serve_agent):
            threading.Thread(target=work, daemon=True).start()

    def _ping(self) -> None:
        while not self._is_over.wait(1.0):
            with contextlib.suppress(OSError):
                self.agent.sending.sendall(_PING.pack(8, 7, 0, 0, 0, time.monotonic_ns()))

    def _serve_agent(self) -> None:
        token = wire.bearer(self.agent.welcome["session"])
        with contextlib.suppress(grpc.RpcError):
            for request in agent_rpc.AgentsStub(self._channel).Session(
                iter(self._agent_reports.get, None), metadata=token
            ):
                if request.WhichOneof("request") == "start_host":
                    threading.Thread(target=self._serve_host, args=(request.start_host,), daemon=True).start()

    def _serve_host(self, start: agent_pb.StartHost) -> None:
        started = agent_pb.FarHostStarted(host=start.host, incarnation=start.incarnation, pid=1)
        self._agent_reports.put(agent_pb.AgentReport(started=started))
        self.reports.put(pb.HostReport(stage=pb.HostStage(stage=wire.Stage.HOST_READY)))
        with contextlib.suppress(grpc.RpcError):
            for request in self._requests(start.token):
                self.asked.append(request)
                if (report := self.answer(request)) is not None:
                    report.request = request.request
                    self.reports.put(report)

    def _requests(self, token: str) -> Iterator[pb.HostRequest]:
        found: Any = rpc.HostsStub(self._channel).Session(iter(self.reports.get, None), metadata=wire.bearer(token))
        return iter(found)

    def close(self) -> None:
        """Leaves."""
        self._is_over.set()
        self.reports.put(None)
        self._agent_reports.put(None)
        self._channel.close()
        self._tunnels.close()
        self.agent.close()
        self._loop.close()
        self._folder.cleanup()
