"""Asks clients to move their slices: only a client can move the arrays of a slice, because it owns their names.

pathways/cluster/slice_moves.py answers. A client has one stream for this, open for as long as it lives. One without a
stream, as each of a proxy, moves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pathways import errors
from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.pending_answers import PendingAnswers
from pathways.controller.records import ClientRecord
from pathways.protocol import control_pb2 as pb
from pathways.protocol import wire

#: Seconds that a client has to answer beyond the time in which it gives up a move.
ANSWER_S = 2.0


class SliceMoves:
    """Owned by the controller's event loop thread."""

    def __init__(self, cluster: ClusterManager) -> None:
        self._cluster = cluster
        self._answers: PendingAnswers[pb.MoveAnswer] = PendingAnswers()

    async def move(self, client: ClientRecord, slice_id: int, devices: Sequence[int], timeout_s: float) -> None:
        """Has a client move a slice. Returns when all of its arrays lie on the devices.

        Raises:
            SliceError: the client does not answer, or has gone.
            PathwaysError: what it says; the slice has not moved.
        """
        if client.moves is None:
            raise errors.SliceError(
                "its program keeps the devices that it has chosen; end it, and start it without these"
            )
        request = self._answers.new_number()
        future = self._answers.expect(client.number, request)
        client.moves.put_nowait(
            pb.MoveRequest(request=request, slice_id=slice_id, devices=devices, timeout_s=timeout_s)
        )
        try:
            answer = await asyncio.wait_for(self._cluster.unless_ended(future), timeout_s + ANSWER_S)
        except TimeoutError:
            raise errors.SliceError(f"its client ({client.connection.who}) does not answer") from None
        finally:
            future.cancel()
        if answer.HasField("error"):
            raise wire.make_error(answer.error.type, answer.error.message)

    def open(self, client: ClientRecord) -> asyncio.Queue[pb.MoveRequest | None]:
        """A client's stream is open: what it is asked, from now on. An item None ends the stream."""
        self.close(client)
        requests = client.moves = asyncio.Queue()
        requests.put_nowait(pb.MoveRequest())  # tells the client that the stream is open
        return requests

    def answer(self, client: ClientRecord, answer: pb.MoveAnswer) -> None:
        """Takes in an answer. One to a request of another client is ignored (TRUST-1)."""
        self._answers.answered(client.number, answer.request, answer)

    def close(self, client: ClientRecord) -> None:
        """A client answers no more: its stream is over, or the client itself has gone."""
        if client.moves is not None:
            client.moves.put_nowait(None)
            client.moves = None
        self._answers.gone(client.number, errors.SliceError("its client has stopped answering"))
