"""What can go wrong with a cluster of machines (fault_world.py), two at a time. test_fault_pairs.py plays a few pairs;
as a program, this file plays many.

    python tests/stress/fault_pairs.py [--pairs N] [--seconds N] [--faults A,B]    # PATHWAYS_SEED=N repeats
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil
from fault_world import HANGS_S, MACHINES, World, kill
from namespaces import end  # fault_world.py has found the folder

from pathways import errors
from pathways.cluster.drain_target import DrainTarget
from pathways.cluster.operator import drain, undrain

#: By how much `World.kept` may differ after a pair.
MORE = {"fds": 20, "threads": 12, "MiB": 400, "processes": 0}


# -- faults: each plays itself on a machine, and returns when it is over ---------------------------------------------


def pulled(seconds: float) -> Callable[[World, str], None]:
    def fault(world: World, machine: str) -> None:
        world.network.pull(machine)
        time.sleep(seconds)
        world.network.plug(machine)

    return fault


def cut(is_outgoing: bool) -> Callable[[World, str], None]:
    def fault(world: World, machine: str) -> None:
        way = (machine, "switch") if is_outgoing else ("switch", machine)
        world.network.cut(*way)
        time.sleep(8)
        with contextlib.suppress(subprocess.CalledProcessError):  # the cable was pulled meanwhile, and forgot it
            world.network.mend(*way)

    return fault


def agent_killed(world: World, machine: str) -> None:
    kill(world.processes_of(machine, "pathways.agent.main"))


def agent_stopped(world: World, machine: str) -> None:
    stopped = world.processes_of(machine, "pathways.agent.main")
    kill(stopped, signal.SIGSTOP)
    time.sleep(8)
    kill(stopped, signal.SIGCONT)


def host_killed(world: World, machine: str) -> None:
    kill(world.processes_of(machine, "pathways-host"))


def machine_killed(world: World, machine: str) -> None:
    world.kill_machine(machine, 1)


def joining(world: World, machine: str) -> None:
    """The agent leaves at once, and another one joins."""
    kill(world.processes_of(machine, "pathways agent"), signal.SIGTERM)


def far_killed(world: World, machine: str) -> None:
    with world.replacing:
        end(world.far.process)
        world.start_far()


def far_pulled(world: World, machine: str) -> None:
    pulled(8)(world, "laptop")


def controller_killed(world: World, machine: str) -> None:
    with world.replacing:
        kill([psutil.Process(world.controller)])
        world.start_controller()


def draining(world: World, machine: str) -> None:
    island = DrainTarget.of(island=int(machine.removeprefix("m")))
    with contextlib.suppress(errors.PathwaysError):
        drain(world.address, island, 15.0, force=False)
    with contextlib.suppress(errors.PathwaysError):
        undrain(world.address, island)


def working(op: str) -> Callable[[World, str], None]:
    """Not a fault: what the clients do while the other one comes."""

    def fault(world: World, machine: str) -> None:
        for client in (world.victim, world.far):
            with contextlib.suppress(AssertionError, OSError):  # the far client is killed
                client.ask("ops", op)
        time.sleep(4)

    return fault


FAULTS: dict[str, Callable[[World, str], None]] = {
    "pulled-2s": pulled(2),
    "pulled-10s": pulled(10),
    "cut-out": cut(True),
    "cut-in": cut(False),
    "agent-killed": agent_killed,
    "agent-stopped": agent_stopped,
    "host-killed": host_killed,
    "machine-killed": machine_killed,
    "joining": joining,
    "far-killed": far_killed,
    "far-pulled": far_pulled,
    "controller-killed": controller_killed,
    "draining": draining,
    "resize": working("resize"),
    "transfer": working("transfer"),
    "put": working("put"),
    "fetch": working("fetch"),
}
WORKS = ("resize", "transfer", "put", "fetch")


#: Two faults: [(name, machine, seconds from the beginning)].
Pair = list[tuple[str, str, float]]


def told(pair: Pair) -> str:
    """For people."""
    return ", ".join(f"{name} {machine} at {after:.2f} s" for name, machine, after in pair)


def draw(generator: random.Random, names: list[str]) -> Pair:
    """A pair; at least one of its faults is no work."""
    while True:
        pair = [generator.choice(names), generator.choice(names)]
        if not all(name in WORKS for name in pair):
            break
    where = [generator.choice(MACHINES[1:]) for _ in pair]
    offset = generator.choice((0.0, generator.uniform(0, 1), generator.uniform(0, 8)))
    order = [0.0, offset] if pair[1] not in WORKS else [offset, 0.0]
    return list(zip(pair, where, order, strict=True))


def play(world: World, pair: Pair) -> None:
    """Plays a pair. Returns when both faults are over."""
    failed: list[BaseException] = []

    def one(name: str, machine: str, after: float) -> None:
        try:
            time.sleep(after)
            FAULTS[name](world, machine)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=each) for each in pair]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        world.tend()
        time.sleep(0.1)
    if failed:
        raise failed[0]


class Checker:
    """Plays pairs in one world, and checks each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._most: dict[str, int] = {}
        self._whole({})
        kept = world.kept()
        # Connections come and go, and how much of its shared memory a client uses varies.
        self._most = {what: kept[what] + more for what, more in MORE.items()}

    def play(self, pair: Pair) -> None:
        """Plays a pair, and waits until all is as before.

        Raises:
            AssertionError: a value was wrong, an error was none of those that the faults explain, or something is not
                as before.
        """
        world = self._world
        reports: dict[str, list[Any]] = {}
        began = time.time()
        play(world, pair)
        took = self._whole(reports)
        names = {name for name, _, _ in pair}
        told_lost = [
            (at - began, f"{role}, {op}: {error} after {after:.1f} s: {line}")
            for role, said in reports.items()
            for each in said
            for op, error, after, at, line in each["errors"]
        ]
        print("".join(f"    {at:5.1f} s: {line[:160]}\n" for at, line in sorted(told_lost)), end="")
        print(f"    whole again after {took:.1f} s; {world.kept()}", flush=True)
        bad = [bad for said in reports.values() for each in said for bad in each["bad"]]
        assert not bad, bad[0]
        if "controller-killed" not in names:
            innocent = [line for _, line in told_lost if line.startswith("innocent")]
            assert not innocent, f"the innocent client was told: {innocent}"

    def _whole(self, reports: dict[str, list[Any]]) -> float:
        """Waits until all hosts are up and each client has done each of its operations; returns the seconds."""
        world = self._world
        began = time.monotonic()
        everything = ["step", *WORKS]
        wanted = {"innocent": {"train"}, "victim": set(everything), "far": set(everything)}
        for client in (world.victim, world.far):
            client.ask("ops", ",".join(everything))
        said: dict[str, Any] = {}
        is_up = False
        left: dict[str, int] = {}
        while not is_up or any(wanted.values()) or left:
            world.tend()
            was_up, is_up = is_up, world.states() == ["up"] * len(MACHINES)
            for client in world.clients:
                said[client.role] = report = client.ask("report")
                reports.setdefault(client.role, []).append(report)
                assert not report["bad"], f"{client.role}: {report['bad'][0]}"
                if was_up and is_up:
                    wanted[client.role] -= set(report["right"])
            left = {what: kept for what, kept in world.kept().items() if kept > self._most.get(what, kept)}
            took = time.monotonic() - began
            assert took < HANGS_S, f"not whole after {took:.0f} s: {world.states()}, {wanted}, {said}, left: {left}"
            time.sleep(0.3)
        return time.monotonic() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Play random pairs of faults on a cluster of machines.")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--faults", default=",".join(FAULTS), help="the faults to draw from, by comma")
    options = parser.parse_args()
    seed = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}", flush=True)
    generator = random.Random(seed)
    pairs = [draw(generator, options.faults.split(",")) for _ in range(options.pairs)]
    deadline = time.monotonic() + options.seconds
    played = failed = 0
    while played < len(pairs) and time.monotonic() < deadline:
        done, is_right = campaign(pairs[played:], deadline, played)
        played += done
        failed += not is_right
    print(f"{played} pairs, {failed} failed; PATHWAYS_SEED={seed}")
    sys.exit(failed > 0)


def campaign(pairs: list[Pair], deadline: float, number: int) -> tuple[int, bool]:
    """Plays pairs in a new world until the deadline, or until one fails, which is shown; the logs are kept then.
    Returns how many it played, and whether all went well."""
    played = 0
    with World() as world:
        try:
            checker = Checker(world)
            print(f"    ready: {world.kept()}", flush=True)
            for pair in pairs:
                if time.monotonic() > deadline:
                    break
                print(f"{number + played}: {told(pair)}", flush=True)
                played += 1
                checker.play(pair)
        except Exception:
            kept = tempfile.mkdtemp(prefix="fault-pairs-")
            shutil.copytree(world.folder, kept, dirs_exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copytree(os.path.dirname(world.address.removeprefix("unix:")) + "/logs", f"{kept}/logs")
            traceback.print_exc()
            print(f"the logs are in {kept}", flush=True)
            return max(played, 1), False
    if left := world.processes():
        print(f"left: {left}", flush=True)
    return played, not left


if __name__ == "__main__":
    main()
