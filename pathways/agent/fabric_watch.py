"""Finds out whether the machines of an island reach each other over their fabric, and tells the controller (FAB-1).

A firewall may let links through, and not the fabric; then a collective would wait for a long time. So each machine
calls each other one over the fabric before the island starts, and goes on: it says something every second, and the
other one answers. Each machine calls, so that both ways of each pair are tried. Both ends show their certificates
(CERT-1), and a secret that the island's machines have.

Belongs to the agent's event loop; the port and the transport's loop have threads of their own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

from pathways import errors
from pathways.agent.fabric import Fabric, check_neighbour, dial_neighbour
from pathways.protocol import agent_pb2 as pb
from pathways.transport import HEARTBEAT_S, SILENCE_S
from pathways.transport.connection import Connection, Parser
from pathways.transport.loop import Loop
from pathways.trust import Identity, Port, Renewal, Role

#: The first call begins within this time, in seconds, and takes no longer. The other machine may hear of its neighbours
#: later.
REACH_S = 10.0
_AGAIN_S = 0.2
_PURPOSE = "fabric"
_BEAT = memoryview(b".")

Report = Callable[[pb.AgentReport], None]


class FabricWatch:
    """One machine's end: it answers its neighbours, and calls them."""

    def __init__(self, loop: Loop, fabric: Fabric, credentials: Renewal, port: Port) -> None:
        """`loop`: serves the connections. `port`: where this machine listens on the fabric."""
        self._transport = loop
        self._fabric = fabric
        self._credentials = credentials
        self._port = port
        self._secret = ""
        self._calls: list[asyncio.Task[None]] = []
        port.on(_PURPOSE, [Role.HOST], self._answer, self._admit)

    def watch(self, neighbours: pb.Neighbours, report: Report) -> None:
        """Watches these machines from now on, and no others. `report`: tells the controller."""
        self.stop()
        self._secret = neighbours.secret
        create = asyncio.get_running_loop().create_task
        self._calls = [create(self._call(neighbours, each, report)) for each in neighbours.others]

    def stop(self) -> None:
        """Watches none."""
        self._secret = ""
        for call in self._calls:
            call.cancel()

    async def _call(self, neighbours: pb.Neighbours, machine: pb.Neighbours.Machine, report: Report) -> None:
        def tell(error: str = "") -> None:
            seen = pb.FabricReport(number=neighbours.number, machine=machine.name, error=error)
            report(pb.AgentReport(fabric=seen))

        loop = asyncio.get_running_loop()
        give_up = loop.time() + REACH_S
        why, has_reached = "", False
        while not has_reached and loop.time() < give_up:
            try:
                sock = await asyncio.to_thread(
                    dial_neighbour, machine, self._credentials, _PURPOSE, neighbours.secret, timeout_s=REACH_S
                )
            except (errors.PathwaysError, OSError) as error:
                why = str(error).partition(": is ")[0]  # what follows is advice about a controller
                await asyncio.sleep(_AGAIN_S)
                continue
            why, has_reached = await self._hear(sock, tell)
        tell(f"{why} (from {self._fabric})")

    async def _hear(self, sock: socket.socket, tell: Callable[[], None]) -> tuple[str, bool]:
        """Talks over a connection until it ends. Returns why it did, and whether the other end has answered."""
        loop = asyncio.get_running_loop()
        answered, ended = asyncio.Event(), loop.create_future()

        def on_beat() -> None:
            loop.call_soon_threadsafe(answered.set)

        def on_end(why: str) -> None:
            loop.call_soon_threadsafe(ended.set_result, why)

        connection = Connection(self._transport, sock, on_end, parse=_each_beat(on_beat), silence_s=SILENCE_S)
        connection.start()
        try:
            connection.send(_BEAT)
            first = asyncio.ensure_future(answered.wait())
            await asyncio.wait([ended, first], return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if answered.is_set():
                tell()
            while not ended.done():
                await asyncio.wait([ended], timeout=HEARTBEAT_S)
                connection.send(_BEAT)
            return ended.result(), answered.is_set()
        finally:
            connection.end()
            sock.close()

    # -- threads of the port and of the transport's loop --------------------------------------------------------------

    def _admit(self, identity: Identity, hello: dict[str, Any]) -> Mapping[str, Any]:
        check_neighbour(identity, hello, self._secret)
        return {}

    def _answer(self, sock: socket.socket, identity: Identity, hello: dict[str, Any]) -> None:
        def beat() -> None:
            connection.send(_BEAT)

        connection = Connection(
            self._transport, sock, lambda why: self._port.let_go(sock), parse=_each_beat(beat), silence_s=SILENCE_S
        )
        connection.start()


def _each_beat(then: Callable[[], None]) -> Parser:
    """Reads beats, and says so."""
    place = memoryview(bytearray(64))
    while True:
        yield place
        then()
