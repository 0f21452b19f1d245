"""Arrays of the door in files: jobs of the hosts that hold them, as a client of the cluster asks for them.

The session's thread stages what is written, in the cluster's order, and asks for what is read. So whatever the program
does next with its arrays comes after. Threads of their own then go from step to step, and tell a token (JOB-1, SAVE-1).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pathways import errors
from pathways.api.checkpoints.jobs import Job, settled
from pathways.protocol import payloads
from pathways.proxy.behind import Buffer, Done, Shard, Stored
from pathways.proxy.cluster_buffers import form_of_kind, whole
from pathways.proxy.cluster_kinds import Kind, Places, tiled
from pathways.proxy.waiter import LOSS_AGE_S, Waiter, failure_of

#: So many saves and restores of a program go on at once.
_THREADS = 4


class Token:
    """A buffer without values, which is ready when a job is over. Any thread may use it."""

    devices: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype = None
    memory_kind = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: list[BaseException | None] = []
        self._waiting: list[Done] = []

    def settle(self, error: BaseException | None) -> None:
        """The job is over; only the first call counts."""
        with self._lock:
            if self._outcome:
                return
            self._outcome.append(error)
            waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(error)

    def when_ready(self, then: Done) -> None:
        """See `Buffer`."""
        with self._lock:
            if not self._outcome:
                self._waiting.append(then)
                return
        then(self._outcome[0])

    def delete(self) -> None:
        """See `Buffer`."""


class Files:
    """What a program of the door saves and restores."""

    def __init__(
        self, places: Places, waiter: Waiter, shown: Callable[[Sequence[Shard], Kind], Any], root: str | None
    ) -> None:
        """`shown` gives the array of a kind that shards are. `root`: the folder in which all lies; None: anywhere."""
        self._places, self._waiter, self._shown = places, waiter, shown
        self._root = root
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "pathways-door-files")

    def save(self, arrays: Sequence[Stored], shards: Sequence[Sequence[Shard]], timeout_s: float) -> Token:
        """See `pathways.proxy.behind.Devices`."""
        job = self._job(arrays)
        values = []
        try:
            for number, (stored, parts) in enumerate(zip(arrays, shards, strict=True)):
                values.append(self._shown(parts, self._kind(stored)))
                job.stage(values[-1], number)
        except BaseException:
            job.end(early=True)
            raise
        entries = [
            (value, [number, stored.name, _spec(stored)])
            for number, (stored, value) in enumerate(zip(arrays, values, strict=True))
        ]
        return self._begin(job, self._write(job, entries), timeout_s, f"the save of {_named(arrays)}")

    async def _write(self, job: Job, entries: Sequence[tuple[Any, list[Any]]]) -> None:
        await job.settle()
        for step in ("prepare", "write", "commit"):
            job.ask_for(step, entries, context={}, plain=True, root=self._root, name=entries[0][1][1])
            await job.settle()

    def restore(self, arrays: Sequence[Stored], timeout_s: float) -> tuple[list[Buffer], Token]:
        """See `pathways.proxy.behind.Devices`."""
        job = self._job(arrays)
        values = []
        try:
            for stored in arrays:
                values.append(self._read(job, stored))
        except BaseException:
            job.end(early=True)
            raise
        made = [
            whole(value, form_of_kind(self._kind(stored)), self._waiter)
            for value, stored in zip(values, arrays, strict=True)
        ]
        return [*made], self._begin(job, self._all_read(job, values), timeout_s, f"the read of {_named(arrays)}")

    def _read(self, job: Job, stored: Stored) -> Any:
        """The array that the hosts make of its files."""
        layout, session = self._places.layout(self._kind(stored)), self._places.session
        session.native.enter()
        try:
            placement = session.placement(layout).number
            array = session.native.new_array(layout)
            job.join(array)
            payload = payloads.task(
                "read",
                job.number,
                name=stored.name,
                folder=stored.folder,
                root=self._root,
                is_exact=True,
                context={},
                placement=placement,
                dtype=stored.cut.dtype.name,
            )
            session.native.make(array, payload)
        finally:
            session.native.leave()
        return array

    async def _all_read(self, job: Job, arrays: Sequence[Any]) -> None:
        failed = [
            failure_of(array)
            for array in arrays
            if await settled(array.client, array.raw_handle, look=job.look) == "failed"
        ]
        if failed:
            raise failed[0]

    def close(self) -> None:
        """The program is gone; what is under way ends with the session."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _kind(self, stored: Stored) -> Kind:
        return tiled(stored.cut.shape, stored.cut.dtype, stored.devices, stored.cut.tiling)

    def _job(self, arrays: Sequence[Stored]) -> Job:
        """A job on the devices of these arrays. Raises `HostLostError` if some are on an island that is down."""
        devices = tuple({device: None for stored in arrays for device in stored.devices})
        islands = self._places.islands
        islands.check(devices)

        def look() -> None:
            if (loss := islands.loss_of(devices, LOSS_AGE_S)) is not None:
                raise loss

        return Job(look)

    def _begin(self, job: Job, work: Coroutine[Any, Any, None], timeout_s: float, what: str) -> Token:
        token = Token()

        async def go() -> None:
            doing = asyncio.ensure_future(work)
            done, _ = await asyncio.wait([doing], timeout=timeout_s)
            if not done:
                token.settle(errors.DeadlineExceededError(f"{what} has not ended after {timeout_s:g} seconds"))
                doing.cancel()
            try:
                await doing
            except BaseException as error:
                await job.give_up()
                token.settle(error)
            else:
                job.end(early=False)
                token.settle(None)

        def run() -> None:
            try:
                asyncio.run(go())
            except BaseException as error:  # the session is over
                token.settle(error)

        self._threads.submit(run)
        return token


def _named(arrays: Sequence[Stored]) -> str:
    return f"{arrays[0].name!r} and {len(arrays) - 1} more arrays in {arrays[0].folder}"


def _spec(stored: Stored) -> dict[str, Any]:
    """tensorstore's, as orbax has it without OCDBT: a file for each distinct shard."""
    cut = stored.cut
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{stored.folder}/{stored.name}/"},
        "dtype": cut.dtype.name,
        "metadata": {
            "shape": list(cut.shape),
            "chunks": [size // parts for size, parts in zip(cut.shape, cut.tiling.grid, strict=True)],
            "compressor": {"id": "zstd"},
        },
        "store_data_equal_to_fill_value": True,
    }
