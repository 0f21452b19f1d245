"""ONCE-1: a program goes to each machine once, for all of its hosts there, and again only for successors.

The machines are doubles; `machines/test_programs_over_links.py` has real ones.
"""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from pathways import errors
from pathways.controller import program_manager
from pathways.controller.machines import ProgramText
from pathways.controller.program_manager import ProgramManager
from pathways.plan.topology import Topology
from pathways.protocol import control_pb2 as pb


class Machine:
    """Takes down what it is given."""

    def __init__(self) -> None:
        self.handed: list[tuple[int, list[int]]] = []

    def hand_program(self, program: ProgramText, hosts: list[int]) -> None:
        self.handed.append((pb.StoreProgram.FromString(program.data).program_id, list(hosts)))

    def take(self) -> list[tuple[int, list[int]]]:
        handed, self.handed = self.handed, []
        return handed


def client_called(name: str, number: int) -> Any:
    return types.SimpleNamespace(number=number, programs=set(), connection=types.SimpleNamespace(proven_name=name))


def host(number: int) -> Any:
    return types.SimpleNamespace(is_served=True, number=number, config=types.SimpleNamespace(devices=[number]))


def test_each_machine_gets_a_program_once() -> None:
    """Six hosts, four on the one machine and two on the other."""
    one, two = Machine(), Machine()
    forgotten: list[int] = []

    async def run() -> None:
        hosts = [host(number) for number in range(6)]
        cluster: Any = types.SimpleNamespace(
            topology=Topology.grid(1, 6, 1),
            hosts=hosts,
            controller=types.SimpleNamespace(take_forgotten=lambda: [forgotten.pop() for _ in forgotten[:]]),
            placement=types.SimpleNamespace(of=lambda number: one if number < 4 else two),
            register_plan=lambda program: None,
        )
        client = client_called("alice", 1)
        manager = ProgramManager(cluster, {1: client}, requests=None)  # type: ignore[arg-type]

        def register(*devices: int) -> int:
            request = pb.RegisterProgramRequest(program=b"x", bindings=[pb.Binding(devices=devices)])
            return manager.register(client, request)

        whole = register(0, 1, 2, 3, 4, 5)
        assert one.take() == [(whole, [0, 1, 2, 3])] and two.take() == [(whole, [4, 5])]
        part = register(1, 3)
        assert one.take() == [(part, [1, 3])] and two.take() == []

        hosts[2].is_served = False  # it is lost: its successor gets all that there is, and nobody else
        manager.host_lost(2, "killed")
        late = register(2, 4)
        assert one.take() == [] and two.take() == [(late, [4])]
        hosts[2] = host(2)
        manager.serve([hosts[2]])
        assert one.take() == [(whole, [2]), (late, [2])] and two.take() == []

        manager.serve([hosts[number] for number in (4, 5)])  # a machine that takes the place of a lost one
        assert two.take() == [(whole, [4, 5]), (late, [4])] and one.take() == []

        forgotten.append(whole)
        manager.serve(hosts)
        assert one.take() == [(part, [1, 3]), (late, [2])] and two.take() == [(late, [4])]
        manager.client_gone(1)
        manager.serve(hosts)
        assert one.take() == [] and two.take() == []
        assert not manager._programs and not manager._held

    asyncio.run(run())


class Stopped:
    """A machine that takes nothing."""

    def __init__(self) -> None:
        self.waiting: list[ProgramText] = []

    def hand_program(self, program: ProgramText, hosts: list[int]) -> None:
        self.waiting.append(program)


@pytest.mark.parametrize("comes_again", [False, True])
def test_what_a_machine_does_not_take_is_bounded(monkeypatch: pytest.MonkeyPatch, comes_again: bool) -> None:
    """FLOW-1: a client registers programs there and forgets them, or leaves and comes again. Another one is served."""
    monkeypatch.setattr(program_manager, "MOST_PROGRAM_BYTES", 1 << 20)
    monkeypatch.setattr(program_manager, "memory_bytes", lambda: 0)
    machine = Stopped()
    forgotten: list[int] = []

    async def run() -> None:
        cluster: Any = types.SimpleNamespace(
            topology=Topology.grid(1, 1, 1),
            hosts=[host(0)],
            controller=types.SimpleNamespace(take_forgotten=lambda: [forgotten.pop() for _ in forgotten[:]]),
            placement=types.SimpleNamespace(of=lambda number: machine),
            register_plan=lambda program: None,
        )
        clients: dict[int, Any] = {1: client_called("mallory", 1)}
        manager = ProgramManager(cluster, clients, requests=None)  # type: ignore[arg-type]
        request = pb.RegisterProgramRequest(program=bytes(1 << 18), bindings=[pb.Binding(devices=[0])])

        def one(number: int) -> None:
            made = manager.register(clients[number], request)
            if comes_again:
                manager.client_gone(number)
                clients[number] = client_called("mallory", number)
            else:
                forgotten.append(made)

        for _ in range(3):
            one(1)
        with pytest.raises(errors.ResourceExhaustedError, match=r"machines of this cluster have not taken 78\d+ bytes"):
            one(1)
        clients[2] = client_called("alice", 2)
        manager.register(clients[2], request)
        with pytest.raises(errors.ResourceExhaustedError, match="have not taken"):
            one(1)
        assert len(machine.waiting) == 4
        machine.waiting.clear()
        assert not manager._untaken.taken
        one(1)

    asyncio.run(run())
