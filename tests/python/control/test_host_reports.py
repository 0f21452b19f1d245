"""FAULT-1, TRUST-1: what a host of another machine says in its session concerns its own machine alone.

The controller is real; hosts and machines are objects of this process (`introduction_cases.py`). With real connections:
test_machine_sessions.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest
from introduction_cases import World

from pathways.controller import client_manager
from pathways.protocol import control_pb2 as pb
from pathways.protocol.wire import Stage


@contextlib.asynccontextmanager
async def world(folder: pathlib.Path) -> AsyncIterator[tuple[World, Any]]:
    """A cluster with two machines, and a client that has a program on the first one."""
    made = World(folder, 3, far=True)
    made.cluster.register_plan = lambda program: None  # type: ignore[method-assign]
    await made.cluster.start_hosts()
    made.agents.join(0, 1)
    await made.until(lambda: made.up() == [0, 1], "both are up")
    connection = types.SimpleNamespace(segment=object(), bell=None, proven_name=None)
    client = types.SimpleNamespace(
        number=7, connection=connection, checkpoint_root="", futures=64, slices=set(), programs=set(), questions=None
    )
    made.clients.clients[7] = client  # type: ignore[assignment]
    try:
        yield made, client
        assert made.clients.clients == {7: client}
        assert made.up() == [0] and not made.agents.machines[0].evicted
    finally:
        del made.clients.clients[7]
        await made.close()


@pytest.mark.parametrize("when", ["joins", "is joined"])
@pytest.mark.parametrize("is_silent", [False, True], ids=["refuses", "is silent"])
def test_a_host_that_takes_no_clients(
    tmp_path: pathlib.Path, when: str, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_manager, "FAR_ATTACH_TIMEOUT_S", 2.0)

    async def run() -> None:
        async with world(tmp_path) as (made, client):
            if is_silent:
                made.ways[1].answers.clear()
            made.ways[1].refuses_clients = True
            host = made.cluster.hosts[1]
            await (made.clients._keep(host, client) if when == "joins" else made.clients._attach(host, client))
            (why,) = made.agents.machines[1].evicted
            assert why.startswith("it does not take client 7: ")

    asyncio.run(run())


@pytest.mark.parametrize(
    "report",
    [
        pb.HostReport(stage=pb.HostStage(stage=Stage.FAILED)),
        pb.HostReport(stage=pb.HostStage(stage=Stage.CLUSTER_READY)),
        pb.HostReport(program_compiled=pb.ProgramCompiled(program_id=2, memory={"devices": [{"device": 0}]})),
    ],
    ids=["failed", "ready", "memory of others"],
)
def test_what_no_host_says(tmp_path: pathlib.Path, report: pb.HostReport) -> None:
    async def run() -> None:
        async with world(tmp_path) as (made, client):
            for devices in ([0], [1]):
                made.clients.programs.register(client, pb.RegisterProgramRequest(bindings=[{"devices": devices}]))
            before = len(made.cluster.startup)
            made.clients.report(made.cluster.hosts[1], report)
            assert len(made.agents.machines[1].evicted) == 1
            assert len(made.cluster.startup) == before

    asyncio.run(run())


def test_a_host_speaks_for_its_own_programs(tmp_path: pathlib.Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as (made, client):
            program = made.clients.programs.register(client, pb.RegisterProgramRequest(bindings=[{"devices": [0]}]))
            host, client.questions = made.cluster.hosts[1], asyncio.Queue()
            forged = pb.ProgramCompiled(program_id=program, memory={"donated": [0], "devices": [{"device": 1}]})
            made.clients.report(host, pb.HostReport(program_compiled=forged))
            made.clients.report(host, pb.HostReport(program_stored=pb.Answer(number=program)))
            made.clients.report(host, pb.HostReport(callback=pb.CallbackPart(client=7, call=1, last=True)))
            record = made.clients.programs._programs[program]
            assert not record.memory and not record.stored[0].done() and not record.compiled[0].done()
            assert client.questions.empty(), "it asks for a function of a program that it has not"
            made.clients.report(host, pb.HostReport(error=pb.HostError(error=pb.Error(message="x" * (1 << 20)))))
            assert len(host.error) < 10_000
            made.process(1).die()

    asyncio.run(run())
