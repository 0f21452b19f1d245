"""Passes the calls of clients' functions from hosts to clients, and the answers back.

pathways/host/callbacks.py asks, pathways/cluster/callbacks.py answers.
"""

from __future__ import annotations

from collections.abc import Mapping

from pathways.controller.cluster_manager import ClusterManager
from pathways.controller.records import ClientRecord, HostRecord, Questions
from pathways.process.memory import memory_bytes
from pathways.protocol import control_pb2 as pb

#: So many calls of clients' functions may one host have under way.
MOST_CALLS = 1 << 16
_REFUSED = 0  # instead of the client that must answer


class CallbackRouter:
    """Owned by the controller's event loop thread.

    FLOW-1: what clients have not taken is bounded for all together; each of n clients may always have an n-th of that.
    """

    def __init__(self, cluster: ClusterManager, clients: Mapping[int, ClientRecord]) -> None:
        """`clients`: those that there are now, by number; the client manager changes it."""
        self._cluster = cluster
        self._clients = clients
        # Calls that have no answer yet. The key: host, its incarnation, number of the call. The value: the client that
        # must answer.
        self._calls: dict[tuple[int, int, int], int] = {}
        self._most_untaken = memory_bytes() // 4

    def ask_client(self, host: HostRecord, part: pb.CallbackPart) -> None:
        """Passes a host's call of a client's function to that client.

        Raises:
            ValueError: the host begins more calls than a host can have under way (FAULT-1).
        """
        client, key = self._clients.get(part.client), (host.number, host.incarnation, part.call)
        why = f"client {part.client}, which would have to answer, is gone"
        if client is not None and client.questions is not None:
            untaken = client.questions.nbytes
            part.host, part.incarnation = host.number, host.incarnation
            self._check_calls(key)
            if self._calls.setdefault(key, client.number) != _REFUSED:
                if self._has_room(untaken, Questions.size_of(part)):
                    client.questions.put_nowait(part)
                    return
                self._calls[key] = _REFUSED
                forget = pb.CallbackPart(host=host.number, incarnation=host.incarnation, call=part.call, last=True)
                client.questions.put_nowait(forget)
            why = (
                f"client {part.client} does not take the calls of its functions: {untaken:,} bytes wait for it, and "
                "the controller keeps no more. Is its process stopped, or its network slow? `pw.host_callback` calls "
                "functions beside their arguments"
            )
        if part.last:
            self._calls.pop(key, None)
            self._refuse(host, part.call, why)

    def _check_calls(self, key: tuple[int, int, int]) -> None:
        if key in self._calls or len(self._calls) < MOST_CALLS:
            return
        if sum(each[0] == key[0] for each in self._calls) >= MOST_CALLS:
            raise ValueError(f"it has {MOST_CALLS} calls of clients' functions under way, and begins one more")

    def _has_room(self, mine: int, more: int) -> bool:
        open_now = [each.questions.nbytes for each in self._clients.values() if each.questions is not None]
        return sum(open_now) + more <= self._most_untaken or mine + more <= self._most_untaken // len(open_now)

    def answer_host(self, client: ClientRecord, part: pb.CallbackPart) -> None:
        """Passes a client's answer to the host that asked. An answer to a call of another client is ignored."""
        key = (part.host, part.incarnation, part.call)
        if self._calls.get(key) != client.number:
            return
        if part.last or part.error:
            del self._calls[key]
        host = self._cluster.hosts[part.host]
        if not host.is_lost and host.incarnation == part.incarnation:
            host.requests.put_nowait(pb.HostRequest(callback=part))

    def stop_answering(self, client: ClientRecord) -> None:
        """Fails every call that a client has not answered, and every call that hosts make to it from now on."""
        if client.questions is not None:
            client.questions.put_nowait(None)
            client.questions = None
        for key in [key for key, whose in self._calls.items() if whose == client.number]:
            del self._calls[key]
            host = self._cluster.hosts[key[0]]
            if not host.is_lost and host.incarnation == key[1]:
                self._refuse(host, key[2], f"client {client.number}, which was to answer, is gone")

    def host_lost(self, host: int) -> None:
        """A lost host waits for no answer: its open calls are forgotten."""
        self._calls = {key: whose for key, whose in self._calls.items() if key[0] != host}

    @staticmethod
    def _refuse(host: HostRecord, call: int, why: str) -> None:
        host.requests.put_nowait(pb.HostRequest(callback=pb.CallbackPart(call=call, last=True, error=why)))
