"""Sessions: what ends one, what it leaves (nothing), what it may have, and that sessions do not see each other.

PROXY-3 (a session that ends frees all): test_a_killed_client_frees_all
PROXY-4 (bounds): test_a_client_that_never_reads, test_a_client_whose_requests_wait, test_host_buffers_wait_for_room,
test_bounds_of_a_session
PROXY-5 (apart): test_two_sessions_are_apart
"""

from __future__ import annotations

import pathlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from doors import PACKAGE, Door, Wire, array_request, client_environment, run

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.errors import Code

ONES = np.ones((2, 3), np.float32)
LARGE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LIMITS = {"sessions": 3, "host_bytes": 4096, "requests": 64, "handles": 100, "request_bytes": 1 << 20}


@pytest.fixture(scope="module")
def small() -> Iterator[Door]:
    """A proxy with tight bounds."""
    made = Door(limits=LIMITS)
    yield made
    made.close()


def eventually(holds: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def settled(count: Callable[[], int]) -> int:
    """A count that grows, when it does so no more."""
    counts = [-1, 0]
    while counts[-1] != counts[-2]:
        time.sleep(0.5)
        counts.append(count())
    return counts[-1]


def nothing_left(door: Door) -> bool:
    stats = door.stats()
    return (stats["sessions"], stats["alive"], stats["open"], stats["host_bytes"]) == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_killed_client_frees_all(door: Door) -> None:
    process = door.start(
        """
        import signal, os
        mesh = jax.make_mesh((8,), ("a",))
        x = jax.device_put(np.ones(800, np.float32), NamedSharding(mesh, P("a")))
        y = jax.jit(lambda v: v * 2)(x)
        y.block_until_ready()
        print("ready", flush=True)
        while True:
            y = y + 1
        """
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready" in line:
                break
        assert door.stats()["alive"] > 0
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: nothing_left(door), "what the killed client had is still there")


@pytest.mark.slow
def test_a_client_that_goes_in_order_frees_all(door: Door) -> None:
    assert door.run("results['x'] = jnp.arange(3) + 1").returncode == 0
    eventually(lambda: nothing_left(door), "what the client had is still there")


def test_a_client_that_waits_for_what_never_comes(door: Door) -> None:
    wire = Wire(door).begin()
    wire.send("make_array_from_host_buffer_request", array_request(5, (2, 3)))
    wire.store(6, ONES.tobytes())
    wire.close()
    eventually(lambda: nothing_left(door), "the session has not ended")


def test_two_sessions_are_apart(door: Door) -> None:
    one, other = Wire(door).begin(), Wire(door).begin()
    one.put(5, ONES)
    assert other.error("check_value_ready_request", value_handles=[5])[0] == Code.NOT_FOUND
    other.put(5, ONES * 2)
    assert np.array_equal(one.read(5, (2, 3)), ONES) and np.array_equal(other.read(5, (2, 3)), ONES * 2)
    one.store(7, b"mine")
    assert one.number != other.number and min(one.number, other.number) > 1 << 32  # nobody guesses it
    for number in (other.number, one.number + 1, 0):
        with pytest.raises(grpc.RpcError) as refused:
            other.look_up(7, session=number)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    one.close()
    assert np.array_equal(other.read(5, (2, 3)), ONES * 2)  # the end of one is nothing to the other
    other.close()
    eventually(lambda: nothing_left(door), "a session is left")


def test_garbage_in_a_session_ends_that_session(door: Door) -> None:
    good, bad = Wire(door).begin(), Wire(door).begin()
    bad.put(5, ONES)
    bad.send_raw(b"\xff\xff\xff garbage")
    with pytest.raises(grpc.RpcError) as ended:
        bad.reply(10**6)
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    eventually(lambda: door.stats()["sessions"] == 1, "the session of garbage is still there")
    good.put(5, ONES)
    assert np.array_equal(good.read(5, (2, 3)), ONES)
    good.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 4096,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,  # a frame of 16 MB
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01",
        b"PRI * HT",  # half a preface
    ],
)
def test_garbage_on_the_port(door: Door, sent: bytes) -> None:
    wire = Wire(door).begin()
    with socket.create_connection(("127.0.0.1", door.port), timeout=10) as peer:
        peer.sendall(sent)
        wire.put(5, ONES)
        assert np.array_equal(wire.read(5, (2, 3)), ONES)
    wire.close()


def test_silent_connections_keep_nobody_out() -> None:
    """More than there may be, before and after somebody works: the others come in, and who works goes on (PROXY-4)."""
    made = Door(limits={"sessions": 2})
    first = Wire(made).begin()
    first.put(5, ONES)
    silent = [socket.create_connection(("127.0.0.1", made.port), timeout=10) for _ in range(150)]
    # By a connection of its own: gRPC would take the first one's.
    second = Wire(made, options=[("grpc.use_local_subchannel_pool", 1)]).begin()
    for wire in (first, second):
        wire.put(6, ONES)
        assert np.array_equal(wire.read(6, (2, 3)), ONES)
    assert made.stats()["threads"] < 100
    for each in silent:
        each.close()
    first.close()
    second.close()
    eventually(lambda: nothing_left(made), "a session is left")
    made.close()


def test_mutated_requests(door: Door) -> None:
    """Whatever bytes a request has, the proxy answers, or ends that session; and the next client finds it as before."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    fields = message(f"{PACKAGE}.IfrtRequest").DESCRIPTOR.oneofs_by_name["request"].fields
    wire = Wire(door).begin()
    for turn in range(300):
        request = message(f"{PACKAGE}.IfrtRequest")()
        request.request_metadata.op_id = turn + 1000
        _fill(getattr(request, draw.choice(fields).name), draw, 0)
        data = bytearray(request.SerializeToString())
        for _ in range(draw.choice((0, 0, 1, 4))):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        wire.send_raw(bytes(data))
    wire.close()
    eventually(lambda: nothing_left(door), "a session is left")
    after = Wire(door).begin()
    after.put(5, ONES)
    assert np.array_equal(after.read(5, (2, 3)), ONES)
    after.close()


def _fill(proto: Any, draw: random.Random, depth: int) -> None:
    """Writes nonsense of the right types; host buffers that never come would only hold the session up."""
    proto.SetInParent()
    for field in proto.DESCRIPTOR.fields:
        if "host_buffer_handle" in field.name or "make_array" in proto.DESCRIPTOR.name or draw.random() < 0.3:
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            continue
        many = field.is_repeated
        if field.message_type is not None:
            if depth < 4:
                for target in (
                    [getattr(proto, field.name).add() for _ in range(2)] if many else [getattr(proto, field.name)]
                ):
                    _fill(target, draw, depth + 1)
        else:
            values = [_nonsense(field, draw) for _ in range(2 if many else 1)]
            if many:
                getattr(proto, field.name).extend(values)
            else:
                setattr(proto, field.name, values[0])


def _nonsense(field: Any, draw: random.Random) -> Any:
    kinds = field.cpp_type
    if kinds == field.CPPTYPE_STRING:
        text = draw.choice(
            ["", "x", "xla::ifrt::HloSharding", "xla::ifrt::SingleDeviceSharding", "xla::ifrt::XlaProgram"]
        )
        return text.encode() if field.type == field.TYPE_BYTES else text
    if kinds == field.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kinds in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return draw.random()
    if kinds == field.CPPTYPE_ENUM:
        return draw.choice(field.enum_type.values).number
    small = draw.choice([0, 1, 2, 5, 7])
    if kinds in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return draw.choice([small, (1 << 32) - 1 if kinds == field.CPPTYPE_UINT32 else (1 << 64) - 1])
    return draw.choice([small, -1, (1 << 31) - 1 if kinds == field.CPPTYPE_INT32 else (1 << 63) - 1])


def test_a_client_that_never_reads() -> None:
    """It asks without an end and reads nothing: past a bound nothing of it is done, until it reads. Others go on."""
    made = Door(limits={"unread_bytes": 100_000})
    # gRPC would widen what it reads ahead of its user to many megabytes.
    silent, other = Wire(made, options=[("grpc.http2.bdp_probe", 0)]).begin(), Wire(made).begin()
    silent.put(5, ONES)
    last = 0
    for turn in range(3000):
        silent.send("init_request")  # a long reply
        last = silent.send("copy_arrays_request", array_handles=[5], result_handles=[10 + turn], copy_semantics=1)
    other.put(5, ONES)
    assert np.array_equal(other.read(5, (2, 3)), ONES)
    count = settled(lambda: made.stats()["copies"])
    assert count < 2000
    assert silent.reply(last).response_metadata.status.code == 0
    assert made.stats()["copies"] == 3000
    silent.close()
    other.close()
    eventually(lambda: nothing_left(made), "a session is left")
    made.close()


def test_a_client_whose_requests_wait() -> None:
    """The first one waits for bytes that come late: few of those behind it are read, and all are served then."""
    made = Door(limits={"requests": 64})
    wire, other = Wire(made).begin(), Wire(made).begin()
    first = wire.send("make_array_from_host_buffer_request", array_request(5, (2, 3)))
    request = message(f"{PACKAGE}.IfrtRequest")()
    request.is_array_deleted_request.array_handle = 5
    asked = range(1000, 2000)
    for number in asked:
        request.request_metadata.op_id = number
        unknown = b"\x82\x7d\x80\x80\x04" + bytes(64 << 10)  # field 2000: 64 KiB that no proxy knows
        wire.send_raw(request.SerializeToString() + unknown)
    other.put(5, ONES)
    assert np.array_equal(other.read(5, (2, 3)), ONES)
    count = settled(lambda: made.stats()["waiting"])
    assert 64 <= count < 500
    wire.store(5, ONES.tobytes())
    for number in (first, *asked):
        assert wire.reply(number).response_metadata.status.code == 0
    wire.close()
    other.close()
    eventually(lambda: nothing_left(made), "a session is left")
    made.close()


def test_host_buffers_wait_for_room(small: Door) -> None:
    """More bytes come than there is room for, the last ones first: all arrays are made, and the room is kept."""
    wire = Wire(small).begin()
    values = {handle: np.full(256, handle, np.float32) for handle in range(5, 65)}  # 1 KiB each
    stores = [
        threading.Thread(target=wire.store, args=(handle, values[handle].tobytes())) for handle in reversed(values)
    ]
    for store in stores:
        store.start()
    assert small.stats()["host_bytes"] <= LIMITS["host_bytes"]
    for handle, expected in values.items():
        wire.ask("make_array_from_host_buffer_request", array_request(handle, (256,)))
        if handle % 10 == 0:
            assert small.stats()["host_bytes"] <= 2 * LIMITS["host_bytes"]
            assert np.array_equal(wire.read(handle, (256,)), expected)
        wire.ask("destruct_array_request", array_handle=[handle])
    for store in stores:
        store.join()
    assert small.stats()["host_bytes"] == 0
    wire.close()


def test_reads_wait_for_room(small: Door) -> None:
    """The fifth has room when one of the first four was fetched, whatever comes meanwhile."""
    wire = Wire(small).begin()
    for handle in range(5, 10):
        wire.put(handle, np.full(256, handle, np.float32))
    for handle in range(50, 54):  # the room of what comes is full as well
        wire.store(handle, bytes(1024))
    asked = [
        wire.send("copy_to_host_buffer_request", array_handle=handle, host_buffer_handle=100 + handle)
        for handle in range(5, 10)
    ]
    for number in asked[:4]:
        assert wire.reply(number).response_metadata.status.code == 0
    assert small.stats()["host_bytes"] == 2 * LIMITS["host_bytes"]
    wire.drop(105)
    assert wire.reply(asked[4]).response_metadata.status.code == 0
    assert np.array_equal(np.frombuffer(wire.look_up(109), np.float32), np.full(256, 9))
    wire.close()


def test_bounds_of_a_session(small: Door) -> None:
    wire = Wire(small).begin()
    with pytest.raises(grpc.RpcError) as refused:
        wire.store(5, b"x", size=LIMITS["host_bytes"] + 1)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    wire.put(5, ONES)
    for handle in range(6, 5 + LIMITS["handles"]):
        wire.ask("copy_arrays_request", array_handles=[5], result_handles=[handle])
    code, text = wire.error("copy_arrays_request", array_handles=[5], result_handles=[1000])
    assert (code, "at most 100 arrays" in text) == (Code.RESOURCE_EXHAUSTED, True)
    wire.ask("destruct_array_request", array_handle=[6])
    wire.ask("copy_arrays_request", array_handles=[5], result_handles=[1000])
    wire.close()


def test_more_sessions_than_there_may_be(small: Door) -> None:
    eventually(lambda: nothing_left(small), "a session is left")
    wires = [Wire(small).begin() for _ in range(LIMITS["sessions"])]
    with pytest.raises(grpc.RpcError) as refused:
        Wire(small).begin()
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    wires.pop().close()
    eventually(lambda: small.stats()["sessions"] < LIMITS["sessions"], "the session has not ended")
    wires.append(Wire(small).begin())
    for wire in wires:
        wire.close()


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [
        ((16, 2), (25, 6), (25, None)),  # jaxlib 0.12
        ((16, 0), (25, 3), (25, 3)),  # jaxlib 0.10.2
        ((16, 2), (99, 99), (25, None)),
        ((26, 2), (99, 6), None),
        ((1, 0), (15, 3), None),
        ((16, 7), (25, 9), None),
    ],
)
def test_versions(
    door: Door, oldest: tuple[int, int], newest: tuple[int, int], chosen: tuple[int, int | None] | None
) -> None:
    request = message(f"{PACKAGE}.GrpcGetVersionRequest")()
    for version, (protocol, serdes) in ((request.min_version, oldest), (request.max_version, newest)):
        version.protocol_version, version.ifrt_serdes_version_number = protocol, serdes
    with grpc.insecure_channel(door.target) as channel:
        ask = channel.unary_unary(f"/{PACKAGE}.GrpcIfrtService/GetVersion")
        if chosen is None:
            with pytest.raises(grpc.RpcError) as refused:
                ask(request.SerializeToString(), timeout=30)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "pip install 'jax>=0.10.2,<0.13'" in refused.value.details()
            return
        answer = message(f"{PACKAGE}.GrpcGetVersionResponse").FromString(ask(request.SerializeToString(), timeout=30))
    assert answer.version.protocol_version == chosen[0]
    serdes = answer.version.ifrt_serdes_version_number
    assert oldest[1] <= serdes <= newest[1] and chosen[1] in (None, serdes)


def test_a_session_of_an_unknown_version(door: Door) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        Wire(door, version=(99, 3)).begin()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.slow
def test_large_puts_through_a_shared_directory(tmp_path: pathlib.Path) -> None:
    made = Door(shared=str(tmp_path))
    program = """
        x = jax.device_put(np.arange(1 << 20, dtype=np.float32))
        results["sum"] = x[::1000].sum()
        results["small"] = jnp.arange(3.0)
        """
    variables = {f"{LARGE}_DIRECTORY": str(tmp_path), f"{LARGE}_THRESHOLD_BYTES": "100000"}
    try:
        for _ in range(2):  # one client after the other
            ended = made.run(program, **variables)
            assert ended.returncode == 0, ended.printed
            assert ended.results["sum"] == np.arange(1 << 20, dtype=np.float32)[::1000].sum()
            assert list(tmp_path.iterdir()) == []
    finally:
        made.close()


def test_who_opens_a_session_is_known(door: Door) -> None:
    """What a program gives its client for the proxy comes to what lies behind the door, which may refuse it."""
    wire = Wire(door, said={"name": "trainer", "weight": 3}).begin()
    client = door.stats()["clients"][-1]
    assert client["said"] == {"name": "trainer", "weight": 3} and "127.0.0.1" in client["peer"]
    wire.close()
    with pytest.raises(grpc.RpcError) as refused:
        Wire(door, said={"refuse": "no place for you"}).begin()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.details() == "no place for you"
    eventually(lambda: nothing_left(door), "a session is left")


@pytest.mark.slow
def test_a_socket_of_this_machine(door: Door) -> None:
    ended = run("results['x'] = jnp.arange(3) * 2", **client_environment(door.unix))
    assert ended.returncode == 0, ended.printed
    assert ended.results["x"].tolist() == [0, 2, 4]
