"""The functions that the native executor calls on a host. The enqueue thread calls them and holds Python's lock.

Launches, readiness and references are handled here; the driver (pathways/host/jax_backend.py) handles the rest. An
exception becomes the backend's last error, and the function returns kFailed. Included by `_core.pyx`.
"""

cdef object _is_ready = "is_ready"
cdef object _block_until_ready = "block_until_ready"
cdef object _is_deleted = "is_deleted"


cdef int _launch(void* self, const NodeContext* where, const Value* inputs, size_t n, Value* outputs,
                 size_t m) noexcept:
    cdef Host host = <Host>self
    cdef PyObject* function = PyTuple_GET_ITEM_(host.fast[where.plan], where.computation)
    cdef PyObject* result = PyObject_Vectorcall(function, <PyObject* const*>inputs, n, NULL)
    cdef PyObject* item
    cdef size_t i
    if result == NULL:
        if not _is_refused_by_disable_jit(host):
            return host.failed("launch", where)
        try:
            again = host.driver.launch_with_jit(<object>function, [<object><PyObject*>inputs[i] for i in range(n)])
        except BaseException:
            return _python_failed(host, "launch", where)
        result = <PyObject*>again
        Py_INCREF_(result)
    if PyList_CheckExact_(result):
        for i in range(m):
            item = PyList_GET_ITEM_(result, i)
            Py_INCREF_(item)
            outputs[i] = <Value>item
    elif PyTuple_CheckExact_(result):
        for i in range(m):
            item = PyTuple_GET_ITEM_(result, i)
            Py_INCREF_(item)
            outputs[i] = <Value>item
    else:
        return _attend(host, where, result)
    Py_DECREF_(result)
    return <int>Status.kOk


cdef int _attend(Host host, const NodeContext* where, PyObject* launch) noexcept:
    # A thread of the driver launches a computation that calls functions of its client, because that thread may wait.
    cdef object work = <object>launch
    Py_DECREF_(launch)
    try:
        host.driver.attend(where.order, where.plan, where.node, work)
        return <int>Status.kPending
    except BaseException:
        return _python_failed(host, "launch", where)


cdef bint _is_refused_by_disable_jit(Host host) noexcept:
    # Called while an exception is set. An embedded cluster launches on its user's threads, where `jax.disable_jit` may
    # be on. JAX then refuses every launch before it does anything. In that case this clears the exception; else it
    # keeps it.
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    cdef bint refused = False
    PyErr_Fetch(&kind, &value, &trace)
    try:
        refused = host.driver.is_jit_disabled()
    except BaseException:
        pass
    if not refused:
        PyErr_Restore(kind, value, trace)
        return False
    Py_XDECREF_(kind)
    Py_XDECREF_(value)
    Py_XDECREF_(trace)
    return True


cdef bint _was_deleted(PyObject* array) noexcept:
    # Called while an exception is set: clears the exception when the array is deleted, and keeps it otherwise.
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    PyErr_Fetch(&kind, &value, &trace)
    cdef PyObject* answer = PyObject_CallMethodNoArgs(array, <PyObject*>_is_deleted)
    cdef bint deleted = answer == Py_True_
    if answer == NULL:
        PyErr_Clear()
    else:
        Py_DECREF_(answer)
    if not deleted:
        PyErr_Restore(kind, value, trace)
        return False
    Py_XDECREF_(kind)
    Py_XDECREF_(value)
    Py_XDECREF_(trace)
    return True


cdef int _readiness(void* self, Value value) noexcept:
    # 0 pending, 1 ready, 2 failed, 3 deleted (donated). A deleted array does not tell whether its launch ran (LOOK-1).
    cdef Host host = <Host>self
    cdef PyObject* array = <PyObject*>value
    cdef PyObject* answer = PyObject_CallMethodNoArgs(array, <PyObject*>_is_ready)
    if answer == NULL:
        if _was_deleted(array):
            return 3
        host.failed("run", NULL)
        return 2
    cdef bint ready = answer == Py_True_
    Py_DECREF_(answer)
    if not ready:
        return 0
    answer = PyObject_CallMethodNoArgs(array, <PyObject*>_block_until_ready)
    if answer == NULL:
        if _was_deleted(array):
            return 3
        host.failed("run", NULL)
        return 2
    Py_DECREF_(answer)
    return 1


cdef void _retain(void* self, Value value) noexcept:
    Py_INCREF_(<PyObject*>value)


cdef void _drop(void* self, Value value) noexcept:
    Py_DECREF_(<PyObject*>value)


cdef Value _own(object value) noexcept:
    Py_INCREF(value)
    return <Value><PyObject*>value


cdef Value _placeholder(void* self, const NodeContext* where, uint32_t index) noexcept:
    cdef Host host = <Host>self
    try:
        return _own(host.driver.placeholder(where.plan, where.node, index))
    except BaseException:
        import traceback
        traceback.print_exc()
        return _own(None)  # then the launch fails and reports an error


cdef int _transfer(void* self, const NodeContext* where, Value value, Value* out) noexcept:
    cdef Host host = <Host>self
    try:
        out[0] = _own(host.driver.transfer(where.plan, where.computation, <object><PyObject*>value))
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "transfer", where)


cdef int _begin_receive(void* self, const NodeContext* where, vector[ReceiveBuffers]* receives) noexcept:
    cdef Host host = <Host>self
    cdef ReceiveBuffers receive
    try:
        room = host.driver.begin_receive(where.order, where.plan, where.computation)
        if room is None:
            return <int>Status.kNoMemory
        sources, offsets = room
        for offset in offsets:
            receive.offsets.push_back(offset)
        for source in sources:
            receive.source = source
            receives.push_back(receive)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "receive", where)


cdef int _shards(void* self, const NodeContext* where, Value value, vector[const byte*]* out, Value* keep) noexcept:
    cdef Host host = <Host>self
    try:
        kept, addresses = host.driver.shards(where.plan, where.computation, <object><PyObject*>value)
        for address in addresses:
            out.push_back(<const byte*><size_t>address)
        keep[0] = _own(kept)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "send", where)


cdef int _send_remote(void* self, const NodeContext* where, uint32_t destination, uint64_t key,
                      shared_ptr[const CopyPlan] copy_plan, vector[const byte*] sources, Value keep) noexcept:
    cdef Host host = <Host>self
    cdef OutgoingTransfer outgoing = OutgoingTransfer.__new__(OutgoingTransfer)
    try:
        outgoing.key, outgoing.destination, outgoing.order = key, destination, where.order
        outgoing.node = host.driver.transfer_number(where.plan, where.computation)
        outgoing.keep = <object><PyObject*>keep
        outgoing.core.reset(new CppOutgoingTransfer(where.order, outgoing.node, host.number, copy_plan, sources))
        host.driver.send_remote(outgoing)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "send", where)


cdef int _direct(void* self, const NodeContext* where, Value value) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.direct(where.order, where.plan, where.computation, <object><PyObject*>value)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "send", where)


cdef int _finish_receive(void* self, const NodeContext* where, Value* out) noexcept:
    cdef Host host = <Host>self
    try:
        out[0] = _own(host.driver.finish_receive(where.order, where.plan, where.computation))
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "receive", where)


cdef void _abandon_receive(void* self, const NodeContext* where) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.abandon_receive(where.order, where.plan, where.computation)
    except BaseException:
        _python_failed(host, "receive", where)


cdef int _put(void* self, uint32_t client, const byte* data, size_t n, Value* out, uint64_t* devices) noexcept:
    cdef Host host = <Host>self
    try:
        value, mask = host.driver.put(client, (<const char*>data)[:n])
        out[0] = _own(value)
        devices[0] = mask
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "put", NULL)


cdef int _fetch(void* self, uint32_t client, Value value, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.fetch(client, <object><PyObject*>value, (<const char*>data)[:n])
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "fetch", NULL)


cdef int _read_back(void* self, Value value, byte* small, byte* large) noexcept:
    # A recipe has three items. First, the size of the whole value. Second, for each part that this host must write: the
    # shard's number, the part's offset in the whole value, and its bytes; None when the shards cannot be copied as they
    # are. Third, a function that gets an array's shards; None when the array itself is the only shard.
    cdef Host host = <Host>self
    cdef object array = <object><PyObject*>value
    cdef byte* out
    cdef size_t nbytes, pointer, start, size
    try:
        if array.is_deleted():  # donated: no reader is left
            return <int>Status.kOk
        key = (array.sharding, array.shape, array.dtype)
        recipe = host.read_backs.get(key)
        if recipe is None:
            if len(host.read_backs) > 4096:
                host.read_backs.clear()
            recipe = host.read_backs[key] = host.driver.read_back_recipe(array)
        nbytes = recipe[0]
        if nbytes == 0:
            return <int>Status.kOk
        out = small if nbytes <= kSmallBytes else large
        if out == NULL or nbytes > kLargeBytes:
            raise ValueError(f"a value of {nbytes} bytes does not fit its read-back slot")
        if recipe[1] is None:
            host.driver.read_back(array, PyMemoryView_FromMemory(<char*>out, nbytes, PyBUF_WRITE))
            return <int>Status.kOk
        if recipe[1]:
            shards = (array,) if recipe[2] is None else recipe[2](array)
            for number, start, size in recipe[1]:
                pointer = shards[number].unsafe_buffer_pointer()
                memcpy(out + start, <const void*>pointer, size)
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "read-back", NULL)


cdef void _refuse_put(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.refuse_put(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "put", NULL)


cdef void _refuse_fetch(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.refuse_fetch(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "fetch", NULL)


cdef int _start_task(void* self, uint32_t client, uint64_t task, Value value, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.start_task(client, task, None if value == NULL else <object><PyObject*>value,
                               (<const char*>data)[:n])
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "task", NULL)


cdef void _command(void* self, uint32_t client, const byte* data, size_t n) noexcept:
    cdef Host host = <Host>self
    try:
        host.driver.command(client, (<const char*>data)[:n])
    except BaseException:
        _python_failed(host, "command", NULL)


cdef int _offload(void* self, uint32_t client, Value* values, size_t count, const byte* data, size_t n,
                  cbool away) noexcept:
    cdef Host host = <Host>self
    cdef size_t i
    cdef list moved
    try:
        moved = host.driver.offload(client, [<object><PyObject*>values[i] for i in range(count)],
                                    (<const char*>data)[:n], away)
        if moved is None:  # it failed; the driver has already reported the reason to the requester
            return <int>Status.kFailed
        for i in range(count):
            new = _own(moved[i])
            Py_DECREF_(<PyObject*>values[i])
            values[i] = new
        return <int>Status.kOk
    except BaseException:
        return _python_failed(host, "offload", NULL)


cdef void _forget_plan(void* self, uint32_t plan) noexcept:
    cdef Host host = <Host>self
    try:
        if plan < <uint32_t>len(host.launchables):
            host.launchables[plan] = None
            host.fast[plan] = NULL
        host.driver.program_gone(plan)
    except BaseException:
        _python_failed(host, "forget", NULL)


cdef void _forget_client(void* self, uint32_t client) noexcept:
    # The host no longer uses the client's memory. This unmaps the memory, unless values that were put without a copy
    # still refer to it; then it stays mapped until the last of them is freed.
    cdef Host host = <Host>self
    try:
        host.clients.pop(client, None)
        host.driver.client_gone(client)
    except BaseException:
        _python_failed(host, "forget", NULL)


cdef void _explain(void* self, const NodeContext* maker) noexcept:
    cdef Host host = <Host>self
    try:
        text = host.driver.describe("run", host.failure, maker.plan, maker.node)
        host.backend.get().set_error(text.encode("utf-8", "replace"))
    except BaseException:  # keep the backend's present error: it says less, but it is true
        import traceback
        traceback.print_exc()
    host.failure = None


cdef int _python_failed(Host host, str doing, const NodeContext* where) noexcept:
    """Call it inside an `except` block: the caught exception becomes the backend's last error."""
    import sys
    error = sys.exc_info()[1]
    try:
        text = host.driver.describe(doing, error, where.plan if where != NULL else -1,
                                    where.node if where != NULL else -1)
    except BaseException as problem:
        text = f"{doing}: {error!r} ({problem!r})"
    host.backend.get().set_error(text.encode("utf-8", "replace"))
    return <int>Status.kFailed
