"""Values between a client's memory and a host's devices: puts, fetches, and small results that are read back.

The enqueue thread calls all of it. Embedded, client and host hand each other objects by a key instead of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    def put(
        self, client: int, payload: bytes, leased: tuple[int, int], booked_mask: int, booked_bytes: int
    ) -> tuple[jax.Array, int]:
        """Makes a buffer of a client's bytes, on CPU without another copy. Returns it and the mask of local devices.

        Args:
            client: its number.
            payload: see `payloads.put_inline` and its kin.
            leased: the block of the client's memory that is leased to this host: (offset, bytes).
            booked_mask: the local devices on which the order has booked the buffer.
            booked_bytes: the bytes that it has booked on each of them.

        Raises:
            ValueError: the payload makes no sense, or its buffer takes more than is booked (MEM-6).
        """
        block = self._take(client, leased)  # which is returned, whatever comes of the put
        number, mode, what = payloads.parse_put(payload)
        placed = self._placements.of(client, number)
        if not placed.fits(booked_mask, booked_bytes):
            if isinstance(what, int):  # Mode.LOCAL
                self.local.pop(what, None)
            raise ValueError(placed.too_big(booked_mask, booked_bytes))
        if mode is Mode.LEASED:
            value = placed.unpack(memoryview(block))
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

    def refuse_put(self, client: int, payload: bytes, leased: tuple[int, int]) -> None:
        """Returns the client's memory of a put that was refused because there is no room for its buffer."""
        self._take(client, leased)
        _, _, what = payloads.parse_put(payload)
        if isinstance(what, int):  # Mode.LOCAL
            self.local.pop(what, None)

    @own_settings
    def fetch(
        self, client: int, value: jax.Array, payload: bytes, leased: tuple[int, int]
    ) -> Sequence[tuple[int, int]]:
        """Writes this host's share of a ready buffer into the client's memory: each distinct part once. Returns which
        pieces of the leased block may have been written: (offset, bytes) of each.
        """
        block = self._take(client, leased)
        mode, key = payloads.parse_fetch(payload)
        if mode is Mode.LOCAL:
            if key in self.local:  # else the reader is gone
                self.local[key] = read_back.whole(value)
            return []
        if mode is Mode.PACKED:
            return read_back.write_packed(value, memoryview(block))
        read_back.write(value, memoryview(block))
        return [(0, leased[1])]

    def refuse_fetch(self, client: int, payload: bytes, leased: tuple[int, int]) -> None:
        """Returns the client's memory of a fetch whose buffer was deleted or has failed."""
        self._take(client, leased)

    def _take(self, client: int, leased: tuple[int, int]) -> Any:
        """A view of what is leased to this host; its end returns the lease."""
        return self._core.client_block(client, *leased) if leased[1] != 0 else b""

    @own_settings
    def read_back_recipe(self, value: jax.Array) -> read_back.Recipe:
        """The recipe by which `_core` reads back arrays like `value`."""
        return read_back.recipe(value, self._quirks)

    @own_settings
    def read_back(self, value: jax.Array, memory: memoryview) -> None:
        """Writes this host's share of a small result into `memory`, where the client reads it."""
        read_back.write(value, memory)
