"""`Interrupts`: keeps Ctrl-C out of a host's work, when the main thread of an embedded cluster does it. Included by
`_core.pyx`.
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
