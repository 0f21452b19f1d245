"""What goes back to a client: a response to each request. Any thread may call."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable
from typing import Any

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Refused


def body_of(name: str) -> str:
    """The field of IfrtResponse that answers a field of IfrtRequest."""
    return f"{name.removesuffix('request')}response"


#: Writes the body of a response; None: the body is empty.
Fill = Callable[[Any], object] | None


class Replies:
    """`send` takes a response and does not block. `explain` adds to an error what helps the user."""

    def __init__(self, send: Callable[[bytes], None], explain: Callable[[Refused], Refused]) -> None:
        self._send, self.explain = send, explain
        self._response = message("xla.ifrt.proxy.IfrtResponse")
        #: The number of the next response that the client counts.
        self.next_count = itertools.count().__next__
        self._lock = threading.Lock()
        self._empty: dict[str, Any] = {}  # responses without a body, by the request's name: they are used again
        #: Numbers of contexts to which nothing refers any more. The next response tells the client.
        self.dropped: collections.deque[int] = collections.deque()

    def reply(self, name: str, number: int, fill: Fill, is_counted: bool) -> None:
        """Answers the request `number`, whose field in IfrtRequest is `name`.

        A client counts some replies, without a gap, to know when it may forget contexts.
        """
        with self._lock:
            response = self._empty.get(name) if fill is None else None
            if response is None:
                response = self._new(name)
                if fill is None:
                    self._empty[name] = response
                else:
                    fill(getattr(response, body_of(name)))
            metadata = response.response_metadata
            metadata.op_id = number
            if not is_counted:
                metadata.ClearField("seq_num")
            else:
                metadata.seq_num = self.next_count()
                if self.dropped:
                    self._empty.pop(name, None)
                while self.dropped:
                    metadata.destroyed_user_context_ids.append(self.dropped.popleft())
            reply = response.SerializeToString()
        self._send(reply)

    def _new(self, name: str) -> Any:
        response = self._response()
        response.response_metadata.status.SetInParent()
        getattr(response, body_of(name)).SetInParent()
        return response

    def fail(self, number: int, refusal: Refused) -> None:
        """Answers with an error."""
        response = self._response()
        response.response_metadata.op_id = number
        self.explain(refusal).fill(response.response_metadata.status)
        self._send(response.SerializeToString())
