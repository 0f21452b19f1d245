"""Networks: machines and far clients behind slow, long and lossy lines, with every value checked against NumPy.

    python tests/stress/networks.py [--rates 64e3,1.5e6,100e6] [--delays 0.3,0.05,0] [--losses 0.02,0]

Each cell is a machine with a client at the head, or a far client of the head's machine, behind a line of its own, so
that all wait at the same time. It puts and fetches 16 MiB (PATHWAYS_NETWORK_MIB) at the same time, does nothing for a
while, and calls a thousand times. No link may be lost. Delays are those of one direction: a round trip takes twice as
long. At 64 kbit/s, 16 MiB take three quarters of an hour. Needs root and /dev/net/tun. `network_cuts.py` cuts lines.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lines import Line, Lines
from network_world import LARGE, SIDES, Cell, Place, Work, at_once, batches, running, timed, told, wait_for


def play_cell(cell: Cell, place: Place, work: Work, say: Callable[..., None]) -> None:
    """The four kinds of work."""
    at_once(say, put=work.put, fetch=work.fetch)
    timed(work.idle, say, "idle")
    timed(work.calls, say, "calls")


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All combinations; those that take longest begin first."""
    islands = itertools.count(1)
    cells = []
    numbers = [[float(each) for each in text.split(",")] for text in (options.rates, options.losses, options.delays)]
    for number, (rate, loss, delay, side) in enumerate(itertools.product(*numbers, options.sides.split(","))):
        cells.append(Cell(f"{side}{number}", side, rate, delay, loss, next(islands) if side == "machine" else 0))
    return cells


def play_cells(options: argparse.Namespace) -> int:
    cells = cells_of(options)
    named = {cell.name: cell for cell in cells}
    end = time.monotonic() + options.minutes * 60
    wrong: set[str] = set()
    with Lines(options.congestion) as lines, running(lines, cells) as (world, _):
        begins: dict[str, Any] = {}
        ways: dict[str, Line] = {}

        def hear(name: str, said: str, took: float, fault: str) -> None:
            if name not in named:
                return
            cell = named[name]
            if said in ("ready", "over"):
                return
            share = f"{LARGE * 8 / took / cell.rate * 100:.0f} % of the line" if said in ("put", "fetch") else ""
            told(f"| {cell} | {said} | {took:.1f} s | {share} | {fault or 'right'} |")
            if fault:
                wrong.add(name)

        for batch in batches(cells, 3):
            for cell in batch:
                ways[cell.name] = line = lines.add(cell.name)
                if cell.side == "machine":
                    world.agent(cell.name, cell.island, line)
                begins[cell.name] = world.start(cell, line, play_cell)
            wait_for(world, {cell.name for cell in batch}, hear, "ready")
        told("all are ready")
        for cell in cells:
            ways[cell.name].change(rate=cell.rate, delay_s=cell.delay_s, loss=cell.loss)
            begins[cell.name].set()
        left = wait_for(world, set(named), hear, "over", max(end - time.monotonic(), 1))
        for name in sorted(left):
            counts = subprocess.run(
                ["ip", "-s", "-n", ways[name].machine, "link", "show", "tun0"], capture_output=True, text=True
            ).stdout.split()
            told(f"{named[name]}: not over; {counts[-14:]}")
        lost = world.losses()
    ended = f"{len(cells)} cells, {len(wrong)} of them wrong, {len(left - wrong)} not over"
    told(f"{ended}, {len(lost)} lines about lost links")
    return bool(wrong or lost)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="64e3,1.5e6,100e6")
    parser.add_argument("--delays", default="0.3,0.05,0")
    parser.add_argument("--losses", default="0.02,0")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--congestion", default="reno")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return play_cells(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
