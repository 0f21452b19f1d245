"""A proxy over `LocalDevices` in a process of its own, and clients: stock JAX in child processes, or by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.attributes import fill_attributes

HERE = pathlib.Path(__file__).parent
PACKAGE = "xla.ifrt.proxy"
LIMIT_S = 150.0
#: A Python with another JAX, for the clients of a proxy.
CLIENT_PYTHON = os.environ.get("PATHWAYS_CLIENT_PYTHON", sys.executable)
#: JAX of before 0.11 does not know the platform "proxy". Each program of a client begins with this.
PRELUDE = """
import sys
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jax._src import xla_bridge
from jaxlib import _ifrt_proxy
if "proxy" not in xla_bridge._backend_factories:
    xla_bridge.register_backend_factory(
        "proxy",
        lambda: _ifrt_proxy.get_client(xla_bridge.BACKEND_TARGET.value, _ifrt_proxy.ClientConnectionOptions()),
        priority=-1,
        fail_quietly=False,
    )
results = {}
def error_of(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
"""
SAVE = "\nnp.savez(sys.argv[1], **{name: np.asarray(value) for name, value in results.items()})\n"


@dataclasses.dataclass
class Ended:
    """A client's program that has ended."""

    returncode: int
    printed: str
    results: dict[str, Any]


class Door:
    """The process of a proxy. `options` are those of `serving.py`."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "serving.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._said()
        self.port: int = said["port"]
        self.unix: str = said["unix"]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stats(self) -> dict[str, Any]:
        """What the proxy holds now."""
        assert self._process.stdin is not None
        self._process.stdin.write("stats\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the proxy has ended with {self._process.wait()}"
        return json.loads(line)

    def start(self, program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A stock client of this proxy that runs `program`."""
        return start(program, *arguments, **client_environment(self.target), **environment)

    def run(self, program: str, **environment: str) -> Ended:
        """The same, to its end."""
        return run(program, **client_environment(self.target), **environment)

    def close(self) -> None:
        self._process.communicate(timeout=30)


def client_environment(target: str) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": f"grpc://{target}",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    }


def start(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    is_client = environment.get("JAX_PLATFORMS") == "proxy"
    text = PRELUDE + textwrap.dedent(program) + SAVE
    return subprocess.Popen(
        [CLIENT_PYTHON if is_client else sys.executable, "-c", text, *(arguments or ("/dev/null",))],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(program: str, **environment: str) -> Ended:
    """A program of a client to its end, with what it left in `results`."""
    with tempfile.TemporaryDirectory(prefix="pwp", dir="/tmp") as folder:
        process = start(program, f"{folder}/results.npz", **environment)
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            raise AssertionError(process.communicate()[0]) from None
        results = {}
        if process.returncode == 0:
            with np.load(f"{folder}/results.npz", allow_pickle=False) as loaded:
                results = dict(loaded)
        return Ended(process.returncode, printed, results)


def run_beside_plain_jax(door: Door, program: str) -> tuple[Ended, Ended]:
    """The same program through the proxy, and by JAX's own eight CPU devices."""
    plain: list[Ended] = []
    beside = threading.Thread(target=lambda: plain.append(run(program, JAX_PLATFORMS="cpu")))
    beside.start()
    proxied = door.run(program)
    beside.join()
    return proxied, plain[0]


class Wire:
    """A session by hand: what a client sends, message by message."""

    def __init__(
        self,
        door: Door,
        version: tuple[int, int] = (25, 3),
        said: dict[str, Any] | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.channel = grpc.insecure_channel(door.target, options)
        metadata = message(f"{PACKAGE}.GrpcIfrtSessionMetadata")()
        metadata.version.protocol_version, metadata.version.ifrt_serdes_version_number = version
        fill_attributes(said or {}, metadata.initialization_data)
        self._out: Any = _Queue()
        call = self.channel.stream_stream(f"/{PACKAGE}.GrpcIfrtService/IfrtSession")
        key = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
        self.replies = call(iter(self._out), metadata=((key, metadata.SerializeToString()),))
        self._numbers = itertools.count(1)
        self._pending: dict[int, Any] = {}
        self.number = 0

    def begin(self) -> Wire:
        """Sends the first request. Raises `grpc.RpcError`: the proxy refuses the client; it has said so twice."""
        response = self.reply(self.send("init_request"))
        if (status := response.response_metadata.status).code:
            with contextlib.suppress(StopIteration):
                next(self.replies)
            raise AssertionError(status)
        self.number = response.init_response.session_id
        return self

    def send(self, name: str, body: Any = None, context: int = 0, **fields: Any) -> int:
        """Sends a request, and returns the number of its reply."""
        request = message(f"{PACKAGE}.IfrtRequest")()
        request.request_metadata.op_id = number = next(self._numbers)
        request.request_metadata.user_context_id = context
        target = getattr(request, name)
        target.SetInParent()
        target.MergeFrom(type(target)(**fields) if body is None else body)
        self.send_raw(request.SerializeToString())
        return number

    def send_raw(self, data: bytes) -> None:
        self._out.put(data)

    def reply(self, number: int) -> Any:
        """The whole response to the request `number`."""
        parse = message(f"{PACKAGE}.IfrtResponse").FromString
        while number not in self._pending:
            response = parse(next(self.replies))
            self._pending[response.response_metadata.op_id] = response
        return self._pending.pop(number)

    def ask(self, name: str, body: Any = None, **fields: Any) -> Any:
        """The body of the response. Fails when it is an error."""
        response = self.reply(self.send(name, body, **fields))
        status = response.response_metadata.status
        assert status.code == 0, (name, status)
        return getattr(response, name.replace("request", "response"))

    def error(self, name: str, body: Any = None, **fields: Any) -> tuple[int, str]:
        """The code and the text of an error. Fails when there is none."""
        status = self.reply(self.send(name, body, **fields)).response_metadata.status
        assert status.code != 0, name
        return status.code, status.message

    def store(self, handle: int, data: bytes, size: int | None = None, session: int | None = None) -> None:
        """Brings a host buffer. Raises `grpc.RpcError`."""
        metadata = message(f"{PACKAGE}.GrpcHostBufferStoreMetadata")(
            session_id=self.number if session is None else session,
            handle=handle,
            buffer_size=len(data) if size is None else size,
        )
        request = message(f"{PACKAGE}.GrpcHostBufferStoreRequest")
        parts = [request(data=data[at : at + 1000]).SerializeToString() for at in range(0, len(data), 1000)]
        self._call("HostBufferStore", "stream_unary")(
            iter(parts),
            metadata=(("ifrt-proxy-grpc-host-buffer-store-metadata-bin", metadata.SerializeToString()),),
            timeout=60,
        )

    def look_up(self, handle: int, session: int | None = None) -> bytes:
        """Fetches a host buffer. Raises `grpc.RpcError`."""
        number = self.number if session is None else session
        request = message(f"{PACKAGE}.GrpcHostBufferLookupRequest")(session_id=number, handle=handle)
        parse = message(f"{PACKAGE}.GrpcHostBufferLookupResponse").FromString
        parts = self._call("HostBufferLookup", "unary_stream")(request.SerializeToString(), timeout=60)
        return b"".join(parse(part).data for part in parts)

    def drop(self, handle: int) -> None:
        request = message(f"{PACKAGE}.GrpcHostBufferDeleteRequest")(session_id=self.number, handle=handle)
        self._call("HostBufferDelete", "unary_unary")(request.SerializeToString(), timeout=60)

    def put(self, handle: int, values: np.ndarray[Any, Any], device: int = 0) -> None:
        """An array of float32 on one device."""
        self.store(handle, values.tobytes())
        self.ask("make_array_from_host_buffer_request", array_request(handle, values.shape, device))

    def read(self, handle: int, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """The values of an array of float32 on one device."""
        buffer = next(self._numbers) + (1 << 40)
        self.ask("copy_to_host_buffer_request", array_handle=handle, host_buffer_handle=buffer)
        data = self.look_up(buffer)
        self.drop(buffer)
        return np.frombuffer(data, np.float32).reshape(shape)

    def close(self) -> None:
        """The client goes away."""
        self._out.put(None)
        self.replies.cancel()
        self.channel.close()

    def _call(self, name: str, kind: str) -> Callable[..., Any]:
        return getattr(self.channel, kind)(f"/{PACKAGE}.GrpcIfrtService/{name}")


class _Queue:
    """What gRPC iterates over while others put."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.put = self._queue.put

    def __iter__(self) -> Iterator[bytes]:
        while (item := self._queue.get()) is not None:
            yield item


def single(device: int) -> Any:
    """The ShardingProto of one device."""
    made = message("xla.ifrt.ShardingProto")()
    made.serialized_sharding.type_name = "xla::ifrt::SingleDeviceSharding"
    made.serialized_sharding.data = message("xla.ifrt.SingleDeviceShardingProto")(device_id=device).SerializeToString()
    return made


def array_request(handle: int, shape: Sequence[int], device: int = 0, kind: int = 11) -> Any:
    """A MakeArrayFromHostBufferRequest whose array has the handle of its host buffer."""
    made = message(f"{PACKAGE}.MakeArrayFromHostBufferRequest")(host_buffer_handle=handle, array_handle=handle)
    made.dtype.kind = kind
    made.shape.dims.extend(shape)
    made.sharding.CopyFrom(single(device))
    return made
