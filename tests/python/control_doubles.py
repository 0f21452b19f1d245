"""Doubles for the native module and the driver: the control plane without JAX and without native code.

`FakeController` and `FakeDriver` write what they are told into the controller's stats or their own, so that a test sees
it through `cluster_stats()`. Environment variables make a host fail on purpose.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pathways.compiler.ir import LogicalProgram
from pathways.runtime.options import HostConfig

OPTIONS = {"native": "control_doubles", "driver": "control_doubles:start_fake_driver"}


class Segment:
    """`_native.Segment` by os calls."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.truncate(fd, nbytes)
        return cls(fd)

    @classmethod
    def attach(cls, fd: int) -> Segment:
        return cls(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def controller_segment() -> Segment:
    return Segment.create("pathways-controller", 4096)


def host_segment(host: int, hosts: int, ring_bytes: int, arena_bytes: int) -> Segment:
    return Segment.create(f"pathways-host-{host}", ring_bytes + arena_bytes)


def client_segment(futures: int, ring_bytes: int, arena_bytes: int) -> Segment:
    return Segment.create("pathways-client", ring_bytes + arena_bytes)


class Controller:
    """`_native.Controller`, remembering what it was told."""

    def __init__(self, segment: Segment, hosts: list[Segment], islands: list[int]) -> None:
        self.segment = segment
        self.calls: list[str] = [f"hosts {len(hosts)} islands {islands}"]

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            plain = [argument for argument in arguments if isinstance(argument, (int, str, list))]
            self.calls.append(" ".join([name, *map(str, plain)]))

        return call

    def stats(self) -> dict[str, Any]:
        return {"calls": self.calls}


class FakeDriver:
    """A driver without devices: a program compiles in the time that its first mesh's name says."""

    def __init__(self, config: HostConfig, segments: Sequence[Segment]) -> None:
        self.config = config
        self.segments = segments
        self.clients: dict[int, int] = {}
        self.programs: dict[int, str] = {}
        self._stopped = threading.Event()

    def attach_client(self, client: int, segment: Segment) -> None:
        self.clients[client] = segment.nbytes

    def detach_client(self, client: int) -> None:
        self.clients.pop(client)

    def register_program(
        self,
        client: int,
        program_id: int,
        program: LogicalProgram,
        bindings: tuple[tuple[int, ...], ...],
        on_compiled: Callable[[int, str | None], None],
    ) -> None:
        if program.name == "refused":
            raise ValueError("this program is refused")
        self.programs[program_id] = f"{program.name} {bindings}"

        def compile_program() -> None:
            if program.name == "slow":
                time.sleep(3600)
            on_compiled(program_id, f"XLA says no to {program.name}" if program.name == "broken" else None)

        threading.Thread(target=compile_program, daemon=True).start()

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            if os.path.exists(f"/proc/self/fd/{self.config.socket_fd}") is False:
                return

    def stop(self) -> None:
        self._stopped.set()

    def stats(self) -> dict[str, Any]:
        return {
            "attached": self.clients,
            "registered": self.programs,
            "segments": [segment.nbytes for segment in self.segments],
            "environment": {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "XLA_FLAGS")},
        }


def start_fake_driver(
    config: HostConfig, segments: Sequence[Segment], controller: Segment, joined: Callable[[], None]
) -> FakeDriver:
    trouble = os.environ.get(f"FAKE_HOST_{config.host}", "")
    print(f"fake host {config.host} starts", file=sys.stderr, flush=True)
    if trouble == "raise":
        raise RuntimeError("no devices today")
    if trouble == "exit":
        print("the last thing it said", file=sys.stderr, flush=True)
        os._exit(3)
    if trouble == "hang":
        time.sleep(3600)
    joined()
    if trouble == "slow":
        time.sleep(1.0)
    return FakeDriver(config, segments)
