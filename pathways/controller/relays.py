"""Relays, as the controller knows them: agents that carry the links of other machines (`pathways agent --relay`).

    trunk    the link to a relay, see `pathways/agent/link_door.py`; it carries many links, each sealed by keys that
             only its machine has (CARRY-1)

A machine is carried because it asks for it (`--via`), or because the controller sends it there: when `FAN_OUT` machines
have links of their own. When a trunk breaks, the links that it carried are lost, each like a link that was cut.

Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.agent.link_door import FarLink, LinkDoor
from pathways.transport import SILENCE_S, TAKES_NOTHING_S
from pathways.transport.links import Links
from pathways.trust import Address, Identity, Port, Role, new_seal_key, seal_cipher

_log = logging.getLogger(__name__)

#: Machines with links of their own, and machines of one relay, from which on the controller sends others to relays.
FAN_OUT = 32
_LOOK_S = 1.0


class CarriedLink:
    """A machine's place in a trunk. See `FarLink.carried`."""

    def __init__(self, relay: Relay, number: int, link: FarLink) -> None:
        self.relay, self.number, self.link, self.name = relay, number, link, relay.name

    def start(self) -> None:
        """Sends for it from now on."""
        self.relay.trunk.native.start(self.number)

    def close(self) -> None:
        """Carries it no more. A second call does nothing."""
        if self.relay.carried.pop(self.number, None) is not None:
            self.relay.trunk.native.drop(self.number)


class Relay:
    """A relay, whose trunk is open or about to be."""

    def __init__(self, name: str, address: str, trunk: FarLink) -> None:
        self.name, self.address, self.trunk = name, address, trunk
        self.carried: dict[int, CarriedLink] = {}
        self._next = 0

    def place(self, link: FarLink) -> dict[str, Any]:
        """Gives a link a place; returns what its machine is told."""
        number, self._next = self._next, self._next + 1
        sends, gets = new_seal_key(), new_seal_key()  # the machine
        self.trunk.native.add(number, link.native, seal_cipher(gets), seal_cipher(sends), link.identity.name)
        link.carried = self.carried[number] = CarriedLink(self, number, link)
        return {"carried": (number, sends, gets)}

    def broken(self, number: int, why: str) -> None:
        """A link that it carries is over, and no other one."""
        if (carried := self.carried.get(number)) is not None:
            carried.link.on_lost(why)


class Relays:
    """All relays of a cluster."""

    def __init__(self, native: Any, links: Links, is_direct: Callable[[str], bool]) -> None:
        """`is_direct`: whether a machine of this name has joined, with a link of its own."""
        self._native, self._links, self._is_direct = native, links, is_direct
        self._by_name: dict[str, Relay] = {}
        self._loop = asyncio.get_running_loop()
        self._door = LinkDoor(self._open, self._opened, links)
        self._looked_at = 0.0
        self._look: asyncio.TimerHandle | None = None

    def serve_at(self, port: Port) -> None:
        """Says what the port does for relays."""
        self._door.serve_at(port, "trunk", [Role.HOST])

    def called(self, name: str, machine: str) -> Relay:
        """The relay of this name, for a machine that wants to be carried.

        Raises:
            ConnectError: there is no such relay.
        """
        if name == machine:
            raise errors.ConnectError(
                f"the agent {name} dials its own relay, in a circle: --via names another machine's relay"
            )
        relay = self._by_name.get(name)
        if relay is None:
            raise errors.ConnectError(
                f"the machine {name} is no relay of this cluster now: start its agent with --relay, or leave out --via"
            )
        return relay

    def choose(self, direct: int) -> str:
        """Where a machine should go if so many have links of their own: the address of a relay; empty: it stays."""
        if direct < FAN_OUT:
            return ""
        there = [relay for relay in self._by_name.values() if relay.trunk.is_open and len(relay.carried) < FAN_OUT]
        return min(there, key=lambda relay: len(relay.carried)).address if there else ""

    def lose(self, name: str, why: str) -> None:
        """The trunk of a relay is over, if there is one: so are the links that it carries."""
        if (relay := self._by_name.pop(name, None)) is None:
            return
        _log.warning("the relay %s is lost: %s", name, why)
        for number in list(relay.carried):
            relay.broken(number, f"the relay {name}, which carried it, is lost: {why}")
        relay.trunk.close()

    def close(self) -> None:
        """Ends all trunks."""
        if self._look is not None:
            self._look.cancel()
        for relay in list(self._by_name.values()):
            relay.trunk.close()

    def _open(self, identity: Identity, hello: dict[str, Any]) -> tuple[FarLink, dict[str, Any]]:
        name = identity.name
        if not self._is_direct(name):
            raise errors.ConnectError(f"{name} cannot be a relay: it has no link of its own to this cluster")
        # It says where, unless it listens everywhere; then it is where it calls from.
        where = hello.get("host") or identity.peer.rpartition(":")[0]
        address = str(Address.parse(f"{where}:{hello.get('port')}"))
        self.lose(name, "it has called again")
        trunk = FarLink(self._native.Carrier(self._links.native), identity, lambda why: self._lost(relay, why))
        relay = Relay(name, address, trunk)

        def look_for_breaks() -> None:
            for number, why in trunk.native.take_broken():
                self._loop.call_soon_threadsafe(relay.broken, number, why)

        trunk.on_delivered = look_for_breaks
        self._by_name[name] = relay
        return trunk, {"address": address}

    def _opened(self, trunk: FarLink) -> None:
        _log.info("the agent %s is a relay", trunk.identity.name)
        if self._look is None:
            self._looked_at = time.monotonic()
            self._look = self._loop.call_later(_LOOK_S, self._look_for_silence)

    def _lost(self, relay: Relay, why: str) -> None:
        if self._by_name.get(relay.name) is relay:
            self.lose(relay.name, why)

    def _look_for_silence(self) -> None:
        """A relay tells when it hears nothing of a machine. One that withholds what a machine says must not keep it in
        the cluster for ever; but what is behind the blocks of others on a slow network may come late.
        """
        now = time.monotonic()
        was_away, self._looked_at = now - self._looked_at > SILENCE_S, now
        for relay in list(self._by_name.values()):
            for number, carried in list(relay.carried.items()):
                silent_s = carried.link.native.stats()["heard_ns"] * 1e-9
                if silent_s > TAKES_NOTHING_S and not was_away:
                    relay.broken(number, f"nothing was heard of it for {silent_s:.0f} s over the relay {relay.name}")
        self._look = self._loop.call_later(_LOOK_S, self._look_for_silence)
