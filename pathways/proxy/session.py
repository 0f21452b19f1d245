"""One client: its requests in order, and a reply to each.

    connection --receive--> waiting --> a handler by the request's kind --send--> connection

* PROXY-1: requests take effect in the order in which they came. A reply may come later, when something behind the door
  is done.
* A request whose host buffers have not come, or that must wait for room, holds up those behind it, and no thread.
* Each request gets one reply. A request that fails leaves its error under the handles that it should have filled, and
  harms nothing else. Bytes that are no request end the session.
* PROXY-3: when the session ends, whatever the client had is freed.

Threading: the session's thread, which is that of its connection, calls all but `send`.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from pathways import errors
from pathways._jaxlib.proxy_messages import message
from pathways.proxy.behind import Devices
from pathways.proxy.calls import Call, Outcome
from pathways.proxy.contexts import Context
from pathways.proxy.errors import OBJECT_STORE, Code, Refused, not_implemented, refusal_of
from pathways.proxy.host_buffers import HostBuffers
from pathways.proxy.kinds import KINDS
from pathways.proxy.limits import Limits
from pathways.proxy.memory_report import object_store_dump
from pathways.proxy.module_reader import ModuleReader
from pathways.proxy.replies import Replies
from pathways.proxy.state import State
from pathways.proxy.usual_requests import UsualRequests

log = logging.getLogger(__name__)

#: Errors that a client or its program causes; others are told to the operator as well.
EXPECTED = (Refused, errors.PathwaysError, NotImplementedError)


class Session:
    """See above. `number` names it towards the client, which shows it when it brings host buffers."""

    def __init__(
        self,
        number: int,
        devices: Devices,
        limits: Limits,
        reader: ModuleReader,
        send: Callable[[bytes], None],
        post: Callable[[Callable[[], None]], None],
        ended: Callable[[], None],
    ) -> None:
        """`send` takes a response, and `post` what the session's thread shall do soon, before it calls `go_on`. Any
        thread calls them, and neither blocks. `ended` is called once, at the end.
        """
        self.number = number
        self.is_paused = False  # no request is handled for now; any thread may say so
        self._state = State(number, devices, limits, reader, post)
        self._replies = Replies(send, self._explain)
        self._usual = UsualRequests(self._state.arrays, self._state.executables, self._replies)
        self._ended = ended
        self._request = message("xla.ifrt.proxy.IfrtRequest")
        self._waiting: collections.deque[Call] = collections.deque()

    @property
    def buffers(self) -> HostBuffers:
        """The client's host buffers. Any thread may use them."""
        return self._state.buffers

    def answer(self, request: bytes) -> bytes | None:
        """The response to the next request, if it can be handled whole and at once; else `receive` takes it."""
        if self._waiting or self.is_paused:
            return None
        return self._usual.handle(request)

    def receive(self, request: bytes) -> None:
        """Takes the next request. Raises `Refused` when it is none: then the session is to be ended."""
        self._waiting.append(self._call(request))
        self.go_on()

    def go_on(self) -> None:
        """Handles requests, until one must wait."""
        while self._waiting and not self.is_paused and self._handle(self._waiting[0]):
            self._waiting.popleft()

    def end(self) -> None:
        """The client is gone: what it has is freed. What it has asked and what was not begun is dropped."""
        self._waiting.clear()
        try:
            self._state.free()
        except Exception:
            log.exception("session %x: what it had could not be freed", self.number)
        finally:
            self._ended()

    def _call(self, raw: bytes) -> Call:
        """The request in `raw`. Raises `Refused` when there is none."""
        try:
            request = self._request.FromString(raw)
        except DecodeError:
            raise Refused(Code.INVALID_ARGUMENT, "what came is no request of the IFRT proxy protocol") from None
        name = request.WhichOneof("request") or ""
        metadata = request.request_metadata
        context = Context(metadata.user_context_id, self._replies.dropped) if metadata.user_context_id else None
        return Call(self._replies, name, getattr(request, name) if name else None, metadata.op_id, context)

    def _handle(self, call: Call) -> bool:
        """Handles a request; False when it must wait."""
        kind = KINDS.get(call.name)
        if kind is None:
            call.fail(not_implemented(f"this proxy has no request {call.name or 'of this kind'}"))
            return True
        try:
            if not kind.may_begin(self._state, call):
                return False
            outcome = kind.handle(self._state, call)
        except Exception as error:
            if not isinstance(error, EXPECTED):
                log.warning("session %x: %s failed", self.number, call.name, exc_info=error)
            refusal = self._explain(refusal_of(error).within(call.context))
            self._state.arrays.fail(kind.results(call.body), refusal)
            self._state.futures.fail(kind.statuses(call.body), refusal)
            call.fail(refusal)
            error.__traceback__ = None  # its frames refer to it: a circle, which would keep contexts for a while
            return True
        if not isinstance(outcome, Outcome):
            call.reply(outcome)
        return True

    def _explain(self, refusal: Refused) -> Refused:
        """The same with what helps the user: who holds the memory. Any thread may call."""
        if refusal.code is Code.RESOURCE_EXHAUSTED and OBJECT_STORE not in refusal.payloads:
            refusal.payloads[OBJECT_STORE] = object_store_dump(self._state.arrays.values())
        return refusal


def refused(request: bytes, refusal: Refused) -> bytes:
    """The response to a request of a client for which there is no session."""
    response = message("xla.ifrt.proxy.IfrtResponse")()
    try:
        metadata = message("xla.ifrt.proxy.IfrtRequest").FromString(request).request_metadata
        response.response_metadata.op_id = metadata.op_id
    except DecodeError:
        raise refusal from None
    refusal.fill(response.response_metadata.status)
    made: bytes = response.SerializeToString()
    return made
