"""The host's half of `_core`: `Host`, and the functions by which the native executor calls into JAX. The loop of `Host`
handles a batch of the order each time it holds Python's lock (GIL-1). Included by `_core.pyx`.
"""


import signal as _signal
import threading as _threading
from _signal import getsignal as _getsignal  # signal.getsignal makes an enum, which would slow down each call


cdef class Interrupts:
    """Embedded: keeps Ctrl-C out of the host's work while the main thread does that work.

    Python raises KeyboardInterrupt between two steps of any Python code that the main thread runs. Inside the host's
    work it would look like the failure of a computation. So `hold` installs a handler in place of the user's. An
    interrupt that comes between `hold` and `let_go` is raised after `let_go`, in the user's own code.
    """
    cdef bint holding
    cdef bint came                  # an interrupt came between `hold` and `let_go`
    cdef bint calling
    cdef object previous            # the user's handler
    cdef unsigned long main_thread

    def __init__(self):
        self.main_thread = _threading.main_thread().ident

    def __call__(self, number, frame):
        if self.holding:
            self.came = True
        elif self.calling:  # the user's handler calls the handler that it replaced, which is this one
            _signal.default_int_handler(number, frame)
        else:
            self.calling = True
            try:
                self.previous(number, frame)
            finally:
                self.calling = False

    cdef bint hold(self) except -1:
        """Returns False, and does nothing, on other threads, where Python raises no KeyboardInterrupt, and where the
        user ignores SIGINT or leaves it to the system.
        """
        if PyThread_get_thread_ident() != self.main_thread:
            return False
        handler = _getsignal(_SIGINT)
        if handler is not self:
            if not callable(handler):
                return False
            self.previous = handler
            _signal.signal(_SIGINT, self)
        self.holding = True
        return True

    cdef void let_go(self) noexcept:
        self.holding = False
        if self.came:
            self.came = False
            PyErr_SetInterrupt()

    cdef leave(self):
        """Installs the user's handler again."""
        if PyThread_get_thread_ident() == self.main_thread and _getsignal(_SIGINT) is self:
            _signal.signal(_SIGINT, self.previous)


cdef object _SIGINT = int(_signal.SIGINT)
cdef Interrupts _interrupts = Interrupts()


@cython.final
cdef class ClientMemory:
    """A client's memory as a host uses it: a checked view of the arena (TRUST-1), and the segment that holds it."""
    cdef ArenaView arena
    cdef object segment


cdef HostView _host_view(segment) except *:
    return HostView(<void*><size_t>segment.address, <size_t>segment.nbytes)


@cython.no_gc_clear  # for the reason given at Client
cdef class Host:
    """One host: the native executor, and the calls into JAX that the executor makes.

    `driver` does the rare calls (pathways/host/jax_backend.py). Launches, readiness and references do not use it.
    """
    cdef unique_ptr[CppHost] core
    cdef unique_ptr[CallbackBackend] backend
    cdef object driver
    cdef tuple keep                              # segments: those of the hosts, then the controller's
    cdef Arena* arena
    cdef dict clients                            # id -> ClientMemory
    cdef list launchables                        # by plan: a tuple of callables, or None
    cdef vector[PyObject*] fast                  # by plan: the same tuple, as a borrowed reference
    cdef vector[Value] scratch
    cdef bint stopping
    cdef object failure                          # the exception of the last error
    cdef dict read_backs                         # by (sharding, shape, dtype): the recipe, see _read_back
    cdef readonly uint32_t number

    def __init__(self, driver, uint32_t number, uint32_t devices, uint32_t max_in_flight, list host_segments,
                 controller_segment, uint32_t batch=64, uint64_t device_bytes=0, bint gangs_block=False):
        cdef HostOptions options
        cdef BackendCallbacks callbacks
        cdef vector[HostView] blocks
        cdef vector[ArenaView] arenas
        cdef HostBlock* own = <HostBlock*><size_t>host_segments[number].host_block
        for segment in host_segments:  # None: that host is lost now; see replace_peer
            blocks.push_back(HostView() if segment is None else _host_view(segment))
            arenas.push_back(blocks.back().arena())
        self.keep = (*host_segments, controller_segment)
        self.driver = driver
        self.number = number
        self.arena = own.host_arena() if own.arena != 0 else <Arena*>NULL
        self.clients = {}
        self.launchables = []
        self.read_backs = {}
        callbacks.self = <void*>self
        callbacks.launch = &_launch
        callbacks.placeholder = &_placeholder
        callbacks.readiness = &_readiness
        callbacks.retain = &_retain
        callbacks.drop = &_drop
        callbacks.transfer = &_transfer
        callbacks.begin_receive = &_begin_receive
        callbacks.shards = &_shards
        callbacks.send_remote = &_send_remote
        callbacks.direct = &_direct
        callbacks.finish_receive = &_finish_receive
        callbacks.abandon_receive = &_abandon_receive
        callbacks.put = &_put
        callbacks.fetch = &_fetch
        callbacks.read_back = &_read_back
        callbacks.refuse_fetch = &_refuse_fetch
        callbacks.refuse_put = &_refuse_put
        callbacks.start_task = &_start_task
        callbacks.command = &_command
        callbacks.explain = &_explain
        callbacks.offload = &_offload
        callbacks.forget_plan = &_forget_plan
        callbacks.forget_client = &_forget_client
        self.backend.reset(new CallbackBackend(callbacks, number, arenas, &own.doorbell))
        options.host = number
        options.devices = devices
        options.max_in_flight = max_in_flight
        options.device_bytes = device_bytes
        options.gangs_block = gangs_block
        options.batch = batch
        self.core.reset(new CppHost(options, blocks, <ControllerBlock*><size_t>controller_segment.controller_block,
                                    self.backend.get()[0]))

    def __dealloc__(self):
        # Values are Python references. The core drops them here, with Python's lock held, through the backend. So the
        # backend must be destroyed after the core.
        self.core.reset()
        self.backend.reset()

    # ---- registration, from any thread

    def add_plan(self, uint32_t plan, bytes block not None, uint32_t client):
        """Registers an encoded host plan; it is removed with its client. Raises ValueError when it is malformed."""
        cdef vector[byte] data
        data.resize(len(block))
        memcpy(data.data(), <const char*>block, len(block))
        self.core.get().add_plan(plan, Plan.parse(data), client)

    def add_copy_plan(self, uint32_t plan, uint32_t route, uint32_t destination, words not None):
        """Registers what transfer `route` of a plan writes to one host: uint64 words as csrc/memory/copy_plan.h reads.

        Call it before the plan is added. Raises ValueError when the words are malformed.
        """
        cdef const uint64_t[::1] view = words
        self.backend.get().add_copy_plan(plan, route, destination, const_u64_span(&view[0], <size_t>view.shape[0]))

    def set_launchables(self, uint32_t plan, tuple launchables not None, list value_bytes not None,
                        list launches not None):
        """Sets the callables of the plan's calls. Each takes flat arrays and returns a tuple or list of arrays.

        `value_bytes`: the bytes of each value on each of its devices. `launches`: for each launchable, the bytes of its
        temporaries, and the positions of the inputs whose memory the outputs take over.
        """
        cdef PlanSizes sizes
        cdef LaunchSizes launch
        for size in value_bytes:
            sizes.values.push_back(size)
        for temporary, donated in launches:
            launch.temporary = temporary
            launch.donated.clear()
            for position in donated:
                launch.donated.push_back(position)
            sizes.launches.push_back(launch)
        while <uint32_t>len(self.launchables) <= plan:
            self.launchables.append(None)
            self.fast.push_back(NULL)
        self.launchables[plan] = launchables
        self.fast[plan] = <PyObject*>launchables
        self.core.get().set_compiled(plan, optional[string](), sizes)

    def set_failed(self, uint32_t plan, str error not None):
        """The plan could not be compiled: its runs fail with `error`."""
        cdef string text = error.encode()
        self.core.get().set_compiled(plan, optional[string](text), PlanSizes())

    def remove_plan(self, uint32_t plan):
        """Removes a plan that no later run names. When its last run is over, `driver.program_gone(plan)` is called."""
        self.core.get().remove_plan(plan)

    def attach_client(self, uint32_t client, segment):
        """Maps a client's memory until the client's end in the order. Then `driver.client_gone(client)` is called, and
        the memory is released (OWN-1).

        Raises ValueError when the client's segment is malformed (TRUST-1).
        """
        cdef ClientMemory memory = ClientMemory.__new__(ClientMemory)
        cdef ClientView view = ClientView(<void*><size_t>segment.address, <size_t>segment.nbytes)
        memory.arena = view.arena()
        memory.segment = segment
        self.clients[client] = memory
        self.core.get().attach_client(client, view)

    def set_predecessor_failure(self, str text not None, uint32_t youngest_client):
        """ERR-2: this host is the successor of a lost one. A missing buffer of a client up to `youngest_client` fails
        with `text`. Call it before the loop begins.
        """
        self.core.get().executor().set_predecessor_failure(text.encode(), youngest_client)

    def replace_peer(self, uint32_t peer, segment, uint64_t loss):
        """A lost peer's successor has `segment`. Returns when this host no longer uses the predecessor's memory."""
        from time import sleep
        cdef HostView block = _host_view(segment)
        cdef uint64_t before = self.core.get().peers_replaced()
        self.core.get().replace_peer(peer, block, loss)
        while self.core.get().peers_replaced() == before and not self.stopping:
            sleep(0.001)
        self.backend.get().replace_arena(peer, block.arena())  # Python's lock is held, so no step is under way
        # Views of the old memory keep the old tuple alive.
        self.keep = (*self.keep[:peer], segment, *self.keep[peer + 1:])

    def set_far(self, uint32_t peer):
        """That host is on another machine: `driver.send_remote` sends to it. Call it before the loop begins."""
        self.backend.get().set_far(peer)

    def remote_send_done(self, OutgoingTransfer outgoing not None, str error):
        """Reports that an outgoing transfer was written at its destination, or that it failed with `error`. Any thread.
        """
        cdef string text = b"" if error is None else error.encode("utf-8", "replace")
        self.backend.get().remote_send_done(outgoing.key, outgoing.destination, text)

    def set_faults(self, uint32_t swap_every, int64_t slow_copies_ns=0):
        """For tests: `swap_every` breaks ORD-1 on this host; every copy to another host takes `slow_copies_ns` longer.
        """
        cdef ExecutorFaults faults
        self.backend.get().copier().set_delay(nanoseconds(slow_copies_ns))
        faults.swap_every = swap_every
        self.core.get().set_faults(faults)

    def task_done(self, uint64_t task, value, uint64_t devices, str error):
        """Reports that the driver's task is over: with `value`, which is on the local devices of the mask `devices`, or
        with `error`. Both may be None.
        """
        cdef optional[string] text
        cdef string words
        if error is not None:
            words = error.encode("utf-8", "replace")
            text = optional[string](words)
        self.core.get().task_done(task, NULL if value is None else _own(value), devices, text)

    def launched(self, uint64_t order, uint32_t node, tuple made, str error):
        """Reports that an attended launch is over: its outputs `made` are ready, or it failed with `error`."""
        cdef optional[string] text
        cdef vector[Value] values
        cdef string words
        if error is not None:
            words = error.encode("utf-8", "replace")
            text = optional[string](words)
        else:
            for value in made:
                values.push_back(_own(value))
        self.core.get().launched(order, node, values, text)

    # ---- the loop

    def run(self, arm, tidy):
        """The enqueue thread's loop, until `stop`. `arm(values)` must arrange that the host's doorbell rings when one
        of the values is ready; `tidy()` is called before each wait.

        A wake-up costs more than most of the work that follows it: a watcher that sleeps until a value is ready takes
        four thread switches. So the loop first polls its devices some times itself. When the devices can take no more
        launches, the loop sleeps until half of the launches are done, or for a bounded time, so that completions are
        soon reported.
        """
        cdef uint32_t ticket, done
        cdef uint32_t busy = 0
        cdef uint32_t polls = 0
        cdef nanoseconds limit
        cdef SpinPolicy spin
        while not self.stopping:
            ticket = self.core.get().ticket()
            done = self.core.get().step()
            if done != 0:
                polls = 0
                busy += 1
                if busy % 16 == 0:
                    with nogil:  # so that the control threads can run
                        pass
                    PyErr_CheckSignals()
                continue
            if self.core.get().executor().is_throttled():
                limit, spin = nanoseconds(_THROTTLED_NS), SpinPolicy.sleep_at_once()
                self.core.get().executor().watched_half_way(&self.scratch)
            else:
                self.core.get().executor().watched(&self.scratch)
                polls += 1
                if self.scratch.size() != 0 and polls < _POLL_LIMIT:
                    with nogil:
                        self.core.get().wait(ticket, nanoseconds(0), SpinPolicy.check_once())
                    continue
                limit = nanoseconds(_LOOK_NS)
                spin = SpinPolicy.serve_stream() if self.scratch.empty() else SpinPolicy.sleep_at_once()
            if not self.scratch.empty():
                arm([<object><PyObject*>value for value in self.scratch])
            tidy()
            with nogil:
                self.core.get().wait(ticket, limit, spin)
            polls = 0
            PyErr_CheckSignals()

    def step(self):
        return self.core.get().step()

    def stop(self):
        self.stopping = True
        self.core.get().ring()

    def ring(self):
        """Wakes the loop, so that it makes another step."""
        self.core.get().ring()

    cdef wait_oldest(self, Client client, double seconds):
        """Embedded: waits until something under way is done, at most about `seconds`. When only one value is pending
        and no deadline is set, it waits for that value without a limit.
        """
        cdef uint32_t ticket = self.core.get().ticket()
        cdef double limit = min(seconds, 0.001)
        cdef int64_t due = client.controller.next_deadline_ns()
        cdef bint moved = True
        if client.pumping:  # another thread is inside a step, and its call into JAX released Python's lock
            with nogil:
                self.core.get().wait(ticket, nanoseconds(<int64_t>(limit * 1e9)), SpinPolicy.sleep_at_once())
            return
        cdef bint holds = _interrupts.hold()
        client.pumping = True
        try:
            moved = self.core.get().step() != 0
        finally:
            client.pumping = False
            if holds:
                _interrupts.let_go()
        if moved:
            return
        self.core.get().executor().watched(&self.scratch)
        if self.scratch.size() == 1 and due == INT64_MAX:
            self.driver.block(<object><PyObject*>self.scratch[0])
            return
        if not self.scratch.empty():  # wait for the first value or deadline (DEAD-1)
            self.driver.arm([<object><PyObject*>value for value in self.scratch])
            limit = seconds
            if due != INT64_MAX:
                limit = max(0.0, min(seconds, (due - monotonic_ns()) * 1e-9))
        with nogil:
            self.core.get().wait(ticket, nanoseconds(<int64_t>(limit * 1e9)), SpinPolicy.sleep_at_once())

    def clear(self):
        """Drops every value."""
        self.core.get().executor().clear()

    def is_idle(self):
        return self.core.get().executor().is_idle()

    def stats(self):
        cdef ExecutorStats s = self.core.get().executor().stats()
        cdef const Ledger* ledger = &self.core.get().executor().ledger()
        cdef size_t i
        cdef uint64_t limit
        devices, accounts = [], []
        for i in range(ledger.devices().size()):
            limit = ledger.devices()[i].limit
            devices.append({"bytes": ledger.devices()[i].bytes, "high_water": ledger.devices()[i].high_water,
                            "limit": limit if limit != <uint64_t>-1 else None})
        for i in range(ledger.accounts().size()):
            if ledger.accounts()[i].is_open or ledger.accounts()[i].bytes != 0:
                accounts.append({"client": ledger.accounts()[i].client,
                                 "plan": ledger.accounts()[i].plan if ledger.accounts()[i].plan != PUTS else None,
                                 "bytes": ledger.accounts()[i].bytes,
                                 "high_water": ledger.accounts()[i].high_water})
        return {"runs": s.runs, "launches": s.launches, "gangs": s.gangs, "transfers": s.transfers,
                "objects": s.objects, "live_runs": s.live_runs, "waiting": s.waiting, "overfull": s.overfull,
                "borrowed": _borrowed,
                "oldest_runs": [each.decode() for each in self.core.get().executor().describe_runs(_OLDEST_RUNS)],
                "tasks": s.tasks, "goes": s.goes, "go_ns": s.go_ns,
                "memory": {"devices": devices, "accounts": accounts},
                "bytes_sent": self.backend.get().bytes_sent(), "bytes_kept": self.backend.get().bytes_kept(),
                "bytes_shipped": self.backend.get().bytes_shipped(),
                "arena_bytes": 0 if self.arena == NULL else self.arena.bytes_in_use(),
                "arena_high_water": 0 if self.arena == NULL else self.arena.high_water()}

    # ---- memory

    def allocate(self, size_t nbytes, uint64_t limit):
        """A block of this host's arena. None when the arena has no room now, or when more than `limit` bytes would be
        in use.
        """
        cdef uint64_t offset
        if self.arena == NULL or self.arena.bytes_in_use() + nbytes > limit:
            return None
        if self.arena.allocate(nbytes, &offset) != Status.kOk:
            return None
        return BlockView.make(self.arena, offset, nbytes, self.keep)

    def client_block(self, uint32_t client, uint64_t offset, uint64_t nbytes):
        """A view of a block in a client's arena that the client leased to this host. The view returns the lease.

        Raises ValueError when there is no such block (TRUST-1): the offset and length come from the client.
        """
        cdef ClientMemory memory = self.clients.get(client)
        cdef BlockView view
        cdef byte* data = NULL
        cdef bint is_lease = self.number < BORROWERS
        if memory is not None and memory.arena.is_there():
            data = (memory.arena.find_leased(offset, nbytes, <unsigned>self.number) if is_lease
                    else memory.arena.find(offset, nbytes))
        if data == NULL:
            raise ValueError(f"{nbytes} bytes at offset {offset} of client {client}'s memory are no block that was "
                             f"lent to host {self.number}, or not all of one: it was not lent")
        view = BlockView.__new__(BlockView)
        view.owner_arena = memory.arena
        view.data = data
        view.offset = offset
        view.nbytes = nbytes
        view.keep = memory.segment
        view.borrower = -1
        view.process = process_token()
        if is_lease:
            global _borrowed
            view.borrower = <int>self.number
            _borrowed += 1
        return view

    def arena_capacity(self):
        return 0 if self.arena == NULL else self.arena.capacity()

    cdef int failed(self, str doing, const NodeContext* where) noexcept:
        """Makes the current exception the backend's last error."""
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
        if not _is_refused_by_disable_jit(host):
            return host.failed("launch", where)
        try:
            again = host.driver.launch_with_jit(<object>function, [<object><PyObject*>inputs[i] for i in range(n)])
        except BaseException:
            return _python_failed(host, "launch", where)
        result = <PyObject*>again
        Py_INCREF_(result)
    if PyList_CheckExact_(result):
        for i in range(m):
            item = PyList_GET_ITEM_(result, i)
            Py_INCREF_(item)
            outputs[i] = <Value>item
    elif PyTuple_CheckExact_(result):
        for i in range(m):
            item = PyTuple_GET_ITEM_(result, i)
            Py_INCREF_(item)
            outputs[i] = <Value>item
    else:
        return _attend(host, where, result)
    Py_DECREF_(result)
    return <int>Status.kOk


cdef int _attend(Host host, const NodeContext* where, PyObject* launch) noexcept:
    # A thread of the driver launches a computation that calls functions of its client, because that thread may wait.
    cdef object work = <object>launch
    Py_DECREF_(launch)
    try:
        host.driver.attend(where.order, where.plan, where.node, work)
        return <int>Status.kPending
    except BaseException:
        return _python_failed(host, "launch", where)


cdef bint _is_refused_by_disable_jit(Host host) noexcept:
    # Called while an exception is set. An embedded cluster launches on its user's threads, where `jax.disable_jit` may
    # be on. JAX then refuses every launch before it does anything. In that case this clears the exception; else it
    # keeps it.
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    cdef bint refused = False
    PyErr_Fetch(&kind, &value, &trace)
    try:
        refused = host.driver.is_jit_disabled()
    except BaseException:
        pass
    if not refused:
        PyErr_Restore(kind, value, trace)
        return False
    Py_XDECREF_(kind)
    Py_XDECREF_(value)
    Py_XDECREF_(trace)
    return True


cdef bint _was_deleted(PyObject* array) noexcept:
    # Called while an exception is set: clears the exception when the array is deleted, and keeps it otherwise.
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    PyErr_Fetch(&kind, &value, &trace)
    cdef PyObject* answer = PyObject_CallMethodNoArgs(array, <PyObject*>_is_deleted)
    cdef bint deleted = answer == Py_True_
    if answer == NULL:
        PyErr_Clear()
    else:
        Py_DECREF_(answer)
    if not deleted:
        PyErr_Restore(kind, value, trace)
        return False
    Py_XDECREF_(kind)
    Py_XDECREF_(value)
    Py_XDECREF_(trace)
    return True


cdef int _readiness(void* self, Value value) noexcept:
    # 0 pending, 1 ready, 2 failed, 3 deleted (donated). A deleted array does not tell whether its launch ran (LOOK-1).
    cdef Host host = <Host>self
    cdef PyObject* array = <PyObject*>value
    cdef PyObject* answer = PyObject_CallMethodNoArgs(array, <PyObject*>_is_ready)
    if answer == NULL:
        if _was_deleted(array):
            return 3
        host.failed("run", NULL)
        return 2
    cdef bint ready = answer == Py_True_
    Py_DECREF_(answer)
    if not ready:
        return 0
    answer = PyObject_CallMethodNoArgs(array, <PyObject*>_block_until_ready)
    if answer == NULL:
        if _was_deleted(array):
            return 3
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
        return _own(None)  # then the launch fails and reports an error


cdef int _transfer(void* self, const NodeContext* where, Value value, Value* out) noexcept:
    cdef Host host = <Host>self
    try:
        out[0] = _own(host.driver.transfer(where.plan, where.computation, <object><PyObject*>value))
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "transfer", where)


cdef int _begin_receive(void* self, const NodeContext* where, vector[ReceiveBuffers]* receives) noexcept:
    cdef Host host = <Host>self
    cdef ReceiveBuffers receive
    try:
        room = host.driver.begin_receive(where.order, where.plan, where.computation)
        if room is None:
            return <int>Status.kNoMemory
        sources, offsets = room
        for offset in offsets:
            receive.offsets.push_back(offset)
        for source in sources:
            receive.source = source
            receives.push_back(receive)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "receive", where)


cdef int _shards(void* self, const NodeContext* where, Value value, vector[const byte*]* out, Value* keep) noexcept:
    cdef Host host = <Host>self
    try:
        kept, addresses = host.driver.shards(where.plan, where.computation, <object><PyObject*>value)
        for address in addresses:
            out.push_back(<const byte*><size_t>address)
        keep[0] = _own(kept)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "send", where)


cdef int _send_remote(void* self, const NodeContext* where, uint32_t destination, uint64_t key,
                      shared_ptr[const CopyPlan] copy_plan, vector[const byte*] sources, Value keep) noexcept:
    cdef Host host = <Host>self
    cdef OutgoingTransfer outgoing = OutgoingTransfer.__new__(OutgoingTransfer)
    try:
        outgoing.key, outgoing.destination, outgoing.order = key, destination, where.order
        outgoing.node = host.driver.transfer_number(where.plan, where.computation)
        outgoing.keep = <object><PyObject*>keep
        outgoing.core.reset(new CppOutgoingTransfer(where.order, outgoing.node, host.number, copy_plan, sources))
        host.driver.send_remote(outgoing)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "send", where)


cdef int _direct(void* self, const NodeContext* where, Value value) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.direct(where.order, where.plan, where.computation, <object><PyObject*>value)
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


cdef int _read_back(void* self, Value value, byte* small, byte* large) noexcept:
    # A recipe has three items. First, the size of the whole value. Second, for each part that this host must write: the
    # shard's number, the part's offset in the whole value, and its bytes; None when the shards cannot be copied as they
    # are. Third, a function that gets an array's shards; None when the array itself is the only shard.
    cdef Host host = <Host>self
    cdef object array = <object><PyObject*>value
    cdef byte* out
    cdef size_t nbytes, pointer, start, size
    try:
        if array.is_deleted():  # donated: no reader is left
            return <int>Status.kOk
        key = (array.sharding, array.shape, array.dtype)
        recipe = host.read_backs.get(key)
        if recipe is None:
            if len(host.read_backs) > 4096:
                host.read_backs.clear()
            recipe = host.read_backs[key] = host.driver.read_back_recipe(array)
        nbytes = recipe[0]
        if nbytes == 0:
            return <int>Status.kOk
        out = small if nbytes <= kSmallBytes else large
        if out == NULL or nbytes > kLargeBytes:
            raise ValueError(f"a value of {nbytes} bytes does not fit its read-back slot")
        if recipe[1] is None:
            host.driver.read_back(array, PyMemoryView_FromMemory(<char*>out, nbytes, PyBUF_WRITE))
            return <int>Status.kOk
        if recipe[1]:
            shards = (array,) if recipe[2] is None else recipe[2](array)
            for number, start, size in recipe[1]:
                pointer = shards[number].unsafe_buffer_pointer()
                memcpy(out + start, <const void*>pointer, size)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "read-back", NULL)


cdef void _refuse_put(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.refuse_put(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "put", NULL)


cdef void _refuse_fetch(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.refuse_fetch(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "fetch", NULL)


cdef int _start_task(void* self, uint32_t client, uint64_t task, Value value, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.start_task(client, task, None if value == NULL else <object><PyObject*>value,
                               (<const char*>data)[:n])
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "task", NULL)


cdef void _command(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.command(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "command", NULL)


cdef int _offload(void* self, uint32_t client, Value* values, size_t count, const byte* data, size_t n,
                  cbool away) noexcept:
    cdef Host host = <Host>self
    cdef size_t i
    cdef list moved
    try:
        moved = host.driver.offload(client, [<object><PyObject*>values[i] for i in range(count)],
                                    (<const char*>data)[:n], away)
        if moved is None:  # it failed; the driver has already reported the reason to the requester
            return <int>Status.kFailed
        for i in range(count):
            new = _own(moved[i])
            Py_DECREF_(<PyObject*>values[i])
            values[i] = new
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "offload", NULL)


cdef void _forget_plan(void* self, uint32_t plan) noexcept:
    cdef Host host = <Host>self
    try:
        if plan < <uint32_t>len(host.launchables):
            host.launchables[plan] = None
            host.fast[plan] = NULL
        host.driver.program_gone(plan)
    except BaseException:
        _python_failed(host, "forget", NULL)


cdef void _forget_client(void* self, uint32_t client) noexcept:
    # The host no longer uses the client's memory. This unmaps the memory, unless values that were put without a copy
    # still refer to it; then it stays mapped until the last of them is freed.
    cdef Host host = <Host>self
    try:
        host.clients.pop(client, None)
        host.driver.client_gone(client)
    except BaseException:
        _python_failed(host, "forget", NULL)


cdef void _explain(void* self, const NodeContext* maker) noexcept:
    cdef Host host = <Host>self
    try:
        text = host.driver.describe("run", host.failure, maker.plan, maker.node)
        host.backend.get().set_error(text.encode("utf-8", "replace"))
    except BaseException:  # keep the backend's present error: it says less, but it is true
        import traceback
        traceback.print_exc()
    host.failure = None


cdef int _python_failed(Host host, str doing, const NodeContext* where) noexcept:
    """Call it inside an `except` block: the caught exception becomes the backend's last error."""
    import sys
    error = sys.exc_info()[1]
    try:
        text = host.driver.describe(doing, error, where.plan if where != NULL else -1,
                                    where.node if where != NULL else -1)
    except BaseException as problem:
        text = f"{doing}: {error!r} ({problem!r})"
    host.backend.get().set_error(text.encode("utf-8", "replace"))
    return <int>Status.kFailed
