"""Waits that poll and do not sleep. Included by `_core.pyx`."""

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events, revents
    int poll(pollfd*, unsigned long count, int timeout_ms)
    enum: POLLIN

cdef extern from "<sched.h>" nogil:
    int sched_yield()


def poll_beside(Client client not None, uint64_t raw, int descriptor, double seconds):
    """Polls until the future is not pending, something has come at a descriptor, or the time is over: for an answer
    that is nearly there. The core goes to others between the polls."""
    cdef Handle handle = _handle(raw)
    cdef pollfd watched
    cdef int64_t end = monotonic_ns() + <int64_t>(seconds * 1e9)
    watched.fd, watched.events, watched.revents = descriptor, POLLIN, 0
    with nogil:
        while (client.core.get().poll(handle) == FutureState.kPending and poll(&watched, 1, 0) == 0
               and monotonic_ns() < end):
            sched_yield()
