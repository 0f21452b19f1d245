"""ERR-2: islands that start at the same time are introduced together, and what goes wrong with one harms no other.

The controller is real; hosts and machines are objects of this process (`introduction_cases.py`). With processes:
`test_lost_islands.py`, `test_machine_faults.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from introduction_cases import World

from pathways import errors
from pathways.controller import introductions
from pathways.host.main import HostProcess
from pathways.protocol import control_pb2 as pb

kinds = pytest.mark.parametrize("far", [False, True], ids=["near", "far"])


@contextlib.asynccontextmanager
async def world(folder: pathlib.Path, islands: int, hosts: int = 1, **what: Any) -> AsyncIterator[World]:
    """A cluster whose hosts here are up, and no other."""
    made = World(folder, islands, hosts, **what)
    await made.cluster.start_hosts()
    await made.until(lambda: made.cluster.ready, "the cluster is up")
    try:
        yield made
        made.check_everybody_is_known()
    finally:
        await made.close()


def test_machines_that_join_at_once_are_introduced_together(tmp_path: pathlib.Path) -> None:
    """While the first machine's host starts, the others come; then 30 more while the first ones are up."""

    async def run() -> None:
        async with world(tmp_path, 64, far=True) as made:
            made.ways[0].ready.clear()
            made.agents.join(0)
            await made.until(lambda: made.launched, "the first one is launched")
            for island in range(1, 34):
                made.agents.join(island)
                await asyncio.sleep(0)
            # The second machine did not wait for the first one's host; the rest waits for the end of that exchange.
            await made.until(lambda: len(made.launched) >= 2, "its host starts meanwhile")
            assert not made.up()
            made.ways[0].ready.set()
            await made.until(lambda: len(made.up()) == 34, "all are up")
            assert made.requests() <= 1 + 34, "each host was told of a machine at a time"
            before = made.requests()
            made.agents.join(*range(34, 64))
            await made.until(lambda: len(made.up()) == 64, "all are up")
            assert made.requests() == before + 34
            last = made.launched[0].asked[-1]
            assert [each.host for each in last.successors] == [*range(34, 64)]
            assert last.successors[0].stream == "m34@10.0.0.1:5034" and last.successors[0].epoch == 0
            config = made.process(40).config
            assert config.epochs[41] == 0 and config.streams[41] == "m41@10.0.0.1:5041"
            assert config.epochs[40] == 0 and config.streams[40] is None

    asyncio.run(run())


@kinds
def test_islands_that_are_lost_together_come_back_together(tmp_path: pathlib.Path, far: bool) -> None:
    async def run() -> None:
        async with world(tmp_path, 5, 2, far=far) as made:
            if far:
                made.agents.join(*range(5))
                await made.until(lambda: len(made.up()) == 10, "all are up")
            survivor = made.process(9)
            asked = len(survivor.asked)
            losses = [made.islands.islands[number].loss for number in range(5)]
            made.process(0).die()
            made.process(3).die()
            made.process(4).die()
            await made.until(lambda: len(made.up()) == 10, "all are up again")
            (request,) = survivor.asked[asked:]
            told = {each.host: each.loss for each in request.successors}
            first = max(losses)
            assert told == {host: first + 1 + host // 2 for host in range(6)}
            assert made.process(0).asked == [], "hosts of one exchange know each other from their configurations"
            if not far:
                assert survivor.handed[-6:] == [*range(6)]
                assert made.process(0).segments == set(range(10))
                assert request.successors[0].has_segment
            assert made.cluster.host_with(survivor_token(made, 9)) is made.cluster.hosts[9]

    asyncio.run(run())


def survivor_token(made: World, number: int) -> str:
    return made.cluster.hosts[number].token


def test_no_host_starts_where_old_rings_are_in_use(tmp_path: pathlib.Path) -> None:
    """Where hosts share memory, the new ones wait until all others use none of the old."""

    async def run() -> None:
        async with world(tmp_path, 3, far=False) as made:
            made.ways[2].answers.clear()
            made.process(0).die()
            await made.until(lambda: made.process(2).asked, "the survivor is asked")
            made.process(1).die()  # it comes too late for this exchange
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(made.launched) == 3
            made.ways[2].answers.set()
            await made.until(lambda: len(made.up()) == 3, "all are up")
            assert [[each.host for each in request.successors] for request in made.process(2).asked] == [[0], [1]]
            # The second one was introduced to the first one's successor, as to everybody.
            assert [each.host for request in made.process(0).asked for each in request.successors] == [1]

    asyncio.run(run())


def test_no_island_is_opened_that_somebody_does_not_know(tmp_path: pathlib.Path) -> None:
    """A far host starts before all know it. It enters the order when they do."""

    async def run() -> None:
        async with world(tmp_path, 2, far=True) as made:
            made.agents.join(0)
            await made.until(lambda: made.up() == [0], "the first one is up")
            made.ways[0].answers.clear()
            made.agents.join(1)
            await made.until(lambda: len(made.launched) == 2, "the second one starts")
            await made.until(made.cluster.hosts[1].ready.is_set, "it is ready")
            for _ in range(50):
                await asyncio.sleep(0)
            assert made.up() == [0]
            made.ways[0].answers.set()
            await made.until(lambda: made.up() == [0, 1], "it is up")

    asyncio.run(run())


def test_a_refused_successor_harms_no_other(tmp_path: pathlib.Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 4) as made:
            made.ways[3].refuses.add(1)
            for number in range(3):
                made.process(number).die()
            await made.until(lambda: len(made.up()) == 4, "all are up")
            assert [island.failed_starts for island in made.islands.islands] == [0, 1, 0, 0]
            assert [made.islands.islands[number].incarnation for number in (0, 2)] == [1, 1]
            told = [[each.host for each in request.successors] for request in made.process(3).asked]
            assert told[-2:] == [[0, 1, 2], [1]]

    asyncio.run(run())


@pytest.mark.parametrize("is_silent", [False, True], ids=["refuses", "is silent"])
def test_a_machine_that_does_not_take_others_is_put_out(
    tmp_path: pathlib.Path, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT-1: nothing of the others lies there, so it lies. Their starts do not hang on it."""
    monkeypatch.setattr(introductions, "FAR_ANSWER_S", 2.0)

    async def run() -> None:
        async with world(tmp_path, 4, far=True) as made:
            made.agents.join(*range(4))
            await made.until(lambda: len(made.up()) == 4, "all are up")
            if is_silent:
                made.ways[3].answers.clear()
            else:
                made.ways[3].refuses.add(1)
            for number in range(3):
                made.process(number).die()
            await made.until(lambda: made.up() == [0, 1, 2], "all others are up")
            assert [island.failed_starts for island in made.islands.islands[:3]] == [0, 0, 0]
            assert len(made.agents.machines[3].evicted) == 1

    asyncio.run(run())


@kinds
def test_a_host_that_is_lost_while_it_is_told(tmp_path: pathlib.Path, far: bool) -> None:
    async def run() -> None:
        async with world(tmp_path, 4, far=far) as made:
            if far:
                made.agents.join(*range(4))
                await made.until(lambda: len(made.up()) == 4, "all are up")
            made.ways[3].answers.clear()
            made.process(0).die()
            made.process(1).die()
            await made.until(lambda: made.process(3).asked, "it is asked")
            made.ways[3].answers.set()
            made.process(3).die()
            await made.until(lambda: len(made.up()) == 4, "all are up")
            assert all(island.failed_starts == 0 for island in made.islands.islands)
            assert [made.islands.islands[number].incarnation for number in (0, 1, 3)] == [1] * 3

    asyncio.run(run())


def test_a_machine_that_is_lost_before_its_hosts_start(tmp_path: pathlib.Path) -> None:
    """Its place is free again, the others of the exchange are up, and a new machine takes the place."""

    async def run() -> None:
        async with world(tmp_path, 4, far=True) as made:
            made.agents.join(0)
            await made.until(lambda: made.up() == [0], "the first one is up")
            made.agents.join(1, 2, 3)
            made.agents.lose(2)  # before the exchange begins
            await made.until(lambda: made.up() == [0, 1, 3], "the others are up")
            assert made.islands.islands[2].failed_starts == 1 and made.cluster.hosts[2].state == "lost"
            assert made.cluster.resources._missing == {2: "is lost, with its machine"}
            made.agents.join(2)
            await made.until(lambda: len(made.up()) == 4, "its successor is up")
            assert made.process(1).known() >= {2}

    asyncio.run(run())


def test_a_machine_that_is_replaced_during_the_exchange(tmp_path: pathlib.Path) -> None:
    """The new machine's hosts are introduced anew: the first introduction named the old machine's addresses."""

    async def run() -> None:
        async with world(tmp_path, 3, far=True) as made:
            made.agents.join(0)
            await made.until(lambda: made.up() == [0], "the first one is up")
            made.ways[0].answers.clear()
            made.agents.join(1)
            await made.until(lambda: made.process(0).asked, "an exchange is under way")
            made.agents.join(2)  # it waits for the next exchange
            await asyncio.sleep(0)
            made.agents.lose(2)
            made.agents.join(2)
            made.agents.lose(1)  # its hosts had been started
            made.agents.join(1)
            made.ways[0].answers.set()
            await made.until(lambda: len(made.up()) == 3, "all are up")
            assert [island.failed_starts for island in made.islands.islands] == [0, 0, 0]
            told = [sorted(each.host for each in request.successors) for request in made.process(0).asked]
            assert told == [[1], [1, 2]]
            assert sorted(host.config.host for host in made.launched) == [0, 1, 1, 2]

    asyncio.run(run())


@kinds
def test_an_island_that_cannot_be_started_harms_no_other(tmp_path: pathlib.Path, far: bool) -> None:
    async def run() -> None:
        async with world(tmp_path, 4, far=far) as made:
            if far:
                made.agents.join(*range(4))
                await made.until(lambda: len(made.up()) == 4, "all are up")
            made.ways[1].cannot_start = True
            for number in range(3):
                made.process(number).die()
            await made.until(lambda: made.islands.islands[1].failed_starts, "it cannot be started")
            made.ways[1].cannot_start = False
            await made.until(lambda: len(made.up()) == 4, "all are up")
            assert [made.islands.islands[number].incarnation for number in (0, 2)] == [1, 1]

    asyncio.run(run())


def test_a_host_that_does_not_answer_is_asked_for_one_island_at_a_time(tmp_path: pathlib.Path) -> None:
    """It does not answer because of one of the successors. The others' next tries go without that one."""

    async def run() -> None:
        async with world(tmp_path, 4, start_timeout_s=1.0) as made:
            made.ways[3].answers.clear()
            asked = len(made.process(3).asked)
            for number in range(3):
                made.process(number).die()
            failed = made.islands.islands[:3]
            await made.until(lambda: all(island.failed_starts == 1 for island in failed), "nobody answered")
            made.ways[3].answers.set()
            await made.until(lambda: len(made.up()) == 4, "all are up")
            told = [[each.host for each in request.successors] for request in made.process(3).asked[asked:]]
            assert told == [[0, 1, 2], [0], [1], [2]]

    asyncio.run(run())


@pytest.mark.parametrize("where", ["while others are told", "before hosts are launched"])
def test_the_cluster_ends_during_an_exchange(tmp_path: pathlib.Path, where: str) -> None:
    async def run() -> None:
        made = World(tmp_path, 3, far=False)
        await made.cluster.start_hosts()
        await made.until(lambda: len(made.up()) == 3, "the cluster is up")
        if where == "while others are told":
            made.ways[2].answers.clear()
        else:
            made.can_launch.clear()
        made.process(0).die()
        await made.until(lambda: made.process(2).asked, "an exchange is under way")
        made.process(1).die()
        for _ in range(20):
            await asyncio.sleep(0)
        await made.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(made.launched) == 3
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(run())


def test_an_island_that_leaves_the_exchange_is_not_started(tmp_path: pathlib.Path) -> None:
    """Its machine is replaced while what starts hosts is not ready. It is started once, by the next exchange."""

    async def run() -> None:
        async with world(tmp_path, 2, far=True) as made:
            made.can_launch.clear()
            made.agents.join(0, 1)
            for _ in range(20):
                await asyncio.sleep(0)
            made.agents.lose(1)
            made.agents.join(1)
            made.can_launch.set()
            await made.until(lambda: made.up() == [0, 1], "both are up")
            assert sorted(host.config.host for host in made.launched) == [0, 1]

    asyncio.run(run())


def test_hosts_here_and_hosts_of_machines_know_each_other(tmp_path: pathlib.Path) -> None:
    """Each two are told what they share: a segment on the same machine, else an incarnation and an address."""

    async def run() -> None:
        async with world(tmp_path, 4, here=2) as made:
            assert made.up() == [0, 1] and made.cluster.resources._missing.keys() == {2, 3}
            assert made.process(0).segments == {0, 1} and made.process(0).config.epochs == (0, 0, -1, -1)
            made.agents.join(2)
            await made.until(lambda: made.up() == [0, 1, 2], "the machine's host is up")
            (told,) = made.process(0).asked[0].successors
            assert (told.has_segment, told.epoch, told.stream) == (False, 0, "m2@10.0.0.1:5002")
            assert made.process(0).handed == []
            assert made.process(2).config.epochs == (0, 0, 0, -1) and made.process(2).segments == set()
            assert made.process(2).config.streams == ("unix:/stream-0", "unix:/stream-1", None, "")
            made.ways[2].answers.clear()
            made.process(0).die()
            await made.until(lambda: len(made.process(2).asked) == 1, "the others are told")
            assert len(made.launched) == 3, "one of them has the old rings"
            made.ways[2].answers.set()
            await made.until(lambda: made.up() == [0, 1, 2], "all are up again")
            assert made.process(1).handed == [0] and made.process(2).handed == []
            near, far = (made.process(number).asked[-1].successors[0] for number in (1, 2))
            assert (near.has_segment, near.epoch, near.stream) == (True, 1, "")
            assert (far.has_segment, far.epoch, far.stream) == (False, 1, "unix:/stream-0")

    asyncio.run(run())


def test_an_island_on_several_machines(tmp_path: pathlib.Path) -> None:
    """It starts when all its places are filled, and is lost with each of its machines."""

    async def run() -> None:
        async with world(tmp_path, 2, 2, far=True) as made:
            made.agents.bring(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert made.launched == [] and made.cluster.resources._missing.keys() == {0, 1}
            other = made.agents.bring(1)
            await made.until(lambda: made.up() == [0, 1], "the island is up")
            assert made.cluster.resources._missing.keys() == {1}
            assert made.process(0).config.epochs == (0, 0, -1, -1)
            assert made.process(0).config.streams == (None, "m1@10.0.0.1:5001", "", "")
            first = made.process(0)
            made.agents.leave(other)
            assert made.up() == [] and first.returncode == -9
            assert made.cluster.resources._missing[0] == "is lost, with its machine"
            made.agents.bring(1)
            await made.until(lambda: made.up() == [0, 1], "the island is up again")
            assert made.process(0).config.epochs == (1, 1, -1, -1)

    asyncio.run(run())


def test_a_machine_whose_hosts_do_not_start_is_given_up(tmp_path: pathlib.Path) -> None:
    """Its places are free again, and said to be; another machine takes them."""

    async def run() -> None:
        async with world(tmp_path, 2, far=True) as made:
            made.agents.join(0, 1)
            await made.until(lambda: made.up() == [0, 1], "both are up")
            made.ways[1].cannot_start = True
            bad = made.agents.machines[1]
            made.process(1).die()
            await made.until(lambda: bad.given_up == 1, "it is given up")
            await made.until(lambda: 1 in made.cluster.resources._missing, "its place is free")
            made.ways[1].cannot_start = False
            made.agents.join(1)
            await made.until(lambda: made.up() == [0, 1], "its successor is up")
            assert not made.cluster.resources._missing

    asyncio.run(run())


def test_who_reads_the_rings_to_hosts(tmp_path: pathlib.Path) -> None:
    """The hosts here, or the pool of links. Until both can, a cluster with both is refused."""

    async def run() -> None:
        for here, words in ((3, ""), (0, ""), (1, "beside hosts of agents are not supported yet: .* Start an agent")):
            (folder := tmp_path / str(here)).mkdir()
            made = World(folder, 3, here=here)
            try:
                if words:
                    with pytest.raises(errors.OptionError, match=words):
                        made.cluster._reader_of_rings()
                else:
                    pool = made.cluster.agents.links.native
                    assert made.cluster._reader_of_rings() is (None if here else pool)
            finally:
                await made.close()

    asyncio.run(run())


def test_a_host_answers_for_each_successor() -> None:
    """What is wrong with one successor is said of that one; the others are in force."""

    class Driver:
        def replace_peers(self, successors: Any) -> dict[int, Exception]:
            self.got = [(each.host, each.segment, each.epoch, each.loss, each.stream) for each in successors]
            return {5: ValueError("no such peer")}

    host: Any = HostProcess.__new__(HostProcess)
    handed = iter([("segment", 4)])

    def segment(key: str, what: str, number: int) -> Any:
        found = next(handed, None)
        if found is None:
            raise RuntimeError("expected another segment")
        return found

    host._segment = segment
    successors = [
        pb.Successor(host=3, loss=7, stream="m3@a:1", epoch=2),
        pb.Successor(host=4, has_segment=True, epoch=1),
        pb.Successor(host=5),
        pb.Successor(host=6, has_segment=True),
    ]
    driver: Any = Driver()
    report = host._answer(pb.HostRequest(replace_peers=pb.ReplacePeers(successors=successors)), driver)
    assert driver.got == [(3, None, 2, 7, "m3@a:1"), (4, ("segment", 4), 1, 0, ""), (5, None, 0, 0, "")]
    refused = {each.number: each.error.message for each in report.peers_replaced.refused}
    assert refused == {6: "RuntimeError: expected another segment", 5: "ValueError: no such peer"}


def test_a_host_that_takes_no_more_segments(tmp_path: pathlib.Path) -> None:
    """It is asked for the successors that it has the segments of, or it would take later ones for these."""

    async def run() -> None:
        async with world(tmp_path, 4, far=False) as made:
            survivor = made.process(3)
            hand_over = survivor.hand_over

            def full(message: Any, segment: Any) -> None:
                if message["peer"] == 1:
                    survivor.hand_over = hand_over  # type: ignore[method-assign]
                    raise BlockingIOError
                hand_over(message, segment)

            survivor.hand_over = full  # type: ignore[method-assign]
            for number in range(3):
                made.process(number).die()
            await made.until(lambda: made.islands.islands[1].failed_starts, "it takes no more")
            await made.until(lambda: len(made.up()) == 4, "all are up")
            assert [host for request in survivor.asked for host in [each.host for each in request.successors]] == (
                survivor.handed
            )
            assert survivor.handed[0] == 0 and sorted(survivor.handed[1:]) == [1, 2]

    asyncio.run(run())
