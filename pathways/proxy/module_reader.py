"""Modules of clients are read in a process of their own: on some malformed bytes MLIR ends its process, or never ends
(FAULT-1).

    python -m pathways.proxy.module_reader

It answers one request at a time, in pickles, and ends when its input does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any

from pathways import _jaxlib
from pathways.process.children import describe_exit
from pathways.proxy.behind import Module
from pathways.proxy.errors import Code, Refused

CLOSE_S = 5.0
#: So much of a processor's time a module may take, and more for each of its bytes. Then the kernel ends the process.
_MOST_S, _MOST_S_PER_BYTE = 5.0, 2e-6


class ModuleReader:
    """Reads modules. Any thread may call it; one module is read at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts its process, so that the first module need not wait for that."""
        with self._lock:
            self._start()

    def stablehlo(self, module: bytes) -> tuple[Module, tuple[str, ...], tuple[str, ...]]:
        """A module of StableHLO as hosts can compile it, and the layouts that its parameters and results have there;
        see `_jaxlib.by_default_layouts`.

        Raises:
            Refused: it ends the process that reads it.
            ValueError: it cannot be read, or takes or gives what is no array.
            NotImplementedError: see `_jaxlib.refuse_calls_of_python`.
        """
        found: tuple[Module, tuple[str, ...], tuple[str, ...]] = self._ask("_stablehlo", module)
        return found

    def ifrt_ir(self, bytecode: bytes) -> tuple[_jaxlib.IfrtProgram, dict[str, Module]]:
        """A program in IFRT IR, and the modules that it calls.

        Raises:
            Refused, ValueError, NotImplementedError: as `stablehlo`, and `_jaxlib.read_ifrt_program`.
        """
        found: tuple[_jaxlib.IfrtProgram, dict[str, Module]] = self._ask("_ifrt_ir", bytecode)
        return found

    def close(self) -> None:
        """Ends its process."""
        with self._lock:
            self._stop()

    def _ask(self, what: str, data: bytes) -> Any:
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump((what, data), process.stdin)
                process.stdin.flush()
                found = pickle.load(process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError):
                code = self._stop()
                end = describe_exit(code) if code != -signal.SIGPROF else f"took more than {_most_s(data):.0f} s"
                raise Refused(
                    Code.INVALID_ARGUMENT, f"a module that MLIR cannot read: the process that read it {end}"
                ) from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pathways.proxy.module_reader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        return self._process

    def _stop(self) -> int:
        """Ends the process; how it ended, as `Popen.returncode`."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it has not read of a request
                pipe.close()
        try:
            return process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _most_s(data: bytes) -> float:
    return _MOST_S + _MOST_S_PER_BYTE * len(data)


def _stablehlo(data: bytes) -> Any:
    _jaxlib.refuse_calls_of_python(data)
    module, *layouts = _jaxlib.by_default_layouts(data)
    return _module(_jaxlib.without_tokens(module)), *layouts


def _ifrt_ir(data: bytes) -> Any:
    program = _jaxlib.read_ifrt_program(data)
    modules = {}
    for name, module in program.modules.items():
        _jaxlib.refuse_calls_of_python(module)
        modules[name] = _module(module, name)
    return program, modules


def _module(data: bytes, name: str = "") -> Module:
    own, parameters, results = _jaxlib.signature_of(data)
    return Module(name or own, data, parameters, results)


def main() -> None:
    """Reads modules until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the proxy
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what MLIR prints is no answer
    importlib.import_module("pathways._jaxlib.door")  # JAX too, before anybody waits
    read = {"_stablehlo": _stablehlo, "_ifrt_ir": _ifrt_ir}
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, data = pickle.load(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_PROF, _most_s(data))
            try:
                found = read[what](data)
            except NotImplementedError as error:
                found = NotImplementedError(str(error))
            except Exception as error:  # what MLIR, or its Python, makes of nonsense is of many types
                found = ValueError(str(error))
            pickle.dump(found, answers)
            answers.flush()


if __name__ == "__main__":
    main()
