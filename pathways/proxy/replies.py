"""What goes back to a client: a response to each request. Any thread may call."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Refused

#: Writes the body of a response; None: the body is empty.
Fill = Callable[[Any], object] | None


class Replies:
    """`send` takes a response and does not block. `explain` adds to an error what helps the user."""

    def __init__(self, send: Callable[[bytes], None], explain: Callable[[Refused], Refused]) -> None:
        self._send, self.explain = send, explain
        self._response = message("xla.ifrt.proxy.IfrtResponse")
        self._counted = itertools.count()
        #: Numbers of contexts to which nothing refers any more. The next response tells the client.
        self.dropped: collections.deque[int] = collections.deque()

    def reply(self, name: str, number: int, fill: Fill, is_counted: bool) -> None:
        """Answers the request `number`, whose field in IfrtRequest is `name`.

        A client counts some replies, without a gap, to know when it may forget contexts.
        """
        response = self._response()
        metadata = response.response_metadata
        metadata.op_id = number
        metadata.status.SetInParent()
        body = getattr(response, f"{name.removesuffix('request')}response")
        body.SetInParent()
        if fill is not None:
            fill(body)
        if is_counted:
            metadata.seq_num = next(self._counted)
            while self.dropped:
                metadata.destroyed_user_context_ids.append(self.dropped.popleft())
        self._send(response.SerializeToString())

    def fail(self, number: int, refusal: Refused) -> None:
        """Answers with an error."""
        response = self._response()
        response.response_metadata.op_id = number
        self.explain(refusal).fill(response.response_metadata.status)
        self._send(response.SerializeToString())
