"""The native half of an array: `Layout` (its shape, dtype and hosts), and `Buffer` (a handle with an owner). `pw.Array`
derives from `Buffer`. Included by `_core.pyx`.
"""


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

    def _learn(self):
        """Call it when the array is read: from now on the values of this result come with their completions."""
        if self.maker is not None:
            self.maker.learn(self.place)

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

    def _pin(self):
        """From now on something reads it outside of the order: a call that donates it must pass a copy (MEM-4)."""
        self.shared = True

    def _lie_as(self, Layout layout not None):
        """The slice has got another shape, and the array this layout. Call it only while `Client.moving` (MOVE-1)."""
        self.layout = layout
