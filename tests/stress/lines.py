"""Lines between a head and its machines that are slow, long, lossy or cut, each machine a network namespace.

    with Lines() as lines:
        line = lines.add("m1", rate=64e3, delay_s=0.3, loss=0.02)
        subprocess.Popen(line.command(["pathways", "agent", ...]))
        line.change(cut=[True, False])          # nothing comes to the head any more

Needs root and /dev/net/tun, but no netem: a line is a process that carries packets between two TUN devices. A packet
waits until the packets before it are sent at the line's rate, and then for its delay. It is lost by chance, or when the
packets before it take more than `QUEUE_S`. Both directions are alike, and do not wait for each other. A line is cut at
its end: what is under way is lost, too.

`python lines.py HEAD MACHINE DEVICE` is that process. It reads what changes from standard input.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

QUEUE_S = 1.0
MTU = 1400
ADDRESS = "10.88.0.1"  # of the head
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # linux/if_tun.h
_AT_ONCE = 64  # packets


def move_to(namespace: str) -> None:
    """Moves the calling thread to a network namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if library.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"this process cannot move to the network {namespace}")


class Line:
    """One line, and the machine at its end."""

    def __init__(self, lines: Lines, name: str, number: int) -> None:
        self.name, self.machine, self.head = name, lines.namespace(name), lines.head
        device, self.address = f"tun{number}", f"10.88.{1 + number // 200}.{1 + number % 200}"
        self._relay = subprocess.Popen(
            [sys.executable, "-S", __file__, self.head, self.machine, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline(), "the relay has ended"
        for command in (f"link set {device} mtu {MTU} up", f"route add {self.address} dev {device} src {ADDRESS}"):
            _ip(f"-n {self.head} {command}")
        for command in (
            f"addr add {self.address}/32 dev tun0",
            f"link set tun0 mtu {MTU} up",
            "route add default dev tun0",
        ):
            _ip(f"-n {self.machine} {command}")

    def change(self, **what: Any) -> None:
        """Changes `rate` (bits per second; 0: any), `delay_s`, `loss` (a share), or `cut` (to the head, from it)."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps(what) + "\n")
        self._relay.stdin.flush()

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on the machine."""
        return ["ip", "netns", "exec", self.machine, *command]

    def close(self) -> None:
        """Ends the line."""
        with contextlib.suppress(OSError):
            assert self._relay.stdin is not None
            self._relay.stdin.close()
        self._relay.kill()
        self._relay.wait()


class Lines:
    """A head, and lines that lead to it. A context manager. This process moves to the head's network."""

    def __init__(self, congestion: str = "reno") -> None:
        self._stack = contextlib.ExitStack()
        self._congestion = congestion
        self._prefix = f"pl{os.getpid() % 100000}"
        self._lines: list[Line] = []
        self.head = ""

    def __enter__(self) -> Lines:
        with contextlib.ExitStack() as self._stack:
            self.head = self.namespace("head")
            _ip(f"-n {self.head} addr add {ADDRESS}/32 dev lo")
            move_to(self.head)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def namespace(self, name: str) -> str:
        """Makes a network."""
        full = f"{self._prefix}-{name}"
        _ip(f"netns add {full}")
        self._stack.callback(_ip, f"netns del {full}")
        _ip(f"-n {full} link set lo up")
        setting = f"net.ipv4.tcp_congestion_control={self._congestion}"
        subprocess.run(["ip", "netns", "exec", full, "sysctl", "-qw", setting], check=True)
        return full

    def add(self, name: str, **what: Any) -> Line:
        """A line to a new machine; `what`: see `Line.change`."""
        line = Line(self, name, len(self._lines))
        self._stack.callback(line.close)
        self._lines.append(line)
        line.change(**what)
        return line


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, stdout=sys.stderr)


def _tun(namespace: str, device: str) -> int:
    opened: list[int] = []

    def there() -> None:
        move_to(namespace)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22s", device.encode(), _IFF_TUN | _IFF_NO_PI, b""))
        opened.append(descriptor)

    thread = threading.Thread(target=there)
    thread.start()
    thread.join()
    return opened[0]


class _Relay:
    def __init__(self, head: str, machine: str, device: str) -> None:
        self._ends = [_tun(machine, "tun0"), _tun(head, device)]  # direction 0 is to the head
        self._state: dict[str, Any] = {"rate": 0.0, "delay_s": 0.0, "loss": 0.0, "cut": [False, False]}
        self._queues: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]
        self._busy_until = [0.0, 0.0]
        self._chance = random.Random(device)

    def run(self) -> None:
        poll = select.epoll()
        commands = sys.stdin.fileno()
        for descriptor in (*self._ends, commands):
            poll.register(descriptor, select.EPOLLIN)
        print("ready", flush=True)
        while True:
            now = time.monotonic()
            dues = [self._send(way, now) for way in (0, 1)]
            for descriptor, _ in poll.poll(max(min(dues) - now, 0) if min(dues) < now + 1 else 1):
                if descriptor != commands:
                    self._take(self._ends.index(descriptor))
                elif not (line := sys.stdin.readline()):
                    return
                else:
                    self._state |= json.loads(line)

    def _take(self, way: int) -> None:
        state, queue = self._state, self._queues[way]
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._ends[way], 2 * MTU)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self._chance.random() < state["loss"]:
                continue
            begin = max(now, self._busy_until[way])
            if begin - now > QUEUE_S:
                continue
            if state["rate"]:
                self._busy_until[way] = begin = begin + 8 * len(packet) / state["rate"]
            queue.append((begin + state["delay_s"], packet))

    def _send(self, way: int, now: float) -> float:
        """Sends what is due. Returns when the next packet is."""
        queue = self._queues[way]
        while queue and queue[0][0] <= now:
            packet = queue.popleft()[1]
            if not self._state["cut"][way]:
                with contextlib.suppress(OSError):
                    os.write(self._ends[1 - way], packet)
        return queue[0][0] if queue else float("inf")


if __name__ == "__main__":
    _Relay(*sys.argv[1:]).run()
