# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The hot path between Python and the native core: submit, futures, host buffers, and a host's enqueue loop.

The client's side is here: `Layout` (an array's shape, dtype and hosts), `Buffer` (a handle with an owner; `pw.Array`
derives from it), `Client`, `Call` (one compiled signature of a program), and `BlockView` (a block of shared memory as
a Python buffer). Two files are included. `_host.pxi` is the host's side: `Host`, and the functions that the executor
calls. `_network_transfer.pxi` is the transfers between machines. Segments come from `pathways._native` by address.
"""
cimport cython
from cpython.buffer cimport PyBUF_WRITE, PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_Fetch, PyErr_NormalizeException, PyErr_Restore, PyErr_SetInterrupt
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy


cdef extern from "Python.h":
    PyObject* PyObject_Vectorcall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames)
    PyObject* PyObject_CallMethodNoArgs(PyObject* self, PyObject* name)
    PyObject* PyTuple_GET_ITEM_ "PyTuple_GET_ITEM"(PyObject*, Py_ssize_t)
    PyObject* PyList_GET_ITEM_ "PyList_GET_ITEM"(PyObject*, Py_ssize_t)
    int PyTuple_CheckExact_ "PyTuple_CheckExact"(PyObject*)
    int PyList_CheckExact_ "PyList_CheckExact"(PyObject*)
    PyObject* Py_TYPE_ "(PyObject*)Py_TYPE"(PyObject*)
    void Py_XDECREF_ "Py_XDECREF"(PyObject*)
    void Py_INCREF_ "Py_INCREF"(PyObject*)
    void Py_DECREF_ "Py_DECREF"(PyObject*)
    void PyErr_Clear()
    PyObject* Py_True_ "Py_True"
    unsigned long PyThread_get_thread_ident()
    ctypedef struct PyTypeObject:
        PyObject* (*tp_new)(PyTypeObject*, PyObject*, PyObject*) except NULL

from time import sleep as _sleep

cdef object _is_ready = "is_ready"
cdef object _block_until_ready = "block_until_ready"
cdef object _is_deleted = "is_deleted"
cdef tuple _nothing = ()
cdef uint64_t _donating = 0  # number of calls so far that donate something
cdef int64_t _borrowed = 0   # number of leases that this process holds of blocks in clients' memory

# The longest native wait before Python checks for signals and for a cluster that is gone.
cdef int64_t _LOOK_NS = 50_000_000
# How many times a host polls its devices, with a yield of the core after each poll, before a watcher sleeps on them.
cdef uint32_t _POLL_LIMIT = 8
# The longest sleep of a host while its devices can take no more launches.
cdef int64_t _THROTTLED_NS = 500_000
# From this number of runs under way on, a client is taken to have a stream of runs.
cdef uint64_t _STREAM_RUNS = 8
# A client that has waited this long sends the releases that it holds back.
cdef int64_t _BRIEF_NS = 1_000_000
# A host's statistics tell for this many of its live runs, the oldest, what they wait for.
cdef size_t _OLDEST_RUNS = 16
# After this many runs without a read of a result, the result's value no longer comes with its completion.
cdef uint32_t _UNREAD_RUNS = 64

PENDING, READY, FAILED, RELEASED = "pending", "ready", "failed", "released"


# ------------------------------------------------------------------------------------------------------ client side

cdef class Layout:
    """Shape, dtype and placement of an array on one client's cluster. Interned: equal layouts are one object."""
    cdef readonly tuple shape
    cdef readonly object dtype
    cdef readonly bint weak_type
    cdef readonly object slice        # pathways.api.Slice
    cdef readonly tuple spec          # per dimension: the axes that shard it
    cdef readonly uint32_t group      # number of the group of hosts that hold it; changes when the slice moves
    cdef readonly tuple hosts         # the hosts of that group
    cdef readonly uint32_t parts      # the number of those hosts
    cdef readonly uint64_t nbytes
    cdef public object cache          # for the api's use
    cdef readonly uint32_t space_set  # the devices that hold it, for the ledger of memory
    cdef readonly uint64_t space_bytes  # its bytes on each of these devices

    def __init__(self, tuple shape, dtype, bint weak_type, slice, tuple spec, group, tuple hosts not None, nbytes,
                 space_set, space_bytes):
        self.shape = shape
        self.dtype = dtype
        self.weak_type = weak_type
        self.slice = slice
        self.spec = spec
        self.group = group
        self.hosts = hosts
        self.parts = len(hosts)
        self.nbytes = nbytes
        self.space_set = space_set
        self.space_bytes = space_bytes
        self.cache = None

    def move(self, uint32_t group, tuple hosts not None, uint32_t space_set):
        """From now on other devices hold the arrays of this layout. Call it only while `Client.moving` (MOVE-1)."""
        self.group = group
        self.hosts = hosts
        self.parts = len(hosts)
        self.space_set = space_set


@cython.no_gc
cdef class Buffer:
    """The owner of a handle: releases the handle when Python frees the object (OWN-1). FUT-3: a deleted handle is never
    read as another buffer's.
    """
    cdef uint64_t handle
    cdef readonly Layout layout
    cdef readonly Client client
    cdef bint deleted
    cdef public object cached         # the fetched value, or the fetch under way
    cdef readonly bint shared         # MEM-4: something may still read it outside of the order, or shares its memory
    cdef readonly uint64_t run        # tag of the run that makes it; 0: no run
    cdef Call maker                   # the call that made it
    cdef uint32_t place               # which result of that call it is
    cdef readonly bint is_inline     # READ-1: its value comes with its completion
    cdef readonly bint timed          # the run that makes it has a deadline
    cdef uint64_t seen                # number (see `_donating`) of the last donating call that has it as an argument

    def __dealloc__(self):
        # Sends nothing itself: the release command is batched, and sent with later traffic.
        if self.client is not None and not self.deleted and self.handle != 0:
            self.client.release_array(self)

    @property
    def raw_handle(self):
        return self.handle

    def is_deleted(self):
        """True after `delete()` or donation."""
        return self.deleted

    def _forget(self):
        """Releases the handle now."""
        if not self.deleted:
            self.deleted = True
            self.cached = None
            self.client.release_array(self)

    def _learn(self):
        """Call it when the array is read: from now on the values of this result come with their completions."""
        if self.maker is not None:
            self.maker.learn(self.place)

    def _read(self):
        """READ-1: waits for an inline result and returns its bytes in C order; None when it failed or was deleted."""
        cdef Handle handle
        handle.raw = self.handle
        if self.client.closed:
            self.client.check_alive()
        if self.client.core.get().poll(handle) == FutureState.kPending:
            self.client.wait_raw(self.handle)
        # Python's lock is held from this poll to the copy, so no thread releases the handle in between.
        if self.deleted or self.client.core.get().poll(handle) != FutureState.kReady:
            return None
        return PyBytes_FromStringAndSize(<const char*>self.client.core.get().read(handle, self.layout.nbytes),
                                         self.layout.nbytes)

    def _pin(self):
        """From now on something reads it outside of the order: a call that donates it must pass a copy (MEM-4)."""
        self.shared = True


cdef class Deadline:
    """How long runs of one program may take, and the error text of those that take longer (DEAD-1)."""
    cdef int64_t nanos
    cdef ErrorText text

    def __init__(self, double seconds, str text not None):
        self.nanos = <int64_t>min(seconds * 1e9, 1e18)  # 1e18 ns (31 years): as good as no limit
        self.text = make_error_text(text.encode())


@cython.no_gc_clear  # its memory must outlive its core, so the garbage collector must not clear members first
cdef class Client:
    """The native part of a client. Embedded, the client's own threads also run the whole cluster."""
    cdef unique_ptr[CppClient] core
    cdef object keep                   # segments
    cdef object array_type
    cdef readonly bint closed
    cdef readonly str orphaned         # in a forked child: why the parent's arrays cannot be used here; else None
    cdef bint gated                    # closed, or moving: a thread must call `pass_gate` before it sends
    cdef readonly bint moving          # a thread moves a slice; no other thread sends anything meanwhile (MOVE-1)
    cdef unsigned long mover           # the identifier of that thread
    cdef int inside                    # number of threads between `enter` and `leave`
    cdef PyObject** live               # by index of the handle: the array that owns it (a borrowed reference)
    cdef list held                     # (handle, layout) of arrays released while a slice moved
    cdef Host host                     # embedded: the host that this client's threads run; else None
    cdef CppController* controller     # embedded: the controller
    cdef bint pumping                  # embedded: a thread is inside a step
    cdef object liveness               # callable: raises when the controller process is gone
    cdef readonly uint64_t dispatches

    def __init__(self, uint32_t client_id, client_segment, status_segment, bell_segment, array_type, liveness=None,
                 uint32_t window=1024, uint64_t release_bytes=1 << 20):
        cdef ClientOptions options
        options.id = client_id
        options.window = window
        options.release_bytes = release_bytes
        client_segment.hide_from_children()
        status_segment.hide_from_children()
        bell_segment.hide_from_children()
        self.keep = (client_segment, status_segment, bell_segment)
        self.core.reset(new CppClient(options, <ClientBlock*><size_t>client_segment.client_block,
                                      <const StatusBlock*><size_t>status_segment.status_block,
                                      <DoorbellWord*><size_t>bell_segment.bell))
        self.live = <PyObject**>calloc(self.core.get().futures().capacity(), sizeof(PyObject*))
        if self.live == NULL:
            raise MemoryError("no memory for the table of arrays")
        self.held = []
        self.array_type = array_type
        self.liveness = liveness
        self.host = None
        self.controller = NULL

    def __dealloc__(self):
        free(self.live)

    def embed(self, controller, Host host not None):
        """From now on this client's threads run `controller` and `host` themselves."""
        self.keep = self.keep + (controller,)
        self.controller = <CppController*><size_t>controller.address
        self.host = host

    def close(self):
        """From now on sends nothing. Handles released from now on are dropped without a command."""
        self.closed = self.gated = True
        if self.host is not None:
            _interrupts.leave()

    def abandon(self, str reason not None, object owner):
        """In a forked child: closes the client; every use of it raises `reason` (FORK-1). The client and its owner are
        never freed, because their threads exist only in the parent: a join of them would wait for ever.
        """
        Py_INCREF(self)
        Py_INCREF(owner)
        self.close()
        self.orphaned = reason
        self.host = None

    cdef inline void release_array(self, Buffer array) noexcept:
        cdef Handle handle
        handle.raw = array.handle
        self.live[handle.index()] = NULL
        if self.gated:
            if not self.closed:
                self.held.append((array.handle, array.layout))
            return
        try:
            self.core.get().release(handle, array.layout.group, array.layout.nbytes)
        except Exception:  # a release that cannot be sent now is sent with the next one
            pass

    # ---- moving a slice

    cdef pass_gate(self):
        """Waits while another thread moves a slice; raises when this client is closed."""
        if self.closed:
            self.check_alive()
        while self.moving and self.mover != PyThread_get_thread_ident():
            _sleep(0.001)

    def enter(self):
        """From here until `leave` no slice moves. Use it around code that reads a layout and then sends a command that
        depends on it.
        """
        if self.gated:
            self.pass_gate()
        self.inside += 1

    def leave(self):
        self.inside -= 1

    def begin_move(self):
        """From now on until `end_move` only this thread sends. The caller's lock must admit one thread at a time."""
        self.mover = PyThread_get_thread_ident()
        self.moving = self.gated = True
        while self.inside != 0:
            _sleep(0.001)

    def end_move(self):
        """Lets the other threads send again. The releases held back meanwhile go to the layouts' present hosts."""
        cdef Handle handle
        cdef Layout layout
        self.moving = False
        self.gated = self.closed
        held, self.held = self.held, []
        if self.closed:
            return
        for raw, layout in held:
            handle.raw = raw
            self.core.get().release(handle, layout.group, layout.nbytes)

    def arrays_on(self, slice):
        """Every live array on a slice: those that are neither deleted nor freed."""
        cdef uint32_t i
        cdef list found = []
        for i in range(self.core.get().futures().capacity()):
            if self.live[i] != NULL and (<Buffer><object>self.live[i]).layout.slice is slice:
                found.append(<object>self.live[i])
        return found

    cpdef pump(self):
        """Embedded: runs on this thread all work that is ready. Returns True when something was done."""
        cdef uint32_t done = 0, round_done
        if self.host is None or self.pumping:
            return False
        cdef bint holds = _interrupts.hold()
        self.pumping = True
        try:
            while True:
                round_done = self.controller.step()
                round_done += self.host.core.get().step()
                done += round_done
                if round_done == 0:
                    return done != 0
        finally:
            self.pumping = False
            if holds:
                _interrupts.let_go()

    cdef make_room(self):
        """Waits for credit, ring space or futures; raises when the cluster is gone."""
        self.check_alive()
        self.core.get().flush()
        if self.host is not None:
            if not self.pump():
                self.host.wait_oldest(self, 0.001)
            PyErr_CheckSignals()
            return
        with nogil:
            self.core.get().wait_room(nanoseconds(_LOOK_NS), SpinPolicy.sleep_at_once())
        self.core.get().poll_inbox()
        PyErr_CheckSignals()

    cpdef check_alive(self):
        """Raises when the client is closed, the failure reason when the cluster failed, or what the liveness check
        raises.
        """
        if self.closed:
            from pathways.errors import ClusterClosedError
            raise ClusterClosedError(self.orphaned or "the cluster of this array or program was closed")
        cdef ClusterStatus status = self.core.get().cluster_status()
        if status != ClusterStatus.kUp:
            from pathways.errors import raise_cluster_failure
            raise_cluster_failure(self.core.get().cluster_failure().decode("utf-8", "replace"),
                                  status == ClusterStatus.kClosed)
        if self.liveness is not None:
            self.liveness()

    def state(self, Buffer buffer not None):
        """"pending", "ready", "failed" or "released"; never blocks."""
        cdef Handle handle
        if self.orphaned is not None:
            self.check_alive()
        handle.raw = buffer.handle
        return self.state_of(handle)

    cdef object state_of(self, Handle handle):
        self.core.get().poll_inbox()
        cdef FutureState state = self.core.get().poll(handle)
        if state == FutureState.kPending:
            return PENDING
        return READY if state == FutureState.kReady else (FAILED if state == FutureState.kFailed else RELEASED)

    cpdef str wait_raw(self, uint64_t raw, double timeout=-1.0):
        """Waits for a future. Returns "ready", "failed" or "released"; "pending" when `timeout` seconds are over.

        A negative timeout sets no limit. Ctrl-C ends only the wait. Raises when the cluster is gone.
        """
        cdef Handle handle
        cdef FutureState state
        cdef int64_t end = 0 if timeout < 0 else monotonic_ns() + <int64_t>(min(timeout, 1e9) * 1e9)
        cdef int64_t piece, left
        if self.orphaned is not None:
            self.check_alive()
        handle.raw = raw
        # Few runs under way: the caller waits for a step's result and wants it soon. So this thread polls for long, and
        # holds the releases back, because they would be handled before the result. With a stream of runs under way, the
        # caller only lets the hosts catch up. So this thread sleeps early, to leave the cores to the hosts.
        cdef bint is_brief = self.host is None and self.core.get().in_flight() < _STREAM_RUNS
        if self.host is None and not is_brief:
            self.core.get().flush()
        while True:
            self.core.get().poll_inbox()
            state = self.core.get().poll(handle)
            if state == FutureState.kReady:
                return READY
            if state == FutureState.kFailed:
                return FAILED
            if state == FutureState.kFree:
                return RELEASED
            piece = _BRIEF_NS if is_brief else _LOOK_NS
            if end != 0:  # a wait may return early, because other futures ring the doorbell too
                left = end - monotonic_ns()
                if left <= 0:
                    return PENDING
                piece = min(piece, left)
            if self.host is not None:
                self.check_alive()
                if not self.pump():
                    self.host.wait_oldest(self, piece * 1e-9)
            else:
                with nogil:
                    self.core.get().wait(handle, nanoseconds(piece),
                                         SpinPolicy.await_answer() if is_brief else SpinPolicy.adaptive())
                if is_brief and self.core.get().poll(handle) == FutureState.kPending:
                    is_brief = False
                    self.core.get().flush()  # else the releases would be held back during the whole wait
                if self.core.get().poll(handle) == FutureState.kPending:
                    self.core.get().poll_inbox()
                    if self.core.get().poll(handle) == FutureState.kPending:
                        self.check_alive()
            PyErr_CheckSignals()

    def wait(self, Buffer buffer not None, double timeout=-1.0):
        """See `wait_raw`."""
        return self.wait_raw(buffer.handle, timeout)

    def error_text(self, uint64_t raw):
        """The error text of a failed future."""
        cdef Handle handle
        handle.raw = raw
        self.core.get().poll_inbox()  # its deadline may have passed since the last poll (DEAD-1)
        return self.core.get().error_of(handle).decode("utf-8", "replace")

    def new_array(self, Layout layout not None):
        """A new pending array. The hosts of its layout will complete its parts."""
        cdef Handle handle = self.new_future(layout.parts)
        return self.wrap(handle.raw, layout)

    cdef object wrap(self, uint64_t raw, Layout layout):
        cdef PyTypeObject* kind = <PyTypeObject*>self.array_type
        cdef Buffer array = <Buffer><object>kind.tp_new(kind, <PyObject*>_nothing, NULL)
        Py_DECREF(array)  # tp_new's reference; the cast took its own
        array.handle = raw
        array.layout = layout
        array.client = self
        cdef Handle handle
        handle.raw = raw
        self.live[handle.index()] = <PyObject*>array
        return array

    cdef Handle new_future(self, uint32_t parts) except *:
        cdef Handle handle
        while self.core.get().allocate(parts, &handle) != Status.kOk:
            self.make_room()
        return handle

    def new_token(self, uint32_t parts):
        """A new future for a fetch. Release it with `forget_token`."""
        return self.new_future(parts).raw

    def forget_token(self, uint64_t raw):
        cdef Handle handle
        handle.raw = raw
        if not self.closed:
            self.core.get().forget(handle)

    def put(self, Buffer array not None, bytes payload not None, BlockView block=None):
        """Sends the bytes of a new array as a command, in the order. `block` is the block that the payload names; it is
        leased to each host of the array.
        """
        self.send_command(CommandKind.kPut, array.layout.group, array.handle, 0, payload, array.layout.space_set,
                          array.layout.space_bytes, _lease(block, array.layout))

    def fetch(self, Buffer array not None, uint64_t token, bytes payload not None, BlockView block=None):
        """Has the hosts write an array into `block`, where the payload says, and then complete `token`. The block is
        leased to each host of the array.
        """
        self.send_command(CommandKind.kFetch, array.layout.group, array.handle, token, payload, NO_SPACE_SET, 0,
                          _lease(block, array.layout))

    def make(self, Buffer array not None, bytes payload not None):
        """Has the hosts of a new array make it by a task, in the order."""
        self.send_command(CommandKind.kTask, array.layout.group, array.handle, 0, payload, array.layout.space_set,
                          array.layout.space_bytes, Lease())

    def command(self, int kind, uint32_t group, uint64_t raw, uint64_t token, bytes payload not None):
        """Sends one command in the order. `kind`: see `pathways.protocol.payloads`."""
        self.send_command(<CommandKind>kind, group, raw, token, payload, NO_SPACE_SET, 0, Lease())

    cdef send_command(self, CommandKind kind, uint32_t group, uint64_t raw, uint64_t token, bytes payload,
                      uint32_t space_set, uint64_t space_bytes, Lease lease):
        cdef Handle handle, answer
        cdef const char* data = payload
        cdef Status status
        handle.raw = raw
        answer.raw = token
        if self.closed:
            self.check_alive()
        while True:
            status = self.core.get().command(kind, group, handle, answer,
                                             const_byte_span(<const byte*>data, len(payload)), space_set, space_bytes,
                                             lease)
            if status == Status.kOk:
                break
            if status == Status.kInvalid:
                raise ValueError(f"a command of {len(payload)} bytes does not fit the ring to the controller")
            self.make_room()
        if self.host is not None:
            self.pump()

    def flush(self):
        """Sends the releases held back."""
        self.core.get().flush()
        if self.host is not None:
            self.pump()

    def cancel(self, uint64_t tag, list arrays, str reason):
        """Fails `arrays`, the results of run `tag`, with `reason`. Drops the run unless it was granted to its hosts."""
        cdef vector[uint64_t] raws
        for array in arrays:
            raws.push_back((<Buffer>array).handle)
        cdef string text = reason.encode()
        while self.core.get().cancel(tag, const_u64_span(raws.data(), raws.size()), text) == Status.kFull:
            self.make_room()
        if self.host is not None:
            self.pump()

    def pause(self, double seconds):
        """Waits up to about `seconds` until something happens. Embedded, it runs what is ready meanwhile."""
        cdef int64_t nanos = <int64_t>(seconds * 1e9)
        if self.host is not None:
            if not self.pump():
                self.host.wait_oldest(self, seconds)
        else:
            with nogil:
                self.core.get().wait_room(nanoseconds(nanos), SpinPolicy.sleep_at_once())
            self.core.get().poll_inbox()
        PyErr_CheckSignals()

    @property
    def last_tag(self):
        return self.core.get().last_tag()

    @property
    def in_flight(self):
        return self.core.get().in_flight()

    @property
    def futures_in_use(self):
        return self.core.get().futures().in_use()

    # ---- host buffers

    def allocate(self, size_t nbytes):
        """A block of the client's shared arena, or None when the arena has no room now."""
        cdef uint64_t offset
        cdef Arena* arena = self.core.get().arena()
        if arena == NULL:
            return None
        self.core.get().settle_forks()
        if arena.allocate(nbytes, &offset) != Status.kOk:
            self.core.get().poll_inbox()  # this reclaims the leases of lost hosts
            if arena.allocate(nbytes, &offset) != Status.kOk:
                return None
        return BlockView.make(arena, offset, nbytes, self.keep)

    def arena_in_use(self):
        cdef Arena* arena = self.core.get().arena()
        return 0 if arena == NULL else arena.bytes_in_use()

    def trim_arena(self):
        """Gives the pages of free blocks back to the system, and returns how many bytes they span. Any thread."""
        cdef Arena* arena = self.core.get().arena()
        cdef uint64_t at = 0, done = 0
        if arena == NULL:
            return 0
        while not self.closed:
            with nogil:
                at = arena.trim(at, &done)
            if at == 0:
                break
        return done

    @property
    def max_in_flight(self):
        """How many runs may be in flight; a further call waits."""
        return self.core.get().window()

    @max_in_flight.setter
    def max_in_flight(self, uint32_t most):
        self.core.get().set_window(most)

    def holdings(self):
        """For each live block of the client's memory: (offset, bytes, counted references, hosts that lease it)."""
        cdef Arena* arena = self.core.get().arena()
        cdef vector[Holding] found
        self.core.get().poll_inbox()
        self.core.get().settle_forks()
        if arena != NULL:
            found = arena.holdings()
        return [(found[i].offset, found[i].bytes, found[i].references,
                 [host for host in range(BORROWERS) if found[i].borrowers >> <int>host & 1])
                for i in range(found.size())]

    def arena_stats(self):
        cdef Arena* arena = self.core.get().arena()
        self.core.get().poll_inbox()
        self.core.get().settle_forks()
        if arena == NULL:
            return (0, 0, 0)
        return (arena.bytes_in_use(), arena.high_water(), arena.capacity())


cdef class Call:
    """One compiled signature of a program on one client: handles in, one record out, arrays back (COST-1, ASY-1)."""
    cdef readonly Client client
    cdef ProgramRef program
    cdef public bint stale              # a slice of the program moved: `bind` must be called again
    cdef readonly tuple inputs          # Layouts
    cdef readonly tuple outputs         # Layouts
    cdef readonly tuple donated         # positions of arguments
    cdef readonly tuple shared          # positions of arguments that a run makes `shared`
    cdef readonly tuple shared_results  # positions of results that a run makes `shared`
    cdef vector[uint32_t] kept          # positions of the arguments that are not donated, when some are donated
    cdef vector[uint64_t] arguments
    cdef vector[uint64_t] wanted        # one bit per result: set when its value must come with its completion
    cdef vector[uint32_t] unread        # by result: runs since one of its arrays was read
    cdef uint32_t wants                 # number of bits of `wanted` that are set
    cdef public tuple names             # names of the inputs, for messages; None: messages use their positions

    def __init__(self, Client client not None, uint32_t plan, uint32_t group, tuple inputs, tuple outputs,
                 tuple donated=(), tuple shared=(), tuple shared_results=()):
        self.client = client
        self.inputs = inputs
        self.outputs = outputs
        self.donated = donated
        for position in range(len(inputs)):
            if donated and position not in donated:
                self.kept.push_back(position)
        self.wanted.resize((len(outputs) + 63) // 64)
        self.unread.resize(len(outputs))
        self.arguments.resize(len(inputs) + 1)
        self.bind(plan, group, shared, shared_results)

    def bind(self, uint32_t plan, uint32_t group, tuple shared=(), tuple shared_results=()):
        """From now on the program has plan number `plan` and group `group`, because its slices are on other devices."""
        cdef Layout layout
        self.program.plan = plan
        self.program.group = group
        self.shared = shared
        self.shared_results = shared_results
        self.program.result_parts.clear()
        self.program.result_bytes.clear()
        for layout in self.outputs:
            self.program.result_parts.push_back(layout.parts)
            self.program.result_bytes.push_back(layout.nbytes)
        self.stale = False

    cdef void learn(self, uint32_t place) noexcept:
        self.unread[place] = 0
        if self.program.result_bytes[place] > kLargeBytes or not self.client.core.get().has_read_back():
            return
        if not self.wanted[place // 64] >> (place % 64) & 1:
            self.wanted[place // 64] |= <uint64_t>1 << (place % 64)
            self.wants += 1

    cdef void forget_unread(self) noexcept:
        cdef uint32_t place
        for place in range(<uint32_t>self.unread.size()):
            if self.wanted[place // 64] >> (place % 64) & 1:
                self.unread[place] += 1
                if self.unread[place] > _UNREAD_RUNS:
                    self.wanted[place // 64] &= ~(<uint64_t>1 << (place % 64))
                    self.wants -= 1

    @property
    def inline_results(self):
        """The positions of the results whose values come with their completions."""
        return [place for place in range(len(self.outputs)) if self.wanted[place // 64] >> (place % 64) & 1]

    cdef bint gather(self, list leaves) except -1:
        cdef Py_ssize_t i, n = len(self.inputs)
        cdef Buffer leaf
        cdef object array_type = self.client.array_type
        cdef PyObject* item
        cdef PyObject* want
        if len(leaves) != n:
            return False
        for i in range(n):
            item = PyList_GET_ITEM_(<PyObject*>leaves, i)
            if <PyObject*>Py_TYPE_(item) != <PyObject*>array_type:
                return False
            leaf = <Buffer><object>item
            want = PyTuple_GET_ITEM_(<PyObject*>self.inputs, i)
            if <PyObject*>leaf.layout != want:
                return False
            # The moving thread accepts deleted arrays too: the release of an array that is deleted during the move is
            # sent after the move.
            if leaf.deleted and not (self.client.moving and self.client.mover == PyThread_get_thread_ident()):
                from pathways.errors import DeletedArrayError
                name = i if self.names is None else self.names[i]
                raise DeletedArrayError(f"argument {name} was deleted or donated: {leaf!r}")
            self.arguments[i] = leaf.handle
        return True

    cdef bint gives_twice(self, list leaves) except -1:
        """Whether a donated array is also another argument of this call."""
        global _donating
        cdef Buffer leaf
        cdef Py_ssize_t i
        cdef size_t n
        _donating += 1
        for i in self.donated:
            leaf = <Buffer>leaves[i]
            if leaf.seen == _donating:
                return True
            leaf.seen = _donating
        for n in range(self.kept.size()):
            if (<Buffer>leaves[<Py_ssize_t>self.kept[n]]).seen == _donating:
                return True
        return False

    def __call__(self, list leaves not None):
        """Submits one run and returns its results as a list. Returns None when the leaves do not fit this signature, or
        when a donated leaf is shared, is being read, or is also another argument: then pass a copy of it (MEM-4).
        """
        return self.submit(leaves, None)

    def timed(self, list leaves not None, Deadline deadline not None):
        """As `__call__`, but the run must be over when `deadline`, counted from now, has passed."""
        return self.submit(leaves, deadline)

    cdef bint takes(self, list leaves) except -1:
        """Whether the call may be made with these leaves now. The answer holds until Python's lock is released."""
        cdef Py_ssize_t i
        if self.stale or not self.gather(leaves) or (self.donated and self.gives_twice(leaves)):
            return False
        for i in self.donated:
            if (<Buffer>leaves[i]).shared or (<Buffer>leaves[i]).cached is not None:
                return False
        return True

    cdef list submit(self, list leaves, Deadline deadline):
        cdef int64_t at_ns = 0
        cdef Py_ssize_t i, n
        cdef Status status
        cdef uint64_t tag
        cdef Client client = self.client
        cdef list out
        cdef Layout layout
        # Local variables, because another thread may make this call while the arrays are made below.
        cdef uint64_t few[16]
        cdef vector[uint64_t] many
        cdef uint64_t* results = few
        cdef vector[uint64_t] mask
        if deadline is not None:
            at_ns = monotonic_ns() + deadline.nanos
        n = len(self.inputs)
        if len(self.outputs) > 16:
            many.resize(len(self.outputs))
            results = many.data()
        while True:
            if client.gated:
                client.pass_gate()
            if not self.takes(leaves):
                return None
            if self.wants != 0:
                mask = self.wanted
            if at_ns == 0:
                status = client.core.get().submit(self.program, const_u64_span(self.arguments.data(), n), results,
                                                  u64_span(mask.data(), mask.size()))
            else:
                status = client.core.get().submit(self.program, const_u64_span(self.arguments.data(), n), results,
                                                  u64_span(mask.data(), mask.size()), at_ns, &deadline.text)
            if status == Status.kOk:
                break
            if status == Status.kInvalid:
                raise ValueError(f"a call with {n} arguments and {len(self.outputs)} results does not fit the ring "
                                 "to the controller; pass fewer, larger arrays")
            client.make_room()  # other threads may move, delete or pin the leaves meanwhile: check them again
        for i in self.shared:
            (<Buffer>leaves[i]).shared = True
        for i in self.donated:  # before another thread can pin it
            (<Buffer>leaves[i])._forget()
        client.dispatches += 1
        tag = client.core.get().last_tag()
        n = len(self.outputs)
        out = [None] * n
        for i in range(n):
            layout = <Layout><object>PyTuple_GET_ITEM_(<PyObject*>self.outputs, i)
            out[i] = client.wrap(results[i], layout)
            (<Buffer>out[i]).run = tag
            (<Buffer>out[i]).maker = self
            (<Buffer>out[i]).place = <uint32_t>i
            (<Buffer>out[i]).timed = at_ns != 0
        if mask.size() != 0:
            for i in range(n):
                (<Buffer>out[i]).is_inline = mask[i // 64] >> (i % 64) & 1
            self.forget_unread()
        for i in self.shared_results:
            (<Buffer>out[i]).shared = True
        if client.host is not None:
            client.pump()
        return out


cdef Lease _lease(BlockView block, Layout layout):
    """A lease of a block for each host of a layout; hosts with numbers from BORROWERS on get a counted reference."""
    cdef Lease lease
    if block is not None:
        lease.offset = block.offset
        for host in layout.hosts:
            if host < BORROWERS:
                lease.borrowers |= <uint64_t>1 << <int>host
            else:
                lease.others += 1
    return lease


@cython.no_gc
cdef class BlockView:
    """A block of a shared arena as a writable Python buffer; releases its reference when Python frees the view."""
    cdef Arena* arena       # an arena of this process; NULL: the block belongs to another process
    cdef ArenaView owner_arena   # the arena of the other process (TRUST-1), which leased the block
    cdef byte* data
    cdef int borrower       # the number of the lease's borrower; negative: the reference is a counted one
    cdef uint64_t process   # the process that holds the reference; a forked child's copy of the view has none (FORK-1)
    cdef readonly uint64_t offset
    cdef readonly size_t nbytes
    cdef object keep

    @staticmethod
    cdef BlockView make(Arena* arena, uint64_t offset, size_t nbytes, keep):
        cdef BlockView view = BlockView.__new__(BlockView)
        view.arena = arena
        view.data = arena.at(offset)
        view.process = process_token()
        view.offset = offset
        view.nbytes = nbytes
        view.keep = keep
        return view

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.data, self.nbytes, 0, flags)

    def __dealloc__(self):
        if self.process != process_token():
            return
        if self.arena != NULL:
            self.arena.release(self.offset)
        elif self.data != NULL:
            global _borrowed
            if self.borrower >= 0:
                _borrowed -= 1
                self.owner_arena.return_lease(self.offset, <unsigned>self.borrower)
            else:
                self.owner_arena.release(self.offset)


include "_network_transfer.pxi"
include "_host.pxi"
