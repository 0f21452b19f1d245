"""Blocks of shared memory: `BlockView` (a block as a Python buffer), leases of a client's blocks to hosts, and
`ClientMemory` (a client's memory as a host uses it). Included by `_core.pyx`.
"""

cdef int64_t _borrowed = 0   # number of leases that this process holds of blocks in clients' memory


cdef Lease _lease(BlockView block, Layout layout, span=None, uint32_t parts=0):
    """A lease of a block for each host of a layout; hosts with numbers from BORROWERS on get a counted reference.
    `span`: what is said of the block instead. `parts`: see `Client.put`.
    """
    cdef Lease lease
    if block is not None:
        lease.offset = block.offset
        lease.bytes = block.nbytes - parts * sizeof(LeasedPart)
        lease.parts = parts
        for host in layout.hosts:
            if host < BORROWERS:
                lease.borrowers |= <uint64_t>1 << <int>host
            else:
                lease.others += 1
    if span is not None:
        lease.lie, lease.bytes = <uint64_t>span[0] - lease.offset, span[1]
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


@cython.final
cdef class ClientMemory:
    """A client's memory as a host uses it: a checked view of the arena (TRUST-1), and the segment that holds it."""
    cdef ArenaView arena
    cdef object segment
