"""Cut lines: machines and far clients whose line is cut while much goes over it, in both directions or in one.

    python tests/stress/network_cuts.py [--seconds 1,3,6,60] [--rate 1.5e6 --delay 0.05 --loss 0] [--no-bulk]

A cut of 3 s loses nothing. Of a longer one both ends know within 5 s: its client, the controller, the machine's agent;
and afterwards everything is as before. Every value is checked, and an innocent client goes on. Needs root and
/dev/net/tun. See `networks.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lines import Line, Lines
from network_world import SIDES, Cell, Place, Work, batches, connected, running, timed, told, wait_for

WAYS = {"both ways": (True, True), "to head": (True, False), "from head": (False, True)}
LOST_S = 3.0  # a longer cut may lose a link
KNOWN_S = 5.0
HEALED_S = 120.0


def play_cut(cell: Cell, place: Place, work: Work, say: Callable[..., None], cut: Any, healed: Any, bulk: bool) -> None:
    """Calls all the time, with bulk beside; after the line is healed it connects again if it must."""
    import pathways as pw

    faults: list[tuple[float, str]] = []
    over = threading.Event()

    def repeat(what: str, do: Callable[[], object]) -> None:
        while not over.is_set():
            try:
                do()
            except BaseException as error:
                faults.append((time.monotonic(), f"{what}: {type(error).__name__}: {str(error)[:300]}"))
                return

    works: dict[str, Callable[[], object]] = {"calls": lambda: work.calls(5)}
    if bulk:
        works |= {"put": work.put, "fetch": work.fetch}
        if cell.side == "machine":
            works["hop"] = work.hop
    threads = [threading.Thread(target=repeat, args=each, daemon=True) for each in works.items()]
    for thread in threads:
        thread.start()
    cut.wait()
    began = time.monotonic()
    healed.wait()
    time.sleep(12)
    over.set()
    for thread in threads:
        thread.join(240)
    hung = [what for what, thread in zip(works, threads, strict=True) if thread.is_alive()]
    first = min(faults, default=(began, ""))
    if hung:
        first = (first[0], f"HUNG {hung}; {first[1]}")
    say("client knew", first[0] - began, first[1])
    back = time.monotonic()
    if faults:
        if "ControllerLostError" in first[1] or "ClusterClosedError" in first[1]:
            with contextlib.suppress(pw.errors.PathwaysError):
                work.cluster.close()
            work = connected(cell, place)
        while True:
            try:
                work.calls(5)
                break
            except pw.errors.HostLostError:
                if time.monotonic() - back > HEALED_S:
                    raise
                time.sleep(0.5)
    timed(lambda: work.calls(50), say, "calls after")


def play_cuts(options: argparse.Namespace) -> int:
    islands = itertools.count(1)
    chosen = list(
        itertools.product(options.sides.split(","), map(float, options.seconds.split(",")), options.ways.split(","))
    )
    cells, plans = [], {}
    for number, (side, seconds, way) in enumerate(chosen):
        island = next(islands) if side == "machine" else 0
        cells.append(Cell(f"{side}{number}", side, options.rate, options.delay, options.loss, island))
        plans[cells[-1].name] = (seconds, way)
    wrong: set[str] = set()
    with Lines(options.congestion) as lines, running(lines, cells) as (world, _):
        begins: dict[str, Any] = {}
        said_by: dict[str, dict[str, tuple[float, str]]] = {cell.name: {} for cell in cells}
        ways: dict[str, Line] = {}
        cut, healed = {}, {}

        def hear(name: str, said: str, took: float, fault: str) -> None:
            if name in said_by:
                said_by[name][said] = (took, fault)
                if said == "failed":
                    told(f"{name}: {fault}")

        for batch in batches(cells, 3):
            for cell in batch:
                cut[cell.name], healed[cell.name] = world.event(), world.event()
                ways[cell.name] = line = lines.add(cell.name)
                if cell.side == "machine":
                    world.agent(cell.name, cell.island, line)
                what = (cut[cell.name], healed[cell.name], options.bulk)
                begins[cell.name] = world.start(cell, line, play_cut, *what)
            wait_for(world, {cell.name for cell in batch}, hear, "ready")
        told("all are ready")
        ends: dict[str, dict[str, float]] = {}

        def one(cell: Cell) -> None:
            seconds, way = plans[cell.name]
            line, found = ways[cell.name], ends.setdefault(cell.name, {})
            line.change(rate=cell.rate, delay_s=cell.delay_s, loss=cell.loss)
            begins[cell.name].set()
            time.sleep(10)
            before = world.agent_log(cell.name).count("the link is over")
            began = time.monotonic()
            line.change(cut=WAYS[way])
            cut[cell.name].set()
            is_healed = False
            while time.monotonic() - began < max(seconds, 12):
                if not is_healed and time.monotonic() - began >= seconds:
                    line.change(cut=[False, False])
                    is_healed = True
                log = world.log()
                pattern = rf"agent {cell.name} of .* is lost|client {cell.name} .*is over|of client \S*{cell.name}\b"
                if "head" not in found and any(re.search(pattern, each) for each in log):
                    found["head"] = time.monotonic() - began
                if "machine" not in found and world.agent_log(cell.name).count("the link is over") > before:
                    found["machine"] = time.monotonic() - began
                time.sleep(0.1)
            line.change(cut=[False, False])
            healed[cell.name].set()

        threads = [threading.Thread(target=one, args=(cell,)) for cell in cells]
        for thread in threads:
            thread.start()
        left = wait_for(world, set(plans), hear, "over", 600)
        for thread in threads:
            thread.join()
        for cell in cells:
            seconds, way = plans[cell.name]
            said, found = said_by[cell.name], ends[cell.name]
            knew, fault = said.get("client knew", (0.0, "not over"))
            after = said.get("calls after", (0.0, "not over"))
            known = {"client": knew if fault else None, **found}
            told(f"| {cell} | {seconds:g} s, {way} | {known} | {fault} | after: {after[1] or 'right'} |")
            if after[1] or (seconds <= LOST_S and (fault or found)) or cell.name in left:
                wrong.add(cell.name)
            if seconds > LOST_S and (not fault or max([knew, *found.values()]) > KNOWN_S):
                told(f"{cell.name}: not known within {KNOWN_S:g} s")
                wrong.add(cell.name)
    told(f"{len(cells)} cuts, {len(wrong)} of them wrong: {sorted(wrong)}")
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rate", type=float, default=1.5e6)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seconds", default="1,3,6,60")
    parser.add_argument("--bulk", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--congestion", default="reno")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return play_cuts(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
