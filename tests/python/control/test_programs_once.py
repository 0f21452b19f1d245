"""ONCE-1: a program goes to each machine once, for all of its hosts there, and again only for successors.

The machines are doubles; `machines/test_programs_over_links.py` has real ones.
"""

from __future__ import annotations

import asyncio
import types
from typing import Any

from pathways.controller.program_manager import ProgramManager
from pathways.plan.topology import Topology
from pathways.protocol import control_pb2 as pb


class Machine:
    """Takes down what it is given."""

    def __init__(self) -> None:
        self.handed: list[tuple[int, list[int]]] = []

    def hand_program(self, program: bytes, hosts: list[int]) -> None:
        self.handed.append((pb.StoreProgram.FromString(program).program_id, list(hosts)))

    def take(self) -> list[tuple[int, list[int]]]:
        handed, self.handed = self.handed, []
        return handed


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
        client: Any = types.SimpleNamespace(number=1, programs=set())
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
