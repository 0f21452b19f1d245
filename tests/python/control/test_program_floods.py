"""A client that registers programs without end delays no other client's compilation for long, and is bounded. So are
its slices, the sets of hosts that it names, and the calls of its functions that it does not take (FLOW-1).

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
from pathways.controller import callback_router, program_manager, service
from pathways.controller.callback_router import CallbackRouter
from pathways.controller.program_manager import ProgramManager
from pathways.controller.records import Questions
from pathways.controller.resource_manager import ResourceManager
from pathways.plan.memory_profile import DeviceNeed, ProgramMemory, ResultMemory, ledger_entries
from pathways.plan.topology import Topology
from pathways.protocol import control_pb2 as pb
from pathways.protocol.serialization import dump

FLOOD = 16


def client_called(number: int) -> Any:
    connection = types.SimpleNamespace(proven_name=f"c{number}")
    return types.SimpleNamespace(number=number, programs=set(), connection=connection)


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
        clients: Any = {number: client_called(number) for number in (1, 2)}
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
        client = client_called(1)
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
        client = client_called(1)
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


def test_slices_and_sets_of_hosts_of_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_OF_CLIENT", 3)
    resources = ResourceManager(Topology.grid(1, 4, 1))
    clients = {number: types.SimpleNamespace(slices=set(), groups=set()) for number in (1, 2)}
    numbers = types.SimpleNamespace(bind=lambda binding: binding, group=resources.group)
    asked: Any = service.ControllerService.__new__(service.ControllerService)
    asked._cluster = types.SimpleNamespace(resources=resources, numbers=numbers)
    asked._client_manager = types.SimpleNamespace(attached=lambda client, hosts: asyncio.sleep(0))
    monkeypatch.setattr(service.ControllerService, "_caller", lambda self, client: clients[client])

    class Refused(Exception):
        pass

    async def refuse(context: Any, error: errors.PathwaysError) -> None:
        raise Refused(f"{type(error).__name__}: {error}")

    monkeypatch.setattr(service.wire, "refuse", refuse)

    async def run() -> None:
        slice_, group = pb.AllocateSliceRequest(shape=[1], axis_names=["x"]), asked.Group
        for hosts in ([0], [1], [0, 1]):
            await asked.AllocateSlice(slice_, 1)
            await group(pb.GroupRequest(hosts=hosts), 1)
        with pytest.raises(
            Refused, match="ResourceExhaustedError: this client has 3 slices, and one client may have 3"
        ):
            await asked.AllocateSlice(slice_, 1)
        with pytest.raises(Refused, match="this client has 3 sets of hosts"):
            await group(pb.GroupRequest(hosts=[2, 3]), 1)
        assert len(resources.slices) == 3 and (2, 3) not in resources.groups.values()
        await asked.ReleaseSlice(pb.ReleaseSliceRequest(slice_id=0), 1)
        await asked.AllocateSlice(slice_, 1)
        await asked.AllocateSlice(slice_, 2)
        await group(pb.GroupRequest(hosts=[2, 3]), 2)

    asyncio.run(run())


def test_empty_calls_that_a_client_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part without data takes room, too, and a host that begins calls without end makes no sense (FAULT-1)."""
    monkeypatch.setattr(callback_router, "MOST_CALLS", 20)

    async def run() -> None:
        clients: Any = {1: types.SimpleNamespace(number=1, questions=Questions())}
        hosts: Any = [
            types.SimpleNamespace(number=number, incarnation=0, is_lost=False, requests=asyncio.Queue())
            for number in (0, 1)
        ]
        router = CallbackRouter(types.SimpleNamespace(hosts=hosts), clients)  # type: ignore[arg-type]
        router._most_untaken = 10 * Questions.PART_BYTES
        for _ in range(1000):
            router.ask_client(hosts[0], pb.CallbackPart(client=1, call=1))
        assert clients[1].questions.qsize() == 11  # ten, and that nothing more comes
        with pytest.raises(ValueError, match="it has 20 calls of clients' functions under way"):
            for call in range(1, 1000):
                router.ask_client(hosts[0], pb.CallbackPart(client=1, call=call))
        router.ask_client(hosts[1], pb.CallbackPart(client=1, call=1))  # another host may begin one
        assert len(router._calls) == 21 and clients[1].questions.qsize() == 31
        router.host_lost(0)
        router.ask_client(hosts[0], pb.CallbackPart(client=1, call=1))

    asyncio.run(run())


def test_calls_that_a_client_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Questions, "PART_BYTES", 0)

    async def run() -> None:
        clients: Any = {number: types.SimpleNamespace(number=number, questions=Questions()) for number in (1, 2)}
        host: Any = types.SimpleNamespace(number=0, incarnation=0, is_lost=False, requests=asyncio.Queue())
        router = CallbackRouter(types.SimpleNamespace(hosts=[host]), clients)  # type: ignore[arg-type]
        router._most_untaken = 100

        def ask(client: int, call: int, size: int, last: bool = False) -> None:
            router.ask_client(host, pb.CallbackPart(client=client, call=call, data=bytes(size), last=last))

        ask(1, 1, 60)
        for _ in range(1000):
            ask(1, 1, 60)
        assert host.requests.empty() and clients[1].questions.nbytes == 60
        assert clients[1].questions.qsize() == 2  # what it was sent, and that nothing more comes of it
        ask(1, 1, 60, last=True)
        refused = host.requests.get_nowait().callback
        assert refused.call == 1 and refused.last
        assert refused.error.startswith("client 1 does not take the calls of its functions: 60 bytes wait for it")
        ask(2, 1, 40)
        ask(2, 1, 10, last=True)  # a half is the other client's, whatever the first one has
        assert clients[2].questions.nbytes == 50
        assert [clients[1].questions.get_nowait().last for _ in range(2)] == [False, True]
        ask(1, 2, 50, last=True)
        assert clients[1].questions.nbytes == 50 and host.requests.empty()
        router.answer_host(clients[1], pb.CallbackPart(host=0, call=1, last=True))  # of the call that was refused
        assert host.requests.empty()
        router.answer_host(clients[1], pb.CallbackPart(host=0, call=2, last=True))
        assert host.requests.get_nowait().callback.call == 2
        assert list(router._calls.values()) == [2]

    asyncio.run(run())
