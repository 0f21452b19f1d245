"""Sixteen clients, half of them hostile: they flood, keep results unread, fill memory, make programs without end, begin
saves and drop the arrays, garble the memory that they share, stop in the midst of what they do, are killed and replaced
(`hostile_client.py`).

Meanwhile eight honest clients of weights 1 and 2 keep steps under way and check every value. They get their part of the
devices; nobody but the hostile ends; the controller's and the hosts' memory and open files stay what they were.

  SHARE-1, SHARE-2, FLOW-1, TRUST-1, OWN-1, MEM-7

PATHWAYS_HOSTILE_SECONDS says for how long (5), PATHWAYS_SEED repeats what is drawn. Counts are printed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
from hostile_client import MODES

from benchmarks.tenants import shares as tenants_shares
from pathways.bench import processes, stats
from pathways.cluster import operator
from pathways.cluster.launcher import start_local_cluster

SECONDS = float(os.environ.get("PATHWAYS_HOSTILE_SECONDS", "5"))
WEIGHTS = {f"honest {i}": 1.0 + i % 2 for i in range(8)}
HOSTILE, WARM_UP_S, PATIENCE = 8, 6.0, 120.0
STEP_US, AHEAD = 3000, 16
DEVICE_BYTES = 512 << 20
#: The clients share two cores with all else: what is asked of their shares is less than `benchmarks.tenants` finds. A
#: short run has two windows of 2 s, in which one client's process may not have been run at all.
LEAST_OF_PART, MOST_DISTANCE = 0.7, 0.05 if SECONDS >= 60 else 0.2
MOST_GROWTH_BYTES, MOST_GROWTH_FILES = 48 << 20, 24  # after the warm-up; hostile clients come and go at any moment


class Nursery:
    """The hostile clients: those alive, by process, and what became of the others."""

    def __init__(self, address: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.alive: dict[int, str] = {}
        self.stopped: set[int] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._hired = 0  # asked for and not ended
        self._asked: collections.deque[str] = collections.deque()  # the modes of those that are not started yet
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("hostile_client.py")), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._lock:
                if said["event"] == "started":
                    self.alive[said["pid"]] = self._asked.popleft()
                elif said["event"] == "ended":
                    mode = self.alive.pop(said["pid"])
                    self.stopped.discard(said["pid"])
                    self._hired -= 1
                    self.counts[f"{mode} {'killed' if said['status'] == -signal.SIGKILL else 'ended'}"] += 1

    def hire(self, count: int) -> None:
        """Starts clients until there are so many."""
        assert self._process.stdin is not None
        while self._hired < count:
            with self._lock:
                self._hired += 1
                self.counts["started"] += 1
                mode = self.random.choice(list(MODES))
                self._asked.append(mode)
            asked = {"mode": mode, "name": f"hostile {self.counts['started']}"}
            self._process.stdin.write(json.dumps({**asked, "seed": self.random.getrandbits(32)}) + "\n")
            self._process.stdin.flush()

    def trouble(self) -> None:
        """Kills one, or stops one, or lets one go on."""
        with self._lock:
            if not self.alive:
                return
            pid = self.random.choice(sorted(self.alive))
            number = signal.SIGCONT if pid in self.stopped else self.random.choice((signal.SIGKILL, signal.SIGSTOP))
            if number == signal.SIGSTOP:
                self.stopped.add(pid)
            else:
                self.stopped.discard(pid)
            self.counts[number.name] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kills all, also those that are not started yet."""
        deadline = time.monotonic() + 20
        while self._asked and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            for pid in self.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def sizes(pids: list[int]) -> tuple[list[int], list[int]]:
    """Resident bytes and open files of each process."""
    found = [psutil.Process(pid) for pid in pids]
    return [each.memory_info().rss for each in found], [each.num_fds() for each in found]


def what_is_left(told: dict[str, Any]) -> list[object]:
    """Names of clients, and what the ledger and the hosts still keep of them."""
    found: list[object] = [each["name"] for each in told["clients"] if each["name"]]
    if any(told["controller"]["live_bytes"]):
        found.append(("ledger", told["controller"]["live_bytes"]))
    for host in told["hosts"]:
        kept = {name: host[name] for name in ("objects", "tasks", "checkpoint_jobs") if host[name]}
        devices = [device["bytes"] for device in host["memory"]["devices"] if device["bytes"]]
        if kept or devices:
            found.append((host["host"], kept, devices))
    return found


@pytest.mark.slow
@pytest.mark.watchdog(300 + 2 * SECONDS)
def test_hostile_clients_harm_nobody() -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"PATHWAYS_SEED={seed}")
    with contextlib.ExitStack() as stack:
        handle = start_local_cluster(1, 2, 1, platform="cpu", policy="share", device_memory=DEVICE_BYTES)
        stack.callback(handle.close)
        address = handle.address
        honest = [processes.Child("benchmarks.tenants.client:Client") for _ in WEIGHTS]
        for child in honest:
            stack.callback(child.kill)
        for requests in (
            [("start", address, name, weight) for name, weight in WEIGHTS.items()],
            [("load", (STEP_US,))] * len(honest),
        ):
            for child, request in zip(honest, requests, strict=True):
                child.send(*request)
            for child in honest:
                child.receive(PATIENCE)
        start = operator.inspect(address)
        pids = [start["controller"]["pid"], *(host["pid"] for host in start["hosts"])]
        before = sizes(pids)
        nursery = Nursery(address, seed)
        stack.callback(nursery.end)
        nursery.hire(HOSTILE)
        deadline = time.monotonic() + PATIENCE
        while sum(each["name"].startswith("hostile") for each in operator.inspect(address)["clients"]) < HOSTILE - 2:
            assert time.monotonic() < deadline, "the hostile clients do not come"
            time.sleep(0.1)
        begin = time.monotonic() + 1.0
        end = begin + WARM_UP_S + SECONDS
        sampler = tenants_shares.Sampler(address, every=0.5)
        stack.callback(sampler.finish)
        for child in honest:
            child.send("flood", begin, end, (STEP_US,), AHEAD)
        seen: list[tuple[list[int], list[int]]] = []
        while time.monotonic() < end:
            time.sleep(nursery.random.uniform(0.2, 1.5))
            nursery.trouble()
            nursery.hire(HOSTILE)
            if time.monotonic() > begin + WARM_UP_S:
                seen.append(sizes(pids))
        steps = [len(child.receive(PATIENCE + SECONDS)) for child in honest]  # each has checked its own
        samples = sampler.finish()
        counts = operator.inspect(address)["controller"]
        nursery.end()

        windows = tenants_shares.windows(samples, begin + WARM_UP_S, end, list(WEIGHTS), 2.0)
        part = sum(WEIGHTS.values()) / (sum(WEIGHTS.values()) + HOSTILE)
        all_seconds = stats.quantile([window.busy for window in windows], 0.5)
        mean = {name: sum(each.shares[name] for each in windows) / len(windows) for name in WEIGHTS}
        targets = tenants_shares.targets(WEIGHTS)
        distance = max(abs(mean[name] - targets[name]) for name in WEIGHTS)
        print(
            f"honest: {sum(steps)} steps, none wrong; {all_seconds:.2f} of the devices' time, at least {part:.2f} due"
        )
        worst = tenants_shares.worst_error(windows, WEIGHTS)
        print(f"shares among them: off by {100 * distance:.1f} points in the mean, {100 * worst:.1f} in the worst 2 s")
        others = counts["runs"] - sum(steps) - len(honest)
        print(f"hostile: {others} runs, {counts['refused']} refused; {dict(sorted(nursery.counts.items()))}")
        assert others > 0
        third = max(1, len(seen) // 3)
        for what, most, at, unit in (
            ("MiB resident", MOST_GROWTH_BYTES, 0, 1 << 20),
            ("open files", MOST_GROWTH_FILES, 1, 1),
        ):
            first = [max(each[at][i] for each in seen[:third]) for i in range(len(pids))]
            last = [max(each[at][i] for each in seen[-third:]) for i in range(len(pids))]
            told = {"before": before[at], "first third": first, "last third": last}
            print(what, {when: [value // unit for value in values] for when, values in told.items()})
            assert all(after <= earlier + most for earlier, after in zip(first, last, strict=True)), what

        after = operator.inspect(address)
        assert [after["controller"]["pid"], *(host["pid"] for host in after["hosts"])] == pids
        assert all_seconds >= LEAST_OF_PART * part
        assert distance <= MOST_DISTANCE
        for child in honest:
            child.ask("load", (STEP_US,), timeout=PATIENCE)  # all are still there
            child.end()
        deadline = time.monotonic() + 30
        while left := what_is_left(operator.inspect(address)):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
