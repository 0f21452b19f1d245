"""Hostile clients of the campaign (`test_hostile_tenants.py`), forked from a process that has imported everything.

    hostile_client.py ADDRESS

A nursery (`nursery.py`): each line of its input is {"mode", "name", "seed"}. A client misbehaves in its mode until it
is killed, or evicted.
"""

from __future__ import annotations

import gc
import os
import pathlib
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import nursery

import pathways as pw
from pathways.api.checkpoints import jobs
from pathways.protocol import payloads
from pathways.testing import stand_in

STEP_US = 3000
HOARD_BYTES, PIECE_BYTES = 32 << 20, 1 << 20
TOO_MUCH_BYTES = 1 << 30  # more than any device of the campaign has


class Hostile:
    """One client."""

    def __init__(self, address: str, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = pw.connect(address, name=name)
        self.slice = pw.make_virtual_device_set(self.cluster).add_slice(devices=len(self.cluster.devices))
        self.step = pw.jit(lambda x: stand_in.step(x + 1, STEP_US), devices=self.slice)
        self.value = pw.device_put(np.zeros(1024, np.float32), self.slice)

    def flood(self) -> None:
        """Submits whatever it may, and never looks at a result."""
        while True:
            self.value = self.step(self.value)

    def keep(self) -> None:
        """Submits as fast as it may, and keeps the results of its last 5,000 runs unread."""
        kept: list[Any] = []
        while True:
            kept.append(self.step(self.value))
            del kept[:-5000]

    def hoard(self) -> None:
        """Fills memory, asks for more than there is, is refused, lets go, and begins again."""
        while True:
            kept = []
            for _ in range(HOARD_BYTES // PIECE_BYTES):
                kept.append(pw.device_put(np.ones(PIECE_BYTES // 4, np.float32), self.slice).block_until_ready())
            grow = pw.jit(lambda x: jax.numpy.broadcast_to(x[0], (TOO_MUCH_BYTES // 4,)) + 1, devices=self.slice)
            try:
                grow(self.value).block_until_ready()
            except pw.errors.ResourceExhaustedError:
                pass
            else:
                raise AssertionError("a device had more memory than it has")
            time.sleep(self.random.random())
            del kept
            gc.collect()

    def programs(self) -> None:
        """Makes programs, runs some of them, and drops all."""
        number = 0
        while True:
            number += 1
            step = pw.jit(lambda x, number=number: x * 2 + number, devices=self.slice)
            for _ in range(self.random.randrange(3)):
                step(self.value)
            del step
            gc.collect()

    def save(self) -> None:
        """Begins saves and drops the arrays. Some saves write what nobody can write, or write it twice; the last one
        ends when the client ends, or some time later.
        """
        job = None
        while True:
            begun = jobs.Job()
            for number in range(HOARD_BYTES // PIECE_BYTES // 2):
                array = pw.device_put(np.ones(PIECE_BYTES // 4, np.float32), self.slice)
                group = begun.join(array)
                begun.ask(group, payloads.task("stage", begun.number, number=number), array)
                if self.random.random() < 0.5:
                    array.delete()
            for _ in range(self.random.randrange(3)):
                arrays = [[number, "a", {"driver": self.random.choice(("zarr", "none"))}] for number in range(4)]
                write = {"lead": 0, "arrays": arrays, "context": {}, "atomic": True}
                begun.ask(group, payloads.task("write", begun.number, **write))
            if job is not None:
                job.end(early=self.random.random() < 0.5)
            job = begun
            del array
            time.sleep(self.random.random() / 10)

    def garble(self) -> None:
        """Floods, and overwrites pieces of the memory that it shares with the controller and the hosts."""
        spans = [
            (int(match[1], 16), int(match[2], 16))
            for match in re.finditer(r"(\w+)-(\w+) rw-s .*pathways-client", pathlib.Path("/proc/self/maps").read_text())
        ]
        assert spans
        memory = os.open("/proc/self/mem", os.O_RDWR)
        while True:
            for _ in range(self.random.randrange(200)):
                self.value = self.step(self.value)
            begin, end = self.random.choice(spans)
            for _ in range(self.random.randrange(1, 8)):
                at = self.random.randrange(begin, min(end, begin + (4 << 20)))
                os.pwrite(memory, self.random.randbytes(self.random.choice((1, 8, 64, 4096)))[: end - at], at)


MODES: dict[str, Callable[[Hostile], None]] = {
    name: getattr(Hostile, name) for name in ("flood", "keep", "hoard", "programs", "save", "garble")
}


def play(asked: dict[str, Any]) -> None:
    """One client, until it is killed or evicted."""
    log = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(log, fd)
    MODES[asked["mode"]](Hostile(sys.argv[1], asked["name"], asked["seed"]))


if __name__ == "__main__":
    nursery.serve(play)
