"""FAB-1: who finds out that machines of an island do not reach each other, and which of them is evicted for it."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pathways import errors
from pathways.agent import fabric_watch
from pathways.agent.fabric import Fabric
from pathways.agent.fabric_watch import FabricWatch
from pathways.agent.rendezvous import Rendezvous
from pathways.controller import fabrics
from pathways.controller.agent_machine import AgentMachine
from pathways.controller.fabrics import Fabrics
from pathways.protocol import agent_pb2 as pb
from pathways.transport.loop import Loop
from pathways.trust import Authority, Port, Role

ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Ends:
    """The watches of two machines, and what they report."""

    def __init__(self, folder: pathlib.Path) -> None:
        authority = Authority.open_or_create(str(folder))
        self.loop = Loop()
        self.reports: list[list[pb.FabricReport]] = [[], []]
        self.ports, self.watches = [], []
        for at, address in enumerate(ADDRESSES):
            own = authority.credentials(Role.HOST, f"m{at}")
            self.ports.append(Port(f"{address}:0", own))
            self.watches.append(FabricWatch(self.loop, Fabric(address, "lo"), own, self.ports[-1]))  # type: ignore[arg-type]

    def watch(self, at: int, secret: str = "word") -> None:
        other = pb.Neighbours.Machine(name=f"m{1 - at}", fabric=self.ports[1 - at].address.endpoint)
        said = self.reports[at]
        told = pb.Neighbours(number=7, secret=secret, others=[other])
        self.watches[at].watch(told, lambda report: said.append(report.fabric))

    async def hear(self, at: int, count: int) -> pb.FabricReport:
        async with asyncio.timeout(30):
            while len(self.reports[at]) < count:
                await asyncio.sleep(0.01)
        return self.reports[at][-1]

    def close(self) -> None:
        for watch in self.watches:
            watch.stop()
        for port in self.ports:
            port.close()
        self.loop.close()


def played(folder: pathlib.Path, scene: Callable[[Ends], Awaitable[None]], opens: Sequence[int] = (0, 1)) -> None:
    async def play() -> None:
        ends = Ends(folder)
        for at in opens:
            ends.ports[at].start()
        try:
            await scene(ends)
        finally:
            ends.close()
            await asyncio.sleep(0.1)

    asyncio.run(play())


def test_both_reach_each_other_and_one_goes(tmp_path: pathlib.Path) -> None:
    async def scene(ends: Ends) -> None:
        for at in (0, 1):
            ends.watch(at)
        for at in (0, 1):
            report = await ends.hear(at, 1)
            assert (report.number, report.machine, report.error) == (7, f"m{1 - at}", "")
        ends.ports[1].close()
        assert "(from 127.0.0.1, lo)" in (await ends.hear(0, 2)).error

    played(tmp_path, scene)


def test_who_has_another_word_is_not_reached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_watch, "REACH_S", 3.0)

    async def scene(ends: Ends) -> None:
        ends.watch(0)
        ends.watch(1, "another")
        for at in (0, 1):
            assert f"m{at} is no machine of this island" in (await ends.hear(at, 1)).error

    played(tmp_path, scene)


def test_another_machine_that_answers_hears_no_secret(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CERT-1: it has a certificate of the cluster, and listens where a neighbour should be."""
    monkeypatch.setattr(fabric_watch, "REACH_S", 1.0)
    heard: list[Any] = []

    async def scene(ends: Ends) -> None:
        ends.ports[1].on("fabric", [Role.HOST], lambda *_: None, lambda _, hello: heard.append(hello) or {})
        told = pb.Neighbours.Machine(name="m7", fabric=ends.ports[1].address.endpoint)
        said = ends.reports[0]
        ends.watches[0].watch(
            pb.Neighbours(number=7, secret="word", others=[told]), lambda report: said.append(report.fabric)
        )
        assert "machine m7 is expected at" in (await ends.hear(0, 1)).error

    played(tmp_path, scene)
    assert heard == []


def test_silence_is_noticed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that has answered before, and takes what it is sent."""
    monkeypatch.setattr(fabric_watch, "SILENCE_S", 1.5)
    kept = []

    def answer_once(sock: Any, *_: Any) -> None:
        sock.setblocking(True)
        sock.send(b".")
        kept.append(sock)

    async def scene(ends: Ends) -> None:
        ends.ports[1].on("fabric", [Role.HOST], answer_once)
        ends.ports[1].start()
        ends.watch(0)
        assert not (await ends.hear(0, 1)).error
        assert "1.5 s" in (await ends.hear(0, 2)).error

    played(tmp_path, scene, opens=[0])
    assert len(kept) == 1


def test_hosts_meet_again_under_the_same_number(tmp_path: pathlib.Path) -> None:
    """As they do when another controller takes over an agent."""
    loop = Loop()
    meeting = Rendezvous(loop, str(tmp_path), "m1", None, None)
    meeting.set_neighbours(pb.Neighbours(first="m0", others=[pb.Neighbours.Machine(name="m0")]))
    for _ in range(2):
        assert meeting.begin(0, 2) == f"unix:{tmp_path}/island-0.sock"
        meeting.end()
    loop.close()


class Machine(AgentMachine):
    """One that only has what fabrics are about."""

    def __init__(self, name: str, since: float) -> None:
        self.name, self.since, self.island = name, since, 0
        self.hosts = (int(name[1:]),)
        self.neighbour = pb.Neighbours.Machine(name=name)
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.lost_why = ""
        self.link = self

    def on_lost(self, why: str) -> None:
        self.lost_why = why

    @property
    def told(self) -> list[Any]:
        found = []
        while not self.requests.empty():
            found.append(self.requests.get_nowait())
        return found


def reports(number: int, pairs: Sequence[tuple[int, int]], error: str = "") -> list[tuple[int, pb.FabricReport]]:
    return [(one, pb.FabricReport(number=number, machine=f"m{other}", error=error)) for one, other in pairs]


ALL = list(itertools.permutations(range(3), 2))


@pytest.mark.parametrize(
    ("bad", "culprit"),
    [
        ([(0, 2), (2, 0), (1, 2), (2, 1)], "m2"),
        ([(0, 1), (1, 0), (1, 2), (2, 1)], "m1"),  # most reports mean it
        ([(0, 1)], "m1"),  # of the two, the one that came last
        ([(2, 0), (0, 2)], "m2"),
        ([(0, 1), (0, 2)], "m0"),  # one way
    ],
)
@pytest.mark.parametrize("was_whole", [False, True])
def test_who_is_evicted(
    bad: list[tuple[int, int]], culprit: str, was_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabrics, "JUDGE_S", 0.02)
    monkeypatch.setattr(fabrics, "LEAVE_S", 0.2)

    async def play() -> None:
        island = Fabrics()
        machines = [Machine(f"m{number}", float(number)) for number in range(3)]
        whole = asyncio.ensure_future(island.whole(machines))
        await asyncio.sleep(0)
        told = [machine.told[0].neighbours for machine in machines]
        assert {each.first for each in told} == {"m0"}
        assert len({each.secret for each in told}) == 1
        number = told[0].number
        good = ALL if was_whole else [pair for pair in ALL if pair not in bad]
        for one, report in reports(number + 1, ALL) + reports(number, good[:-1]):
            island.report(machines[one], report)
        await asyncio.sleep(0.01)
        assert not whole.done()
        for one, report in reports(number, good[-1:]):
            island.report(machines[one], report)
        await asyncio.sleep(0.01)
        assert whole.done() == was_whole
        for one, report in reports(number, bad, "it does not answer\x1b"):
            island.report(machines[one], report)
        await asyncio.sleep(0.1)
        named = f"the fabric from machine m{bad[0][0]}" if len(bad) == 1 else "the fabric from machine m"
        for machine in machines:
            left = [each.leave.why for each in machine.told]
            assert bool(left) == (machine.name == culprit and not was_whole)
            assert bool(machine.lost_why) == (machine.name == culprit and was_whole)
            for why in (*left, machine.lost_why):
                assert "\x1b" not in why
                assert not why or named in why
        # A start that failed before the place is free would fail again and again, and take the others along.
        assert whole.done() == was_whole
        island.lost(next(machine for machine in machines if machine.name == culprit), "gone")
        if was_whole:
            await whole
        else:
            with pytest.raises(errors.HostLostError, match=f"machine {culprit} is lost: gone"):
                await whole
            await asyncio.sleep(0.2)  # who does not leave is lost
            assert [bool(machine.lost_why) for machine in machines] == [m.name == culprit for m in machines]
        again = asyncio.ensure_future(island.whole(machines))  # another one has its place
        await asyncio.sleep(0)
        assert all(machine.told for machine in machines)
        again.cancel()

    asyncio.run(play())


def test_a_loss_ends_the_wait() -> None:
    async def play() -> None:
        island = Fabrics()
        machines = [Machine("m0", 0.0), Machine("m1", 1.0)]
        whole = asyncio.ensure_future(island.whole(machines))
        await asyncio.sleep(0)
        island.lost(machines[0], "its link broke")
        with pytest.raises(errors.HostLostError, match="machine m0 is lost: its link broke"):
            await whole
        await island.whole(machines[:1])  # alone it waits for nobody

    asyncio.run(play())
