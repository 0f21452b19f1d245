"""Requests that are handled at once (`UsualRequests`) beside the same requests handled as all others (PROXY-1).

Two sessions get the same random requests, of which many are wrong. The replies, what ran, and what the client has are
the same, request by request.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from pathways import errors
from pathways._jaxlib.proxy_messages import message
from pathways.proxy import dtypes, shardings
from pathways.proxy.arrays import Array, of_buffer, of_parts
from pathways.proxy.behind import DeviceInfo, Machine, Parameter, Result, Shard
from pathways.proxy.errors import Refused
from pathways.proxy.handles import OWN
from pathways.proxy.limits import Limits
from pathways.proxy.loaded import Loaded, LoadedResult
from pathways.proxy.module_reader import ModuleReader
from pathways.proxy.session import Session

DEVICES = (0, 1)
F32 = dtypes.of_name("float32")


class Buffer:
    """A buffer of which only the shape matters."""

    dtype, memory_kind, devices = np.dtype("float32"), "device", DEVICES

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def when_ready(self, then: Any) -> None:
        then(None)

    def delete(self) -> None:
        pass


class Program:
    """Takes arrays of one shape, which is that of its first run; gives `results` arrays."""

    def __init__(self, log: list[str], name: str, takes: int, results: int, donated: tuple[int, ...]) -> None:
        self.log, self.name, self.donated, self.takes = log, name, donated, takes
        self.parameters = (Parameter(None, ""),) * takes
        self.results = (Result((4,), "float32", (4,), None, "", ""),) * results
        self.last: list[Any] | None = None

    @property
    def metadata(self) -> Any:
        return self

    def execute(self, arguments: Sequence[Sequence[Shard]], kept: Collection[int]) -> list[Buffer]:
        shapes = [shards[0].buffer.shape for shards in arguments]
        if (9,) in shapes:
            raise errors.HostLostError("island 1 is down")
        self.last = shapes
        return self._run(shapes)

    def run_again(self, arguments: Sequence[Any]) -> list[Buffer] | None:
        shapes = [each.shape for each in arguments]
        if shapes != self.last:
            return None
        return self._run(shapes)

    def _run(self, shapes: list[Any]) -> list[Buffer]:
        self.log.append(f"{self.name}{shapes}")
        return [Buffer(4) for _ in self.results]


class Devices:
    def describe(self) -> Machine:
        return Machine("cpu", "", tuple(DeviceInfo(n, "cpu", 0, 0, ("device",)) for n in DEVICES))

    def close(self) -> None:
        pass


class Never:
    def handle(self, raw: bytes) -> None:
        """Nothing is usual."""


class Client:
    """A session, and what comes back from it."""

    def __init__(self, limits: Limits, is_usual: bool) -> None:
        self.log: list[str] = []
        self.replies: list[bytes] = []
        self.at_once = 0
        self.session = Session(
            1,
            Devices(),
            limits,
            ModuleReader(),
            self.replies.append,
            lambda work: work(),
            lambda: None,  # type: ignore[arg-type]
        )
        if not is_usual:
            self.session._usual = Never()  # type: ignore[assignment]
        state = self.session._state
        sharding = shardings.even(DEVICES, "device", (4,), (4,))
        for number, size in enumerate((4, 4, 4, 4, 5, 9), 1):
            self.gets([number, 10 + number], size)
        for number, (takes, results, donated) in enumerate(((1, 1, ()), (2, 3, (0,)), (1, 2, (0,)), (0, 1, ())), 1):
            program = Program(self.log, f"p{number}", takes, results, donated)
            kinds = tuple(LoadedResult(F32, (4,), sharding, sharding) for _ in program.results)
            layouts = [""] * takes, [""] * results
            loaded = Loaded(program, program.name, DEVICES, kinds, frozenset(donated), layouts)  # type: ignore[arg-type]
            state.executables.add([100 + number], [loaded])

    def gets(self, handles: list[int], size: int = 4) -> None:
        """An array and a view of its shards."""
        sharding = shardings.even(DEVICES, "device", (4,), (4,))
        whole = of_buffer(Buffer(size), "put", F32, (4,), sharding, None)
        view = of_parts(F32, (4,), sharding, whole.parts, None)
        with contextlib.suppress(Refused):  # there is no room
            self.session._state.arrays.add(handles, [whole, view])

    def ask(self, raw: bytes) -> Any:
        """The reply, or why there is none."""
        self.destroyed: list[int] = []
        try:
            reply = self.session.answer(raw)
            if reply is None:
                self.session.receive(raw)
                (reply,) = self.replies
                self.replies.clear()
            else:
                self.at_once += 1
        except (Refused, AttributeError) as error:  # it ends the session; `Program` does not know all
            return str(error)
        parsed = message("xla.ifrt.proxy.IfrtResponse").FromString(reply)
        self.destroyed = list(parsed.response_metadata.destroyed_user_context_ids)
        del parsed.response_metadata.destroyed_user_context_ids[:]
        return parsed

    def has(self) -> dict[int, str]:
        return {
            handle: f"{kept.is_deleted} {kept.devices}" if isinstance(kept, Array) else kept.text
            for handle, kept in self.session._state.arrays.kept.items()
        }


def drawn(draw: random.Random, number: int, fresh: Any, has: list[int]) -> bytes:
    """A request that may have anything unusual or wrong."""
    request = message("xla.ifrt.proxy.IfrtRequest")()
    request.request_metadata.op_id = number
    if draw.random() < 0.8:
        request.request_metadata.user_context_id = number + (1 << 63)

    def handle() -> int:
        return draw.choice(has) if draw.random() < 0.97 else draw.choice((0, 77777, OWN + 5))

    kind = draw.choices(("execute", "destruct", "delete", "ready", "garbage"), (60, 30, 4, 5, 1))[0]
    if kind == "execute":
        body = request.loaded_executable_execute_request
        program = draw.choice((1, 1, 1, 2, 3, 4)) if draw.random() < 0.98 else 9
        body.loaded_executable_handle = 100 + program
        takes, results = {1: (1, 1), 2: (2, 3), 3: (1, 2)}.get(program, (0, 1))
        body.args_handles.extend(handle() for _ in range(takes if draw.random() < 0.98 else 3))
        given = [next(fresh) for _ in range(results if draw.random() < 0.98 else 2)]
        if draw.random() < 0.05:
            given[draw.randrange(len(given))] = draw.choice((0, given[0], OWN + 3, handle()))
        if draw.random() < 0.05:
            given.reverse()
        body.result_array_handle.extend(given if draw.random() < 0.98 else [])
        options = body.execute_options
        if draw.random() < 0.9:
            options.launch_id, options.execution_stream_id = draw.randrange(1 << 31), draw.randrange(1 << 63)
        if draw.random() < 0.05:
            options.non_donatable_input_indices.append(0)
        if draw.random() < 0.05:
            options.fill_status, body.result_status_handle = True, next(fresh)
        if draw.random() < 0.03:
            body.device_ids.extend(draw.choice(((0, 1), (1, 0))))
    elif kind == "destruct":
        request.destruct_array_request.array_handle.extend(handle() for _ in range(draw.choice((0, 1, 1, 1, 2, 20))))
    elif kind == "delete":
        request.delete_array_request.array_handle.append(handle())
    elif kind == "ready":
        request.check_value_ready_request.value_handles.append(handle())
    raw = bytearray(request.SerializeToString())
    if kind == "garbage" and raw:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return bytes(raw)


@pytest.mark.parametrize("most", [40, 1 << 20])
def test_the_same_as_handled_otherwise(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 0)  # of a report
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw, fresh = random.Random(seed), itertools.count(1000)
    limits = Limits(handles=most)
    usual, other = Client(limits, True), Client(limits, False)
    destroyed: list[list[int]] = [[], []]
    for number in range(1, 3001):
        if draw.random() < 0.1:
            handles = [next(fresh), next(fresh)]
            for client in (usual, other):
                client.gets(handles)
        kept = usual.session._state.arrays.kept
        good = [handle for handle in kept if isinstance(kept[handle], Array)]
        bad = [handle for handle in kept if handle not in good]
        has = draw.sample(good, min(len(good), 8)) + draw.sample(bad, min(len(bad), 1 + len(bad) // 10))
        raw = drawn(draw, number, fresh, has or [1])
        replies = [client.ask(raw) for client in (usual, other)]
        assert replies[0] == replies[1], (number, raw.hex())
        assert usual.has() == other.has(), (number, raw.hex())
        assert usual.log == other.log, (number, raw.hex())
        for client, told in zip((usual, other), destroyed, strict=True):
            told += client.destroyed
    assert usual.at_once > 300 and other.at_once == 0
    for client, told in zip((usual, other), destroyed, strict=True):
        client.session.end()
        gc.collect()  # an error may be in a circle
        told += client.session._replies.dropped
    assert sorted(destroyed[0]) == sorted(destroyed[1])


def test_half_a_request_is_none() -> None:
    """Each request cut at each byte, and with each byte changed, does nothing or what it does otherwise."""
    draw = random.Random(7)
    seen = 0
    for turn in range(1, 40):
        raw = drawn(draw, turn, itertools.count(1000), [1, 2, 5, 6])
        for at in range(len(raw)):
            for cut in (raw[:at], raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :]):
                clients = [Client(Limits(), is_usual) for is_usual in (True, False)]
                replies = [client.ask(cut) for client in clients]
                assert replies[0] == replies[1], cut.hex()
                assert clients[0].has() == clients[1].has() and clients[0].log == clients[1].log
                seen += clients[0].at_once
    assert seen > 0
