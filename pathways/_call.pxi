"""`Call`: one compiled signature of a program, which a client calls; and `Deadline`, the limit of its runs. Any thread
may call it, with Python's lock held. Included by `_core.pyx`.
"""

import enum as _enum

cdef uint64_t _donating = 0  # number of calls so far that donate something
# After this many runs without a read of a result, the result's value no longer comes with its completion.
cdef uint32_t _UNREAD_RUNS = 64


class Refusal(_enum.Enum):
    """Why a `Call` did not take its leaves. Nothing was sent. Reasons that come first are found first."""
    UNLIKE = "another number of leaves, or an array of another layout: the leaves have another signature"
    HOST_VALUE = "a leaf is not an array yet, and the arrays fit: put the leaf"
    STALE = "a slice of the program moved: call `bind`"
    SHARED = "a donated array is shared, is being read, or is also another argument: pass a copy of it (MEM-4)"


cdef object _UNLIKE = Refusal.UNLIKE
cdef object _HOST_VALUE = Refusal.HOST_VALUE
cdef object _STALE = Refusal.STALE
cdef object _SHARED = Refusal.SHARED


_here = _thread_local()  # `deadline`: of the call that this thread makes, if that has one


cdef class Deadline:
    """How long calls of one program may take, and the error text of those that take longer (DEAD-1). `begin` makes the
    one of a call, for a `with` statement around it: whatever this thread waits for inside ends when it passes.
    """
    cdef int64_t nanos
    cdef int64_t at_ns                  # of a call: when it passes
    cdef ErrorText text
    cdef str words                      # the same text

    def __init__(self, double seconds, str text not None):
        self.nanos = <int64_t>min(seconds * 1e9, 1e18)  # 1e18 ns (31 years): as good as no limit
        self.text = make_error_text(text.encode())
        self.words = text

    def begin(self):
        """The deadline of a call that begins now."""
        cdef Deadline begun = Deadline.__new__(Deadline)
        begun.nanos = self.nanos
        begun.at_ns = monotonic_ns() + self.nanos
        begun.text = self.text
        begun.words = self.words
        return begun

    def __enter__(self):
        _here.deadline = self
        return self

    def __exit__(self, *_):
        _here.deadline = None

    def left(self):
        """Seconds until it passes; 0 when it has passed."""
        return max(0, self.at_ns - monotonic_ns()) * 1e-9

    def passed(self, str doing not None):
        """The error of a call that was still `doing` something when its deadline passed."""
        from pathways.errors import DeadlineExceededError
        return DeadlineExceededError(f"{self.words.partition(': ')[2]}; it was still {doing}")


def deadline_here():
    """The deadline of the call that this thread makes; None: it has none."""
    return getattr(_here, "deadline", None)


def check_deadline(str doing not None):
    """Call it between two waits. `doing`: what this thread waits for.

    Raises:
        DeadlineExceededError: the deadline of the call that this thread makes has passed.
    """
    cdef Deadline deadline = getattr(_here, "deadline", None)
    if deadline is not None and monotonic_ns() >= deadline.at_ns:
        raise deadline.passed(doing)


cdef class Call:
    """One compiled signature of a program on one client: handles in, one record out, arrays back (COST-1, ASY-1)."""
    cdef readonly Client client
    cdef ProgramRef program
    cdef public bint stale              # a slice of the program moved: `bind` must be called again
    cdef readonly tuple inputs          # Layouts of the leaves
    cdef readonly tuple layouts         # Layouts of the leaves, then of `closed_over`
    cdef readonly list closed_over      # the arrays that the program closes over: its last arguments
    cdef readonly tuple outputs         # Layouts
    cdef public tuple written           # the variables that a run sets, to its results from `first_written` on
    cdef public Py_ssize_t first_written
    cdef public list taken              # their arrays when the run was prepared: see `pathways.api.programs.state`
    cdef readonly tuple donated         # positions of arguments
    cdef readonly tuple shared          # positions of arguments that a run makes `shared`
    cdef readonly tuple shared_results  # positions of results that a run makes `shared`
    cdef vector[uint32_t] kept          # positions of the arguments that are not donated, when some are donated
    cdef vector[uint64_t] arguments
    cdef vector[uint64_t] wanted        # one bit per result: set when its value must come with its completion
    cdef vector[uint32_t] unread        # by result: runs since one of its arrays was read
    cdef uint32_t wants                 # number of bits of `wanted` that are set
    cdef str name                       # of the program, for messages
    cdef tuple names                    # of the inputs, for messages; empty: messages use their positions

    def __init__(self, Client client not None, uint32_t plan, uint32_t group, tuple inputs, tuple outputs,
                 tuple donated=(), tuple shared=(), tuple shared_results=(), list closed_over not None=[],
                 str name="", tuple names=()):
        """`inputs`: the Layouts of the leaves, then those of `closed_over`."""
        self.client = client
        self.layouts = inputs
        self.closed_over = closed_over
        self.inputs = inputs[:len(inputs) - len(closed_over)]
        self.name = name
        self.names = names
        self.outputs = outputs
        self.written = ()
        self.taken = []
        self.donated = donated
        for position in range(len(inputs)):
            if donated and position not in donated:
                self.kept.push_back(position)
        self.wanted.resize((len(outputs) + 63) // 64)
        self.unread.resize(len(outputs))
        self.arguments.resize(len(inputs) + 1)
        self.bind(plan, group, shared, shared_results)

    def bind(self, uint32_t plan, uint32_t group, tuple shared=(), tuple shared_results=()):
        """From now on the program has plan number `plan` and group `group`, because its slices are on other devices."""
        cdef Layout layout
        self.program.plan = plan
        self.program.group = group
        self.shared = shared
        self.shared_results = shared_results
        self.program.result_parts.clear()
        self.program.result_bytes.clear()
        for layout in self.outputs:
            self.program.result_parts.push_back(layout.parts)
            self.program.result_bytes.push_back(layout.nbytes)
        self.stale = False

    cdef void learn(self, uint32_t place) noexcept:
        self.unread[place] = 0
        if self.program.result_bytes[place] > kLargeBytes or not self.client.core.get().has_read_back():
            return
        if not self.wanted[place // 64] >> (place % 64) & 1:
            self.wanted[place // 64] |= <uint64_t>1 << (place % 64)
            self.wants += 1

    cdef void forget_unread(self) noexcept:
        cdef uint32_t place
        for place in range(<uint32_t>self.unread.size()):
            if self.wanted[place // 64] >> (place % 64) & 1:
                self.unread[place] += 1
                if self.unread[place] > _UNREAD_RUNS:
                    self.wanted[place // 64] &= ~(<uint64_t>1 << (place % 64))
                    self.wants -= 1

    cdef object gather(self, list leaves):
        """Takes the leaves' handles. Returns None, or what the first look at the leaves refuses."""
        cdef Py_ssize_t i, n = len(self.layouts)
        cdef Buffer leaf
        cdef object refusal = None
        cdef object array_type = self.client.array_type
        cdef PyObject* item
        if len(leaves) != n:
            return _UNLIKE
        for i in range(n):
            item = PyList_GET_ITEM_(<PyObject*>leaves, i)
            if <PyObject*>Py_TYPE_(item) != <PyObject*>array_type:
                refusal = _HOST_VALUE
                continue
            leaf = <Buffer><object>item
            if <PyObject*>leaf.layout != PyTuple_GET_ITEM_(<PyObject*>self.layouts, i):
                return _UNLIKE
            # The moving thread accepts deleted arrays too: the release of an array that is deleted during the move is
            # sent after the move.
            if leaf.deleted and not (self.client.moving and self.client.mover == PyThread_get_thread_ident()):
                self.refuse_deleted(i, leaf)
            self.arguments[i] = leaf.handle
        return refusal

    cdef refuse_deleted(self, Py_ssize_t i, Buffer leaf):
        from pathways.errors import DeletedArrayError
        if i >= len(self.inputs):
            raise DeletedArrayError(
                f"{self.name!r} closes over {leaf!r}, which was deleted, or donated to a program, since it was "
                "traced. Give it as an argument, or keep the array")
        name = self.names[i] if self.names else i
        raise DeletedArrayError(f"argument {name} was deleted or donated: {leaf!r}")

    cdef bint gives_twice(self, list leaves) except -1:
        """Whether a donated array is also another argument of this call."""
        global _donating
        cdef Buffer leaf
        cdef Py_ssize_t i
        cdef size_t n
        _donating += 1
        for i in self.donated:
            leaf = <Buffer>leaves[i]
            if leaf.seen == _donating:
                return True
            leaf.seen = _donating
        for n in range(self.kept.size()):
            if (<Buffer>leaves[<Py_ssize_t>self.kept[n]]).seen == _donating:
                return True
        return False

    cdef object refusal_of(self, list leaves):
        """Why the call may not be made with these leaves now; None: it may, until Python's lock is released."""
        cdef Py_ssize_t i
        cdef object refusal = self.gather(leaves)
        if refusal is not None:
            return refusal
        if self.stale:
            return _STALE
        if self.donated:
            if self.gives_twice(leaves):
                return _SHARED
            for i in self.donated:
                if (<Buffer>leaves[i]).shared or (<Buffer>leaves[i]).cached is not None:
                    return _SHARED
        return None

    def __call__(self, list leaves not None, Deadline deadline=None):
        """Submits one run and returns its results as a list, or a `Refusal`. The run must be over when `deadline` has
        passed.

        Raises:
            DeadlineExceededError: other runs have left no room for this one until then.
        """
        cdef int64_t at_ns = 0
        cdef Py_ssize_t i, n
        cdef Status status
        cdef uint64_t tag
        cdef Client client = self.client
        cdef list out
        cdef object refusal
        cdef Layout layout
        # Local variables, because another thread may make this call while the arrays are made below.
        cdef uint64_t few[16]
        cdef vector[uint64_t] many
        cdef uint64_t* results = few
        cdef vector[uint64_t] mask
        if deadline is not None:
            at_ns = deadline.at_ns
        if self.closed_over:
            leaves = leaves + self.closed_over
        n = len(self.layouts)
        if len(self.outputs) > 16:
            many.resize(len(self.outputs))
            results = many.data()
        while True:
            if client.gated:
                client.pass_gate()
            refusal = self.refusal_of(leaves)
            if refusal is not None:
                return refusal
            if self.wants != 0:
                mask = self.wanted
            if at_ns == 0:
                status = client.core.get().submit(self.program, const_u64_span(self.arguments.data(), n), results,
                                                  u64_span(mask.data(), mask.size()))
            else:
                status = client.core.get().submit(self.program, const_u64_span(self.arguments.data(), n), results,
                                                  u64_span(mask.data(), mask.size()), at_ns, &deadline.text)
            if status == Status.kOk:
                break
            if status == Status.kInvalid:
                raise ValueError(f"a call with {n} arguments and {len(self.outputs)} results does not fit the ring "
                                 "to the controller; pass fewer, larger arrays")
            client.make_room()  # other threads may move, delete or pin the leaves meanwhile: check them again
        for i in self.shared:
            (<Buffer>leaves[i]).shared = True
        for i in self.donated:  # before another thread can pin it
            (<Buffer>leaves[i]).give()
        client.dispatches += 1
        tag = client.core.get().last_tag()
        n = len(self.outputs)
        out = [None] * n
        for i in range(n):
            layout = <Layout><object>PyTuple_GET_ITEM_(<PyObject*>self.outputs, i)
            out[i] = client.wrap(results[i], layout)
            (<Buffer>out[i]).run = tag
            (<Buffer>out[i]).maker = self
            (<Buffer>out[i]).place = <uint32_t>i
        if mask.size() != 0:
            for i in range(n):
                (<Buffer>out[i]).is_inline = mask[i // 64] >> (i % 64) & 1
            self.forget_unread()
        for i in self.shared_results:
            (<Buffer>out[i]).shared = True
        # Before anything may raise, because the old arrays may be donated. Who has set a variable since the run was
        # prepared comes after the run.
        for i in range(len(self.written)):
            if self.written[i]._array is self.taken[i]:
                self.written[i]._array = out[self.first_written + i]
        if client.host is not None:
            client.pump()
        return out
