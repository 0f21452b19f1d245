"""Makes a real agent, or the process beside a far client, send what a test says. test_machine_records.py puts this
folder on its PYTHONPATH.

The file PATHWAYS_TEST_FRAMES has frames that the agent sends beside its own. <file>.change has a seed, and how many of
its own frames, of real runs, it changes before it sends them; or what it writes where in the next record of a kind.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import struct
import sys
import threading
import time
import weakref
from typing import Any

PATH = os.environ.get("PATHWAYS_TEST_FRAMES", "")
HEAD = struct.Struct("<IHHIi")  # FrameHeader: bytes, kind, reserved, a, b
RECORD_AT = {2: 0, 3: 8, 9: 0}  # where its record begins, in frames of hosts to the controller, to hosts; of clients
BLOCK, DATA = 4, 5


class Changes:
    """Changes frames on their way out."""

    def __init__(self) -> None:
        self.draw = random.Random()
        self.left = 0
        self.wanted: dict[str, Any] | None = None

    def look(self) -> None:
        """Reads what to change from now on."""
        if os.path.exists(PATH + ".change"):
            with open(PATH + ".change") as file:
                wanted = json.load(file)
            os.unlink(PATH + ".change")
            self.draw.seed(wanted["seed"])
            self.left, self.wanted = wanted["count"], wanted if "kind" in wanted else None

    def frames(self, data: bytes) -> bytes:
        """The frames, some of them changed."""
        made, at = [], 0
        while at < len(data):
            size, kind, _, a, b = HEAD.unpack_from(data, at)
            end = at + HEAD.size + -(-size // 8) * 8
            payload = bytearray(data[at + HEAD.size : at + HEAD.size + size])
            at = end
            changed = self.changed(kind, payload) if self.left > 0 else [payload]
            made += [HEAD.pack(len(each), kind, 0, a, b) + each + bytes(-len(each) % 8) for each in changed]
        return b"".join(made)

    def changed(self, kind: int, payload: bytearray) -> list[bytearray]:
        """What goes out instead of a frame."""
        start = RECORD_AT.get(kind)
        if self.wanted is not None:
            if start is None or struct.unpack_from("<H", payload, start)[0] != self.wanted["kind"]:
                return [payload]
            new = bytes.fromhex(self.wanted["bytes"])
            payload[start + self.wanted["at"] : start + self.wanted["at"] + len(new)] = new
            return self.count([payload])
        if (start is None and kind not in (BLOCK, DATA)) or self.draw.random() < 0.5:
            return [payload]
        draw = self.draw
        place = draw.randrange(0, max(1, min(len(payload), 128) - 7), 4)
        old = int.from_bytes(payload[place : place + 8], "little")
        match draw.randrange(5):
            case 0:
                payload[place] ^= 1 << draw.randrange(8)
            case 1:
                new = draw.choice((0, 1, 2, old + 1, old - 1, old ^ 1 << 32, draw.getrandbits(6), draw.getrandbits(64)))
                payload[place : place + 8] = (new % (1 << 64)).to_bytes(8, "little")
            case 2:
                return self.count([payload, bytearray(payload)])
            case 3:
                del payload[place : place + 8]
            case _:
                payload[place:place] = draw.randbytes(8)
        return self.count([payload])

    def count(self, frames: list[bytearray]) -> list[bytearray]:
        """One more is changed."""
        self.left -= 1
        with open(PATH + ".changed", "ab") as file:
            file.write(b"".join(bytes(each[:64]).hex().encode() + b"\n" for each in frames))
        return frames


def all_links() -> list[weakref.ref[Any]]:
    """The links that this process opens from now on: a list that grows. (To look for them among all objects would
    disturb what other threads are making.)
    """
    kind, found = importlib.import_module("pathways.transport.links").Link, []
    plain = kind.__init__

    def begin(self: Any, *arguments: Any, **more: Any) -> None:
        plain(self, *arguments, **more)
        found.append(weakref.ref(self))

    kind.__init__ = begin
    return found


def send_what_comes(links: list[weakref.ref[Any]]) -> None:
    """Sends the content of each file that comes, over the agent's link, and removes it."""
    changes, last = Changes(), None
    while True:
        time.sleep(0.005)
        changes.look()
        link = links[-1]() if links else None
        if link is None or link.is_over:
            continue
        if link is not last:
            last = link
            connection = link.sending

            def send(data: Any, stays: bool = False, plain: Any = connection.send) -> bool:
                return bool(plain(memoryview(changes.frames(bytes(data))), False))

            connection.send = send
        if os.path.exists(PATH):
            with open(PATH, "rb") as file:
                frames = file.read()
            os.unlink(PATH)
            with link.sending.lock:
                link.sending.send(frames)


if PATH and not {"pathways.agent.main", "pathways.agent.client_end"}.isdisjoint(sys.orig_argv):
    threading.Thread(target=send_what_comes, args=(all_links(),), daemon=True).start()
