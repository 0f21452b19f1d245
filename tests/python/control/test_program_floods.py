"""A client that registers programs without end delays no other client's compilation for long, and is bounded.

What a program keeps in the controller for each device ends when the native controller has it.
"""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways import errors
from pathways.controller import program_manager
from pathways.controller.program_manager import ProgramManager
from pathways.plan.memory_profile import DeviceNeed, ProgramMemory, ResultMemory, ledger_entries
from pathways.plan.topology import Topology
from pathways.protocol import control_pb2 as pb
from pathways.protocol.serialization import dump

FLOOD = 16


def host_of_one_device(number: int) -> Any:
    """A record of it, as far as a `ProgramManager` uses it."""
    config = types.SimpleNamespace(devices=[number])
    return types.SimpleNamespace(is_served=False, number=number, config=config)


def some_program(number: int) -> Callable[[Any], Any]:
    """Takes a while to compile, and no other one is like it."""

    def run(x: Any) -> Any:
        for step in range(20):
            x = jnp.sin(x * (number + step)) @ jnp.cos(x)
        return x.sum()

    return run


@pytest.mark.slow
def test_a_flood_delays_a_neighbour_by_a_compilation_at_a_time(sessions: Callable[[str], Any]) -> None:
    cluster = sessions("local")
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    x = pw.device_put(np.ones((4, 4), np.float32), slice_)
    over = threading.Semaphore(0)
    programs = [pw.jit(some_program(number), devices=slice_) for number in range(FLOOD)]  # they live to the end

    def flood(number: int) -> None:
        programs[number](x).block_until_ready()
        over.release()

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(FLOOD)]
    with pw.connect(cluster.address, name="neighbour") as neighbour:
        there = pw.make_virtual_device_set(neighbour).add_slice(devices=1)
        y = pw.device_put(np.ones((4, 4), np.float32), there)
        for thread in threads:
            thread.start()
        assert over.acquire(timeout=100)  # one is compiled; the others are registered or on their way
        assert float(pw.jit(lambda v: v.sum() + 0.25, devices=there)(y)) == 16.25
        left = FLOOD - 1 - over._value
    for thread in threads:
        thread.join()
    print(f"{left} programs of the flood were not compiled when the neighbour's was")
    assert left > FLOOD // 4


def test_programs_of_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_manager, "MOST_PROGRAMS", 3)
    each = pb.RegisterProgramRequest(program=b"x" * 100, bindings=[pb.Binding(devices=[0])]).ByteSize() + 459
    monkeypatch.setattr(program_manager, "MOST_PROGRAM_BYTES", 3 * each + 600)
    forgotten: list[int] = []

    def take_forgotten() -> list[int]:
        taken = forgotten[:]
        forgotten.clear()
        return taken

    async def run() -> None:
        cluster: Any = types.SimpleNamespace(
            topology=Topology.grid(1, 1, 2),
            hosts=[types.SimpleNamespace(is_served=False)],
            controller=types.SimpleNamespace(take_forgotten=take_forgotten),
            register_plan=lambda program: None,
            unless_ended=lambda future: future,
        )
        clients: Any = {number: types.SimpleNamespace(number=number, programs=set()) for number in (1, 2)}
        manager = ProgramManager(cluster, clients, requests=None)  # type: ignore[arg-type]

        def register(client: int, size: int) -> None:
            request = pb.RegisterProgramRequest(program=b"x" * size, bindings=[pb.Binding(devices=[0])])
            manager.register(clients[client], request)

        for _ in range(3):
            register(1, 100)
        with pytest.raises(errors.ResourceExhaustedError, match=f"client 1 has 3 programs of {3 * each} bytes"):
            register(1, 100)
        manager.forget(clients[1], [1])  # a client that only says so: its command has not been granted
        with pytest.raises(errors.ResourceExhaustedError):
            register(1, 100)
        forgotten.append(1)
        register(1, 690)
        register(2, 1700)
        with pytest.raises(errors.ResourceExhaustedError, match=f"of {3 * each + 600} bytes: delete functions that"):
            register(2, 1)
        manager.client_gone(2)
        register(2, 10)
        # Names and bindings are kept too; the bound holds for all of a request.
        big_name = pb.RegisterProgramRequest(name="n" * (3 * each + 600), bindings=[pb.Binding(devices=[0])])
        with pytest.raises(errors.ResourceExhaustedError, match="client 2 has 1 programs"):
            manager.register(clients[2], big_name)
        many = pb.RegisterProgramRequest(program=b"x", bindings=[pb.Binding(devices=[0, 1])] * 60)
        with pytest.raises(errors.ResourceExhaustedError, match="client 2 has 1 programs"):
            manager.register(clients[2], many)
        twice = pb.RegisterProgramRequest(program=b"x", bindings=[pb.Binding(devices=[1, 1])])
        with pytest.raises(errors.SliceError, match="binds a mesh to each device once"):
            manager.register(clients[2], twice)

    asyncio.run(run())


def test_an_admitted_program_keeps_nothing_for_each_device() -> None:
    results = (ResultMemory(0, 8), ResultMemory(0, 16))
    memory = [ProgramMemory((DeviceNeed(host, 24, 0),), 0, results, (), "", ()) for host in range(2)]
    admitted: list[Any] = []

    async def run() -> None:
        hosts = [host_of_one_device(host) for host in range(2)]
        cluster: Any = types.SimpleNamespace(
            topology=Topology.grid(1, 2, 1),
            hosts=hosts,
            controller=types.SimpleNamespace(take_forgotten=list),
            numbers=types.SimpleNamespace(admit_by=lambda *given: admitted.append(given)),
            register_plan=lambda program: None,
            unless_ended=lambda future: future,
        )
        client: Any = types.SimpleNamespace(number=1, programs=set())
        manager = ProgramManager(cluster, {1: client}, requests=None)  # type: ignore[arg-type]
        request = pb.RegisterProgramRequest(program=b"x", bindings=[pb.Binding(devices=[0, 1])])
        number = manager.register(client, request)
        (program,) = manager._programs.values()

        def compiled(host: Any) -> None:
            manager.stored(host, pb.Answer(number=program.number))
            part = dump(memory[host.number], pb.ProgramMemory)
            manager.compiled(host, pb.ProgramCompiled(program_id=program.number, memory=part))

        for host in hosts:
            compiled(host)
        await manager.wait_compiled(client, number)
        await manager.wait_compiled(client, program.number)
        compiled(hosts[1])  # the successor of a lost host
        assert admitted == [(program.number, 1, "", ((0, 1),), {0: memory[0], 1: memory[1]})]
        assert not program.memory and not program.bindings

    asyncio.run(run())


def test_a_client_that_goes_when_its_program_is_compiled_leaves_nothing() -> None:
    """OWN-1: the hosts have compiled it, and who waited for that has not gone on yet."""
    admitted: list[Any] = []

    async def run() -> None:
        cluster: Any = types.SimpleNamespace(
            topology=Topology.grid(1, 1, 1),
            hosts=[host_of_one_device(0)],
            controller=types.SimpleNamespace(take_forgotten=list),
            numbers=types.SimpleNamespace(admit_by=lambda *given: admitted.append(given)),
            register_plan=lambda program: None,
            unless_ended=lambda future: future,
        )
        client: Any = types.SimpleNamespace(number=1, programs=set())
        manager = ProgramManager(cluster, {1: client}, requests=None)  # type: ignore[arg-type]
        request = pb.RegisterProgramRequest(program=b"x", bindings=[pb.Binding(devices=[0])])
        number = manager.register(client, request)
        (program,) = manager._programs.values()
        manager.stored(cluster.hosts[0], pb.Answer(number=program.number))
        waiting = asyncio.ensure_future(manager.wait_compiled(client, number))
        await asyncio.sleep(0)
        part = dump(ProgramMemory((DeviceNeed(0, 24, 0),), 0), pb.ProgramMemory)
        manager.compiled(cluster.hosts[0], pb.ProgramCompiled(program_id=program.number, memory=part))
        manager.client_gone(1)
        with pytest.raises(errors.PlanError, match="no program"):
            await waiting
        assert not admitted

    asyncio.run(run())


def test_each_place_of_results_is_looked_up_once() -> None:
    parts = [
        ProgramMemory(
            (DeviceNeed(host, 24, 0),), 5, tuple(ResultMemory(0, n, n == 3) for n in range(5)), (), "", (0, 0)
        )
        for host in range(2)
    ]
    asked: list[tuple[int, ...]] = []

    def number_of(members: Any) -> int:
        asked.append(tuple(members))
        return len(asked)

    needs, results, arguments = ledger_entries(parts, [(0, 1)], [0, 1], Topology.grid(1, 2, 1), number_of, number_of)
    assert needs == [(0, 24, 0), (1, 24, 0), (2, 5, 0), (3, 5, 0)]
    assert asked == [
        (0, 1),
        (0, 1),
        (0, 1),
        (2, 3),
        (0, 1),
    ]  # the hosts and the spaces of either place; who holds arguments
    assert arguments == [5, 5]
    assert results == [(1, 2, 0, -1, -1), (1, 2, 1, -1, -1), (1, 2, 2, -1, -1), (3, 4, 3, -1, -1), (1, 2, 4, -1, -1)]
