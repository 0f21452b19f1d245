"""`Client`: the futures, the ring and the arena of one client. Each call, put, fetch and wait goes through it. Any
thread may use it: Python's lock is held, except in waits. Included by `_core.pyx`.
"""

from time import sleep as _sleep


cdef inline Handle _handle(uint64_t raw) noexcept nogil:
    cdef Handle handle
    handle.raw = raw
    return handle


cdef tuple _nothing = ()
# From this number of runs under way on, a client is taken to have a stream of runs.
cdef uint64_t _STREAM_RUNS = 8
# A client that has waited this long sends the releases that it holds back.
cdef int64_t _BRIEF_NS = 1_000_000

PENDING, READY, FAILED, RELEASED = "pending", "ready", "failed", "released"


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
    cdef readonly uint32_t top         # no array has ever had this index, nor one above
    cdef list held                     # (handle, layout) of arrays released while a slice moved
    cdef Host host                     # embedded: the host that this client's threads run; else None
    cdef CppController* controller     # embedded: the controller
    cdef object value_type             # embedded: see `embed`
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

    def embed(self, controller, Host host not None, value_type not None):
        """From now on this client's threads run `controller` and `host` themselves. `value_type`: of the host's values
        that are on their devices.
        """
        self.value_type = value_type
        self.keep = self.keep + (controller,)
        self.controller = <CppController*><size_t>controller.address
        self.host = host

    @property
    def is_embedded(self):
        """Whether `embed` was called."""
        return self.host is not None

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
        cdef Handle handle = _handle(array.handle)
        self.live[handle.index()] = NULL
        if self.gated:
            if not self.closed:
                self.held.append((array.handle, array.layout))
            return
        try:
            self.core.get().release(handle, array.layout.group, array.layout.nbytes)
        except Exception:  # a release that cannot be sent now is sent with the next one
            pass

    cdef inline void give_array(self, Buffer array) noexcept:
        cdef Handle handle = _handle(array.handle)
        self.live[handle.index()] = NULL
        self.core.get().donated(handle)

    # ---- moving a slice

    cdef pass_gate(self):
        """Waits while another thread moves a slice; raises when this client is closed."""
        if self.closed:
            self.check_alive()
        while self.moving and self.mover != PyThread_get_thread_ident():
            check_deadline("waiting for a slice that moves")
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
        cdef Layout layout
        self.moving = False
        self.gated = self.closed
        held, self.held = self.held, []
        if self.closed:
            return
        for raw, layout in held:
            self.core.get().release(_handle(raw), layout.group, layout.nbytes)

    cdef inline bint is_live(self, uint32_t index) noexcept:
        """Whether an array has this index, and is not just being freed."""
        return self.live[index] != NULL and Py_REFCNT_(self.live[index]) != 0

    def arrays_on(self, slice):
        """Every live array on a slice: those that are neither deleted nor freed."""
        cdef uint32_t i
        cdef list found = []
        for i in range(self.top):
            if self.is_live(i) and (<Buffer><object>self.live[i]).layout.slice is slice:
                found.append(<object>self.live[i])
        return found

    cpdef pump(self):
        """Embedded: runs work that is ready on this thread, for about _PUMP_NS at most: a loop may never end, and
        callers look for signals and deadlines between. Returns True when something was done.
        """
        cdef uint32_t done = 0, round_done, rounds = 0
        cdef int64_t end = 0
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
                rounds += 1
                if rounds % 64 == 0:
                    if end == 0:
                        end = monotonic_ns() + _PUMP_NS
                    elif monotonic_ns() > end:
                        return True
        finally:
            self.pumping = False
            if holds:
                _interrupts.let_go()

    cdef make_room(self):
        """Waits for credit, ring space or futures; raises when the cluster is gone, or this thread's deadline."""
        self.check_alive()
        check_deadline("waiting for room among the runs under way")
        self.core.get().flush()
        self.pause(0.001 if self.host is not None else _LOOK_NS * 1e-9)

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
        if self.orphaned is not None:
            self.check_alive()
        self.core.get().poll_inbox()
        cdef FutureState state = self.core.get().poll(_handle(buffer.handle))
        if state == FutureState.kPending:
            return PENDING
        return READY if state == FutureState.kReady else (FAILED if state == FutureState.kFailed else RELEASED)

    cpdef str wait_raw(self, uint64_t raw, double timeout=-1.0, uint64_t source=0):
        """Waits for a future. Returns "ready", "failed" or "released"; "pending" when `timeout` seconds are over.

        `source`: the array that this future reads; when the array has failed, the answer is "failed", whatever came of
        the future (END-1). A negative timeout sets no limit. Ctrl-C ends only the wait. Raises if the cluster is gone.
        """
        cdef Handle handle = _handle(raw)
        cdef Handle read = _handle(source)
        cdef FutureState state
        cdef int64_t end = 0 if timeout < 0 else monotonic_ns() + <int64_t>(min(timeout, 1e9) * 1e9)
        cdef int64_t piece, left
        if self.orphaned is not None:
            self.check_alive()
        # Few runs under way: the caller waits for a step's result and wants it soon. So this thread polls for long, and
        # holds the releases back, because they would be handled before the result. With a stream of runs under way, the
        # caller only lets the hosts catch up. So this thread sleeps early, to leave the cores to the hosts.
        cdef bint is_brief = self.host is None and self.core.get().in_flight() < _STREAM_RUNS
        if self.host is None and not is_brief:
            self.core.get().flush()
        while True:
            self.core.get().poll_inbox()
            if source != 0 and self.core.get().poll(read) == FutureState.kFailed:
                return FAILED
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
                                         SpinPolicy.await_answer() if is_brief else SpinPolicy.adaptive(), read)
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
        """The error text of a failed future. The failure counts as read (UNREAD-1)."""
        self.core.get().poll_inbox()  # its deadline may have passed since the last poll (DEAD-1)
        return self.core.get().error_of(_handle(raw)).decode("utf-8", "replace")

    def unread_error_text(self, uint64_t raw):
        """The error text of a failed future, which somebody will perhaps read: see `mark_read`."""
        return self.core.get().unread_error_of(_handle(raw)).decode("utf-8", "replace")

    def mark_read(self, str text not None):
        """The failures with this text count as read (UNREAD-1)."""
        self.core.get().mark_read(text.encode())

    def take_unread(self, bint all):
        """What has failed and was read by nobody, to be told now: of each the error text, and how many arrays had it.
        `all`: also of arrays that are still there.
        """
        cdef vector[UnreadFailure] unread
        self.core.get().poll_inbox()
        unread = self.core.get().take_unread(all)
        return [(unread[i].text.decode("utf-8", "replace"), unread[i].futures) for i in range(unread.size())]

    def new_array(self, Layout layout not None):
        """A new pending array. The hosts of its layout will complete its parts.

        Raises:
            SliceResizedError: the slice has got another shape since the layout was made.
        """
        if layout.is_retired:
            from pathways.errors import SliceResizedError
            raise SliceResizedError(f"{layout.slice!r} has got its shape meanwhile; try again")
        return self.wrap(self.new_token(layout.parts), layout)

    cdef object wrap(self, uint64_t raw, Layout layout):
        cdef PyTypeObject* kind = <PyTypeObject*>self.array_type
        cdef Buffer array = <Buffer><object>kind.tp_new(kind, <PyObject*>_nothing, NULL)
        Py_DECREF(array)  # tp_new's reference; the cast took its own
        array.handle = raw
        array.layout = layout
        array.client = self
        cdef uint32_t index = _handle(raw).index()
        self.live[index] = <PyObject*>array
        if index >= self.top:
            self.top = index + 1
        return array

    def stand_in(self, Layout layout not None):
        """An array without a buffer, which no call may be given: it stands for another one while a program is traced.
        """
        cdef PyTypeObject* kind = <PyTypeObject*>self.array_type
        cdef Buffer array = <Buffer><object>kind.tp_new(kind, <PyObject*>_nothing, NULL)
        Py_DECREF(array)  # as in `wrap`
        array.layout = layout
        array.client = self
        return array

    def own_token(self, owner not None, uint32_t parts):
        """Makes a new token as `owner.token`, so that not even Ctrl-C comes between the two."""
        owner.token = self.new_token(parts)

    cpdef uint64_t new_token(self, uint32_t parts) except? 0:
        """A new future for a fetch. Release it with `forget_token`."""
        cdef Handle handle
        while self.core.get().allocate(parts, &handle) != Status.kOk:
            self.make_room()
        return handle.raw

    def forget_token(self, uint64_t raw):
        if not self.closed:
            self.core.get().forget(_handle(raw))

    def put(self, Buffer array not None, bytes payload not None, BlockView block=None, span=None, uint32_t parts=0):
        """Sends the bytes of a new array as a command, in the order. `block` has them, and is leased to each host of
        the array. `span`: what the command says of it instead, (offset, bytes), for tests of TRUST-1. `parts`: so many
        entries at its end say what each host needs (`payloads.leased_parts`); 0: each needs all.
        """
        self.send_command(CommandKind.kPut, array.layout.group, array.handle, 0, payload, array.layout.space_set,
                          array.layout.space_bytes, _lease(block, array.layout, span, parts))

    def fetch(self, Buffer array not None, uint64_t token, bytes payload not None, BlockView block=None, span=None):
        """Has the hosts write an array into `block`, which is leased to each host of the array, and then complete
        `token`. `span`: see `put`.
        """
        self.send_command(CommandKind.kFetch, array.layout.group, array.handle, token, payload, NO_SPACE_SET, 0,
                          _lease(block, array.layout, span))

    def make(self, Buffer array not None, bytes payload not None):
        """Has the hosts of a new array make it by a task, in the order."""
        self.send_command(CommandKind.kTask, array.layout.group, array.handle, 0, payload, array.layout.space_set,
                          array.layout.space_bytes, Lease())

    def command(self, int kind, uint32_t group, uint64_t raw, uint64_t token, bytes payload not None):
        """Sends one command in the order. `kind`: see `pathways.protocol.payloads`."""
        self.send_command(<CommandKind>kind, group, raw, token, payload, NO_SPACE_SET, 0, Lease())

    cdef send_command(self, CommandKind kind, uint32_t group, uint64_t raw, uint64_t token, bytes payload,
                      uint32_t space_set, uint64_t space_bytes, Lease lease):
        cdef const char* data = payload
        cdef Status status
        if self.closed:
            self.check_alive()
        while True:
            status = self.core.get().command(kind, group, _handle(raw), _handle(token),
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

    cpdef pause(self, double seconds):
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
    def in_flight(self):
        return self.core.get().in_flight()

    @property
    def losses(self):
        """How many losses of hosts this client has heard of, as far as it has polled. An array that was ready before
        one of them may be lost (ERR-2)."""
        return self.core.get().losses()

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
        if self.core.get().allocate_block(nbytes, &offset) != Status.kOk:
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
