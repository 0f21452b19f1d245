"""`Host`: one host's native executor and its enqueue loop. The loop handles a batch of the order each time it holds
Python's lock (GIL-1). Included by `_core.pyx`.
"""

# How long a host polls its devices, with a yield of the core after each poll, before a watcher sleeps on them.
cdef int64_t _POLL_NS = 30_000
# The longest sleep of a host while its devices can take no more launches.
cdef int64_t _THROTTLED_NS = 500_000
# A host's statistics tell for this many of its live runs, the oldest, what they wait for.
cdef size_t _OLDEST_RUNS = 16


cdef HostView _host_view(segment) except *:
    return HostView(<void*><size_t>segment.address, <size_t>segment.nbytes)


cdef optional[string] _text(str error) except *:
    cdef string text
    if error is None:
        return optional[string]()
    text = error.encode("utf-8", "replace")
    return optional[string](text)


@cython.no_gc_clear  # for the reason given at Client
cdef class Host:
    """One host: the native executor, and the calls into JAX that the executor makes.

    `driver` does the rare calls (pathways/host/jax_host.py). What the executor calls is in `_host_callbacks.pxi`.
    """
    cdef unique_ptr[CppHost] core
    cdef unique_ptr[SendingBackend] backend
    cdef bint copies_scalars
    cdef object driver
    cdef tuple keep                              # segments: those of the hosts, then the controller's
    cdef Arena* arena
    cdef dict clients                            # id -> ClientMemory
    cdef list launchables                        # by plan: a tuple of callables, or None
    cdef vector[PyObject*] fast                  # by plan: the same tuple, as a borrowed reference
    cdef vector[Value] scratch
    cdef bint stopping
    cdef int64_t polled_since                    # of `wait_oldest`, as in `run`
    cdef object failure                          # the exception of the last error
    cdef dict read_backs                         # by (sharding, shape, dtype): the recipe, see _read_back
    cdef readonly uint32_t number

    def __init__(self, driver, uint32_t number, uint32_t devices, quirks, list host_segments,
                 controller_segment, uint32_t batch=64, uint64_t device_bytes=0, uint32_t swap_every_for_testing=0,
                 epochs=()):
        cdef HostOptions options
        cdef vector[HostView] blocks
        cdef vector[ArenaView] arenas
        cdef vector[int32_t] peers = epochs  # see HostConfig.epochs
        cdef HostBlock* own = <HostBlock*><size_t>host_segments[number].host_block
        cdef ControllerBlock* controller
        for segment in host_segments:  # None: that host is lost now; see replace_peers
            blocks.push_back(HostView() if segment is None else _host_view(segment))
            arenas.push_back(blocks.back().arena())
        self.keep = (*host_segments, controller_segment)
        self.driver = driver
        self.number = number
        self.arena = own.host_arena() if own.arena != 0 else <Arena*>NULL
        self.clients = {}
        self.launchables = []
        self.read_backs = {}
        self.backend.reset(new JaxOperations(<PyObject*>self))
        self.backend.get().open(number, arenas, &own.doorbell)
        options.host = number
        options.devices = devices
        options.quirks.max_in_flight = quirks.in_flight if devices > 1 else 0  # one device computes in the launch
        self.copies_scalars = quirks.copies_scalars
        options.quirks.gangs_block = quirks.gangs_block
        options.quirks.computes_in_launch = quirks.computes_in_launch
        options.device_bytes = device_bytes
        options.batch = batch
        controller = <ControllerBlock*><size_t>controller_segment.controller_block
        if swap_every_for_testing == 0:
            self.core.reset(new CppHost(options, blocks, controller, self.backend.get()[0], peers))
        else:
            self.core.reset(new SwappingHostForTesting(swap_every_for_testing, options, blocks, controller,
                                                       self.backend.get()[0], peers))

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
        """Registers what transfer `route` of a plan writes to one host: uint64 words as csrc/bulk/copy_plan.h reads.

        Call it before the plan is added. Raises ValueError when the words are malformed.
        """
        cdef const uint64_t[::1] view = words
        self.backend.get().add_copy_plan(plan, route, destination, const_u64_span(&view[0], <size_t>view.shape[0]))

    def set_launchables(self, uint32_t plan, tuple launchables not None, list value_bytes not None,
                        list launches not None):
        """Sets the callables of the plan's calls. Each takes flat arrays and returns a tuple or list of arrays.

        `value_bytes`: the bytes of each value on each of its devices. `launches`: for each launchable, the bytes of its
        temporaries, the positions of the inputs whose memory the outputs take over, and whether it moves its input to
        another memory.
        """
        cdef PlanSizes sizes
        cdef LaunchSizes launch
        for size in value_bytes:
            sizes.values.push_back(size)
        for temporary, donated, moves in launches:
            launch.temporary = temporary
            launch.moves = moves
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
        self.core.get().set_compiled(plan, _text(error), PlanSizes())

    def remove_plan(self, uint32_t plan):
        """Removes a plan that no later run names. When its last run is over, `driver.program_gone(plan)` is called."""
        self.core.get().remove_plan(plan)

    def attach_client(self, uint32_t client, segment, uint32_t futures):
        """Maps a client's memory until the notice of the client's end. Then `driver.client_gone(client)` is called, and
        the memory is released (OWN-1). `futures`: how many it has; GANG-1: all hosts must be told the same number,
        because they refuse runs that name others.

        Raises ValueError when the client's segment is malformed (TRUST-1).
        """
        cdef ClientMemory memory = ClientMemory.__new__(ClientMemory)
        cdef ClientView view = ClientView(<void*><size_t>segment.address, <size_t>segment.nbytes)
        memory.arena = view.arena()
        memory.segment = segment
        self.clients[client] = memory
        self.core.get().attach_client(client, view, futures)

    def set_predecessor_failure(self, str text not None, uint32_t youngest_client):
        """ERR-2: this host is the successor of a lost one. A missing buffer of a client up to `youngest_client` fails
        with `text`. Call it before the loop begins.
        """
        self.core.get().executor().set_predecessor_failure(text.encode(), youngest_client)

    def replace_peers(self, list successors not None):
        """Lost peers have successors: of each the peer's number, its segment, its epoch, the number of the loss, and
        whether bytes go there through a stream. The segment is None when the successor is beyond the machine's link.
        Returns when this host no longer uses the memory of those predecessors whose successors have segments: by peer,
        the exception of a successor that it refuses, and keeps as lost.
        """
        from time import sleep
        cdef dict refused = {}
        cdef uint64_t wanted = self.core.get().peers_replaced()
        for peer, segment, epoch, loss, _ in successors:
            try:
                self.core.get().open_peer(peer, HostView() if segment is None else _host_view(segment), epoch, loss)
                wanted += segment is not None
            except Exception as error:
                refused[peer] = error
        while self.core.get().peers_replaced() < wanted and not self.stopping:
            sleep(0.001)
        keep = list(self.keep)
        for peer, segment, _, _, is_streamed in successors:
            if peer not in refused and segment is not None:  # Python's lock is held, so no step is under way.
                if not is_streamed:
                    self.backend.get().open_memory(peer, _host_view(segment).arena())
                keep[peer] = segment
        self.keep = tuple(keep)  # views of the old memory keep the old tuple alive
        return refused

    def open_stream(self, uint32_t peer):
        """Bytes go to that host through `driver.transfers.send_remote`. Call it before the loop, or by its thread."""
        self.backend.get().open_stream(peer)

    def remote_send_done(self, OutgoingTransfer outgoing not None, str error):
        """Reports that an outgoing transfer was written at its destination, or that it failed with `error`. Any thread.
        """
        cdef string text = b"" if error is None else error.encode("utf-8", "replace")
        self.backend.get().remote_send_done(outgoing.key, outgoing.destination, text)

    def arrived(self, uint64_t order, uint32_t node, uint32_t source):
        """Reports that all that a host on another machine sends in a transfer is written. Any thread."""
        self.backend.get().arrived(order, node, source)

    def keep_early(self, const unsigned char[::1] message not None):
        """Keeps the chunk that a message begins with until its receive has memory (FAR-3). False: it cannot.
        Any thread.

        Raises RuntimeError when it is no chunk.
        """
        cdef const_byte_span chunk = const_byte_span(<const byte*>&message[0], message.shape[0])
        return self.backend.get().keep_early(first_chunk(chunk).first, chunk)

    def slow_copies_for_testing(self, double seconds):
        """Every copy to another host takes so much longer. Call it before the loop begins."""
        self.backend.get().slow_copies_for_testing(nanoseconds(<int64_t>(seconds * 1e9)))

    def task_done(self, uint64_t task, value, uint64_t devices, str error):
        """Reports that the driver's task is over: with `value`, which is on the local devices of the mask `devices`, or
        with `error`. Both may be None.
        """
        self.core.get().task_done(task, NULL if value is None else _own(value), devices, _text(error))

    def task_answered(self, uint64_t task):
        """Completes the token of the driver's task, which keeps its value until `task_done`."""
        self.core.get().task_answered(task)

    def launched(self, uint64_t order, uint32_t node, tuple made, str error):
        """Reports that an attended launch is over: its outputs `made` are ready, or it failed with `error`."""
        cdef vector[Value] values
        if error is None:
            for value in made:
                values.push_back(_own(value))
        self.core.get().launched(order, node, values, _text(error))

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
        cdef int64_t polled_since = 0   # 0: the devices were not polled since the last wait, or the last thing done
        cdef int64_t begin
        cdef nanoseconds limit
        cdef SpinPolicy spin
        cdef TurnSpin turns
        while not self.stopping:
            ticket = self.core.get().ticket()
            done = self.core.get().step()
            if done != 0:
                polled_since = 0
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
                if self.scratch.size() != 0:
                    begin = monotonic_ns()
                    if polled_since == 0:
                        polled_since = begin
                    if begin - polled_since < _POLL_NS:
                        with nogil:
                            self.core.get().wait(ticket, nanoseconds(0), SpinPolicy.check_once())
                        continue
                limit = nanoseconds(_LOOK_NS)
                spin = turns.policy() if self.scratch.empty() else SpinPolicy.sleep_at_once()
            if not self.scratch.empty():
                arm([<object><PyObject*>value for value in self.scratch])
            tidy()
            begin = monotonic_ns()
            with nogil:
                self.core.get().wait(ticket, limit, spin)
            turns.waited(nanoseconds(monotonic_ns() - begin))
            polled_since = 0
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
        """Embedded: waits until something under way is done, at most about `seconds`: the caller looks for signals, and
        whether another thread has cancelled or closed what it waits for (END-1).

        As in `run`, this thread first polls some times itself: most values are ready before a watcher would sleep.
        """
        cdef uint32_t ticket = self.core.get().ticket()
        cdef double limit = min(seconds, 0.001)
        cdef int64_t due = client.controller.next_deadline_ns()
        cdef int64_t begin
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
            self.polled_since = 0
            return
        self.core.get().executor().watched(&self.scratch)
        if not self.scratch.empty():  # wait for the first value or deadline (DEAD-1)
            begin = monotonic_ns()
            if self.polled_since == 0:
                self.polled_since = begin
            if begin - self.polled_since < _POLL_NS:
                with nogil:
                    self.core.get().wait(ticket, nanoseconds(0), SpinPolicy.check_once())
                return
            self.polled_since = 0
            self.driver.watchers.arm([<object><PyObject*>value for value in self.scratch])
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
        cdef Executor* executor = &self.core.get().executor()
        cdef vector[LedgerDevice] devices = executor.ledger().devices()
        cdef vector[LedgerAccount] accounts = executor.ledger().accounts()
        return {**executor.stats(), "borrowed": _borrowed,
                "oldest_runs": [each.decode() for each in executor.describe_runs(_OLDEST_RUNS)],
                "memory": {"devices": [{"bytes": each.bytes, "high_water": each.high_water,
                                        "limit": each.limit if each.limit != <uint64_t>-1 else None}
                                       for each in devices],
                           "accounts": [{"client": each.client, "plan": each.plan if each.plan != PUTS else None,
                                         "bytes": each.bytes, "high_water": each.high_water}
                                        for each in accounts if each.is_open or each.bytes != 0]},
                "busy": executor.device_uses(),
                "bytes_sent": self.backend.get().bytes_sent(), "bytes_kept": self.backend.get().bytes_kept(),
                "bytes_shipped": self.backend.get().bytes_shipped(),
                "arena_bytes": 0 if self.arena == NULL else self.arena.bytes_in_use(),
                "arena_high_water": 0 if self.arena == NULL else self.arena.high_water()}

    # ---- traces. Python's lock is held, as it is in each step: see csrc/runs/run_trace.h.

    def start_trace(self, size_t capacity):
        """Traces the runs that are read from now on, in memory for `capacity` records."""
        self.core.get().executor().start_trace(capacity)

    def stop_trace(self):
        """Traces no run further. What was recorded stays for `take_trace`."""
        self.core.get().executor().stop_trace()

    def take_trace(self):
        """The records of the trace so far, as the bytes of RunTraceRecords, and how many older ones were dropped."""
        cdef RunTraceTaken taken = self.core.get().executor().take_trace()
        cdef size_t nbytes = taken.records.size() * sizeof(RunTraceRecord)
        return PyBytes_FromStringAndSize(<const char*>taken.records.data(), <Py_ssize_t>nbytes), taken.dropped

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
        if data == NULL and offset == 0:  # so a link says it
            raise ValueError(f"a block for {nbytes} bytes of client {client} was not lent. For a client on another "
                             "machine this means no room on the way: such clients have all the memory that they may "
                             "take at the head. Try again later")
        if data == NULL:
            raise ValueError(f"the block of {nbytes} bytes at offset {offset} of client {client}'s memory was not "
                             f"lent to host {self.number}, or is not one whole block")
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
