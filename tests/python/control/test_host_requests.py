"""Requests to hosts and others, and their answers.

END-1    test_nothing_waits_for_who_is_gone
TRUST-1  test_an_answer_counts_for_who_was_asked_only
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pathways import errors
from pathways.controller.host_requests import HostRequests
from pathways.controller.pending_answers import PendingAnswers
from pathways.host.main import HostProcess
from pathways.protocol import control_pb2 as pb


class Cluster:
    """A cluster of hosts that answer nothing by themselves."""

    def __init__(self, hosts: int = 2) -> None:
        self.hosts = [
            types.SimpleNamespace(
                number=number, is_lost=False, opened_at=0, name=f"host {number}", requests=asyncio.Queue()
            )
            for number in range(hosts)
        ]

    async def unless_ended(self, future: asyncio.Future[Any], timeout_s: float | None = None) -> Any:
        return await asyncio.wait_for(asyncio.shield(future), timeout_s)


def played(play: Callable[[Any, HostRequests], Awaitable[None]]) -> None:
    async def run() -> None:
        cluster: Any = Cluster()
        requests = HostRequests(cluster)
        await play(cluster, requests)
        assert not requests._answers._asked, "nothing is kept of a request that is over"

    asyncio.run(run())


async def asked(host: Any) -> pb.HostRequest:
    request: pb.HostRequest = await asyncio.wait_for(host.requests.get(), 10)
    return request


TRACE = pb.HostTrace(action=pb.HostTrace.TAKE)


def test_an_answer_counts_for_who_was_asked_only() -> None:
    async def play(cluster: Any, requests: HostRequests) -> None:
        one, other = cluster.hosts
        waiting = asyncio.ensure_future(requests.ask(one, pb.HostRequest(trace=TRACE)))
        request = await asked(one)
        assert request.trace == TRACE and request.request
        requests.answered(other, pb.HostReport(request=request.request, traced=pb.TracePart(remark="not mine")))
        requests.answered(one, pb.HostReport(request=request.request + 1, traced=pb.TracePart(remark="another")))
        requests.answered(one, pb.HostReport(traced=pb.TracePart(remark="of none")))
        await asyncio.sleep(0)
        assert not waiting.done()
        requests.answered(one, pb.HostReport(request=request.request, traced=pb.TracePart(remark="mine")))
        requests.answered(one, pb.HostReport(request=request.request, traced=pb.TracePart(remark="twice")))
        answer = await waiting
        assert answer is not None and answer.traced.remark == "mine"

    played(play)


def test_nothing_waits_for_who_is_gone() -> None:
    """ERR-2: a host that is lost, before it was asked and while it is. OWN-1: a client. A host that is only silent."""

    async def play(cluster: Any, requests: HostRequests) -> None:
        one, other = cluster.hosts
        waiting = asyncio.ensure_future(requests.ask(one, pb.HostRequest(trace=TRACE)))
        assert len(requests.expect_all(7, without={other.number})[1]) == 1, "a host that lacks the client says nothing"
        number, moved = requests.expect_all(7)
        await asked(one)
        requests.host_lost(one)
        assert await waiting is None and await moved[0] is None and not moved[1].done()
        one.is_lost = True
        assert await requests.ask(one, pb.HostRequest(trace=TRACE)) is None
        assert one.requests.empty()
        requests.client_gone(8, errors.ClusterClosedError("another client is gone"))
        assert not moved[1].done()
        requests.client_gone(7, errors.ClusterClosedError("client 7 is gone"))
        with pytest.raises(errors.ClusterClosedError, match="client 7"):
            await moved[1]
        requests.answered(other, pb.HostReport(request=number, client_offloaded=pb.ClientOffloaded(bytes=1)))  # late
        with pytest.raises(TimeoutError):
            await requests.ask(other, pb.HostRequest(trace=TRACE), 0.01)
        await asyncio.sleep(0)

    played(play)


def test_answers_of_one_asker_are_not_those_of_another() -> None:
    async def run() -> None:
        answers: PendingAnswers[str] = PendingAnswers()
        number = answers.new_number()
        one, two = (answers.expect(who, number) for who in (1, 2))  # one request to both
        answers.answered(2, number, "two")
        answers.gone(1, errors.SliceError("1 is gone"))
        assert await two == "two"
        with pytest.raises(errors.SliceError):
            await one

    asyncio.run(run())


def test_a_request_that_a_host_does_not_know_is_named() -> None:
    host: Any = HostProcess.__new__(HostProcess)
    with pytest.raises(RuntimeError, match="the controller asks for None, which this host does not know"):
        host._answer(pb.HostRequest(request=1), None)
