"""How an agent's link gets to the controller: by two connections of its own, or over a relay (`relay.py`).

A machine that a relay carries opens its link at the controller itself, as every other one: there it shows its
certificate, and gets the keys by which its link is sealed (CARRY-1). It goes to the relay then. When the relay is lost,
the next link goes directly to the controller, at once. A later one goes to the relay of `--via` again, and directly if
that relay does not carry it for `PATIENCE_S`: the relay may be gone for good, or call a new controller a little later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import socket
import time
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.trust import Role, ask, closed_by_port, dial_answered, seal_cipher
from pathways.trust.credentials import HasCredentials

_log = logging.getLogger(__name__)

#: A relay has heard of a machine after this time at most, in seconds.
_KNOWN_S = 4.0
_RETRY_S = 0.02
#: An agent that has joined once waits so long for the relay of `--via`, in seconds.
PATIENCE_S = 10.0

_Dial = Callable[..., tuple[socket.socket, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class OpenLink:
    """The two connections of a link, and what the controller says."""

    welcome: dict[str, Any]
    sending: socket.socket
    receiving: socket.socket
    relay: str = ""  # the name of the machine that carries it; empty: nobody

    def join(self, native: Any, hub: Any, pool: Any) -> tuple[Any, Any]:
        """The native link, and what is to be carried on the connections: the link itself, or its carrier."""
        if not self.relay:
            link = hub.open_link(False, pool)
            return link, link
        link, carrier = hub.open_link(False), native.Carrier(pool)
        number, sends, gets = self.welcome["carried"]
        carrier.add(number, link, seal_cipher(sends), seal_cipher(gets))
        carrier.start(number)
        return link, carrier


class Ways:
    """Opens the links of an agent, one after the other. Its methods wait."""

    def __init__(self, dial: _Dial, credentials: HasCredentials | None, via: str | None, is_relay: bool) -> None:
        """`dial`: calls the controller's port for a purpose. `via`: the address of a relay; None: the controller says.
        `credentials`: None: there is no encryption, and no relay. `is_relay`: nobody carries this machine.
        """
        self._dial, self._credentials, self._via = dial, credentials, via
        self._never = self._is_direct = credentials is None or is_relay
        self._gives_up_at = math.inf  # waiting for `via`; at first, who starts the agent hears what is wrong

    def broke(self, link: OpenLink) -> bool:
        """This link is over. Whether the next one is to be opened at once, because only the relay may be lost."""
        self._is_direct = bool(link.relay) or self._never
        self._gives_up_at = time.monotonic() + PATIENCE_S
        return bool(link.relay)

    def open(self, **hello: Any) -> OpenLink:
        """A link to the controller; `hello` says what the agent has.

        Raises:
            PathwaysError, OSError: the controller is not there, or refuses it; or the relay of `via`.
        """
        if self._is_direct:
            self._is_direct = self._never
            return self._open_directly(hello)
        if self._via is not None:
            return self._open_at_or_directly(self._via, hello, time.monotonic() >= self._gives_up_at)
        first, welcome = self._dial("link-up", may_go_via=True, **hello)
        if "go_via" not in welcome:
            return self._with_second(first, welcome)
        first.close()
        return self._open_at_or_directly(welcome["go_via"], hello, True)

    def _open_at_or_directly(self, address: str, hello: dict[str, Any], may_be_direct: bool) -> OpenLink:
        """A link over the relay at an address; directly if the relay does not carry it and that is allowed."""
        try:
            return self._open_at(address, hello)
        except (errors.PathwaysError, OSError) as error:
            if not may_be_direct:
                raise
            _log.warning("the relay at %s does not carry this machine: %s", address, error)
        self._gives_up_at = time.monotonic() + PATIENCE_S  # if the controller is the one that is away
        return self._open_directly(hello)

    def _open_directly(self, hello: dict[str, Any]) -> OpenLink:
        return self._with_second(*self._dial("link-up", **hello))

    def _with_second(self, first: socket.socket, welcome: dict[str, Any]) -> OpenLink:
        try:
            second, _ = self._dial("link-down", session=welcome["session"])
        except BaseException:
            first.close()  # or the controller would keep the place for this link for a while
            raise
        return OpenLink(welcome, first, second)

    def _open_at(self, address: str, hello: dict[str, Any]) -> OpenLink:
        """A link over the relay at an address."""
        try:
            relay = str(ask(address, self._credentials, "relay", expects=Role.HOST)["name"])
        except errors.ConnectError as error:
            why = str(error).partition(": is the cluster up")[0]  # what follows is advice about a controller
            raise errors.ConnectError(f"there is no relay at {address}: {why}") from None
        with contextlib.ExitStack() as stack:
            first, welcome = self._dial("link-up", via=relay, **hello)
            stack.callback(first.close)
            with contextlib.ExitStack() as carried:
                sending, answer = self._call_known(address, relay)
                carried.callback(sending.close)
                receiving, _ = self._call_relay(address, relay, "carry-down", session=answer["session"])
                carried.callback(receiving.close)
                second, _ = self._dial("link-down", session=welcome["session"])
                closed_by_port(second, _KNOWN_S)  # or the controller would find the link closed before it is open
                carried.pop_all()
        return OpenLink(welcome, sending, receiving, relay)

    def _call_known(self, address: str, relay: str) -> tuple[socket.socket, dict[str, Any]]:
        """The first connection to a relay, which hears from the controller that this machine comes, perhaps later."""
        deadline = time.monotonic() + _KNOWN_S
        while True:
            try:
                return self._call_relay(address, relay, "carry-up")
            except errors.ConnectError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _call_relay(
        self, address: str, relay: str, purpose: str, **fields: Any
    ) -> tuple[socket.socket, dict[str, Any]]:
        return dial_answered(address, self._credentials, purpose, expects=Role.HOST, machine=relay, **fields)
