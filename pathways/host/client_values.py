"""Values between a client's memory and a host's devices: puts, fetches, and small results that are read back.

The enqueue thread calls all of it. Embedded, client and host hand each other objects by a key instead of bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pathways.host import read_back
from pathways.host.own_settings import own_settings
from pathways.host.placements import Placements
from pathways.protocol import payloads
from pathways.protocol.payloads import Mode
from pathways.quirks import Quirks


class ClientValues:
    """The puts and fetches of one host."""

    def __init__(self, core: Any, placements: Placements, quirks: Quirks) -> None:
        self._core = core
        self._placements = placements
        self._quirks = quirks
        self.local: dict[int, Any] = {}  # embedded: objects that client and host hand to each other, by key

    @own_settings
    def put(self, client: int, payload: bytes, booked_mask: int, booked_bytes: int) -> tuple[jax.Array, int]:
        """Makes a buffer of a client's bytes, on CPU without another copy. Returns it and the mask of local devices.

        Args:
            client: its number.
            payload: see `payloads.put_inline` and its kin.
            booked_mask: the local devices on which the order has booked the buffer.
            booked_bytes: the bytes that it has booked on each of them.

        Raises:
            ValueError: the payload makes no sense, or its buffer takes more than is booked (MEM-6).
        """
        number, _, what = payloads.parse_put(payload)
        placed = self._placements.of(client, number)
        if not placed.fits(booked_mask, booked_bytes):
            self.refuse_put(client, payload)
            raise ValueError(placed.too_big(booked_mask, booked_bytes))
        if isinstance(what, tuple):  # Mode.ARENA
            value = placed.unpack(memoryview(self._core.client_block(client, *what)))
        elif isinstance(what, int):  # Mode.LOCAL
            handed = self.local.pop(what, None)
            if handed is None:
                raise ValueError(f"nothing was handed over under key {what}")
            value = placed.take(handed)
        else:  # Mode.INLINE
            full = np.frombuffer(what, placed.type.dtype) if what else np.empty(0, placed.type.dtype)
            value = placed.cut(full.reshape(placed.type.shape))
        return value, placed.mask

    def devices_of_put(self, client: int, payload: bytes) -> int:
        """The mask of the local devices that will hold the buffer of a put."""
        number, _, _ = payloads.parse_put(payload)
        return self._placements.of(client, number).mask

    def refuse_put(self, client: int, payload: bytes) -> None:
        """Returns the client's memory of a put that was refused because there is no room for its buffer."""
        _, _, what = payloads.parse_put(payload)
        if isinstance(what, tuple):  # Mode.ARENA
            self._core.client_block(client, *what)
        elif isinstance(what, int):  # Mode.LOCAL
            self.local.pop(what, None)

    @own_settings
    def fetch(self, client: int, value: jax.Array, payload: bytes) -> None:
        """Writes this host's share of a ready buffer into the client's memory: each distinct part once."""
        mode, what = payloads.parse_fetch(payload)
        if mode is Mode.LOCAL:
            if what[0] in self.local:  # else the reader is gone
                self.local[what[0]] = read_back.whole(value)
            return
        offset, nbytes = what
        block = self._core.client_block(client, offset, nbytes)
        read_back.write(value, memoryview(block))

    def refuse_fetch(self, client: int, payload: bytes) -> None:
        """Returns the client's memory of a fetch whose buffer was deleted or has failed."""
        mode, what = payloads.parse_fetch(payload)
        if mode is Mode.ARENA:
            self._core.client_block(client, *what)

    @own_settings
    def read_back_recipe(self, value: jax.Array) -> read_back.Recipe:
        """The recipe by which `_core` reads back arrays like `value`."""
        return read_back.recipe(value, self._quirks)

    @own_settings
    def read_back(self, value: jax.Array, memory: memoryview) -> None:
        """Writes this host's share of a small result into `memory`, where the client reads it."""
        read_back.write(value, memory)
