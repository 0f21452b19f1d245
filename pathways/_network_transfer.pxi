"""Network transfers: data sent to hosts on other machines and received from them, packed without Python's lock.

`pathways/host/network_transfer.py` is the stream that carries the messages. Included by `_core.pyx`.
"""


@cython.final
cdef class OutgoingTransfer:
    """All that this host sends to one host on another machine in one transfer. Keeps the source arrays alive."""
    cdef unique_ptr[CppOutgoingTransfer] core
    cdef object keep
    cdef readonly uint64_t key           # the executor's key, by which the end of the transfer is reported
    cdef readonly uint32_t destination
    cdef readonly uint64_t order         # `order` and `node` identify the run and its transfer on every host
    cdef readonly uint32_t node

    @property
    def nbytes(self):
        return self.core.get().bytes()

    @property
    def is_over(self):
        """Whether all of its bytes are packed."""
        return self.core.get().is_over()


def pack(list outgoing not None, uint64_t limit, room not None):
    """Packs the next message: one chunk of each transfer of `outgoing` in turn, as long as they fit into `limit` bytes,
    but at least one chunk. `room(bytes)` returns writable memory for it.

    Returns the bytes of the message.
    """
    cdef vector[CppOutgoingTransfer*] each
    cdef uint64_t total = 0
    cdef uint64_t used = 0
    cdef size_t i
    for transfer in outgoing:
        each.push_back((<OutgoingTransfer?>transfer).core.get())
        total += each.back().room()
        if total >= limit:
            break
    total = max(min(total, limit), each[0].least())
    cdef unsigned char[::1] message = room(total)
    if <uint64_t>message.shape[0] < total:
        raise ValueError(f"a message needs room for {total} bytes, there are {message.shape[0]}")
    cdef byte* out = <byte*>&message[0]
    with nogil:
        for i in range(each.size()):
            used += each[i].pack(byte_span(out + used, <size_t>(total - used)))
    return used


def pack_head(OutgoingTransfer outgoing not None, uint64_t least, uint64_t most, room not None):
    """Packs the head of a chunk whose payload lies in one piece in a source, with `least` to `most` bytes.
    `room(bytes)` returns writable memory for the head.

    Returns the bytes of the head, and the payload, which is there as long as `outgoing`. None: it is not in one piece.
    """
    cdef const_byte_span payload
    cdef unsigned char[::1] head = room(outgoing.core.get().room() - outgoing.core.get().left())
    cdef uint64_t used = outgoing.core.get().pack_head(byte_span(<byte*>&head[0], <size_t>head.shape[0]), least, most,
                                                       &payload)
    if used == 0:
        return None
    return used, PyMemoryView_FromMemory(<char*>payload.data(), payload.size(), PyBUF_READ)


@cython.final
cdef class IncomingTransfer:
    """The receive buffers of a transfer from another machine: the blocks as writable arrays, None where nothing is
    written.
    """
    cdef unique_ptr[CppIncomingTransfer] core
    cdef list keep

    def __init__(self, list blocks not None):
        cdef vector[byte*] at
        cdef vector[uint64_t] sizes
        for block in blocks:
            if block is None:
                at.push_back(<byte*>NULL)
                sizes.push_back(0)
            else:
                at.push_back(<byte*><size_t>block.__array_interface__["data"][0])
                sizes.push_back(block.nbytes)
        self.keep = blocks
        self.core.reset(new CppIncomingTransfer(at, sizes))

    @property
    def is_over(self):
        """Whether all of its bytes have their places, and those that were taken are written."""
        return self.core.get().is_over()


def place(const unsigned char[::1] prefix not None, uint64_t message_bytes, waiting not None):
    """Where the payload of a message must be written, if the message is one chunk whose payload goes into one piece
    of a receive buffer. `prefix`: its first bytes.

    Returns the chunk's order, node and host, its `IncomingTransfer`, the bytes before the payload, and the memory for
    it, which is there as long as the `IncomingTransfer`. None: `unpack` must take it.
    """
    cdef optional[ChunkHead] found = chunk_head(const_byte_span(<const byte*>&prefix[0], <size_t>prefix.shape[0]))
    cdef ChunkHead head
    cdef IncomingTransfer incoming
    cdef byte_span target
    if not found.has_value():
        return None
    head = found.value()
    if head.payload_at + head.payload_bytes != message_bytes:
        return None
    order, node, host = head.chunk.order, head.chunk.node, head.chunk.host
    incoming = waiting(order, node, host)
    if incoming is None:
        return None
    target = incoming.core.get().place(head.chunk, head.payload_bytes)
    if target.empty():
        return None
    memory = PyMemoryView_FromMemory(<char*>target.data(), target.size(), PyBUF_WRITE)
    return order, node, host, incoming, head.payload_at, memory


def unpack(const unsigned char[::1] message not None, waiting not None, keep_early):
    """Writes a message's chunks into the receive buffers. `waiting(order, node, host)` returns the `IncomingTransfer`,
    or None when none waits. Then `keep_early(order, node, host, chunk)`, if given, says whether it has kept the chunk.

    Returns the transfers that are complete, and those that failed: (order, node, host, error or None). Raises
    RuntimeError when the message is cut off.
    """
    cdef size_t left = message.shape[0]
    cdef size_t begin
    cdef const byte* at = NULL
    cdef pair[Chunk, uint64_t] first
    cdef IncomingTransfer incoming
    if left != 0:
        at = <const byte*>&message[0]
    finished = []
    while left != 0:
        first = first_chunk(const_byte_span(at, left))
        begin = message.shape[0] - left
        at += first.second
        left -= first.second
        order, node, host = first.first.order, first.first.node, first.first.host
        incoming = waiting(order, node, host)
        if incoming is None:
            if keep_early is not None and keep_early(order, node, host, message[begin : begin + first.second]):
                continue
            finished.append((order, node, host, "nobody waits for it there"))
            continue
        try:
            with nogil:
                incoming.core.get().take(first.first)
        except RuntimeError as error:
            finished.append((order, node, host, str(error)))
            continue
        if incoming.core.get().is_over():
            finished.append((order, node, host, None))
    return finished
