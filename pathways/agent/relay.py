"""A relay: an agent that carries the links of other machines to the controller (`pathways agent --relay`).

    carry-up, carry-down    a machine's link, as `link_door.py` has it. The certificate says which machine it is
    relay                   who this is, for machines that know only its address

It has one link to the controller for all of them, the trunk. What it carries is sealed, and it has no keys (CARRY-1):
it takes frames of one connection to another one, in native code (`csrc/link/relay_link.h`). The controller says over
the trunk whom it expects; nobody else is let in.

Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.agent.link_door import FarLink, LinkDoor
from pathways.transport.links import Links
from pathways.transport.loop import Loop
from pathways.trust import Identity, Port, Role
from pathways.trust.credentials import HasCredentials

_log = logging.getLogger(__name__)

#: Seconds until a relay tries again to reach the controller, and until it must have done so at first.
RETRY_S, OPEN_S = 1.0, 10.0
_Dial = Callable[..., tuple[socket.socket, dict[str, Any]]]


class Relay:
    """Carries machines while `serve` runs."""

    def __init__(
        self, loop: Loop, native: Any, where: str, credentials: HasCredentials, name: str, dial: _Dial
    ) -> None:
        """Listens from now on, on a running event loop.

        Args:
            loop: serves the connections.
            native: the module.
            where: `HOST:PORT`, where it listens.
            credentials: of this machine.
            name: of this machine.
            dial: `dial(purpose, **fields)` calls the controller's port.

        Raises:
            ConnectError: it cannot listen there.
        """
        self._native, self._name, self._dial = native, name, dial
        self._links = Links(loop, native)
        self._hub: Any = None  # while there is a trunk
        self._is_open = asyncio.Event()
        self._branches: dict[int, FarLink] = {}  # by the controller's number
        self._port = Port(where, credentials)
        self._port.on("relay", [Role.HOST], lambda sock, *_: self._port.let_go(sock), lambda *_: {"name": name})
        LinkDoor(self._open, lambda link: None, self._links).serve_at(self._port, "carry", [Role.HOST])
        self._port.start()
        #: Where machines find it, which the controller says: what they say for --via.
        self.address = ""

    async def opened(self) -> None:
        """Returns when it has a link to the controller, and can carry machines.

        Raises:
            ConnectError: it has none after `OPEN_S`.
        """
        try:
            await asyncio.wait_for(self._is_open.wait(), OPEN_S)
        except TimeoutError:
            raise errors.ConnectError(
                f"the relay has no link to the controller after {OPEN_S:g} s: see its log"
            ) from None

    async def serve(self) -> None:
        """Keeps a trunk to the controller, until it is cancelled."""
        while True:
            try:
                why = await self._serve_trunk()
            except (OSError, errors.PathwaysError) as error:
                why = str(error)
            _log.warning("this relay has no link to the controller now: %s", why)
            await asyncio.sleep(RETRY_S)

    async def _serve_trunk(self) -> str:
        """Carries machines until the trunk breaks; returns why."""
        loop = asyncio.get_running_loop()
        here = self._port.address
        host = "" if here.is_everywhere else here.endpoint.rpartition(":")[0]
        sending, welcome = await asyncio.to_thread(self._dial, "trunk-up", host=host, port=here.port)
        self.address = welcome["address"]
        try:
            receiving, _ = await asyncio.to_thread(self._dial, "trunk-down", session=welcome["session"])
        except BaseException:
            sending.close()
            raise
        broken: asyncio.Future[str] = loop.create_future()

        def break_trunk(why: str) -> None:
            if not broken.done():
                broken.set_result(why)

        def look_for_ends() -> None:
            for number in hub.take_ended():
                loop.call_soon_threadsafe(self._end, number)

        hub = self._hub = self._native.RelayHub(self._links.native)
        trunk = self._links.add(
            hub.open_trunk(),
            sending,
            receiving,
            lambda why: loop.call_soon_threadsafe(break_trunk, why),
            on_delivered=look_for_ends,
        )
        self._is_open.set()
        try:
            return await broken
        finally:
            self._hub = None
            self._is_open.clear()
            for number in list(self._branches):
                self._end(number)
            trunk.close()
            sending.close()
            receiving.close()

    def _open(self, identity: Identity, hello: dict[str, Any]) -> tuple[FarLink, dict[str, Any]]:
        """A machine's end of its link has come."""
        if identity.name == self._name:
            raise errors.ConnectError(
                f"the agent {self._name} dials its own relay, in a circle: --via names another machine's relay"
            )
        number = None if self._hub is None else self._hub.number_of(identity.name)
        if number is None:
            raise errors.ConnectError(f"the controller has not asked the relay {self._name} to carry {identity.name}")
        if (old := self._branches.pop(number, None)) is not None:
            old.close()
        link = FarLink(self._hub.open_branch(number), identity, functools.partial(self._lost, number))
        self._branches[number] = link
        return link, {}

    def _lost(self, number: int, why: str) -> None:
        """The connection to a machine has broken."""
        if self._hub is not None:
            self._hub.end(number)
        self._end(number)

    def _end(self, number: int) -> None:
        if (link := self._branches.pop(number, None)) is not None:
            link.close()

    def close(self) -> None:
        """Listens no more."""
        self._port.close()
        for number in list(self._branches):
            self._end(number)
        self._links.close()
