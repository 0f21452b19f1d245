"""One trace is recorded at a time: who gives way to whom, and what a host keeps while it is traced."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

from pathways import errors
from pathways.controller import recording
from pathways.controller.recording import Recordings
from pathways.host import recording as host_recording
from pathways.host.recording import HostTrace
from pathways.protocol import trace_records

GUEST, OTHER_GUEST, OPERATOR = ("client 2", {2}), ("client 3", {3}), ("an operator (pid 7)", None)


class Controller:
    """Knows whether it is traced."""

    def __init__(self) -> None:
        self.is_on = False

    def start_trace(self, capacity: int) -> None:
        self.is_on = True

    def stop_trace(self) -> None:
        self.is_on = False

    def take_trace(self) -> tuple[bytes, int]:
        return b"", 0


class Tracer:
    """Somebody who traces, until it has its last part or an error."""

    def __init__(self, traces: Recordings, who: str, own: set[int] | None) -> None:
        self.over = asyncio.Event()
        self.parts = 0
        self.stream = traces.record(who, own, self.over)

    async def read(self) -> None:
        async for _ in self.stream:
            self.parts += 1

    async def begin(self) -> asyncio.Task[None]:
        """Reads on in a task, which has begun."""
        task = asyncio.ensure_future(self.read())
        while not self.parts and not task.done():
            await asyncio.sleep(0.001)
        return task


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Recordings, Controller]]:
    """A cluster without hosts; nobody traces it in the end."""
    controller = Controller()
    topology = types.SimpleNamespace(describe=lambda: "none", devices_per_host=1, hosts=0)
    traces = Recordings(types.SimpleNamespace(controller=controller, hosts=[], topology=topology), {}, None)  # type: ignore[arg-type]
    yield traces, controller
    assert not controller.is_on
    last = Tracer(traces, *GUEST)
    task = await last.begin()
    last.over.set()
    await task


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.parametrize("newcomer", [OPERATOR, GUEST])
def test_who_may_trace_for_ever(newcomer: Any) -> None:
    async def work() -> None:
        async with cluster() as (traces, controller):
            first = Tracer(traces, *OPERATOR)
            task = await first.begin()
            with pytest.raises(errors.TraceFileError, match=r"operator \(pid 7\) traces this cluster now.* over$"):
                await Tracer(traces, *newcomer).read()
            assert controller.is_on and not task.done()
            first.over.set()
            await task

    run(work())


def test_a_guest_gives_way_to_an_operator() -> None:
    async def work() -> None:
        async with cluster() as (traces, controller):
            first, second = Tracer(traces, *GUEST), Tracer(traces, *OPERATOR)
            ended = await first.begin()
            going_on = await second.begin()
            with pytest.raises(errors.TraceFileError, match=r"an operator \(pid 7\) has ended this trace"):
                await ended
            assert first.parts >= 3  # the first part, and what was recorded last
            assert controller.is_on and not going_on.done()
            second.over.set()
            await going_on

    run(work())


def test_a_guest_gives_way_to_a_guest_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with cluster() as (traces, controller):
            first, second = Tracer(traces, *GUEST), Tracer(traces, *OTHER_GUEST)
            ended = await first.begin()
            with pytest.raises(
                errors.TraceFileError, match=r"client 2 traces this cluster now.*or in 60 s, when it gives"
            ):
                await Tracer(traces, *OTHER_GUEST).read()
            assert not ended.done()
            monkeypatch.setattr(recording, "LEASE_S", 0.0)
            going_on = await second.begin()
            with pytest.raises(errors.TraceFileError, match="client 3 has ended this trace"):
                await ended
            assert controller.is_on
            second.over.set()
            await going_on

    run(work())


def test_one_that_reads_nothing_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "GIVE_WAY_S", 0.05)

    async def work() -> None:
        async with cluster() as (traces, controller):
            silent = Tracer(traces, *GUEST)
            await anext(silent.stream)  # and no more
            second = Tracer(traces, *OPERATOR)
            going_on = await second.begin()
            assert controller.is_on
            with pytest.raises(errors.TraceFileError, match="has ended this trace"):
                await silent.read()  # at last; it harms nobody
            assert controller.is_on and not going_on.done()
            await asyncio.sleep(2 * recording.PERIOD_S)
            assert controller.is_on and not going_on.done()
            second.over.set()
            await going_on

    run(work())


def test_several_newcomers_at_once() -> None:
    """One of them traces; the others are told so."""

    async def work() -> None:
        async with cluster() as (traces, controller):
            first = Tracer(traces, *GUEST)
            ended = await first.begin()
            others = [Tracer(traces, *OPERATOR) for _ in range(3)]
            tasks = [asyncio.ensure_future(other.read()) for other in others]
            done, going_on = await asyncio.wait(tasks, timeout=2.0)
            assert len(done) == 2 and len(going_on) == 1 and controller.is_on
            assert all("traces this cluster now" in str(task.exception()) for task in done)
            with pytest.raises(errors.TraceFileError, match="has ended this trace"):
                await ended
            for other in others:
                other.over.set()
            await asyncio.wait(going_on)

    run(work())


class Core:
    """Returns the records of the programs that ran."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def start_trace(self, capacity: int) -> None:
        self.ran = []

    def stop_trace(self) -> None:
        """Keeps what is there."""

    def take_trace(self) -> tuple[bytes, int]:
        records = np.zeros(len(self.ran), trace_records.RUN)
        records["plan"] = self.ran
        self.ran = []
        return records.tobytes(), 0


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> tuple[HostTrace, Core, dict[int, Any]]:
    """A host's trace that is on; its core, and its programs."""
    monkeypatch.setattr(host_recording, "describe", lambda program: {"name": program})
    core, programs = Core(), {}
    trace = HostTrace(core, programs)
    trace.start()
    return trace, core, programs


def test_a_program_that_went_is_named(traced: Any) -> None:
    trace, core, programs = traced
    programs.update({1: "one", 2: "two", 3: "three"})
    core.ran = [1, 2]
    trace.keep(1)
    del programs[1]
    assert trace.take()[2] == {1: {"name": "one"}, 2: {"name": "two"}}
    core.ran = [2, 3]
    assert trace.take()[2] == {3: {"name": "three"}}


def test_what_a_host_keeps_of_programs_that_went(traced: Any) -> None:
    """A client makes and drops programs for as long as the trace is on, runs some of them, and nobody stops it."""
    trace, core, programs = traced
    kept = 0
    for number in range(10_000):
        programs[number] = f"program {number}"
        if number % 2:
            core.ran.append(number)
        trace.keep(number)
        del programs[number]
        if number % 100 == 99:
            plans = trace.take()[2]
            assert plans == {each: {"name": f"program {each}"} for each in range(number - 98, number + 1, 2)}
        kept = max(kept, len(trace._gone) + len(trace._gone_before) + len(trace._named))
    assert kept <= 300


def test_what_a_host_keeps_when_nobody_takes(traced: Any) -> None:
    trace, core, programs = traced
    for number in range(5 * host_recording.MOST_GONE):
        programs[number] = "a program"
        core.ran.append(number)
        trace.keep(number)
        del programs[number]
    assert len(trace._gone) <= host_recording.MOST_GONE
    assert sorted(trace.take()[2]) == list(range(4 * host_recording.MOST_GONE, 5 * host_recording.MOST_GONE))
