"""The host's half of `_core`: `Host`, whose loop drains a batch of the order per hold of Python's lock (GIL-1), and the
functions through which the native executor calls into JAX. Included by `_core.pyx`.
"""


import signal as _signal
import threading as _threading
from _signal import getsignal as _getsignal  # not by way of an enum: this is on the way of each call


cdef class Interrupts:
    """Embedded: keeps Ctrl-C out of the host's work while the main thread does it.

    Python raises KeyboardInterrupt between two steps of whatever Python code the main thread runs. Inside the host's
    work that would be taken as the failure of a computation that nobody interrupted. So `hold` puts a handler before
    the user's; what comes before `let_go` is raised after it, in the user's own code.
    """
    cdef bint holding
    cdef bint came                  # while it was held
    cdef bint calling
    cdef object previous            # the user's handler
    cdef unsigned long main_thread

    def __init__(self):
        self.main_thread = _threading.main_thread().ident

    def __call__(self, number, frame):
        if self.holding:
            self.came = True
        elif self.calling:  # the user's handler calls the one that it found before it: this one
            _signal.default_int_handler(number, frame)
        else:
            self.calling = True
            try:
                self.previous(number, frame)
            finally:
                self.calling = False

    cdef bint hold(self) except -1:
        """False on other threads, where none is raised, and where the user ignores it or leaves it to the system."""
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
        """Gives the user's handler its place back."""
        if PyThread_get_thread_ident() == self.main_thread and _getsignal(_SIGINT) is self:
            _signal.signal(_SIGINT, self.previous)


cdef object _SIGINT = int(_signal.SIGINT)
cdef Interrupts _interrupts = Interrupts()


@cython.final
cdef class ClientMemory:
    """What a host knows of a client's memory: its arena, as TRUST-1 has it, and the segment that holds it."""
    cdef ArenaView arena
    cdef object segment


cdef HostView _host_view(segment) except *:
    return HostView(<void*><size_t>segment.address, <size_t>segment.nbytes)


@cython.no_gc_clear  # as Client
cdef class Host:
    """One host: the native executor, and the calls into JAX that it asks for.

    `driver` does the rare calls (pathways/host/jax_backend.py). Launches, readiness and references do not go there.
    """
    cdef unique_ptr[CppHost] core
    cdef unique_ptr[CallbackBackend] backend
    cdef object driver
    cdef tuple keep                              # segments: the hosts', then the controller's
    cdef Arena* arena
    cdef dict clients                            # id -> ClientMemory
    cdef list launchables                        # by plan: tuple of callables, or None
    cdef vector[PyObject*] fast                  # by plan: the same tuple, borrowed
    cdef vector[Value] scratch
    cdef bint stopping
    cdef object failure                          # the exception of the last error
    cdef dict read_backs                         # how to read back, by (sharding, shape, dtype): see _read_back
    cdef readonly uint32_t number

    def __init__(self, driver, uint32_t number, uint32_t devices, uint32_t max_in_flight, list host_segments,
                 controller_segment, uint32_t batch=64, uint64_t device_bytes=0, bint gangs_block=False):
        cdef HostOptions options
        cdef BackendCallbacks callbacks
        cdef vector[HostView] blocks
        cdef vector[ArenaView] arenas
        cdef HostBlock* own = <HostBlock*><size_t>host_segments[number].host_block
        for segment in host_segments:  # None: lost now; see replace_peer
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
        # Values are Python references: they go while Python's lock is held, before the backend that drops them.
        self.core.reset()
        self.backend.reset()

    # ---- registration, from any thread

    def add_plan(self, uint32_t plan, bytes block not None, uint32_t client):
        """Registers an encoded host plan, which goes with its client. Raises ValueError when it is malformed."""
        cdef vector[byte] data
        data.resize(len(block))
        memcpy(data.data(), <const char*>block, len(block))
        self.core.get().add_plan(plan, Plan.parse(data), client)

    def add_copy_plan(self, uint32_t plan, uint32_t route, uint32_t destination, words not None):
        """What a route of a plan writes to one host: uint64 words as csrc/memory/copier.h reads them.

        Before the plan is added. Raises ValueError when they are malformed.
        """
        cdef const uint64_t[::1] view = words
        self.backend.get().add_copy_plan(plan, route, destination, const_u64_span(&view[0], <size_t>view.shape[0]))

    def set_launchables(self, uint32_t plan, tuple launchables not None, list value_bytes not None,
                        list launches not None):
        """The callables that the plan's calls name, flat arrays in and a tuple or list of arrays out.

        `value_bytes`: what each value takes on each of its devices; `launches`: by launchable, the temporaries' bytes
        and the positions of the inputs that the outputs take over.
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
        """No run that comes after names it. When the last that did is over, `driver.program_gone(plan)`."""
        self.core.get().remove_plan(plan)

    def attach_client(self, uint32_t client, segment):
        """Until the order has passed the client's end: `driver.client_gone(client)`, and its memory goes (OWN-1).

        Raises ValueError when the client's segment makes no sense (TRUST-1).
        """
        cdef ClientMemory memory = ClientMemory.__new__(ClientMemory)
        cdef ClientView view = ClientView(<void*><size_t>segment.address, <size_t>segment.nbytes)
        memory.arena = view.arena()
        memory.segment = segment
        self.clients[client] = memory
        self.core.get().attach_client(client, view)

    def set_predecessor_failure(self, str text not None, uint32_t youngest_client):
        """ERR-2: this host succeeds a lost one: what is missing here fails with `text`. Before the loop begins."""
        self.core.get().executor().set_predecessor_failure(text.encode(), youngest_client)

    def replace_peer(self, uint32_t peer, segment, uint64_t loss):
        """A lost peer's successor has `segment`. Returns when nothing of the predecessor's is used any more."""
        from time import sleep
        cdef HostView block = _host_view(segment)
        cdef uint64_t before = self.core.get().peers_replaced()
        self.core.get().replace_peer(peer, block, loss)
        while self.core.get().peers_replaced() == before and not self.stopping:
            sleep(0.001)
        self.backend.get().replace_arena(peer, block.arena())  # no step is under way: Python's lock is held
        # Views of the old memory keep the old tuple.
        self.keep = (*self.keep[:peer], segment, *self.keep[peer + 1:])

    def set_far(self, uint32_t peer):
        """That host is on another machine: `driver.send_remote` brings it what it is sent. Before the loop begins."""
        self.backend.get().set_far(peer)

    def remote_send_done(self, OutgoingTransfer outgoing not None, str error):
        """An outgoing transfer has been written where it belongs, or never will be, for `error`. Any thread."""
        cdef string text = b"" if error is None else error.encode("utf-8", "replace")
        self.backend.get().remote_send_done(outgoing.key, outgoing.destination, text)

    def set_faults(self, uint32_t swap_every, int64_t slow_copies_ns=0):
        """Test hooks: breaks ORD-1 on this host; every copy to another one takes so much longer."""
        cdef ExecutorFaults faults
        self.backend.get().copier().set_delay(nanoseconds(slow_copies_ns))
        faults.swap_every = swap_every
        self.core.get().set_faults(faults)

    def task_done(self, uint64_t task, value, uint64_t devices, str error):
        """The driver's task is over: with `value`, which lies on the local devices of the mask `devices`, or with
        `error`; both may be None."""
        cdef optional[string] text
        cdef string words
        if error is not None:
            words = error.encode("utf-8", "replace")
            text = optional[string](words)
        self.core.get().task_done(task, NULL if value is None else _own(value), devices, text)

    def launched(self, uint64_t order, uint32_t node, tuple made, str error):
        """A launch that the driver attended to is over: `made` are its outputs, which are ready; or it failed."""
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
        """The enqueue thread's loop, until `stop`. `arm(values)` sees to a ring when one of the values is ready;
        `tidy()` is called before each wait.

        Waking up costs more than most things it wakes up for: a watcher that sleeps until a value is ready takes four
        switches between threads. So it looks at its devices itself some times first; and when they have all they can
        take it sleeps until half of that is done, or for a bounded time, so that what is done is soon known.
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
                    with nogil:  # let the control threads have their turn
                        pass
                    PyErr_CheckSignals()
                continue
            if self.core.get().executor().is_throttled():
                limit, spin = nanoseconds(_THROTTLED_NS), SpinPolicy.yield_briefly()
                self.core.get().executor().watched_half_way(&self.scratch)
            else:
                self.core.get().executor().watched(&self.scratch)
                polls += 1
                if self.scratch.size() != 0 and polls < _POLL_LIMIT:
                    with nogil:
                        self.core.get().wait(ticket, nanoseconds(0), SpinPolicy.check_once())
                    continue
                limit = nanoseconds(_LOOK_NS)
                spin = SpinPolicy.yield_long() if self.scratch.empty() else SpinPolicy.yield_briefly()
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
        """Makes the loop look again."""
        self.core.get().ring()

    cdef wait_oldest(self, Client client, double seconds):
        """Embedded: waits until something under way is done, at most about `seconds` unless it is one thing alone."""
        cdef uint32_t ticket = self.core.get().ticket()
        cdef double limit = min(seconds, 0.001)
        cdef int64_t due = client.controller.next_deadline_ns()
        cdef bint moved = True
        if client.pumping:  # another thread is inside a step, and its call into JAX let go of Python's lock
            with nogil:
                self.core.get().wait(ticket, nanoseconds(<int64_t>(limit * 1e9)), SpinPolicy.yield_briefly())
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
        if not self.scratch.empty():  # whichever comes first, or a deadline (DEAD-1)
            self.driver.arm([<object><PyObject*>value for value in self.scratch])
            limit = seconds
            if due != INT64_MAX:
                limit = max(0.0, min(seconds, (due - monotonic_ns()) * 1e-9))
        with nogil:
            self.core.get().wait(ticket, nanoseconds(<int64_t>(limit * 1e9)), SpinPolicy.yield_briefly())

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
        """A block of this host's arena; None when it has no room now, or when more than `limit` would be in use."""
        cdef uint64_t offset
        if self.arena == NULL or self.arena.bytes_in_use() + nbytes > limit:
            return None
        if self.arena.allocate(nbytes, &offset) != Status.kOk:
            return None
        return BlockView.make(self.arena, offset, nbytes, self.keep)

    def client_block(self, uint32_t client, uint64_t offset, uint64_t nbytes):
        """A view of a block in a client's arena that it has lent to this host; gives it back.

        Raises ValueError for what is no such block (TRUST-1): offset and length are the client's words.
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
    # A computation that calls its client back is launched by a thread of the driver's, which may wait there.
    cdef object work = <object>launch
    Py_DECREF_(launch)
    try:
        host.driver.attend(where.order, where.plan, where.node, work)
        return <int>Status.kPending
    except BaseException:
        return _python_failed(host, "launch", where)


cdef bint _was_deleted(PyObject* array) noexcept:
    # Inside the handling of an error: takes the error away when the array is deleted, and leaves it otherwise.
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
    # 0 pending, 1 ready, 2 failed, 3 deleted (donated): an array that is deleted says nothing of its launch (LOOK-1).
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
        return _own(None)  # the launch then fails and says so


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
    # A recipe is the whole value's size and, where shards can be copied as they lie, for each part that this host is to
    # write: which of its shards, where the part begins in the whole, and its bytes.
    cdef Host host = <Host>self
    cdef object array = <object><PyObject*>value
    cdef byte* out
    cdef size_t nbytes, pointer, start, size
    try:
        if array.is_deleted():  # donated: nobody can read it
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
        if moved is None:  # the driver has told whoever asked why
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
    # Where it is the last reference, this unmaps the client's memory: the host touches none of it any more. Values that
    # were put without a copy keep it while somebody still reads them.
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
