"""The soak: random programs against NumPy, under small budgets, while hosts are killed and clients come and go.

    python tests/stress/soak.py --seconds 600 --seed 7

One process owns the cluster and works in two threads; a second client process works in two more. Every second another
client comes, trains a little, and leaves in a way of its own (`soak_visitors.py`). Every few seconds a host dies by
SIGKILL. Between phases there is a quiet point: everything is dropped, and nothing may be left: no buffer,
run, future or byte of any arena; no process may have grown beyond a bound. At the end no process and no file is left.
A mismatch or a leak ends it with exit status 1; so does a thread that does nothing for a minute, with every stack.

The seed is printed first. It settles what each thread does, and whom the killer picks; not how the threads interleave.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import soak_crew

import pathways as pw

SHAPES = ((2, 2, 1, 1), (3, 1, 2, 3), (1, 2, 2, 1))  # islands, hosts in each, devices of each, machines
DEVICE_MEMORY = 3 << 20
TRANSFER_MEMORY = 3 << 20
THREADS = 2
PHASE_S = 15.0
QUIET_S = 60.0
STUCK_S = 60.0
LINE_S = 10.0
LEAVE_S = 15.0
VISIT_S = 1.0
#: Growth of a process from its second quiet point on that is still no leak: allocators, caches of compiled code.
GROWTH_BYTES = 192 << 20
MARK = "PATHWAYS_SOAK"


class Leak(AssertionError):
    """Something is left that should not be."""


class Watchdog(threading.Thread):
    """Ends the process, with every thread's stack, when a thread of the crew did nothing for `STUCK_S`."""

    def __init__(self, crew: soak_crew.Crew) -> None:
        super().__init__(daemon=True)
        self._crew = crew
        self.alive_at = time.monotonic()  # of the main thread, which says so itself

    def run(self) -> None:
        while True:
            # Where the interpreter itself hangs, this one does it.
            faulthandler.dump_traceback_later(STUCK_S + 30, exit=True)
            time.sleep(1)
            oldest = min([self.alive_at, *list(self._crew.beats.values())])
            if time.monotonic() - oldest > STUCK_S:
                print(f"STUCK: nothing happened for {STUCK_S:g} s", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                for number, diary in list(self._crew.diaries.items()):
                    print(f"thread {number}:", *list(diary), sep="\n  ", file=sys.stderr, flush=True)
                with contextlib.suppress(Exception):
                    print(json.dumps(self._crew.cluster.stats(), default=str), file=sys.stderr, flush=True)
                tell_logs(os.environ["TMPDIR"])
                os._exit(1)


def tell_logs(folder: str) -> None:
    """The ends of what the cluster's processes have said."""
    for path in sorted(pathlib.Path(folder).glob("**/*.log")):
        if text := path.read_text(errors="replace")[-2000:].strip():
            print(f"---- {path.name}:\n{text}", flush=True)


class OtherClient:
    """A crew in a process of its own, told what to do line by line."""

    def __init__(self, address: str, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client", address, "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("ready")

    def start(self, phase: int) -> None:
        self._say("start", phase)
        self._answer("started")

    def pause(self) -> dict[str, Any]:
        self._say("pause", 0)
        return self._answer("paused")

    def kept(self) -> dict[str, int]:
        self._say("kept", 0)
        return self._answer("kept")

    def end(self) -> None:
        self._say("end", 0)
        if self._process.wait(LEAVE_S) != 0:
            raise Leak(f"the other client ended with {self._process.returncode}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _say(self, what: str, phase: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{what} {phase}\n")
            self._process.stdin.flush()

    def _answer(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                said, _, rest = line[2:].partition(" ")
                if said != event:
                    break
                return json.loads(rest)
            print(f"client 2: {line}", end="", flush=True)
        raise soak_crew.Mismatch(f"the other client is gone ({self._process.wait()}); expected {event!r}")


def client(address: str, seed: int) -> int:
    """The other process."""

    def say(event: str, content: Any) -> None:
        print(f"> {event} {json.dumps(content)}\n", end="", flush=True)  # in one piece: other threads print as well

    cluster = pw.connect(address)
    crew = soak_crew.Crew(cluster, "guest", seed, THREADS)
    watchdog = Watchdog(crew)
    watchdog.alive_at = float("inf")  # the main thread waits to be told
    watchdog.start()
    say("ready", {})
    for line in sys.stdin:
        what, _, phase = line.partition(" ")
        if what == "start":
            crew.start(int(phase))
            say("started", {})
        elif what == "pause":
            say("paused", crew.pause())
        elif what == "kept":
            say("kept", crew.kept())
        else:
            break
    cluster.close()
    return 0


class Visitors(threading.Thread):
    """A client that comes every `VISIT_S` while a phase lasts; what they found wrong is in `faults`."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("soak_visitors.py")), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._draw = random.Random(seed)
        self._wanted = threading.Event()
        self._idle = threading.Condition()
        self._here = 0
        self.left = 0
        self.faults: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.start()

    def run(self) -> None:
        assert self._process.stdin is not None
        while self._process.poll() is None:
            self._wanted.wait()
            with self._idle:
                if not self._wanted.is_set():
                    continue
                self._here += 1
                with contextlib.suppress(BrokenPipeError, ValueError):
                    self._process.stdin.write(f"{self._draw.getrandbits(32)}\n")
                    self._process.stdin.flush()
            time.sleep(VISIT_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            seed, _, text = line.strip().partition(" ")
            with self._idle:
                self._here -= 1
                self.left += 1
                if text != "ok":
                    self.faults.append(f"visitor {seed}: {text}")
                self._idle.notify_all()

    def resume(self) -> None:
        self._wanted.set()

    def pause(self) -> None:
        """Returns when nobody is here any more."""
        with self._idle:
            self._wanted.clear()
            if not self._idle.wait_for(lambda: self._here == 0, timeout=QUIET_S):
                self.faults.append(f"{self._here} visitors did not leave")
        if self.faults:
            raise soak_crew.Mismatch("; ".join(self.faults))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LEAVE_S)


class Killer(threading.Thread):
    """Kills hosts of islands that are whole, at random moments, until `stop`."""

    def __init__(self, cluster: Any, draw: random.Random, kills: bool) -> None:
        super().__init__(daemon=True)
        self._kills = kills
        self._cluster, self._draw = cluster, draw
        self._stopped = threading.Event()
        self.killed: set[tuple[int, int]] = set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.wait(self._draw.uniform(2.0, 8.0)):
                hosts = self._cluster.stats()["hosts"]
                whole = [
                    island
                    for island in self._cluster.islands
                    if all(hosts[number]["state"] == "up" for number in island)
                ]
                if not self._kills:
                    continue
                for island in self._draw.sample(whole, min(len(whole), self._draw.choice((1, 1, 1, 2)))):
                    victims = self._draw.sample(island, self._draw.randint(1, len(island)))
                    for host in victims:
                        self.killed.add((host, hosts[host]["pid"]))
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(hosts[host]["pid"], signal.SIGKILL)
        except BaseException as error:  # the main thread tells
            self.error = error

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        if self.error is not None:
            raise self.error


class Soak:
    """Phases of work on one cluster after the other, and what they have shown."""

    def __init__(self, seconds: float, seed: int, shapes: tuple[tuple[int, ...], ...], known: str, kills: bool) -> None:
        self.shapes, self.known, self.kills = shapes, known, kills
        self.draw = random.Random(seed)
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.counts: collections.Counter[str] = collections.Counter()
        self._first: dict[int, tuple[int, int]] = {}  # by process: quiet points seen, bytes at the second
        self._told = self.begin

    def run(self) -> None:
        shapes = self.draw.sample(self.shapes, len(self.shapes))
        each = (self.end - self.begin) / len(shapes)
        for number, shape in enumerate(shapes):
            if time.monotonic() < self.end:
                self._one_cluster(shape, min(self.end, self.begin + (number + 1) * each))

    def _one_cluster(self, shape: tuple[int, ...], end: float) -> None:
        *sizes, machines = shape
        target = pw.LocalCluster(
            *sizes, machines=machines, device_memory=DEVICE_MEMORY, transfer_memory=TRANSFER_MEMORY
        )
        with pw.connect(target) as cluster:
            print(f"{cluster!r}, {DEVICE_MEMORY >> 20} MiB for each device and each arena", flush=True)
            crew = soak_crew.Crew(cluster, "owner", self.draw.getrandbits(32), THREADS)
            watchdog = Watchdog(crew)
            watchdog.start()
            guest_seed = self.draw.getrandbits(32)
            guest = OtherClient(cluster.address, guest_seed)
            visitors = Visitors(cluster.address, self.draw.getrandbits(32))
            killed: set[tuple[int, int]] = set()
            before: collections.Counter[str] = collections.Counter()
            for phase in range(1_000_000):
                watchdog.alive_at = time.monotonic()
                crew.start(phase)
                guest.start(phase)
                visitors.resume()
                killer = Killer(cluster, random.Random(self.draw.getrandbits(32)), self.kills)
                killer.start()
                self._work(crew, min(end, time.monotonic() + PHASE_S), watchdog)
                watchdog.alive_at = time.monotonic()
                killer.stop()
                killed |= killer.killed
                reports = [crew.pause()]
                watchdog.alive_at = time.monotonic()
                visitors.pause()
                watchdog.alive_at = time.monotonic()
                if self.draw.random() < 0.15:  # OWN-1: what it has goes with it
                    guest.kill()
                    self.counts["clients killed"] += 1
                    guest_seed += 1
                    guest = OtherClient(cluster.address, guest_seed)
                    before_guest: collections.Counter[str] = collections.Counter()
                else:
                    reports.append(guest.pause())
                    before_guest = collections.Counter(reports[1]["counts"])
                self._take(reports, killed, before)
                before = collections.Counter(reports[0]["counts"]) + before_guest
                self.counts["kills"] += len(killer.killed)
                self.counts["phases"] += 1
                watchdog.alive_at = time.monotonic()
                self._quiet(cluster, [crew, guest])
                if time.monotonic() >= end - 1:
                    break
            guest.end()
            visitors.end()
            self.counts["visitors"] += visitors.left
            watchdog.alive_at = float("inf")
        self._first.clear()

    def _work(self, crew: soak_crew.Crew, end: float, watchdog: Watchdog) -> None:
        while time.monotonic() < end and not crew.mismatches:
            time.sleep(0.1)
            watchdog.alive_at = time.monotonic()
            if time.monotonic() > self._told + LINE_S:
                self._told = time.monotonic()
                done = ", ".join(f"{self.counts[key]} {key}" for key in ("phases", "kills", "calls", "reads", *ERRORS))
                here = ", ".join(f"{value} {key}" for key, value in sorted(crew.counts.items()))
                print(f"{self._told - self.begin:6.0f} s  {done}; this client so far: {here}", flush=True)

    def _take(
        self, reports: list[dict[str, Any]], killed: set[tuple[int, int]], before: collections.Counter[str]
    ) -> None:
        """Adds what the crews counted in this phase, and fails with what they found."""
        now: collections.Counter[str] = collections.Counter()
        for report in reports:
            now += collections.Counter(report["counts"])
            if report["mismatches"]:
                raise soak_crew.Mismatch(f"{len(report['mismatches'])} threads found something, see above")
            for host, pid in report["lost"]:
                if (host, pid) not in killed:
                    raise soak_crew.Mismatch(f"an error names host {host} (pid {pid}), which nobody killed")
        self.counts += now - before

    def _quiet(self, cluster: Any, crews: list[Any]) -> None:
        """Waits until nothing is left, and weighs the processes."""
        deadline = time.monotonic() + QUIET_S - 10
        while True:
            kept = [crew.kept() for crew in crews]
            stats = cluster.stats()
            left = [
                f"client {number + 1}: {key} {n}" for number, each in enumerate(kept) for key, n in each.items() if n
            ]
            left += list(leftovers(stats))
            left = [each for each in left if not (self.known and re.search(self.known, each))]
            if not left:
                break
            if time.monotonic() > deadline:
                ours = cluster.native.holdings()
                tell_logs(os.environ["TMPDIR"])
                raise Leak(f"at a quiet point: {'; '.join(left)}; {ours}\n{json.dumps(stats, default=str)}")
            time.sleep(0.1)
        processes = [("controller", stats["controller"])]
        processes += [(f"client {each['client']}", each) for each in stats["clients"]]
        processes += [(f"host {each['host']}", each) for each in stats["hosts"]]
        for name, each in processes:
            seen, then = self._first.get(each["pid"], (0, 0))
            now = each["resident_bytes"]
            self._first[each["pid"]] = seen + 1, then if seen >= 2 else now
            if seen < 2:
                continue
            kind = name.split()[0]
            self.counts[f"MiB grown, {kind}"] = max(self.counts[f"MiB grown, {kind}"], (now - then) >> 20)
            if now - then > GROWTH_BYTES:
                raise Leak(f"{name} (pid {each['pid']}) grew from {then >> 20} to {now >> 20} MiB")


ERRORS = ("HostLostError", "ResourceExhaustedError", "DeadlineExceededError", "CancelledError")


def leftovers(stats: dict[str, Any]) -> Iterator[str]:
    """What the cluster still has."""
    controller = stats["controller"]
    for key in ("waiting", "held"):
        if controller[key]:
            yield f"controller: {key} {controller[key]}"
    if any(controller["live_bytes"]):
        yield f"controller: live_bytes {controller['live_bytes']}"
    for host in stats["hosts"]:
        if host["state"] != "up":
            yield f"host {host['host']} is {host['state']}"
            continue
        for key in ("objects", "live_runs", "waiting", "arena_bytes", "overfull", "programs"):
            if host[key]:
                yield f"host {host['host']}: {key} {host[key]}"
        for device in host["memory"]["devices"]:
            if device["bytes"]:
                yield f"host {host['host']}: {device['bytes']} bytes on a device"


def marked(mark: str) -> dict[int, str]:
    """Processes of this soak but this one, wherever they went: number to command line."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found[int(entry)] = pathlib.Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")[:160]
    return found


def assert_nothing_left(mark: str, folder: str) -> None:
    """After the last cluster is closed."""
    deadline = time.monotonic() + LEAVE_S
    while True:
        processes, files = marked(mark), os.listdir(folder)
        if not processes and not files:
            return
        if time.monotonic() > deadline:
            raise Leak(f"left at the end: {processes}, {files}")
        time.sleep(0.1)


def main() -> int:
    """Exit status 0 when all was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: PATHWAYS_SEED, else a random one")
    parser.add_argument(
        "--shape", help="one cluster only, such as 3,1,2,1: islands, hosts in each, devices of each, machines"
    )
    parser.add_argument(
        "--known", default="", help="a pattern of leftovers that are no leak here, such as 'arena_bytes'"
    )
    parser.add_argument("--no-kills", dest="kills", action="store_false", help="let every host live")
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        return client(arguments.client, arguments.seed)
    seed = arguments.seed
    if seed is None:
        seed = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}", flush=True)
    mark = f"{os.getpid()}-{random.SystemRandom().getrandbits(64):x}"
    folder = tempfile.mkdtemp(prefix="so", dir="/tmp")
    os.environ[MARK], os.environ["TMPDIR"] = mark, folder
    tempfile.tempdir = folder
    shapes = (tuple(map(int, arguments.shape.split(","))),) if arguments.shape else SHAPES
    soak = Soak(arguments.seconds, seed, shapes, arguments.known, arguments.kills)
    failure: BaseException | None = None
    try:
        soak.run()
        assert_nothing_left(mark, folder)
    except (soak_crew.Mismatch, Leak, pw.errors.PathwaysError) as error:
        failure = error
        print(f"FAILED: {type(error).__name__}: {error}", flush=True)
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'FAILED' if failure else 'all was right'}: seed {seed}, {time.monotonic() - soak.begin:.0f} s", flush=True)
    print(", ".join(f"{value} {key}" for key, value in sorted(soak.counts.items())), flush=True)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
