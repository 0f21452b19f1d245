# The parts of the native library that _core uses. Declarations only; the logic is in csrc/ or in Python.
from libc.stdint cimport int32_t, INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector


cdef extern from "<chrono>" namespace "std::chrono" nogil:
    cdef cppclass nanoseconds:
        nanoseconds()
        nanoseconds(int64_t)

cdef extern from "<optional>" namespace "std" nogil:
    cdef cppclass optional[T]:
        cbool has_value()
        T& value()
        optional()
        optional(T)

cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass const_u64_span "std::span<const uint64_t>":
        const_u64_span()
        const_u64_span(const uint64_t*, size_t)
    cdef cppclass u64_span "std::span<uint64_t>":
        u64_span()
        u64_span(uint64_t*, size_t)
    cdef cppclass const_byte_span "std::span<const std::byte>":
        const_byte_span()
        const_byte_span(const byte*, size_t)
        const byte* data()
        size_t size()
    cdef cppclass byte_span "std::span<std::byte>":
        byte_span()
        byte_span(byte*, size_t)
        byte* data()
        size_t size()
        cbool empty()

cdef extern from "<cstddef>" namespace "std" nogil:
    cdef cppclass byte:
        pass

cdef extern from "base/status.h" namespace "pathways" nogil:
    cdef enum class Status(uint8_t):
        kOk
        kPending
        kFull
        kClosed
        kInvalid
        kNoMemory
        kFailed

cdef extern from "sync/atomic.h" namespace "pathways" nogil:
    int64_t monotonic_ns()

cdef extern from "base/process.h" namespace "pathways" nogil:
    uint64_t process_token()

cdef extern from "base/ids.h" namespace "pathways" nogil:
    cdef cppclass Handle:
        uint64_t raw
        Handle()
        uint32_t index()

cdef extern from "sync/doorbell.h" namespace "pathways" nogil:
    cdef cppclass DoorbellWord:
        pass
    cdef cppclass SpinPolicy:
        @staticmethod
        SpinPolicy sleep_at_once()

        @staticmethod
        SpinPolicy adaptive()

        @staticmethod
        SpinPolicy serve_stream()

        @staticmethod
        SpinPolicy await_answer()

        @staticmethod
        SpinPolicy check_once()
    cdef cppclass TurnSpin:
        SpinPolicy policy()
        void waited(nanoseconds)

cdef extern from "futures/future_table.h" namespace "pathways" nogil:
    cdef enum class FutureState(uint8_t):
        kFree
        kPending
        kReady
        kFailed
    cdef cppclass FutureTable:
        uint32_t capacity()
        uint32_t in_use()

cdef extern from "memory/arena.h" namespace "pathways" nogil:
    cdef unsigned BORROWERS "pathways::Arena::kBorrowers"
    cdef cppclass Holding "pathways::Arena::Holding":
        uint64_t offset
        uint64_t bytes
        uint32_t references
        uint64_t borrowers
    cdef cppclass ArenaView:
        ArenaView()
        cbool is_there()
        byte* find(uint64_t, uint64_t)
        byte* find_leased(uint64_t, uint64_t, unsigned)
        cbool return_lease(uint64_t, unsigned)
        cbool release(uint64_t)
    cdef cppclass Arena:
        vector[Holding] holdings()
        Status allocate(size_t, uint64_t*)
        void return_lease(uint64_t, unsigned)
        void release(uint64_t)
        byte* at(uint64_t)
        uint64_t bytes_in_use()
        uint64_t high_water()
        uint64_t capacity()
        uint64_t trim(uint64_t, uint64_t*)

cdef extern from "futures/read_back.h" namespace "pathways" nogil:
    size_t kSmallBytes "pathways::ReadBackArea::kSmallBytes"
    size_t kLargeBytes "pathways::ReadBackArea::kLargeBytes"
    cdef cppclass ReadBackSlot:
        byte* of(size_t)
        void wrote(size_t, size_t, size_t) except +

cdef extern from "bulk/copy_plan.h" namespace "pathways" nogil:
    cdef cppclass CopyPlan:
        pass

cdef extern from "bulk/network_transfer.h" namespace "pathways" nogil:
    cdef cppclass Chunk:
        uint64_t order
        uint32_t node
        uint32_t host
    cdef cppclass CppOutgoingTransfer "pathways::OutgoingTransfer":
        CppOutgoingTransfer(uint64_t, uint32_t, uint32_t, shared_ptr[const CopyPlan], vector[const byte*]) except +
        uint64_t bytes()
        cbool is_over()
        uint64_t room()
        uint64_t least()
        uint64_t left()
        uint64_t pack(byte_span)
        uint64_t pack_head(byte_span, uint64_t, uint64_t, const_byte_span*)
    cdef cppclass CppIncomingTransfer "pathways::IncomingTransfer":
        CppIncomingTransfer(vector[byte*], vector[uint64_t]) except +
        void take(const Chunk&) except +
        byte_span place(const Chunk&, uint64_t)
        cbool is_over()
    cdef cppclass ChunkHead:
        Chunk chunk
        uint64_t payload_at
        uint64_t payload_bytes
    cdef optional[ChunkHead] chunk_head(const_byte_span)
    cdef pair[Chunk, uint64_t] first_chunk(const_byte_span) except +

cdef extern from "plan/plan.h" namespace "pathways" nogil:
    cdef cppclass Plan:
        @staticmethod
        Plan parse(vector[byte]) except +

cdef extern from "messages/leased_parts.h" namespace "pathways" nogil:
    cdef cppclass LeasedPart:
        pass

cdef extern from "messages/records.h" namespace "pathways" nogil:
    cdef enum class CommandKind(uint16_t):
        kPut
        kFetch
        kTask
    cdef uint32_t NO_SPACE_SET "pathways::kNoSpaceSet"

cdef extern from "device/backend.h" namespace "pathways" nogil:
    ctypedef void* Value
    cdef cppclass const_value_span "std::span<const pathways::Value>":
        const Value* data()
        size_t size()
    cdef cppclass value_span "std::span<pathways::Value>":
        Value* data()
        size_t size()
    cdef enum class Readiness(uint8_t):
        kPending
        kReady
        kFailed
        kDeleted
    cdef enum class Offload(uint8_t):
        kAway
        kBack
    cdef cppclass NodeContext:
        uint64_t order
        uint32_t client
        uint32_t plan
        uint32_t node
        uint32_t computation
    cdef cppclass Leased:
        uint64_t at
        uint64_t bytes
    cdef cppclass BlockPiece:
        uint64_t at
        uint64_t bytes
    cdef cppclass Booked:
        uint64_t devices
        uint64_t bytes
    cdef cppclass ReceiveBuffers:
        ReceiveBuffers()
        uint32_t source
        vector[uint64_t] offsets
    cdef cppclass RowResults:
        vector[int32_t] kept
        vector[int32_t] offered
        vector[vector[int32_t]] slots

# Its operations hold Python's lock: a host's step calls them to reach Python.
cdef extern from "bulk/sending_backend.h" namespace "pathways":
    cdef enum class Remote(uint8_t):
        kTransfer
        kRows
    cdef cppclass SendingBackend:
        void open(uint32_t, vector[ArenaView], DoorbellWord*) except +
        void open_memory(uint32_t, ArenaView) except +
        void add_copy_plan(uint32_t, uint32_t, uint32_t, const_u64_span) except +
        void forget_copy_plans(uint32_t)
        void open_stream(uint32_t) except +
        void remote_send_done(uint64_t, uint32_t, string)
        void arrived(uint64_t, uint32_t, uint32_t)
        bint keep_early(Chunk, const_byte_span) except +
        uint64_t bytes_sent()
        uint64_t bytes_shipped()
        uint64_t bytes_kept()
        void set_error(string)
        void slow_copies_for_testing(nanoseconds) except +

cdef extern from "runs/ledger.h" namespace "pathways" nogil:
    cdef cppclass LaunchSizes "pathways::PlanSizes::Launch":
        LaunchSizes()
        uint64_t temporary
        vector[uint32_t] donated
        bint moves
    cdef cppclass PlanSizes:
        PlanSizes()
        vector[uint64_t] values
        vector[LaunchSizes] launches
    cdef cppclass LedgerDevice "pathways::Ledger::Device":
        uint64_t bytes
        uint64_t high_water
        uint64_t limit
    cdef cppclass LedgerAccount "pathways::Ledger::Account":
        uint32_t client
        uint32_t plan
        uint64_t bytes
        uint64_t high_water
        cbool is_open
    cdef cppclass Ledger:
        const vector[LedgerDevice]& devices()
        const vector[LedgerAccount]& accounts()
    cdef uint32_t PUTS "pathways::Ledger::kPuts"

cdef extern from "runs/run_trace.h" namespace "pathways" nogil:
    cdef cppclass RunTraceRecord:
        pass
    cdef cppclass RunTraceTaken "pathways::RunTrace::Ring::Taken":
        vector[RunTraceRecord] records
        uint64_t dropped

cdef extern from "runs/device_clock.h" namespace "pathways" nogil:
    cdef struct DeviceUse "pathways::DeviceClock::Use":
        uint32_t client
        uint32_t device
        int64_t busy_ns

cdef extern from "executor/executor.h" namespace "pathways" nogil:
    cdef struct ExecutorStats:
        uint64_t runs
        uint64_t launches
        uint64_t gangs
        uint64_t transfers
        uint64_t objects
        uint64_t live_runs
        uint64_t waiting
        uint64_t overfull
        uint64_t exchange_records
        uint64_t tasks
    cdef cppclass Executor:
        void watched(vector[Value]*)
        void watched_half_way(vector[Value]*)
        bint is_throttled()
        Value value_of(uint32_t, Handle)
        ExecutorStats stats()
        vector[string] describe_runs(size_t most)
        const Ledger& ledger()
        void clear()
        cbool is_idle()
        void set_predecessor_failure(string, uint32_t) except +
        vector[DeviceUse] device_uses() except +
        void start_trace(size_t) except +
        void stop_trace() except +
        RunTraceTaken take_trace() except +

cdef extern from "messages/shared_segments.h" namespace "pathways" nogil:
    cdef enum class ClusterStatus(uint32_t):
        kUp
        kFailed
        kClosed
    cdef cppclass ControllerBlock:
        pass
    cdef cppclass StatusBlock:
        pass
    cdef cppclass HostBlock:
        uint64_t arena
        DoorbellWord doorbell
        Arena* host_arena() except +
    cdef cppclass HostView:
        HostView()
        HostView(void*, size_t) except +
        ArenaView arena()
    cdef cppclass ClientBlock:
        pass
    cdef cppclass ClientView:
        ClientView()
        ClientView(void*, size_t) except +
        ArenaView arena()

cdef extern from "controller/controller.h" namespace "pathways" nogil:
    cdef cppclass CppController "pathways::Controller":
        uint32_t step() except +
        int64_t next_deadline_ns()

cdef extern from "device/device.h" namespace "pathways" nogil:
    cdef cppclass Quirks:
        uint32_t max_in_flight
        cbool gangs_block
        cbool computes_in_launch

cdef extern from "host/host.h" namespace "pathways" nogil:
    cdef cppclass HostOptions "pathways::Host::Options":
        HostOptions()
        uint32_t host
        uint32_t devices
        uint64_t device_bytes
        Quirks quirks
        uint32_t batch
    cdef cppclass CppHost "pathways::Host":
        CppHost(HostOptions, vector[HostView], ControllerBlock*, SendingBackend&, vector[int32_t]) except +
        void add_plan(uint32_t, Plan, uint32_t) except +
        void set_compiled(uint32_t, optional[string], PlanSizes) except +
        void remove_plan(uint32_t) except +
        void attach_client(uint32_t, ClientView, uint32_t) except +
        void task_done(uint64_t, Value, uint64_t, optional[string]) except +
        void task_answered(uint64_t) except +
        void launched(uint64_t, uint32_t, vector[Value], optional[string]) except +
        void open_peer(uint32_t, HostView, int32_t, uint64_t) except +
        uint64_t peers_replaced()
        uint32_t step() except +
        uint32_t ticket()
        Status wait(uint32_t, nanoseconds, SpinPolicy)
        void ring()
        Executor& executor()

cdef extern from "host/swapping_host_for_testing.h" namespace "pathways" nogil:
    cdef cppclass SwappingHostForTesting(CppHost):
        SwappingHostForTesting(uint32_t, HostOptions, vector[HostView], ControllerBlock*, SendingBackend&,
                               vector[int32_t]) except +

cdef extern from "client/client.h" namespace "pathways" nogil:
    cdef cppclass ErrorText:
        ErrorText()
    ErrorText make_error_text(string) except +
    cdef cppclass ProgramRef:
        ProgramRef()
        uint32_t plan
        uint32_t group
        vector[uint32_t] result_parts
        vector[uint64_t] result_bytes
    cdef cppclass ClientOptions "pathways::Client::Options":
        ClientOptions()
        uint32_t id
        uint32_t window
        uint64_t release_bytes
    cdef cppclass Lease:
        Lease()
        uint64_t offset
        uint64_t bytes
        uint64_t borrowers
        uint32_t others
        uint32_t parts
        uint64_t lie
    cdef cppclass UnreadFailure "pathways::Failures::Unread":
        string text
        uint64_t futures
    cdef cppclass CppClient "pathways::Client":
        CppClient(ClientOptions, ClientBlock*, const StatusBlock*, DoorbellWord*) except +
        Status submit(const ProgramRef&, const_u64_span, uint64_t*, u64_span) except +
        Status submit(const ProgramRef&, const_u64_span, uint64_t*, u64_span, int64_t, const ErrorText*) except +
        const byte* read(Handle, size_t)
        uint32_t id()
        cbool has_read_back()
        uint64_t last_tag()
        Status cancel(uint64_t, const_u64_span, string) except +
        Status allocate(uint32_t, Handle*)
        Status command(CommandKind, uint32_t, Handle, Handle, const_byte_span) except +
        Status command(CommandKind, uint32_t, Handle, Handle, const_byte_span, uint32_t, uint64_t,
                       const Lease&) except +
        void release(Handle, uint32_t, uint64_t) except +
        void donated(Handle)
        void forget(Handle) except +
        void flush() except +
        void poll_inbox() except +
        Status allocate_block(size_t, uint64_t*) except +
        FutureState poll(Handle)
        FutureState wait(Handle, nanoseconds, SpinPolicy, Handle)
        void wait_room(nanoseconds, SpinPolicy)
        ClusterStatus cluster_status()
        string cluster_failure() except +
        string error_of(Handle) except +
        string unread_error_of(Handle) except +
        void mark_read(const string&) except +
        vector[UnreadFailure] take_unread(cbool) except +
        uint64_t losses()
        uint64_t in_flight()
        void settle_forks()
        void set_window(uint32_t)
        uint32_t window()
        FutureTable& futures()
        Arena* arena()
