# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The hot path between Python and the native core: submit, futures, host buffers, and a host's enqueue loop.

Three classes of the client's side: `Layout` (what an array looks like and who holds it), `Buffer` (a handle with an
owner; `pw.Array` derives from it) and `Client`; `Call` is one compiled signature of a program. Two of the host's side:
`Host`, whose loop drains a batch of the order per hold of Python's lock (GIL-1), and `BlockView`, a span of shared
memory as a Python buffer. Segments come from `pathways._native` by address.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals, PyErr_Fetch, PyErr_NormalizeException
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
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
    ctypedef struct PyTypeObject:
        PyObject* (*tp_new)(PyTypeObject*, PyObject*, PyObject*) except NULL

cdef object _is_ready = "is_ready"
cdef object _block_until_ready = "block_until_ready"
cdef object _is_deleted = "is_deleted"
cdef tuple _nothing = ()
cdef uint64_t _donating = 0  # calls so far that donate something

# How long a native wait lasts before Python looks for signals and for a cluster that is gone.
cdef int64_t _LOOK_NS = 50_000_000
# How often a host looks at its devices, a yield of the core between two looks, before it has a watcher sleep on them.
cdef uint32_t _LOOKS = 8
# How long it sleeps at most while its devices have all they can take.
cdef int64_t _THROTTLED_NS = 500_000

PENDING, READY, FAILED, RELEASED = "pending", "ready", "failed", "released"


# ------------------------------------------------------------------------------------------------------ client side

cdef class Layout:
    """Shape, dtype and placement of an array on one client's cluster. Interned: equal layouts are one object."""
    cdef readonly tuple shape
    cdef readonly object dtype
    cdef readonly bint weak_type
    cdef readonly object slice        # pathways.api.Slice
    cdef readonly tuple spec          # per dimension, the axes that cut it
    cdef readonly uint32_t group      # of the hosts that hold it
    cdef readonly uint32_t parts      # how many they are
    cdef readonly uint64_t nbytes
    cdef public object cache          # whatever the api keeps with it

    def __init__(self, tuple shape, dtype, bint weak_type, slice, tuple spec, group, parts, nbytes):
        self.shape = shape
        self.dtype = dtype
        self.weak_type = weak_type
        self.slice = slice
        self.spec = spec
        self.group = group
        self.parts = parts
        self.nbytes = nbytes
        self.cache = None


@cython.no_gc
cdef class Buffer:
    """A handle with its owner: releases it when Python forgets it (OWN-1). FUT-3: a deleted one is never misread."""
    cdef uint64_t handle
    cdef readonly Layout layout
    cdef readonly Client client
    cdef bint deleted
    cdef public object cached         # the fetched value, or the fetch under way
    cdef readonly bint shared         # MEM-4: something may still read it off the order, or has its memory as well
    cdef readonly uint64_t run        # tag of the run that makes it; 0: no run
    cdef uint64_t seen                # number of the last donating call that it is an argument of

    def __dealloc__(self):
        # Only marks: the release note is batched and sent with later traffic.
        if self.client is not None and not self.deleted and self.handle != 0:
            self.client.release_handle(self.handle, self.layout)

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
            self.client.release_handle(self.handle, self.layout)

    def _donate(self):
        """The handle was given to a run: it is released after it, in the order."""
        self._forget()


@cython.no_gc_clear  # its memory must outlive its core, whatever the garbage collector takes first
cdef class Client:
    """A client's native end and, embedded, the whole cluster that its own thread runs."""
    cdef unique_ptr[CppClient] core
    cdef object keep                   # segments
    cdef object array_type
    cdef readonly bint closed
    cdef Host host                     # embedded: the host that this thread runs; else None
    cdef CppController* controller     # embedded
    cdef bint pumping
    cdef object liveness               # callable: raises when the controller process is gone
    cdef readonly uint64_t dispatches

    def __init__(self, uint32_t client_id, client_segment, controller_segment, array_type, liveness=None,
                 uint32_t window=1024):
        cdef ClientOptions options
        options.id = client_id
        options.window = window
        self.keep = (client_segment, controller_segment)
        self.core.reset(new CppClient(options, <ClientBlock*><size_t>client_segment.client_block,
                                      <ControllerBlock*><size_t>controller_segment.controller_block))
        self.array_type = array_type
        self.liveness = liveness
        self.host = None
        self.controller = NULL

    def embed(self, controller, Host host not None):
        """Makes this client's threads run `controller` and `host` themselves."""
        self.keep = self.keep + (controller,)
        self.controller = <CppController*><size_t>controller.address
        self.host = host

    def close(self):
        """Sends nothing more. Handles released from now on are forgotten."""
        self.closed = True

    cdef inline void release_handle(self, uint64_t raw, Layout layout) noexcept:
        cdef Handle handle
        if self.closed:
            return
        handle.raw = raw
        try:
            self.core.get().release(handle, layout.group, layout.nbytes)
        except Exception:  # a release that cannot be sent now is sent with the next one
            pass

    cpdef pump(self):
        """Embedded: runs what is ready, on this thread. True when something was done."""
        cdef uint32_t done = 0, round_done
        if self.host is None or self.pumping:
            return False
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
            self.core.get().wait_room(nanoseconds(_LOOK_NS), SpinPolicy.park())
        self.core.get().poll_inbox()
        PyErr_CheckSignals()

    cpdef check_alive(self):
        """Raises what befell the cluster, or what the liveness check raises."""
        if self.closed:
            from pathways.errors import ClusterClosedError
            raise ClusterClosedError("the cluster of this array or program was closed")
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
        handle.raw = buffer.handle
        return self.state_of(handle)

    cdef object state_of(self, Handle handle):
        self.core.get().poll_inbox()
        cdef FutureState state = self.core.get().poll(handle)
        if state == FutureState.kPending:
            return PENDING
        return READY if state == FutureState.kReady else (FAILED if state == FutureState.kFailed else RELEASED)

    cpdef str wait_raw(self, uint64_t raw, double timeout=-1.0):
        """Waits for a future: "ready", "failed", or "pending" when `timeout` seconds (negative: none) are over.

        Ctrl-C ends the wait and nothing else. Raises when the cluster is gone.
        """
        cdef Handle handle
        cdef FutureState state
        cdef int64_t left = -1 if timeout < 0 else <int64_t>(timeout * 1e9)
        cdef int64_t piece
        handle.raw = raw
        if self.host is None:
            # Releases held back would otherwise wait with us.
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
            if left == 0:
                return PENDING
            piece = _LOOK_NS if left < 0 or left > _LOOK_NS else left
            if self.host is not None:
                self.check_alive()
                if not self.pump():
                    self.host.wait_oldest(self, piece * 1e-9)
            else:
                with nogil:
                    self.core.get().wait(handle, nanoseconds(piece), SpinPolicy.adaptive())
                if self.core.get().poll(handle) == FutureState.kPending:
                    self.core.get().poll_inbox()
                    if self.core.get().poll(handle) == FutureState.kPending:
                        self.check_alive()
            PyErr_CheckSignals()
            if left > 0:
                left = max(0, left - piece)

    def wait(self, Buffer buffer not None, double timeout=-1.0):
        """See `wait_raw`."""
        return self.wait_raw(buffer.handle, timeout)

    def error_text(self, uint64_t raw):
        """Why a future failed."""
        cdef Handle handle
        handle.raw = raw
        return self.core.get().error_of(handle).decode("utf-8", "replace")

    def new_array(self, Layout layout not None):
        """A new pending array whose parts will be completed by the hosts of its layout."""
        cdef Handle handle = self.new_future(layout.parts)
        return self.wrap(handle.raw, layout)

    cdef object wrap(self, uint64_t raw, Layout layout):
        cdef PyTypeObject* kind = <PyTypeObject*>self.array_type
        cdef Buffer array = <Buffer><object>kind.tp_new(kind, <PyObject*>_nothing, NULL)
        Py_DECREF(array)  # tp_new's reference; the cast took its own
        array.handle = raw
        array.layout = layout
        array.client = self
        return array

    cdef Handle new_future(self, uint32_t parts) except *:
        cdef Handle handle
        while self.core.get().allocate(parts, &handle) != Status.kOk:
            self.make_room()
        return handle

    def new_token(self, uint32_t parts):
        """A future of its own for a fetch; give it back with `forget_token`."""
        return self.new_future(parts).raw

    def forget_token(self, uint64_t raw):
        cdef Handle handle
        handle.raw = raw
        if not self.closed:
            self.core.get().forget(handle)

    def note(self, int kind, uint32_t group, uint64_t raw, uint64_t token, bytes payload not None):
        """Sends one note in the order. `kind`: 1 put, 2 fetch, 4 for the backend."""
        cdef Handle handle, answer
        cdef const char* data = payload
        cdef Status status
        handle.raw = raw
        answer.raw = token
        if self.closed:
            self.check_alive()
        while True:
            status = self.core.get().note(<NoteKind>kind, group, handle, answer,
                                          const_byte_span(<const byte*>data, len(payload)))
            if status == Status.kOk:
                break
            if status == Status.kInvalid:
                raise ValueError(f"a note of {len(payload)} bytes does not fit the ring to the controller")
            self.make_room()
        if self.host is not None:
            self.pump()

    def flush(self):
        """Sends the releases held back."""
        self.core.get().flush()
        if self.host is not None:
            self.pump()

    def cancel(self, uint64_t tag, list arrays, str reason):
        """Drops run `tag` unless hosts have been granted it, and fails its results."""
        cdef vector[uint64_t] raws
        for array in arrays:
            raws.push_back((<Buffer>array).handle)
        cdef string text = reason.encode()
        while self.core.get().cancel(tag, const_u64_span(raws.data(), raws.size()), text) == Status.kFull:
            self.make_room()
        if self.host is not None:
            self.pump()

    def pause(self, double seconds):
        """Waits a little for something to happen; embedded, runs what is ready meanwhile."""
        cdef int64_t nanos = <int64_t>(seconds * 1e9)
        if self.host is not None:
            if not self.pump():
                self.host.wait_oldest(self, seconds)
        else:
            with nogil:
                self.core.get().wait_room(nanoseconds(nanos), SpinPolicy.park())
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
        """A block of the client's shared arena, or None when it has no room now."""
        cdef uint64_t offset
        cdef Arena* arena = self.core.get().arena()
        if arena == NULL or arena.allocate(nbytes, &offset) != Status.kOk:
            return None
        return BlockView.make(arena, offset, nbytes, self.keep)

    def arena_stats(self):
        cdef Arena* arena = self.core.get().arena()
        if arena == NULL:
            return (0, 0, 0)
        return (arena.bytes_in_use(), arena.high_water(), arena.capacity())


cdef class Call:
    """One compiled signature of a program on one client: handles in, one record out, arrays back (COST-1, ASY-1)."""
    cdef readonly Client client
    cdef ProgramRef program
    cdef readonly tuple inputs          # Layouts
    cdef readonly tuple outputs         # Layouts
    cdef readonly tuple donated         # positions of arguments
    cdef readonly tuple shared          # positions of arguments, and of results, that this run makes `shared`
    cdef readonly tuple shared_results
    cdef uint64_t number                # of the donating call under way
    cdef bint is_twice                  # an array is two of its arguments
    cdef vector[uint64_t] arguments
    cdef public object extra

    def __init__(self, Client client not None, uint32_t plan, uint32_t group, tuple inputs, tuple outputs,
                 tuple donated=(), tuple shared=(), tuple shared_results=()):
        cdef Layout layout
        self.client = client
        self.program.plan = plan
        self.program.group = group
        self.inputs = inputs
        self.outputs = outputs
        self.donated = donated
        self.shared = shared
        self.shared_results = shared_results
        for layout in outputs:
            self.program.result_parts.push_back(layout.parts)
        self.arguments.resize(len(inputs) + 1)

    def accepts(self, list leaves not None):
        """True when every leaf is an array of this call's layout."""
        return self.gather(leaves)

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
            if leaf.deleted:
                from pathways.errors import DeletedArrayError
                raise DeletedArrayError(f"argument {i} (flattened) was deleted or donated: {leaf!r}")
            self.arguments[i] = leaf.handle
            if self.donated:
                self.is_twice = self.is_twice or leaf.seen == self.number
                leaf.seen = self.number
        return True

    def __call__(self, list leaves not None):
        """Submits one run and returns its results as a list; None when the leaves are not of this signature, or one
        that it donates is shared, being read, or another argument as well: pass a copy of it (MEM-4).
        """
        global _donating
        cdef Py_ssize_t i, n
        cdef Status status
        cdef uint64_t tag
        cdef Client client = self.client
        cdef list out
        cdef Layout layout
        # Of this call alone: making the arrays below may let another thread in.
        cdef uint64_t few[16]
        cdef vector[uint64_t] many
        cdef uint64_t* results = few
        if self.donated:
            _donating += 1
            self.number = _donating
            self.is_twice = False
        if not self.gather(leaves) or self.is_twice:
            return None
        for i in self.donated:
            if (<Buffer>leaves[i]).shared or (<Buffer>leaves[i]).cached is not None:
                return None
        if client.closed:
            client.check_alive()
        n = len(self.inputs)
        if len(self.outputs) > 16:
            many.resize(len(self.outputs))
            results = many.data()
        while True:
            status = client.core.get().submit(self.program, const_u64_span(self.arguments.data(), n), results)
            if status == Status.kOk:
                break
            if status == Status.kInvalid:
                raise ValueError(f"a call with {n} arguments and {len(self.outputs)} results does not fit the ring "
                                 "to the controller; pass fewer, larger arrays")
            client.make_room()
            self.gather(leaves)  # another thread may have called meanwhile
        client.dispatches += 1
        tag = client.core.get().last_tag()
        n = len(self.outputs)
        out = [None] * n
        for i in range(n):
            layout = <Layout><object>PyTuple_GET_ITEM_(<PyObject*>self.outputs, i)
            out[i] = client.wrap(results[i], layout)
            (<Buffer>out[i]).run = tag
        for i in self.shared:
            (<Buffer>leaves[i]).shared = True
        for i in self.shared_results:
            (<Buffer>out[i]).shared = True
        for i in self.donated:
            (<Buffer>leaves[i])._forget()
        if client.host is not None:
            client.pump()
        return out


@cython.no_gc
cdef class BlockView:
    """A block of a shared arena as a writable Python buffer; gives its reference back when Python forgets it."""
    cdef Arena* arena
    cdef readonly uint64_t offset
    cdef readonly size_t nbytes
    cdef object keep

    @staticmethod
    cdef BlockView make(Arena* arena, uint64_t offset, size_t nbytes, keep):
        cdef BlockView view = BlockView.__new__(BlockView)
        view.arena = arena
        view.offset = offset
        view.nbytes = nbytes
        view.keep = keep
        return view

    def retain(self, int times=1):
        """Takes references for others, who release them by attaching a view of their own."""
        cdef int _
        for _ in range(times):
            self.arena.retain(self.offset)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.arena.at(self.offset), self.nbytes, 0, flags)

    def __dealloc__(self):
        if self.arena != NULL:
            self.arena.release(self.offset)


# -------------------------------------------------------------------------------------------------------- host side

@cython.no_gc_clear  # as Client
cdef class Host:
    """One host: the native executor, and the calls into JAX that it asks for.

    `driver` answers the rare calls (see pathways/runtime/driver.py); launches, readiness and references never reach it.
    """
    cdef unique_ptr[CppHost] core
    cdef unique_ptr[CallbackBackend] backend
    cdef object driver
    cdef object keep
    cdef Arena* arena
    cdef vector[Arena*] arenas                   # of all hosts, NULL where there is none
    cdef dict clients                            # id -> segment
    cdef list launchables                        # by plan: tuple of callables, or None
    cdef vector[PyObject*] fast                  # by plan: the same tuple, borrowed
    cdef vector[Value] scratch
    cdef bint stopping
    cdef object failure                          # the exception of the last error
    cdef readonly uint32_t number

    def __init__(self, driver, uint32_t number, uint32_t devices, uint32_t max_in_flight, list host_segments,
                 controller_segment, uint32_t batch=64):
        cdef HostOptions options
        cdef BackendCallbacks callbacks
        cdef vector[HostBlock*] blocks
        cdef HostBlock* block
        for segment in host_segments:
            block = <HostBlock*><size_t>segment.host_block
            blocks.push_back(block)
            self.arenas.push_back(<Arena*>NULL)
            if block.arena != 0:
                self.arenas[self.arenas.size() - 1] = block.host_arena()
        self.keep = (tuple(host_segments), controller_segment)
        self.driver = driver
        self.number = number
        self.arena = self.arenas[number]
        self.clients = {}
        self.launchables = []
        callbacks.self = <void*>self
        callbacks.launch = &_launch
        callbacks.placeholder = &_placeholder
        callbacks.readiness = &_readiness
        callbacks.retain = &_retain
        callbacks.drop = &_drop
        callbacks.transfer = &_transfer
        callbacks.begin_receive = &_begin_receive
        callbacks.send = &_send
        callbacks.finish_receive = &_finish_receive
        callbacks.abandon_receive = &_abandon_receive
        callbacks.put = &_put
        callbacks.fetch = &_fetch
        callbacks.refuse_fetch = &_refuse_fetch
        callbacks.note = &_note
        callbacks.explain = &_explain
        self.backend.reset(new CallbackBackend(callbacks))
        options.host = number
        options.devices = devices
        options.max_in_flight = max_in_flight
        options.batch = batch
        self.core.reset(new CppHost(options, blocks, <ControllerBlock*><size_t>controller_segment.controller_block,
                                    self.backend.get()[0]))

    def __dealloc__(self):
        # Values are Python references: they go while Python's lock is held, before the backend that drops them.
        self.core.reset()
        self.backend.reset()

    # ---- registration, from any thread

    def add_plan(self, uint32_t plan, bytes block not None):
        """Registers an encoded host plan. Raises ValueError when it is malformed."""
        cdef vector[byte] data
        data.resize(len(block))
        memcpy(data.data(), <const char*>block, len(block))
        self.core.get().add_plan(plan, Plan.parse(data))

    def set_launchables(self, uint32_t plan, tuple launchables not None):
        """The callables that the plan's calls name, flat arrays in and a tuple or list of arrays out."""
        while <uint32_t>len(self.launchables) <= plan:
            self.launchables.append(None)
            self.fast.push_back(NULL)
        self.launchables[plan] = launchables
        self.fast[plan] = <PyObject*>launchables
        self.core.get().set_compiled(plan, optional[string]())

    def set_failed(self, uint32_t plan, str error not None):
        """The plan could not be compiled: its runs fail with `error`."""
        cdef string text = error.encode()
        self.core.get().set_compiled(plan, optional[string](text))

    def attach_client(self, uint32_t client, segment):
        self.clients[client] = segment
        self.core.get().attach_client(client, <ClientBlock*><size_t>segment.client_block)

    def detach_client(self, uint32_t client):
        """Forgets the client's memory; only after the order has told the executor that it is gone."""
        self.clients.pop(client, None)

    def set_faults(self, uint32_t swap_every):
        """Test hook: breaks ORD-1 on this host."""
        cdef ExecutorFaults faults
        faults.swap_every = swap_every
        self.core.get().set_faults(faults)

    # ---- the loop

    def run(self, arm, tidy):
        """The enqueue thread's loop, until `stop`. `arm(values)` sees to a ring when one of the values is ready;
        `tidy()` is called before each wait.

        Waking up costs more than most things it wakes up for: a watcher that sleeps until a value is ready takes four
        switches between threads. So it looks at its devices itself some times first; and when they have all they can
        take it sleeps until half of that is done, or for a bounded time, so that what is done is soon known.
        """
        cdef uint32_t ticket, done
        cdef uint32_t busy = 0
        cdef uint32_t looks = 0
        cdef nanoseconds limit
        cdef SpinPolicy spin
        while not self.stopping:
            ticket = self.core.get().ticket()
            done = self.core.get().step()
            if done != 0:
                looks = 0
                busy += 1
                if busy % 16 == 0:
                    with nogil:  # let the control threads have their turn
                        pass
                    PyErr_CheckSignals()
                continue
            if self.core.get().executor().is_throttled():
                limit, spin = nanoseconds(_THROTTLED_NS), SpinPolicy.park()
                self.core.get().executor().watched_half_way(&self.scratch)
            else:
                self.core.get().executor().watched(&self.scratch)
                looks += 1
                if self.scratch.size() != 0 and looks < _LOOKS:
                    with nogil:
                        self.core.get().wait(ticket, nanoseconds(0), SpinPolicy.glance())
                    continue
                limit = nanoseconds(_LOOK_NS)
                spin = SpinPolicy.linger() if self.scratch.empty() else SpinPolicy.park()
            if not self.scratch.empty():
                arm([<object><PyObject*>value for value in self.scratch])
            tidy()
            with nogil:
                self.core.get().wait(ticket, limit, spin)
            looks = 0
            PyErr_CheckSignals()

    def step(self):
        return self.core.get().step()

    def stop(self):
        self.stopping = True
        self.core.get().ring()

    def ring(self):
        """Makes the loop look again."""
        self.core.get().ring()

    cdef wait_oldest(self, Client client, double seconds):
        """Embedded: waits until something under way is done, at most about `seconds` unless it is one thing alone."""
        cdef uint32_t ticket = self.core.get().ticket()
        cdef double limit = min(seconds, 0.001)
        cdef bint moved = True
        if client.pumping:  # another thread is inside a step, and its call into JAX let go of Python's lock
            with nogil:
                self.core.get().wait(ticket, nanoseconds(<int64_t>(limit * 1e9)), SpinPolicy.park())
            return
        client.pumping = True
        try:
            moved = self.core.get().step() != 0
        finally:
            client.pumping = False
        if moved:
            return
        self.core.get().executor().watched(&self.scratch)
        if self.scratch.size() == 1:
            self.driver.block(<object><PyObject*>self.scratch[0])
            return
        if self.scratch.size() > 1:  # whichever comes first
            self.driver.arm([<object><PyObject*>value for value in self.scratch])
            limit = seconds
        with nogil:
            self.core.get().wait(ticket, nanoseconds(<int64_t>(limit * 1e9)), SpinPolicy.park())

    def clear(self):
        """Drops every value."""
        self.core.get().executor().clear()

    def is_idle(self):
        return self.core.get().executor().is_idle()

    def stats(self):
        cdef ExecutorStats s = self.core.get().executor().stats()
        return {"runs": s.runs, "launches": s.launches, "gangs": s.gangs, "transfers": s.transfers,
                "objects": s.objects, "live_runs": s.live_runs, "waiting": s.waiting,
                "arena_bytes": 0 if self.arena == NULL else self.arena.bytes_in_use(),
                "arena_high_water": 0 if self.arena == NULL else self.arena.high_water()}

    # ---- memory

    def allocate(self, size_t nbytes):
        """A block of this host's arena, or None when it has no room now."""
        cdef uint64_t offset
        if self.arena == NULL or self.arena.allocate(nbytes, &offset) != Status.kOk:
            return None
        return BlockView.make(self.arena, offset, nbytes, self.keep)

    def peer_block(self, uint32_t host, uint64_t offset, size_t nbytes):
        """A view of a block in another host's arena."""
        cdef Arena* arena = self.arenas[host]
        arena.retain(offset)
        return BlockView.make(arena, offset, nbytes, self.keep)

    def client_block(self, uint32_t client, uint64_t offset, size_t nbytes, bint adopt):
        """A view of a block in a client's arena; `adopt` takes over a reference that the client took for us."""
        segment = self.clients[client]
        cdef Arena* arena = (<ClientBlock*><size_t>segment.client_block).client_arena()
        if not adopt:
            arena.retain(offset)
        return BlockView.make(arena, offset, nbytes, segment)

    def arena_capacity(self):
        return 0 if self.arena == NULL else self.arena.capacity()

    cdef int failed(self, str doing, const NodeContext* where) noexcept:
        """Takes the exception under way as the backend's last error."""
        cdef PyObject* kind
        cdef PyObject* value
        cdef PyObject* trace
        PyErr_Fetch(&kind, &value, &trace)
        PyErr_NormalizeException(&kind, &value, &trace)
        text = doing
        try:
            self.failure = error = <object>value if value != NULL else None
            text = self.driver.describe(doing, error, where.plan if where != NULL else -1,
                                        where.node if where != NULL else -1)
        except BaseException as problem:
            text = f"{doing}: {problem!r}"
        self.backend.get().set_error(text.encode("utf-8", "replace"))
        Py_XDECREF_(kind)
        Py_XDECREF_(value)
        Py_XDECREF_(trace)
        return <int>Status.kFailed


cdef int _launch(void* self, const NodeContext* where, const Value* inputs, size_t n, Value* outputs,
                 size_t m) noexcept:
    cdef Host host = <Host>self
    cdef PyObject* function = PyTuple_GET_ITEM_(host.fast[where.plan], where.computation)
    cdef PyObject* result = PyObject_Vectorcall(function, <PyObject* const*>inputs, n, NULL)
    cdef PyObject* item
    cdef size_t i
    if result == NULL:
        return host.failed("launch", where)
    if PyList_CheckExact_(result):
        for i in range(m):
            item = PyList_GET_ITEM_(result, i)
            Py_INCREF_(item)
            outputs[i] = <Value>item
    else:
        for i in range(m):
            item = PyTuple_GET_ITEM_(result, i)
            Py_INCREF_(item)
            outputs[i] = <Value>item
    Py_DECREF_(result)
    return <int>Status.kOk


cdef int _readiness(void* self, Value value) noexcept:
    # 0 pending, 1 ready, 2 failed. An array donated meanwhile counts as ready: its successor is watched.
    cdef Host host = <Host>self
    cdef PyObject* array = <PyObject*>value
    cdef PyObject* answer = PyObject_CallMethodNoArgs(array, <PyObject*>_is_ready)
    if answer == NULL:
        PyErr_Clear()
        return 1
    cdef bint ready = answer == Py_True_
    Py_DECREF_(answer)
    if not ready:
        return 0
    answer = PyObject_CallMethodNoArgs(array, <PyObject*>_block_until_ready)
    if answer == NULL:
        host.failed("run", NULL)
        return 2
    Py_DECREF_(answer)
    return 1


cdef void _retain(void* self, Value value) noexcept:
    Py_INCREF_(<PyObject*>value)


cdef void _drop(void* self, Value value) noexcept:
    Py_DECREF_(<PyObject*>value)


cdef Value _own(object value) noexcept:
    Py_INCREF(value)
    return <Value><PyObject*>value


cdef Value _placeholder(void* self, const NodeContext* where, uint32_t index) noexcept:
    cdef Host host = <Host>self
    try:
        return _own(host.driver.placeholder(where.plan, where.node, index))
    except BaseException:
        import traceback
        traceback.print_exc()
        return _own(None)  # the launch then fails and says so


cdef int _transfer(void* self, const NodeContext* where, Value value, Value* out) noexcept:
    cdef Host host = <Host>self
    try:
        out[0] = _own(host.driver.transfer(where.plan, where.computation, <object><PyObject*>value))
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "transfer", where)


cdef int _begin_receive(void* self, const NodeContext* where, vector[Landing]* landings) noexcept:
    cdef Host host = <Host>self
    cdef Landing landing
    try:
        posts = host.driver.begin_receive(where.order, where.plan, where.computation)
        if posts is None:
            return <int>Status.kNoMemory
        for source, offsets in posts:
            landing.source = source
            landing.offsets.clear()
            for offset in offsets:
                landing.offsets.push_back(offset)
            landings.push_back(landing)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "receive", where)


cdef int _send(void* self, const NodeContext* where, Value value, uint32_t destination, const uint64_t* offsets,
               size_t n) noexcept:
    cdef Host host = <Host>self
    cdef size_t i
    try:
        host.driver.send(where.plan, where.computation, <object><PyObject*>value, destination,
                         [offsets[i] for i in range(n)])
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "send", where)


cdef int _finish_receive(void* self, const NodeContext* where, Value* out) noexcept:
    cdef Host host = <Host>self
    try:
        out[0] = _own(host.driver.finish_receive(where.order, where.plan, where.computation))
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "receive", where)


cdef void _abandon_receive(void* self, const NodeContext* where) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.abandon_receive(where.order, where.plan, where.computation)
    except BaseException:
        _python_failed(host, "receive", where)


cdef int _put(void* self, uint32_t client, const byte* data, size_t n, Value* out, uint64_t* devices) noexcept:
    cdef Host host = <Host>self
    try:
        value, mask = host.driver.put(client, (<const char*>data)[:n])
        out[0] = _own(value)
        devices[0] = mask
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "put", NULL)


cdef int _fetch(void* self, uint32_t client, Value value, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.fetch(client, <object><PyObject*>value, (<const char*>data)[:n])
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "fetch", NULL)


cdef void _refuse_fetch(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.refuse_fetch(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "fetch", NULL)


cdef void _note(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.note(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "note", NULL)


cdef void _explain(void* self, const NodeContext* maker) noexcept:
    cdef Host host = <Host>self
    try:
        text = host.driver.describe("run", host.failure, maker.plan, maker.node)
        host.backend.get().set_error(text.encode("utf-8", "replace"))
    except BaseException:  # what stands there is less, but true
        import traceback
        traceback.print_exc()
    host.failure = None


cdef int _python_failed(Host host, str doing, const NodeContext* where) noexcept:
    """Inside an `except` block: the caught exception becomes the backend's last error."""
    import sys
    error = sys.exc_info()[1]
    try:
        text = host.driver.describe(doing, error, where.plan if where != NULL else -1,
                                    where.node if where != NULL else -1)
    except BaseException as problem:
        text = f"{doing}: {error!r} ({problem!r})"
    host.backend.get().set_error(text.encode("utf-8", "replace"))
    return <int>Status.kFailed
