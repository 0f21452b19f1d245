"""What the native executor asks of JAX: the Python half of its backend. csrc/device/device.h, mover.h and
client_work.h say what each operation does. The enqueue thread calls it and holds Python's lock.

Launches, readiness and references are handled here. All other operations are methods of the parts of the driver
(pathways/host/jax_host.py). An exception becomes the backend's last error, and the operation returns kFailed.
Included by `_core.pyx`.
"""

cdef object _is_ready = "is_ready"
cdef object _block_until_ready = "block_until_ready"


cdef cppclass JaxOperations(SendingBackend):
    PyObject* host  # borrowed: the host owns this object

    __init__(PyObject* host):
        this.host = host

    Status launch(const NodeContext& where, const_value_span inputs, value_span outputs) noexcept:
        cdef Host host = <Host>this.host
        cdef PyObject* function = PyTuple_GET_ITEM_(host.fast[where.plan], where.computation)
        cdef PyObject* result = PyObject_Vectorcall(function, <PyObject* const*>inputs.data(), inputs.size(), NULL)
        cdef PyObject* item
        cdef Value* out = outputs.data()
        cdef Status done
        cdef size_t i
        if result == NULL:
            result = _launch_again(host, where, function, inputs)
            if result == NULL:
                return Status.kFailed
        if PyList_CheckExact_(result):
            for i in range(outputs.size()):
                item = PyList_GET_ITEM_(result, i)
                Py_INCREF_(item)
                out[i] = <Value>item
        elif PyTuple_CheckExact_(result):
            for i in range(outputs.size()):
                item = PyTuple_GET_ITEM_(result, i)
                Py_INCREF_(item)
                out[i] = <Value>item
        else:
            # A thread of the driver launches a computation that calls functions of its client: that thread may wait.
            work = <object>result
            Py_DECREF_(result)
            done = _do(host, "launch", &where, "attendants", "attend", (where.order, where.plan, where.node, work))
            return Status.kPending if done == Status.kOk else done
        Py_DECREF_(result)
        return Status.kOk

    Readiness readiness(Value value) noexcept:
        cdef PyObject* array = <PyObject*>value
        cdef PyObject* answer = PyObject_CallMethodNoArgs(array, <PyObject*>_is_ready)
        if answer == NULL:
            return _not_ready(<Host>this.host, <object>array)
        cdef bint ready = answer == Py_True_
        Py_DECREF_(answer)
        if not ready:
            return Readiness.kPending
        answer = PyObject_CallMethodNoArgs(array, <PyObject*>_block_until_ready)
        if answer == NULL:
            return _not_ready(<Host>this.host, <object>array)
        Py_DECREF_(answer)
        return Readiness.kReady

    Value begin_scalar(Value value) noexcept:
        cdef Host host = <Host>this.host
        if host.copies_scalars:
            try:
                return _own(host.driver.scalar_to_host(<object><PyObject*>value))
            except BaseException:  # the scalar has failed, and says why when it is read
                pass
        Py_INCREF_(<PyObject*>value)
        return value

    Status read_scalar(Value value, int64_t* out) noexcept:
        try:
            out[0] = int(_asarray(<object><PyObject*>value))  # without NumPy it takes 10 times as long
            return Status.kOk
        except BaseException as error:
            this.set_error(f"ComputationError: the number of the branch to take cannot be read: {error}".encode())
            return Status.kFailed

    Value retain(Value value) noexcept:
        Py_INCREF_(<PyObject*>value)
        return value

    void drop(Value value) noexcept:
        Py_DECREF_(<PyObject*>value)

    Value placeholder(const NodeContext& where, uint32_t index) noexcept:
        try:
            return _own((<Host>this.host).driver.programs.placeholder(where.plan, where.node, index))
        except BaseException:
            import traceback
            traceback.print_exc()  # into the host's log: the error of the launch that follows says less
            return _own(None)  # with None, the launch fails and reports an error

    Status transfer(const NodeContext& where, Value value, Value* out) noexcept:
        out[0] = _ask(<Host>this.host, "transfer", &where, "transfers", "transfer",
                      (where.plan, where.computation, <object><PyObject*>value))
        return Status.kFailed if out[0] == NULL else Status.kOk

    Status begin_receive(const NodeContext& where, vector[ReceiveBuffers]* receives) noexcept:
        cdef Host host = <Host>this.host
        cdef ReceiveBuffers receive
        try:
            room = host.driver.transfers.begin_receive(where.order, where.plan, where.computation)
            if room is None:
                return Status.kNoMemory
            sources, offsets = room
            for offset in offsets:
                receive.offsets.push_back(offset)
            for source in sources:
                receive.source = source
                receives.push_back(receive)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "receive", &where, error)

    Status finish_receive(const NodeContext& where, Value* out) noexcept:
        out[0] = _ask(<Host>this.host, "receive", &where, "transfers", "finish_receive",
                      (where.order, where.plan, where.computation))
        return Status.kFailed if out[0] == NULL else Status.kOk

    void abandon_receive(const NodeContext& where) noexcept:
        _do(<Host>this.host, "receive", &where, "transfers", "abandon_receive",
            (where.order, where.plan, where.computation))

    Status shards(const NodeContext& where, Value value, vector[const byte*]* out, Value* keep) noexcept:
        cdef Host host = <Host>this.host
        try:
            kept, addresses = host.driver.transfers.shards(where.plan, where.computation, <object><PyObject*>value)
            for address in addresses:
                out.push_back(<const byte*><size_t>address)
            keep[0] = _own(kept)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "send", &where, error)

    Status direct(const NodeContext& where, Value value) noexcept:
        return _do(<Host>this.host, "send", &where, "transfers", "direct",
                   (where.order, where.plan, where.computation, <object><PyObject*>value))

    Status send_remote(const NodeContext& where, Remote what, uint32_t destination, uint64_t key,
                       shared_ptr[const CopyPlan] copy_plan, vector[const byte*] sources, Value keep) noexcept:
        cdef Host host = <Host>this.host
        cdef OutgoingTransfer outgoing = OutgoingTransfer.__new__(OutgoingTransfer)
        try:
            outgoing.key, outgoing.destination, outgoing.order = key, destination, where.order
            if what == Remote.kRows:
                outgoing.node = host.driver.exchanges.number(where.plan, where.computation)
            else:
                outgoing.node = host.driver.transfers.transfer_number(where.plan, where.computation)
            outgoing.keep = <object><PyObject*>keep
            outgoing.core.reset(new CppOutgoingTransfer(where.order, outgoing.node, host.number, copy_plan, sources))
            host.driver.transfers.send_remote(outgoing)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "send", &where, error)

    void peer_opens(uint32_t host, int32_t epoch) noexcept:
        _do(<Host>this.host, "send", NULL, "transfers", "peer_opens", (host, epoch))

    Status place_early(const NodeContext& where, uint32_t source, const_byte_span chunk) noexcept:
        return _do(<Host>this.host, "receive", &where, "transfers", "place_early",
                   (where.order, where.plan, where.computation, source, _bytes(chunk)))

    Status read_shards(const NodeContext& where, uint32_t index, Value value, vector[const_byte_span]* shards,
                       Value* keep) noexcept:
        cdef Host host = <Host>this.host
        try:
            kept, spans = host.driver.exchanges.read(where.order, where.plan, where.computation, index,
                                                     <object><PyObject*>value)
            for address, nbytes in spans:
                shards.push_back(const_byte_span(<const byte*><size_t>address, <size_t>nbytes))
            keep[0] = _own(kept)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "exchange", &where, error)

    Status begin_exchange(const NodeContext& where, vector[uint64_t]* places) noexcept:
        cdef Host host = <Host>this.host
        try:
            offsets = host.driver.exchanges.begin(where.order, where.plan, where.computation)
            if offsets is None:
                return Status.kNoMemory
            for offset in offsets:
                places.push_back(offset)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "exchange", &where, error)

    Status finish_exchange(const NodeContext& where, const RowResults& results, value_span outputs) noexcept:
        cdef Host host = <Host>this.host
        cdef size_t i
        try:
            made = host.driver.exchanges.finish(where.order, where.plan, where.computation, results.kept,
                                                results.offered, results.slots)
            for i in range(outputs.size()):
                outputs.data()[i] = _own(made[i])
            return Status.kOk
        except BaseException as error:
            return _failed(host, "exchange", &where, error)

    void abandon_exchange(const NodeContext& where) noexcept:
        _do(<Host>this.host, "exchange", &where, "exchanges", "abandon", (where.order, where.plan, where.computation))

    Status put(uint32_t client, const_byte_span payload, const Leased& leased, const Booked& booked, Value* out,
               uint64_t* devices) noexcept:
        cdef Host host = <Host>this.host
        try:
            value, devices[0] = host.driver.values.put(client, _bytes(payload), (leased.at, leased.bytes),
                                                       booked.devices, booked.bytes)
            out[0] = _own(value)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "put", NULL, error)

    uint64_t devices_of_put(uint32_t client, const_byte_span payload) noexcept:
        try:
            return (<Host>this.host).driver.values.devices_of_put(client, _bytes(payload))
        except BaseException:  # `put` says why
            return 0

    void refuse_put(uint32_t client, const_byte_span payload, const Leased& leased) noexcept:
        _do(<Host>this.host, "put", NULL, "values", "refuse_put",
            (client, _bytes(payload), (leased.at, leased.bytes)))

    Status fetch(uint32_t client, Value value, const_byte_span payload, const Leased& leased,
                 vector[BlockPiece]* written) noexcept:
        cdef Host host = <Host>this.host
        cdef BlockPiece piece
        try:
            for at, nbytes in host.driver.values.fetch(client, <object><PyObject*>value, _bytes(payload),
                                                       (leased.at, leased.bytes)):
                piece.at, piece.bytes = at, nbytes
                written.push_back(piece)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "fetch", NULL, error)

    void refuse_fetch(uint32_t client, const_byte_span payload, const Leased& leased) noexcept:
        _do(<Host>this.host, "fetch", NULL, "values", "refuse_fetch",
            (client, _bytes(payload), (leased.at, leased.bytes)))

    Status read_back(Value value, const ReadBackSlot& place) noexcept:
        cdef Host host = <Host>this.host
        try:
            _read_back(host, <object><PyObject*>value, place)
            return Status.kOk
        except BaseException as error:
            return _failed(host, "read-back", NULL, error)

    Status start_task(uint32_t client, uint64_t task, Value value, const_byte_span payload,
                      const Booked& booked) noexcept:
        return _do(<Host>this.host, "task", NULL, "commands", "start_task",
                   (client, task, None if value == NULL else <object><PyObject*>value, _bytes(payload),
                    booked.devices, booked.bytes))

    void command(uint32_t client, uint64_t plan, const_byte_span payload) noexcept:
        _do(<Host>this.host, "command", NULL, "commands", "command", (client, plan, _bytes(payload)))

    Status offload(uint32_t client, value_span values, const_byte_span payload, Offload where) noexcept:
        cdef Host host = <Host>this.host
        cdef Value* at = values.data()
        cdef size_t i
        cdef list moved
        try:
            moved = host.driver.commands.offload(client, [<object><PyObject*>at[i] for i in range(values.size())],
                                                 _bytes(payload), where == Offload.kAway)
            if moved is None:  # it failed; the driver has already reported the reason to the requester
                return Status.kFailed
            for i in range(values.size()):
                new = _own(moved[i])
                Py_DECREF_(<PyObject*>at[i])
                at[i] = new
            return Status.kOk
        except BaseException as error:
            return _failed(host, "offload", NULL, error)

    void forget_plan(uint32_t plan) noexcept:
        cdef Host host = <Host>this.host
        this.forget_copy_plans(plan)
        if plan < <uint32_t>len(host.launchables):
            host.launchables[plan] = None
            host.fast[plan] = NULL
        _do(host, "forget", NULL, None, "program_gone", (plan,))

    void forget_client(uint32_t client) noexcept:
        # The host no longer uses the client's memory. This unmaps the memory, unless values that were put without a
        # copy still refer to it; then it stays mapped until the last of them is freed.
        cdef Host host = <Host>this.host
        host.clients.pop(client, None)
        _do(host, "forget", NULL, None, "client_gone", (client,))

    void explain(const NodeContext& maker) noexcept:
        cdef Host host = <Host>this.host
        try:
            text = host.driver.failures.describe("run", host.failure, maker.plan, maker.node)
            this.set_error(text.encode("utf-8", "replace"))
        except BaseException:  # keep the backend's present error: it says less, but it is true
            import traceback
            traceback.print_exc()
        host.failure = None


cdef bytes _bytes(const_byte_span span):
    return (<const char*>span.data())[:span.size()]


cdef Value _own(object value) noexcept:
    Py_INCREF(value)
    return <Value><PyObject*>value


cdef Value _ask(Host host, str doing, const NodeContext* where, str part, str method, tuple arguments) noexcept:
    """Calls a method of a part of the driver (None: of the driver itself). Returns a new reference to its result; NULL:
    it failed, and the backend's last error says why.
    """
    try:
        asked = host.driver if part is None else getattr(host.driver, part)
        return _own(getattr(asked, method)(*arguments))
    except BaseException as error:
        _failed(host, doing, where, error)
        return NULL


cdef Status _do(Host host, str doing, const NodeContext* where, str part, str method, tuple arguments) noexcept:
    cdef Value result = _ask(host, doing, where, part, method, arguments)
    if result == NULL:
        return Status.kFailed
    Py_DECREF_(<PyObject*>result)
    return Status.kOk


cdef Status _failed(Host host, str doing, const NodeContext* where, error) noexcept:
    """Makes an exception the backend's last error."""
    try:
        text = host.driver.failures.describe(doing, error, where.plan if where != NULL else -1,
                                             where.node if where != NULL else -1)
    except BaseException as problem:
        text = f"{doing}: {error!r} ({problem!r})"
    host.backend.get().set_error(text.encode("utf-8", "replace"))
    return Status.kFailed


cdef object _take_exception():
    """Returns the exception that is set, and clears it."""
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    PyErr_Fetch(&kind, &value, &trace)
    PyErr_NormalizeException(&kind, &value, &trace)
    error = <object>value if value != NULL else None
    Py_XDECREF_(kind)
    Py_XDECREF_(value)
    Py_XDECREF_(trace)
    return error


cdef PyObject* _launch_again(Host host, const NodeContext& where, PyObject* function, const_value_span inputs) noexcept:
    # A launch has raised. An embedded cluster launches on its user's threads, where `jax.disable_jit` may be on. Then
    # JAX refuses every launch before it does anything, and this function launches without `jax.disable_jit`.
    cdef size_t i
    host.failure = error = _take_exception()
    try:
        if host.driver.is_jit_disabled():
            host.failure = None
            return <PyObject*>_own(host.driver.launch_with_jit(
                <object>function, [<object><PyObject*>inputs.data()[i] for i in range(inputs.size())]))
    except BaseException as other:
        error = other
    _failed(host, "launch", &where, error)
    return NULL


cdef Readiness _not_ready(Host host, object array) noexcept:
    # An array has raised instead of an answer. A deleted array does not tell whether its launch ran (LOOK-1).
    error = _take_exception()
    try:
        if array.is_deleted():
            return Readiness.kDeleted
    except BaseException:
        pass
    host.failure = error
    _failed(host, "run", NULL, error)
    return Readiness.kFailed


cdef int _read_back(Host host, object array, const ReadBackSlot& place) except -1:
    # See pathways/host/read_back.py:Recipe.
    cdef byte* out
    cdef size_t nbytes, pointer, start, size
    if array.is_deleted():  # donated: no reader is left
        return 0
    key = (array.sharding, array.shape, array.dtype)
    recipe = host.read_backs.get(key)
    nbytes = array.size * array.dtype.itemsize if recipe is None else recipe[0]
    if nbytes == 0:
        return 0
    out = place.of(nbytes)
    if out == NULL:
        raise ValueError(f"a value of {nbytes} bytes does not fit its read-back slot")
    if recipe is None:
        if len(host.read_backs) > 4096:
            host.read_backs.clear()
        recipe = host.read_backs[key] = host.driver.values.read_back_recipe(array)
    if not recipe[2]:
        host.driver.values.read_back(array, PyMemoryView_FromMemory(<char*>out, nbytes, PyBUF_WRITE))
    elif recipe[1]:
        shards = (array,) if recipe[3] is None else recipe[3](array)
        for number, start, size in recipe[1]:
            pointer = shards[number].unsafe_buffer_pointer()
            memcpy(out + start, <const void*>pointer, size)
    for _, start, size in recipe[1]:
        place.wrote(nbytes, start, size)
    return 0
