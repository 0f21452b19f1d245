"""A host's tasks: the steps of checkpoints, done on threads beside the enqueue thread.

A save is a *job*, in four steps. First the client stages each array, in the order: the host keeps the value until the
end of the job, even if the client then drops its handle. Then the client asks the host to write the arrays, then to
commit the job, and then it ends the job. Before it has plain files written (`plain_arrays`), it asks to prepare that.
Each distinct shard is written by one host: the host whose device holds its replica 0. With OCDBT the writes of a job
are one transaction, so a job that is given up leaves only unreferenced bytes. A restore is a job too: its tasks read
the regions of this host's own shards and make the array of them. The tasks of one job share what tensorstore caches.

The client decides how an array is laid out in files, and sends that as tensorstore specs (see
`pathways.api.checkpoints.orbax_handler`). This module knows tensorstore only, and imports it when the first task comes.

JOB-1 (nothing left under way): when a client gives up a job, it asks each host to end the job. A host answers when
nothing of the job is under way there any more. Reason: a job's first error reaches the client while other hosts may
still write. If the client did not wait for the answers, those writes could mix with its next writes to the same place.

MEM-7: staging an array is a task that is answered at once and is over when the host keeps nothing of the array any
more: the job has ended, and no task of it is under way.

OWN-1: `forget` gives up every job of a client that is gone. Its running tasks still end, and nobody is notified.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways import _jaxlib, errors
from pathways.host import plain_arrays
from pathways.host.checkpoint_root import CheckpointRoot
from pathways.host.host_budget import HostBudget
from pathways.host.host_buffers import LocalPlacement
from pathways.host.own_settings import own_settings
from pathways.plan.resharding import slices
from pathways.process.worker_threads import WorkerThreads
from pathways.protocol import payloads

#: Threads that run tasks; tensorstore has threads of its own for reading and writing.
THREADS = 4
#: Host memory, in bytes, that all restores of a host take at once for what is read and not on its device yet.
RESTORE_BYTES = 1 << 30
#: Given-up jobs that a host remembers per client, the newest ones; no task of an older job is still to come.
GIVEN_UP = 1024
_MOST_WORDS = 1500


class _Job:
    """One save or restore of one client on this host."""

    def __init__(self, root: CheckpointRoot) -> None:
        self.root = root
        self.values: dict[int, jax.Array] = {}  # staged, by number
        self.staging: list[int] = []  # the tasks that staged them; all are over at the end
        self.context: Any = None
        self.transaction: Any = None


class Tasks:
    """The tasks of one host. The enqueue thread calls `stage`, `submit` and `read`; any thread may call the rest."""

    def __init__(self, core: Any, host: int) -> None:
        self._core = core
        self._host = host
        self._threads = WorkerThreads("pw-task", THREADS, is_foreign=True)
        self._lock = threading.Lock()
        self._roots: dict[int, CheckpointRoot] = {}  # by client
        self._jobs: dict[tuple[int, int], _Job] = {}  # guarded by _lock, as are all fields below
        #: Jobs that ended while tasks of them could still come, by client, the oldest first.
        self._given_up: dict[int, dict[int, None]] = {}
        self._running: dict[tuple[int, int], int] = {}  # number of tasks under way, by job
        #: Tasks that are over when no task of their job runs: ends of jobs, and the staging of jobs that have ended.
        self._waiting: dict[tuple[int, int], list[int]] = {}
        self._gone: set[int] = set()
        self._budget = HostBudget(RESTORE_BYTES)
        self.bytes_written = 0
        self.bytes_read = 0

    def attach_client(self, client: int, root: str | None) -> None:
        """A client comes, whose checkpoints must lie in `root`; None: anywhere. Any thread."""
        checks = CheckpointRoot(root)  # it looks at the folder, which may take long
        with self._lock:
            self._roots[client] = checks

    # ---- from the enqueue thread

    def stage(self, client: int, task: int, fields: dict[str, Any], value: Any) -> None:
        """Keeps a ready value for its job."""
        job = self._job(client, fields["job"])
        with self._lock:
            if self._jobs.get((client, fields["job"])) is not job:  # its client is gone since
                raise errors.CheckpointError(f"on host {self._host}: the save was given up")
            job.values[fields["number"]] = value
            job.staging.append(task)
        self._core.task_answered(task)

    def submit(self, client: int, task: int, fields: dict[str, Any]) -> None:
        """Prepares a save, writes staged arrays, or commits a job, on a worker thread."""
        job = None if fields["op"] == "commit" else self._job(client, fields["job"])

        def do() -> tuple[None, int]:
            if job is None:
                self._commit(client, fields)
            elif fields["op"] == "prepare":
                self._prepare(job, fields)
            else:
                self._write(job, fields)
            return None, 0

        self._start(client, task, fields["job"], job, do)

    def end(self, client: int, task: int, fields: dict[str, Any]) -> None:
        """Gives a job up. The task is done when nothing of the job is under way (JOB-1)."""
        self.drop(client, fields["job"], True)
        self._end_when_quiet((client, fields["job"]), [task])

    def read(self, client: int, task: int, fields: dict[str, Any], target: LocalPlacement) -> None:
        """Makes an array of stored regions, on a worker thread."""
        job = self._job(client, fields["job"])
        self._start(client, task, fields["job"], job, lambda: (self._read(job, fields, target), target.mask))

    def refuse(self, task: int, problem: BaseException) -> None:
        """Fails a task that cannot be started."""
        self._core.task_done(task, None, 0, self._words(problem))

    def _start(self, client: int, task: int, number: int, job: _Job | None, do: Callable[[], tuple[Any, int]]) -> None:
        key = (client, number)

        @own_settings
        def run() -> None:
            value, mask, error = None, 0, None
            try:
                if self._is_given_up(client, number):
                    raise errors.CheckpointError(f"on host {self._host}: the save or restore was given up")
                value, mask = do()
            except BaseException as problem:
                error = self._words(problem)
            if self._is_given_up(client, number):  # meanwhile; a transaction begun since would keep the arrays alive
                _abort(job)
            with self._lock:
                self._running[key] -= 1
                enders = self._waiting.pop(key, []) if self._running[key] == 0 else []
                if self._running[key] == 0:
                    del self._running[key]
            self._core.task_done(task, value, mask, error)
            for ender in enders:
                self._core.task_done(ender, None, 0, None)

        with self._lock:
            self._running[key] = self._running.get(key, 0) + 1
        self._threads.do(run, client)

    # ---- from any thread

    def drop(self, client: int, job: int, early: bool) -> None:
        """Drops a job of which the client needs nothing more. `early`: tasks of the job may still come."""
        with self._lock:
            if early:
                given_up = self._given_up.setdefault(client, {})
                given_up[job] = None
                if len(given_up) > GIVEN_UP:
                    del given_up[next(iter(given_up))]
            ended = self._jobs.pop((client, job), None)
        self._end(client, job, ended)

    def forget(self, client: int) -> None:
        """Gives up all jobs of a client that is gone (OWN-1)."""
        with self._lock:
            self._gone.add(client)
            self._roots.pop(client, None)
            ended = {key: self._jobs.pop(key) for key in list(self._jobs) if key[0] == client}
            self._given_up.pop(client, None)
        for key, job in ended.items():
            self._end(*key, job)

    def _end(self, client: int, number: int, job: _Job | None) -> None:
        if job is not None:
            _abort(job)
            self._end_when_quiet((client, number), job.staging)

    def _end_when_quiet(self, key: tuple[int, int], tasks: list[int]) -> None:
        """Tasks are over, as soon as no task of their job runs."""
        with self._lock:
            if key in self._running:
                self._waiting.setdefault(key, []).extend(tasks)
                return
        for task in tasks:
            self._core.task_done(task, None, 0, None)

    def stop(self) -> None:
        """Ends each thread when its work is over."""
        self._threads.stop()

    def stats(self) -> dict[str, int]:
        """Statistics, for people to read."""
        return {
            "checkpoint_jobs": len(self._jobs),
            "checkpoint_bytes_written": self.bytes_written,
            "checkpoint_bytes_read": self.bytes_read,
        }

    # ---- the work

    def _job(self, client: int, number: int) -> _Job:
        with self._lock:
            if self._is_given_up(client, number):
                raise errors.CheckpointError(f"on host {self._host}: the save or restore was given up")
            if (job := self._jobs.get((client, number))) is None:
                job = self._jobs[client, number] = _Job(self._roots[client])
            return job

    def _is_given_up(self, client: int, job: int) -> bool:
        return client in self._gone or job in self._given_up.get(client, ())

    def _open_job(self, job: _Job, fields: dict[str, Any]) -> Any:
        """Makes the job's context, if it has none yet, and returns the module tensorstore."""
        ts = _tensorstore(self._host)
        with self._lock:
            if job.context is None:
                job.context = ts.Context(fields["context"])
                if fields.get("atomic"):
                    job.transaction = ts.Transaction(atomic=True)
        return ts

    def _prepare(self, job: _Job, fields: dict[str, Any]) -> None:
        ts = self._open_job(job, fields)
        _check_roots(job, fields)
        for _, _, spec in fields["arrays"]:
            ts.Spec(spec)  # before anything is removed: it says which elements a file cannot have
        plain_arrays.prepare(fields["arrays"], fields["lead"] == self._host, self._host)

    def _write(self, job: _Job, fields: dict[str, Any]) -> None:
        ts = self._open_job(job, fields)
        how = {"context": job.context, "transaction": job.transaction}
        opened: list[tuple[str, Any, jax.Array]] = []
        for number, name, spec in fields["arrays"]:
            value = job.values.pop(number, None)
            if value is None:
                raise self._lost(f"writing {name!r}")
            spec = json.loads(json.dumps(spec).replace(payloads.HOST, str(self._host)))
            for root in _roots(job, fields):
                root.check(name, spec)
            spec = ts.Spec(spec)
            opened.append((name, spec, value))
        # One host writes the metadata: how the array is laid out. Of plain files they come last.
        if fields["lead"] == self._host and not fields.get("plain", False):
            _all_done("creating", [(n, s, ts.open(s, create=True, open=True, **how)) for n, s, _ in opened], self._host)
        writes = []
        for name, spec, value in opened:
            shards = [shard for shard in value.addressable_shards if shard.replica_id == 0]
            if not shards:
                continue
            store = ts.open(spec, open=True, assume_metadata=True, **how).result()
            for shard in shards:
                data, index = np.asarray(shard.data), shard.index
                if _is_in_parts(store.dtype.numpy_dtype, data.dtype):
                    data, index = _jaxlib.from_physical(data, store.dtype.numpy_dtype), index[:-1]
                writes.append((name, spec, store[index].write(data, can_reference_source_data_indefinitely=True)))
                with self._lock:
                    self.bytes_written += data.nbytes
        _all_done("writing", writes, self._host)

    def _commit(self, client: int, fields: dict[str, Any]) -> None:
        with self._lock:
            job = self._jobs.get((client, fields["job"]))
            if job is None:  # fail: otherwise the checkpoint would be finished without this host's part
                raise self._lost(f"committing {fields['name']!r}")
            # The client asks each group of hosts that has a part, and this host may be in several. Commit once.
            transaction, job.transaction = job.transaction, None
        if fields.get("arrays") and fields["lead"] == self._host:
            ts = self._open_job(job, fields)
            _check_roots(job, fields)
            plain_arrays.check_shards(fields["arrays"], self._host)
            created = [(name, spec, ts.open(ts.Spec(spec), create=True)) for _, name, spec in fields["arrays"]]
            _all_done("writing", created, self._host)
        if transaction is not None:
            _all_done("committing", [(fields["name"], None, transaction.commit_async())], self._host)

    def _read(self, job: _Job, fields: dict[str, Any], target: LocalPlacement) -> jax.Array:
        ts = self._open_job(job, fields)
        name, spec = fields["name"], fields.get("spec")
        if spec is None:
            spec = plain_arrays.find(fields["folder"], name, _roots(job, fields))
        job.root.check(name, spec)
        opening = ts.open(ts.Spec(spec), open=True, context=job.context)
        (store,) = _all_done("opening", [(name, spec, opening)], self._host)
        dtype = payloads.dtype_of(fields["dtype"])
        is_complex = _is_in_parts(dtype, target.type.dtype)
        shape = target.type.shape[:-1] if is_complex else target.type.shape
        if fields.get("is_exact") and store.shape != shape:
            raise errors.CheckpointError(
                f"reading {name!r}{_path(spec)}: it is stored with shape {store.shape}, not {shape}"
            )
        regions = {cell: target.placed.region(cell) for cell in target.cells}
        if is_complex:  # stored without our last dimension (real, imaginary)
            regions = {cell: region[:-1] for cell, region in regions.items()}
        widest = max(store.dtype.numpy_dtype.itemsize, dtype.itemsize)

        def transient(cell: Any) -> int:  # what is read, and a converted copy of it
            return 2 * widest * math.prod(stop - start for start, stop in regions[cell])

        arrays: dict[jax.Device, jax.Array] = {}
        for cells, nbytes in self._budget.batches(list(regions), transient):
            with self._budget.take(nbytes):
                reads = []
                for cell in cells:
                    there = tuple(  # the stored part; the rest becomes zeros, which the client has allowed
                        (min(start, size), min(stop, size))
                        for (start, stop), size in zip(regions[cell], store.shape, strict=True)
                    )
                    reads.append((name, spec, store[slices(there)].read()))
                found = _all_done("reading", reads, self._host)
                for cell, data in zip(cells, found, strict=True):
                    part = self._converted(data, tuple(stop - start for start, stop in regions[cell]), dtype)
                    part = _jaxlib.to_physical(part, dtype) if is_complex else part
                    for device, at in zip(target.devices, target.cells, strict=True):
                        if at == cell:
                            arrays[device] = jax.device_put(part, device)
                jax.block_until_ready(list(arrays.values()))
                del reads, found, part  # from here on only the devices have it
        return jax.make_array_from_single_device_arrays(
            target.type.shape, target.sharding, [arrays[device] for device in target.devices]
        )

    def _converted(self, data: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A part that was read, as a device holds it: padded with zeros to `shape`, and in C order."""
        with self._lock:
            self.bytes_read += data.nbytes
        if data.shape != shape:
            whole = np.zeros(shape, data.dtype)
            whole[tuple(slice(0, size) for size in data.shape)] = data
            data = whole
        return np.ascontiguousarray(data.astype(dtype, copy=False)).reshape(shape)

    def _lost(self, doing: str) -> errors.PathwaysError:
        """The error for a job that this process does not know: its predecessor was lost, and the job with it."""
        return errors.HostLostError(
            f"{doing}: host {self._host} was started anew with its island after the save had begun; what it had is gone"
        )

    def _words(self, problem: BaseException) -> str:
        if isinstance(problem, errors.PathwaysError):
            return f"{type(problem).__name__}: {problem}"
        return f"CheckpointError: on host {self._host}: {type(problem).__name__}: {problem}"


def _all_done(doing: str, work: Sequence[tuple[str, Any, Any]], host: int) -> list[Any]:
    """Waits for each tensorstore future of (name of the array, spec, future); then raises the first error."""
    first: BaseException | None = None
    out: list[Any] = []
    for name, spec, future in work:
        try:
            out.append(future.result())
        except BaseException as problem:
            if first is None:
                first = errors.CheckpointError(
                    f"{doing} {name!r}{_path(spec)} failed on host {host}: {str(problem)[:_MOST_WORDS]}"
                )
    if first is not None:
        try:
            raise first
        finally:
            first = None  # the error refers to this frame and so to the arrays: break the cycle, to free them at once
    return out


def _roots(job: _Job, fields: dict[str, Any]) -> list[CheckpointRoot]:
    """Where what a step asks for must lie: in the root of the client, and in that which the client names itself."""
    return [job.root, CheckpointRoot(fields.get("root"))]


def _check_roots(job: _Job, fields: dict[str, Any]) -> None:
    for _, name, spec in fields["arrays"]:
        for root in _roots(job, fields):
            root.check(name, spec)


def _is_in_parts(stored: np.dtype, held: np.dtype) -> bool:
    """Whether devices hold complex numbers as a last dimension (real, imaginary)."""
    return _jaxlib.is_complex(stored) and not _jaxlib.is_complex(held)


def _path(spec: Any) -> str:
    """ " at /the/path", if the spec has a path; else ""."""
    found = spec if isinstance(spec, dict) or spec is None else spec.to_json()
    while isinstance(found, dict):
        if "path" in found and found.get("driver") not in ("ocdbt",):
            return f" at {found['path']}"
        found = found.get("kvstore", found.get("base"))
    return f" at {found}" if isinstance(found, str) else ""


def _abort(job: _Job | None) -> None:
    if job is not None:
        job.values.clear()
        if job.transaction is not None:
            with contextlib.suppress(Exception):  # committed, or failed already
                job.transaction.abort()


def _tensorstore(host: int) -> Any:
    try:
        import tensorstore
    except ImportError as problem:
        raise errors.CheckpointError(
            f"host {host} cannot read or write checkpoints: {problem}; install 'pathways-jax[checkpoint]' there"
        ) from problem
    return tensorstore
