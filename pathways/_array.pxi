"""The native half of an array: `Layout` (its shape, dtype and hosts), and `Buffer` (a handle with an owner). `pw.Array`
derives from `Buffer`. Included by `_core.pyx`.
"""

from numpy import asarray as _asarray, dtype as _dtype, ndarray as _ndarray


cdef class Layout:
    """Shape, dtype and placement of an array on one client's cluster. Interned: equal layouts are one object.

    When its slice gets another shape, a layout is retired: no array has it any more, and none can be made of it.
    """
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
    cdef public object plain          # the NumPy dtype of its bytes; None: the api converts what was read
    cdef readonly uint32_t space_set  # the devices that hold it, for the ledger of memory
    cdef readonly uint64_t space_bytes  # its bytes on each of these devices
    cdef readonly bint is_retired

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
        self.plain = None

    def move(self, uint32_t group, tuple hosts not None, uint32_t space_set):
        """From now on other devices hold the arrays of this layout. Call it only while `Client.moving` (MOVE-1)."""
        self.group = group
        self.hosts = hosts
        self.parts = len(hosts)
        self.space_set = space_set

    def retire(self):
        """From now on the slice has another shape. Call it only while `Client.moving` (MOVE-1)."""
        self.is_retired = True


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
    cdef public object ahead          # READ-3: a fetch under way that nobody has asked for; a run may still donate it
    cdef readonly bint shared         # MEM-4: something may still read it outside of the order, or shares its memory
    cdef readonly uint64_t run        # tag of the run that makes it; 0: no run
    cdef Call maker                   # the call that made it
    cdef uint32_t place               # which result of that call it is
    cdef readonly bint is_inline     # READ-1: its value comes with its completion
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

    cdef inline void give(self) noexcept:
        """The run that was just submitted donates it: the run has the handle now (FUT-3)."""
        self.deleted = True
        self.cached = None
        self.client.give_array(self)

    def _learn(self):
        """Call it when the array is read: from now on the values of this result come with their completions."""
        if self.maker is not None:
            self.maker.learn(self.place)

    def __array__(self, dtype=None, context=None, copy=None):
        """The value, fetched once and kept; read-only."""
        cdef object value = self.cached
        if type(value) is not _ndarray:
            value = self._read_at_once()
            if value is None:
                value = self._value()
                if not isinstance(value, _ndarray):
                    raise TypeError(f"{self!r} has the extended dtype {self.layout.dtype}; NumPy has nothing like it")
        if dtype is not None and _dtype(dtype) != value.dtype:
            if copy is False:
                raise ValueError(f"a copy is needed to make {dtype} of {value.dtype}, but copy=False was asked for")
            return value.astype(dtype)
        return value.copy() if copy else value

    cdef object _read_at_once(self):
        """Waits, keeps the value and returns it, if it is a plain one that comes without a request. None: `_value` must
        look, and must tell what is wrong."""
        cdef object value
        cdef object plain = self.layout.plain
        if plain is None or self.deleted or self.handle == 0:
            return None
        if self.is_inline:
            value = self._read()
            if value is None:
                return None
            value = _ndarray(self.layout.shape, plain, value)
            self._learn()
        elif self.cached is None and self.client.host is not None:
            value = self._in_process()
            if type(value) is not _ndarray:
                return None
        else:
            return None
        self.cached = value
        return value

    def _in_process(self):
        """Embedded: waits, and returns the host's value as NumPy. READ-2: nothing is sent, and nothing in the order
        waits for it. None: it failed, was deleted, or cannot be looked at now.
        """
        cdef Client client = self.client
        cdef Handle handle = _handle(self.handle)
        cdef Value value
        if client.host is None or client.gated or self.layout.nbytes == 0:
            return None  # XLA's empty shards may have a wrong shape
        if client.core.get().poll(handle) == FutureState.kPending:
            client.wait_raw(self.handle)
        # Python's lock is held from here to the reference. `pumping`: another thread is inside a step, which has
        # released the lock in a launch, so the host's tables may be in the middle of a change.
        if self.deleted or client.gated or client.pumping or client.core.get().poll(handle) != FutureState.kReady:
            return None
        value = client.host.core.get().executor().value_of(client.core.get().id(), handle)
        if value == NULL or Py_TYPE_(<PyObject*>value) != <PyObject*>client.value_type:
            return None  # it is off its devices
        return _asarray(<object><PyObject*>value)

    def _read(self):
        """READ-1: waits for an inline result and returns its bytes in C order; None when it failed or was deleted."""
        cdef Handle handle = _handle(self.handle)
        if self.client.closed:
            self.client.check_alive()
        if self.client.core.get().poll(handle) == FutureState.kPending:
            self.client.wait_raw(self.handle)
        # Python's lock is held from this poll to the copy, so no thread releases the handle in between.
        if self.deleted or self.client.core.get().poll(handle) != FutureState.kReady:
            return None
        return PyBytes_FromStringAndSize(<const char*>self.client.core.get().read(handle, self.layout.nbytes),
                                         self.layout.nbytes)

    def _beside(self, bint in_a_row, Py_ssize_t most):
        """READ-3: up to `most` other small arrays that will probably be read next: results of the same run; of those
        that are ready, the same result of other runs; `in_a_row`: and all others. None of them is here, or on its way.
        """
        cdef Client client = self.client
        cdef Buffer other
        cdef FutureState state
        cdef uint32_t i
        cdef bint is_next
        cdef list found = []
        if client.core.get().futures().in_use() > client.core.get().futures().capacity() // 2:
            return found
        for i in range(client.top):
            if not client.is_live(i):
                continue
            other = <Buffer><object>client.live[i]
            if (other.deleted or other is self or other.is_inline or other.cached is not None
                    or other.ahead is not None or other.layout.nbytes > kLargeBytes):
                continue
            state = client.core.get().poll(_handle(other.handle))
            if state == FutureState.kReady:
                is_next = in_a_row or (self.maker is not None and other.maker is self.maker and (
                    other.place == self.place or other.run == self.run))
            else:
                is_next = state == FutureState.kPending and self.run != 0 and other.run == self.run
            if is_next:
                found.append(other)
                if len(found) >= most:
                    break
        return found

    def _ask_ahead(self, owner not None, bytes payload not None, BlockView block not None):
        """READ-3: as `Client.own_token` and `Client.fetch`, but waits for nothing. Returns whether there was room; else
        nothing was sent.
        """
        cdef Client client = self.client
        cdef const char* data = payload
        cdef Handle token
        if client.gated or client.core.get().allocate(self.layout.parts, &token) != Status.kOk:
            return False
        owner.token = token.raw
        if client.core.get().command(CommandKind.kFetch, self.layout.group, _handle(self.handle), token,
                                     const_byte_span(<const byte*>data, len(payload)), NO_SPACE_SET, 0,
                                     _lease(block, self.layout)) != Status.kOk:
            return False
        return True

    def _pin(self):
        """From now on something reads it outside of the order: a call that donates it must pass a copy (MEM-4)."""
        self.shared = True

    def _lie_as(self, Layout layout not None):
        """The slice has got another shape, and the array this layout. Call it only while `Client.moving` (MOVE-1)."""
        self.layout = layout
