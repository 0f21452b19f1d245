"""Freight in `_core`: what goes to and comes from hosts on other machines, packed and unpacked without Python's lock.

The stream that carries the messages is `pathways/host/network_transfer.py`. Included by `_core.pyx`.
"""


@cython.final
cdef class Shipment:
    """All that this host sends to a host on another machine in one transfer; keeps what it reads."""
    cdef unique_ptr[CppShipment] core
    cdef object keep
    cdef readonly uint64_t key           # the executor's, to be told by
    cdef readonly uint32_t destination
    cdef readonly uint64_t order         # with `node`: which transfer of which run, on every host
    cdef readonly uint32_t node

    @property
    def nbytes(self):
        return self.core.get().bytes()

    @property
    def is_over(self):
        """All of it is packed."""
        return self.core.get().is_over()


def pack(list shipments not None, uint64_t limit):
    """The next message: a piece of each of `shipments` in turn, as far as `limit` bytes go, but some in any case."""
    cdef vector[CppShipment*] each
    cdef uint64_t total = 0
    cdef uint64_t used = 0
    cdef size_t i
    for shipment in shipments:
        each.push_back((<Shipment?>shipment).core.get())
        total += each.back().room()
    total = max(min(total, limit), each[0].least())
    cdef bytes message = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>total)
    cdef byte* out = <byte*>PyBytes_AS_STRING(message)
    with nogil:
        for i in range(each.size()):
            used += each[i].pack(byte_span(out + used, <size_t>(total - used)))
    return message if used == total else message[:<Py_ssize_t>used]


@cython.final
cdef class Delivery:
    """Where one shipment lands: the blocks of a landing, as writable arrays, None where nothing may be written."""
    cdef unique_ptr[CppDelivery] core
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
        self.core.reset(new CppDelivery(at, sizes))


def unpack(bytes message not None, waiting not None):
    """Writes a message's pieces where they belong: `waiting(order, node, host)` is the delivery of a shipment, or None.

    Returns the shipments that are all there, and those that never will be: (order, node, host, error or None). Raises
    RuntimeError when the message is cut off.
    """
    cdef const byte* at = <const byte*>PyBytes_AS_STRING(message)
    cdef size_t left = len(message)
    cdef pair[Piece, uint64_t] first
    cdef Delivery delivery
    told = []
    while left != 0:
        first = first_piece(const_byte_span(at, left))
        at += first.second
        left -= first.second
        order, node, host = first.first.record.order, first.first.record.node, first.first.record.host
        delivery = waiting(order, node, host)
        if delivery is None:
            told.append((order, node, host, "nobody waits for it there"))
            continue
        try:
            with nogil:
                delivery.core.get().take(first.first)
        except RuntimeError as error:
            told.append((order, node, host, str(error)))
            continue
        if delivery.core.get().is_over():
            told.append((order, node, host, None))
    return told
