# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The requests of a usual step of stock JAX: a program runs on whole arrays, handles are dropped.

`UsualRequests.handle` does all of a request and gives its response, or it does nothing and gives None. Then the session
handles it as every other (PROXY-1). So what is wrong with a request is decided in one place, which is not here.

The fields' numbers are those of the protocol, which protobuf never changes; `tests/python/proxy/test_usual_requests.py`
compares what is read and written here with the descriptors of the installed jaxlib.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from pathways.errors import PathwaysError
from pathways.proxy.arrays import Array, Held
from pathways.proxy.contexts import Context
from pathways.proxy.handles import OWN
from pathways.proxy.loaded import Loaded

cdef enum:
    # wire types
    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    # IfrtRequest and IfrtResponse
    METADATA = 1
    DESTRUCT_ARRAY = 12
    EXECUTE = 15
    # RequestMetadata and ResponseMetadata
    OP_ID = 1
    USER_CONTEXT_ID = 5
    STATUS = 2
    SEQ_NUM = 3
    DESTROYED_CONTEXTS = 4
    # DestructArrayRequest
    ARRAY_HANDLE = 2
    # LoadedExecutableExecuteRequest
    PROGRAM = 1
    ARGUMENTS = 2
    OPTIONS = 3
    RESULTS = 5
    # ExecuteOptionsProto: numbers that a run does not need
    LAUNCH_ID = 3
    STREAM_ID = 11

cdef uint64_t _OWN = OWN
cdef Py_ssize_t MOST_DROPPED = 12


cdef struct Span:
    const uint8_t* at
    const uint8_t* end


cdef struct Request:
    uint64_t number
    uint64_t context
    uint32_t kind  # EXECUTE or DESTRUCT_ARRAY
    Span body


cdef bint take_varint(Span* span, uint64_t* value) noexcept nogil:
    cdef uint32_t shift = 0
    value[0] = 0
    while span.at < span.end and shift < 64:
        value[0] |= <uint64_t>(span.at[0] & 127) << shift
        span.at += 1
        if span.at[-1] < 128:
            return True
        shift += 7
    return False


cdef bint take_fixed(Span* span, uint64_t* value) noexcept nogil:
    if span.end - span.at < 8:
        return False
    memcpy(value, span.at, 8)
    span.at += 8
    return True


cdef bint take_span(Span* span, Span* inner) noexcept nogil:
    cdef uint64_t size
    if not take_varint(span, &size) or size > <uint64_t>(span.end - span.at):
        return False
    inner.at = span.at
    inner.end = span.at = span.at + size
    return True


cdef bint take_tag(Span* span, uint32_t* field, uint32_t* wire) noexcept nogil:
    """One of less than 16 in one byte."""
    if span.at[0] >= 128:
        return False
    field[0] = span.at[0] >> 3
    wire[0] = span.at[0] & 7
    span.at += 1
    return True


cdef bint take_handles(Span* span, vector[uint64_t]* handles) noexcept nogil:
    """Packed ones."""
    cdef Span inner
    cdef uint64_t handle
    if not take_span(span, &inner) or (inner.end - inner.at) % 8:
        return False
    while take_fixed(&inner, &handle):
        handles.push_back(handle)
    return True


cdef uint8_t* put_fixed(uint8_t* at, uint32_t field, uint64_t value) noexcept nogil:
    at[0] = field << 3 | FIXED64
    memcpy(at + 1, &value, 8)
    return at + 9


cdef uint8_t* put_varint(uint8_t* at, uint32_t field, uint64_t value) noexcept nogil:
    at[0] = field << 3 | VARINT
    at += 1
    while value > 127:
        at[0] = value & 127 | 128
        at += 1
        value >>= 7
    at[0] = value
    return at + 1


cdef bint take_request(Span span, Request* request) noexcept nogil:
    """Whether it is a request of these kinds, with its fields in their order."""
    cdef uint32_t field, wire
    cdef Span metadata
    if span.at == span.end or not take_tag(&span, &field, &wire) or field != METADATA or wire != BYTES:
        return False
    if not take_span(&span, &metadata):
        return False
    request.number = request.context = 0
    while metadata.at < metadata.end:
        if not take_tag(&metadata, &field, &wire) or wire != FIXED64:
            return False
        if field == OP_ID:
            if not take_fixed(&metadata, &request.number):
                return False
        elif field != USER_CONTEXT_ID or not take_fixed(&metadata, &request.context):
            return False
    if span.at == span.end or not take_tag(&span, &request.kind, &wire) or wire != BYTES:
        return False
    return (request.kind == EXECUTE or request.kind == DESTRUCT_ARRAY) and take_span(&span, &request.body) \
        and span.at == span.end


cdef class UsualRequests:
    """Handles requests of one session. Its thread alone calls it."""
    cdef object arrays, executables, replies, dropped
    cdef dict kept_arrays, kept_executables
    cdef vector[uint64_t] arguments, results

    def __init__(self, arrays, executables, replies):
        """`arrays` and `executables` are the session's tables of handles."""
        self.arrays = arrays
        self.kept_arrays = arrays.kept
        self.kept_executables = executables.kept
        self.replies = replies
        self.dropped = replies.dropped

    def handle(self, bytes raw not None):
        """The response to a request; None: it is not a usual one, or something is wrong, and nothing was done."""
        cdef Request request
        cdef Span span
        span.at = <const uint8_t*>PyBytes_AS_STRING(raw)
        span.end = span.at + len(raw)
        if not take_request(span, &request):
            return None
        if request.kind == EXECUTE:
            return self.execute(&request)
        return self.destruct(&request)

    cdef object destruct(self, Request* request):
        cdef uint32_t field, wire
        self.arguments.clear()
        while request.body.at < request.body.end:
            if not take_tag(&request.body, &field, &wire) or field != ARRAY_HANDLE or wire != BYTES:
                return None
            if not take_handles(&request.body, &self.arguments):
                return None
        cdef list handles = self.arguments
        for handle in handles:
            if handle not in self.kept_arrays:
                return None
        if len(handles) > 1 and len(set(handles)) != <size_t>len(handles):
            return None
        for handle in handles:
            del self.kept_arrays[handle]
        if request.context:
            self.dropped.append(request.context)  # nothing refers to it
        return self.response(request, False)

    cdef object execute(self, Request* request):
        cdef uint64_t number, program_handle = 0
        cdef size_t n
        if not self.take_execute(request.body, &program_handle):
            return None
        program = self.kept_executables.get(program_handle)
        if type(program) is not Loaded:
            return None
        cdef tuple kinds = program.results
        if self.results.size() != <size_t>len(kinds) or len(self.kept_arrays) + len(kinds) > self.arrays.bound:
            return None
        for n in range(self.results.size()):
            number = self.results[n]
            if number == 0 or number >= _OWN or number in self.kept_arrays or (n and number <= self.results[n - 1]):
                return None
        devices = program.devices
        cdef list given = [], buffers = []
        for n in range(self.arguments.size()):
            array = self.kept_arrays.get(self.arguments[n])
            if type(array) is not Array:
                return None
            held = array.whole
            if held is None or held.gone:
                return None
            where = array.sharding.devices
            if where is not devices and where != devices:
                return None
            given.append(array)
            buffers.append(held.buffer)
        if program.donated and len(set(map(id, buffers))) != len(buffers):
            return None
        try:
            made = program.executable.run_again(buffers)
        except PathwaysError:
            return None
        if made is None:
            return None
        for number in program.donated:
            given[number].lose(is_donated=True)
        context = Context(request.context, self.dropped) if request.context else None
        name = program.name
        for n, kind in enumerate(kinds):
            held = Held(made[n], name, context)
            self.kept_arrays[self.results[n]] = Array(kind.dtype, kind.shape, kind.sharding, context, held)
        return self.response(request, True)

    cdef bint take_execute(self, Span body, uint64_t* program) noexcept:
        """Whether an execution has nothing unusual."""
        cdef uint32_t field, wire
        cdef uint64_t unused
        cdef Span options
        self.arguments.clear()
        self.results.clear()
        while body.at < body.end:
            if not take_tag(&body, &field, &wire):
                return False
            if field == PROGRAM and wire == FIXED64:
                if not take_fixed(&body, program):
                    return False
            elif field == ARGUMENTS and wire == BYTES:
                if not take_handles(&body, &self.arguments):
                    return False
            elif field == RESULTS and wire == BYTES:
                if not take_handles(&body, &self.results):
                    return False
            elif field == OPTIONS and wire == BYTES:
                if not take_span(&body, &options):
                    return False
                while options.at < options.end:
                    if not take_tag(&options, &field, &wire) or wire != VARINT or not take_varint(&options, &unused):
                        return False
                    if field != LAUNCH_ID and field != STREAM_ID:
                        return False
            else:
                return False
        return True

    cdef bytes response(self, Request* request, bint is_counted):
        """An empty response. A counted one tells of contexts that were dropped: of a few, so that each length takes one
        byte; the next one tells of more."""
        cdef uint8_t out[256]
        cdef uint8_t* at = out + 2  # behind the tag and the length of the metadata
        cdef uint64_t number
        cdef Py_ssize_t _, count
        at = put_fixed(at, OP_ID, request.number)
        at[0], at[1] = STATUS << 3 | BYTES, 0
        at += 2
        if is_counted:
            at = put_varint(at, SEQ_NUM, self.replies.next_count())
            count = min(len(self.dropped), MOST_DROPPED)
            if count:
                at[0], at[1] = DESTROYED_CONTEXTS << 3 | BYTES, 8 * count
                at += 2
            for _ in range(count):
                number = self.dropped.popleft()
                memcpy(at, &number, 8)
                at += 8
        out[0], out[1] = METADATA << 3 | BYTES, at - out - 2
        at[0], at[1] = request.kind << 3 | BYTES, 0
        return PyBytes_FromStringAndSize(<const char*>out, at + 2 - out)
