"""Doubles for the native module and the driver: the control plane without JAX and without native code.

`Controller` and `FakeDriver` note what they are told whenever they are asked for statistics, and a test reads these
notes with `control_clusters.stats_with_notes`. Environment variables make a host fail on purpose.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways.compiler.ir import LogicalProgram
from pathways.host.successors import Successor
from pathways.process.config import HostConfig

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


def status_segment() -> Segment:
    return Segment.create("pathways-status", 12288)


def bell_segment() -> Segment:
    return Segment.create("pathways-bell", 4096)


class LinkHub:
    """`_native.LinkHub` of a cluster that no link comes to."""

    def __init__(self, most_received: int = 0) -> None:
        pass

    def add_group(self, group: int, hosts: list[int]) -> None:
        pass

    def add_client(self, client: int, segment: Segment, link: object = None) -> None:
        pass

    def remove_client(self, client: int) -> None:
        pass


class LinkPool:
    """`_native.LinkPool` without a link."""

    def wake(self) -> None:
        pass


def host_segment(host: int, hosts: int, ring_bytes: int, arena_bytes: int, *_: int) -> Segment:
    return Segment.create(f"pathways-host-{host}", ring_bytes + arena_bytes)


def client_segment(futures: int, ring_bytes: int, arena_bytes: int) -> Segment:
    return Segment.create("pathways-client", ring_bytes + arena_bytes)


def futures_of(client_segment: Segment) -> int:
    return 64


class Pulse:
    """`_native.Pulse`, which never begins to beat, so nobody misses it."""

    def __init__(self, host_segment: Segment) -> None:
        pass


def pulse_of(host_segment: Segment) -> int:
    return 0


class Notes:
    """What a double tells tests: JSON in a memory file of its process, which `notes_of` reads."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("fake-notes")

    def write(self, notes: dict[str, Any]) -> None:
        os.pwrite(self._fd, json.dumps(notes).encode() + b"\n", 0)


def notes_of(pid: int) -> dict[str, Any]:
    """The notes of a double in another process; none of a process that has ended."""
    folder = pathlib.Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):  # the process has ended
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):  # it is closed meanwhile
                if "fake-notes" in os.readlink(folder / fd):
                    return dict(json.loads((folder / fd).read_text().partition("\n")[0] or "{}"))
    return {}


#: What a client writes to the begin of its segment to have made nonsense of it.
GARBLED = b"garbled"


class Policy(enum.Enum):
    """`_native.Policy`."""

    fifo = 0
    share = 1
    priority = 2


class ClientLimits:
    """`_native.ClientLimits`."""

    def __init__(self, *_: Any) -> None:
        pass


class Controller:
    """`_native.Controller`, remembering what it was told."""

    def __init__(self, segment: Segment, hosts: list[Segment], **_: Any) -> None:
        self.segment = segment
        self.calls: list[str] = [f"hosts {len(hosts)}"]
        self._notes = Notes()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            plain = [argument for argument in arguments if isinstance(argument, (int, str, list))]
            self.calls.append(" ".join([name, *map(str, plain)]))

        return call

    def take_faults(self) -> list[tuple[int, str]]:
        return []

    def add_space_set(self, spaces: list[int]) -> int:
        return len(spaces)

    def take_forgotten(self) -> list[int]:
        path = os.environ.get("FAKE_FORGOTTEN", "")  # a file with numbers
        return [int(number) for number in pathlib.Path(path).read_text().split()] if path else []

    def lose_hosts(self, hosts: list[int], text: str) -> int:
        self.calls.append(f"lose_hosts {hosts} {text}")
        return sum(call.startswith("lose_hosts") for call in self.calls)

    def clients(self) -> list[dict[str, Any]]:
        return []

    def room_requests(self, suspended: list[int]) -> list[tuple[int, bool, list[int]]]:
        return []

    def stats(self, hosts: int = 0) -> dict[str, Any]:
        self._notes.write({"calls": self.calls})
        return {}


class FakeDriver:
    """A driver without devices: a program compiles in the time that its first mesh's name says."""

    def __init__(self, config: HostConfig, segments: Sequence[Segment | None]) -> None:
        self.config = config
        self.segments = segments
        self.clients: dict[int, int] = {}
        self.programs: dict[int, str] = {}
        self.replaced: list[str] = []
        self.notes = Notes()
        self._stopped = threading.Event()

    def attach_client(self, client: int, segment: Segment, futures: int, checkpoint_root: str | None) -> None:
        if os.pread(segment.fd, len(GARBLED), 0) == GARBLED:
            raise ValueError("a ring lies outside of the segment")
        self.clients[client] = segment.nbytes

    def replace_peers(self, successors: Sequence[Successor]) -> dict[int, Exception]:
        self.replaced += [f"host {each.host} loss {each.loss}" for each in successors]
        return {}

    def register_program(
        self,
        client: int,
        program_id: int,
        program: LogicalProgram,
        bindings: tuple[tuple[int, ...], ...],
        on_compiled: Callable[[int, str | None], None],
        islands: Mapping[int, int],
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
        self.notes.write(
            {
                "attached": self.clients,
                "registered": self.programs,
                "segments": [segment and segment.nbytes for segment in self.segments],
                "replaced": self.replaced,
                "predecessor_failure": (self.config.predecessor_failure, self.config.predecessor_client),
                "environment": {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "XLA_FLAGS")},
            }
        )
        return {
            "memory": {
                "devices": [{"bytes": 1 << 20, "high_water": 3 << 20, "limit": 1 << 30} for _ in self.config.devices],
                "accounts": [
                    {"client": client, "plan": plan, "program": name, "bytes": count, "high_water": most}
                    for client in self.clients
                    for plan, name, count, most in (
                        (None, None, 5 << 10, 6 << 10),
                        (3, "train", 2 << 20, 7 << 20),
                        (4, None, 0, 1 << 10),
                        (5, "never ran", 0, 0),
                    )
                ],
            },
        }


def start_driver_on_jax(
    config: HostConfig, segments: Sequence[Segment | None], controller: Segment, joined: Callable[[], None]
) -> Any:
    """The real start of a host's devices and group, with a driver that only looks at them and sums over the island."""
    from pathways.host import main

    class LookingDriver(FakeDriver):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(config, arguments["segments"])
            self.devices, self.all_devices = arguments["devices"], arguments["all_devices"]
            assert arguments["first_device"] == config.devices[0] - config.rank * len(config.devices)
            self.sum = self._sum_over_the_island()

        def _sum_over_the_island(self) -> float:
            import jax
            import numpy as np

            mesh = jax.sharding.Mesh(np.array(self.all_devices), ("x",))
            cut, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("x",), ()))
            mine = np.array(config.devices, np.float32)
            x = jax.make_array_from_process_local_data(cut, mine)
            return float(jax.jit(lambda x: x.sum(), out_shardings=whole)(x).addressable_data(0))

        def stats(self) -> dict[str, Any]:
            import jax

            self.notes.write(
                {
                    "sum": self.sum,
                    "local": [device.id for device in self.devices],
                    "all": [device.id for device in self.all_devices],
                    "process": jax.process_index(),
                    "x64": jax.config.jax_enable_x64,
                    "connections": tcp_listeners(),
                }
            )
            return {}

    module = types.ModuleType("pathways.host.jax_host")
    module.JaxHost = LookingDriver  # type: ignore[attr-defined]
    sys.modules["pathways.host.jax_host"] = module
    return main.start_jax_driver(config, segments, controller, joined)


def tcp_listeners() -> list[str]:
    """The addresses on which this process accepts TCP connections."""
    import psutil

    connections = psutil.Process().net_connections(kind="tcp")
    return sorted({connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN})


def start_fake_driver(
    config: HostConfig, segments: Sequence[Segment | None], controller: Segment, joined: Callable[[], None]
) -> FakeDriver:
    trouble = os.environ.get(f"FAKE_HOST_{config.host}", "")
    if trouble.startswith("again-"):  # only when it is started anew
        trouble = trouble.removeprefix("again-") if config.incarnation else ""
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


def start_on_torus(
    config: HostConfig, segments: Sequence[Segment | None], controller: Segment, joined: Callable[[], None]
) -> Any:
    """A real host whose devices say that they are where FAKE_COORDINATES says: a list for each host, as JSON."""
    from pathways.host.main import start_jax_driver

    driver: Any = start_jax_driver(config, segments, controller, joined)
    driver.coordinates = json.loads(os.environ["FAKE_COORDINATES"])[config.host]
    return driver
