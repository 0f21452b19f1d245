"""Who holds a device's memory: the table that a stock client prints below an error about exhausted memory."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

from pathways._jaxlib.proxy_messages import message
from pathways.proxy.arrays import Array

#: Rows at most, the largest first.
ROWS = 40


def object_store_dump(arrays: Iterable[Array]) -> bytes:
    """A serialized ObjectStoreDumpProto: what the arrays of a client hold on the device where they hold most, by the
    lines that made them and by what made them.
    """
    bytes_of: collections.Counter[tuple[int, int, str]] = collections.Counter()  # device, context, creator
    count_of: collections.Counter[tuple[int, int, str]] = collections.Counter()
    per_device: collections.Counter[int] = collections.Counter()
    seen = set()
    for array in arrays:
        for held, number in array.parts:
            if (held, number) in seen or number in held.gone:
                continue
            seen.add((held, number))
            device = held.buffer.devices[number]
            row = (device, held.context.number if held.context else 0, held.creator)
            bytes_of[row] += held.shard_bytes
            count_of[row] += 1
            per_device[device] += held.shard_bytes
    dump = message("ifrt_proxy_contrib_pathways.ObjectStoreDumpProto")(dump_timestamp_ns=time.time_ns())
    dump.dump.SetInParent()
    fullest = max(per_device, key=lambda device: per_device[device], default=None)
    dump.device = "none" if fullest is None else str(fullest)
    by_context: dict[int, list[tuple[str, int, int]]] = {}
    for (device, context, creator), size in bytes_of.most_common():
        if device == fullest and sum(map(len, by_context.values())) < ROWS:
            by_context.setdefault(context, []).append((creator, count_of[device, context, creator], size))
    for context, rows in by_context.items():
        of_context = dump.dump.per_error_context.add(error_context_id=context)
        for creator, count, size in rows:
            of_context.per_creator.add(creator=creator, ready_obj_count=count, ready_total_size=size)
    return dump.SerializeToString()
