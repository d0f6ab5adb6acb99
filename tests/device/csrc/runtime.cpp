// Streams, events, memory and clocks of the simulated accelerator, and the doors by which PyTorch reaches them.

#include "sim.h"

#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <pybind11/stl.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;

namespace sim {

char *device_view = nullptr, *kernel_view = nullptr, *pinned_view = nullptr;

namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating-point type, -1 in integers
constexpr std::size_t kPage = 4096, kUnit = 512;
constexpr std::string_view kAllocation = "an allocation";
constexpr std::size_t kMostWaiting = std::size_t(1) << 30;  // freed bytes that wait for recorded streams
constexpr int kMostStreams = 4096;

struct Stream {
    Clock known;
    Time now = 0;
    int priority = 0;
    std::uint64_t host_version = 0;
    int queries = 0;
};

struct Fault {
    char* address;
    Block* block;
    Access access;
    bool is_device, writes;
    long text_from, text_to;
};

// Blocks that can be handed out again, of one stream (of pinned memory: of all).
struct Free {
    std::multimap<std::size_t, Block*> clean;
    std::vector<Block*> dirty;  // other streams may still use them
};

struct Stats {
    std::size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, requested = 0, count = 0;
    std::size_t total_allocated = 0, num_allocations = 0, num_segments = 0;
};

struct World {
    std::mutex lock;
    std::deque<Stream> streams;
    int next_reused = 0;
    Clock host;
    std::uint64_t host_version = 1;
    std::unordered_map<StreamNo, Free> device_free;
    Free pinned_free;
    std::map<char*, Block*> blocks;  // by the kernels' address; pinned ones by their own
    Block** starts = nullptr;        // the block that begins at each kUnit of the kernels' addresses
    char *next_device = nullptr, *next_pinned = nullptr;
    std::set<Block*> protected_blocks;
    std::vector<std::shared_ptr<Pending>> pending;
    Stats stats;
    std::size_t limit = 0;  // 0: none
    std::vector<std::string> races;
    bool raises = true;
    std::string failure;
    int num_captures = 0;
    std::size_t checked_pairs = 0;
    std::unordered_map<std::string_view, std::size_t> launches;
    std::size_t num_launches = 0, num_syncs = 0, num_segments = 0;
    std::vector<PlaceRef> syncs, segments, communicators;
    Fault faults[32];
    std::atomic<int> num_faults{0};
    int text_fd = -1;
};
World& world() {
    static auto* one = new World;  // outlives everything
    return *one;
}

thread_local StreamNo tls_stream = 0;
thread_local const Launch* tls_kernel = nullptr;

using Lock = std::unique_lock<std::mutex>;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

void* reserve(int protection, std::size_t size = kReserved) {
    void* found = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "the simulated device cannot reserve ", size, " bytes of addresses");
    return found;
}

std::size_t rounded(std::size_t size, std::size_t unit) { return (std::max<std::size_t>(size, 1) + unit - 1) / unit * unit; }

// Under the lock.
bool is_in_flight(const Access& access) { return world().host.at(access.stream) < access.time; }

void protect(Block& block) {
    const auto set = [&](std::size_t low, std::size_t high, int protection) {
        char* from = block.memory + low / kPage * kPage;
        mprotect(from, rounded(block.memory + high - from, kPage), protection);
    };
    set(0, block.size, PROT_READ | PROT_WRITE);
    bool any = false;
    for (const bool writes : {false, true}) {
        for (const Access& access : block.accesses) {
            if (access.writes == writes && !access.is_reported && is_in_flight(access)) {
                set(access.low, access.high, writes ? PROT_NONE : PROT_READ);
                any = true;
            }
        }
    }
    if (any) {
        world().protected_blocks.insert(&block);
    } else {
        world().protected_blocks.erase(&block);
    }
}

void protect_all() {
    const std::vector<Block*> blocks(world().protected_blocks.begin(), world().protected_blocks.end());
    for (Block* block : blocks) {
        protect(*block);
    }
}

Block* find_block(const char* address) {
    auto& blocks = world().blocks;
    auto found = blocks.upper_bound(const_cast<char*>(address));
    if (found == blocks.begin()) {
        return nullptr;
    }
    Block* block = std::prev(found)->second;
    return address < block->memory + block->size ? block : nullptr;
}

// Whose handler, of Python's faulthandler, writes the thread's stack to ``text_fd``.
int dump_signal() {
    return SIGRTMIN + 6;
}

struct sigaction previous_action;

void on_fault(int signal, siginfo_t* info, void* context) {
    World& w = world();
    char* address = static_cast<char*>(info->si_addr);
    const bool is_device = address >= device_view && address < device_view + kReserved;
    const bool is_pinned = address >= pinned_view && address < pinned_view + kReserved;
    if (!is_device && !is_pinned) {
        if (previous_action.sa_flags & SA_SIGINFO) {
            return previous_action.sa_sigaction(signal, info, context);
        }
        if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
            return previous_action.sa_handler(signal);
        }
        ::signal(signal, SIG_DFL);
        return;  // happens again, and ends the process
    }
    const Lock lock(w.lock);
    Block* block = find_block(is_device ? address - to_device() : address);
    bool writes = false;
#ifdef __x86_64__
    writes = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
    Access* seen = nullptr;
    if (is_device) {
        char* page = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(address) / kPage * kPage);
        mprotect(page, kPage, PROT_READ | PROT_WRITE);
        std::memset(page, kPoison, kPage);
    } else if (block != nullptr) {
        const std::size_t at = address - block->memory;
        for (Access& access : block->accesses) {
            if (access.low <= at && at < access.high && !access.is_reported && is_in_flight(access)) {
                access.is_reported = true;
                seen = seen == nullptr ? &access : seen;
            }
        }
        mprotect(block->memory, block->size, PROT_READ | PROT_WRITE);  // until the next copy or synchronization
    }
    const int number = w.num_faults.load();
    if ((is_device || seen != nullptr) && number < int(std::size(w.faults))) {
        Fault& fault = w.faults[number];
        fault.address = address;
        fault.block = block;
        fault.is_device = is_device;
        fault.writes = writes;
        if (seen != nullptr) {
            fault.access = *seen;
        }
        fault.text_from = lseek(w.text_fd, 0, SEEK_END);
        raise(dump_signal());
        fault.text_to = lseek(w.text_fd, 0, SEEK_END);
        w.num_faults.store(number + 1);
    }
}

void note(std::vector<PlaceRef>& places, PlaceRef place) {
    if (places.size() < 20000) {
        places.push_back(std::move(place));
    }
}

// Under the lock: what the stream does next knows all that the host knows.
Stream& launched_on(StreamNo number) {
    World& w = world();
    Stream& stream = w.streams.at(number);
    if (stream.host_version != w.host_version) {
        stream.known.merge(w.host);
        stream.host_version = w.host_version;
    }
    return stream;
}

// ---------------------------------------------------------------------------------------------------- memory

void forget_ordered(Block& block, const Clock& known) {
    const Clock& host = world().host;
    const auto is_done = [&](StreamNo stream, Time time) { return known.at(stream) >= time || host.at(stream) >= time; };
    std::erase_if(block.accesses, [&](const Access& access) { return is_done(access.stream, access.time); });
    std::erase_if(block.awaited, [&](const auto& event) { return is_done(event.first, event.second); });
}

Block* allocate(std::size_t requested, bool is_pinned) {
    if (requested == 0) {
        return nullptr;
    }
    World& w = world();
    StreamNo number = tls_stream;
    Time time = 0;
    PlaceRef place;
    if (!is_pinned) {
        if (tls_kernel != nullptr) {
            number = tls_kernel->stream(), time = tls_kernel->time(), place = tls_kernel->place();
        } else {
            const Launch launch(kAllocation);
            time = launch.time(), place = launch.place();
        }
    }
    const std::size_t size = rounded(requested, is_pinned ? kPage : kUnit);
    std::vector<std::pair<Access, Block>> raced;  // copies, for the report
    Block* found = nullptr;
    Lock lock(w.lock);
    Free& free = is_pinned ? w.pinned_free : w.device_free[number];
    Clock& known = is_pinned ? w.host : w.streams[number].known;
    std::size_t waiting = 0;
    std::erase_if(free.dirty, [&](Block* block) {
        forget_ordered(*block, known);
        if (!is_pinned && block->size >= size) {
            for (const Access& access : block->accesses) {
                ++w.checked_pairs;
                bool is_awaited = false;
                for (const auto& [stream, until] : block->awaited) {
                    is_awaited |= stream == access.stream && until >= access.time;
                }
                if (!is_awaited) {
                    Block copy;
                    copy.allocated = block->allocated, copy.freed = block->freed;
                    raced.emplace_back(access, copy);
                    block->accesses.clear();
                    break;
                }
            }
        }
        waiting += block->awaited.empty() ? 0 : block->size;
        if (block->accesses.empty() && block->awaited.empty()) {
            free.clean.emplace(block->size, block);
            return true;
        }
        return false;
    });
    if (waiting > kMostWaiting) {  // an allocator asks the events then, and they have happened at last
        for (Block* block : free.dirty) {
            for (const auto& [stream, until] : block->awaited) {
                known.raise(stream, until);
            }
        }
    }
    if (!is_pinned && w.limit != 0 && w.stats.allocated + size > w.limit) {
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "the simulated device is out of memory: ", requested, " bytes were asked for, ",
            w.stats.allocated, " of ", w.limit, " are in use");
    }
    auto fits = free.clean.lower_bound(size);
    if (fits != free.clean.end() && fits->first <= 2 * size + (std::size_t(1) << 12)) {
        found = fits->second;
        free.clean.erase(fits);
    } else {
        char*& next = is_pinned ? w.next_pinned : w.next_device;
        char* end = (is_pinned ? pinned_view : kernel_view) + kReserved;
        TORCH_CHECK_WITH(OutOfMemoryError, std::size_t(end - next) > size, "the simulated device has no addresses left");
        found = new Block;
        found->memory = next;
        found->size = size;
        found->is_pinned = is_pinned;
        next += size;
        std::memset(found->memory, kPoison, size);
        w.blocks[found->memory] = found;
        if (!is_pinned) {
            w.starts[(found->memory - kernel_view) / kUnit] = found;
            w.stats.reserved += size;
            w.stats.peak_reserved = std::max(w.stats.peak_reserved, w.stats.reserved);
            ++w.num_segments;
            note(w.segments, place);
        }
    }
    found->requested = requested;
    found->stream = number;
    found->allocated = place;
    found->freed = nullptr;
    found->is_free = false;
    found->recorded.clear();
    found->accesses.clear();
    found->host = c10::Storage();
    if (!is_pinned) {
        found->accesses.push_back({0, found->size, number, time, true, place});
        w.stats.allocated += found->size;
        w.stats.peak = std::max(w.stats.peak, w.stats.allocated);
        w.stats.requested += requested;
        w.stats.total_allocated += found->size;
        ++w.stats.count;
        ++w.stats.num_allocations;
    }
    lock.unlock();
    for (const auto& [access, block] : raced) {
        report(c10::str(
                   "memory is handed out again while another stream may still use it\n  used by ", text_of(access.place),
                   "\n  freed by ", text_of(block.freed), "\n  handed out to ", text_of(place),
                   "\nThe stream that it was allocated on has to wait for that use before, or record_stream has to name it"),
               /*may_throw=*/false);
    }
    return found;
}

Block* beginning_at(void* memory) {
    auto* address = static_cast<char*>(memory);
    if (address >= kernel_view && address < kernel_view + kReserved) {
        return world().starts[(address - kernel_view) / kUnit];
    }
    const Lock lock(world().lock);
    return world().blocks.at(address);
}

// The context of a block's pointer is its memory, as raw_allocate wants it.
void release(void* context) {
    Block* block = beginning_at(context);
    World& w = world();
    PlaceRef place;
    std::vector<Block::InFlight> in_flight;
    {
        const Lock lock(w.lock);
        in_flight.swap(block->in_flight);
    }
    for (const auto& one : in_flight) {
        one.pending->forget(*block);
    }
    bool is_foreign = false;
    for (const Access& access : block->accesses) {
        is_foreign |= access.stream != block->stream;
    }
    if (is_foreign && !block->is_pinned) {
        place = here("the end of a tensor");
    }
    c10::Storage host = std::move(block->host);
    const Lock lock(w.lock);
    if (block->is_pinned) {
        w.pinned_free.dirty.push_back(block);  // the host's allocator asks the copies' events
        return;
    }
    Stream& stream = w.streams[block->stream];
    w.stats.allocated -= block->size;
    w.stats.requested -= block->requested;
    --w.stats.count;
    block->freed = place;
    block->is_free = true;
    const Clock& known = stream.known;
    std::erase_if(block->accesses, [&](const Access& access) {
        return access.stream == block->stream || known.at(access.stream) >= access.time;
    });
    block->awaited.clear();
    for (const StreamNo recorded : block->recorded) {
        if (recorded != block->stream) {
            block->awaited.emplace_back(recorded, w.streams[recorded].now);
        }
    }
    std::memset(block->memory, kPoison, block->size);
    Free& free = w.device_free[block->stream];
    if (block->accesses.empty() && block->awaited.empty()) {
        free.clean.emplace(block->size, block);
    } else {
        free.dirty.push_back(block);
    }
}

struct DeviceAllocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(std::size_t size) override { return owned(sim::allocate(size, false), false); }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, std::size_t count) const override {
        std::memcpy(static_cast<char*>(to) - to_device(), static_cast<const char*>(from) - to_device(), count);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t = {0, 0}) override {}
    void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_stream(pointer, stream.id()); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        const Lock lock(world().lock);
        const Stats& stats = world().stats;
        c10::CachingDeviceAllocator::DeviceStats found;
        const auto set = [](auto& stat, std::size_t current, std::size_t peak, std::size_t total) {
            stat[0].current = std::int64_t(current);
            stat[0].peak = std::int64_t(peak);
            stat[0].allocated = std::int64_t(total);
            stat[0].freed = std::int64_t(total - current);
        };
        set(found.allocated_bytes, stats.allocated, stats.peak, stats.total_allocated);
        set(found.active_bytes, stats.allocated, stats.peak, stats.total_allocated);
        set(found.reserved_bytes, stats.reserved, stats.peak_reserved, stats.reserved);
        set(found.requested_bytes, stats.requested, stats.requested, stats.requested);
        set(found.allocation, stats.count, stats.count, stats.num_allocations);
        set(found.active, stats.count, stats.count, stats.num_allocations);
        return found;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {
        const Lock lock(world().lock);
        world().stats.peak = world().stats.allocated;
        world().stats.peak_reserved = world().stats.reserved;
    }
    std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override {
        const Lock lock(world().lock);
        const std::size_t total = world().limit != 0 ? world().limit : std::size_t(8) << 30;
        return {total - std::min(total, world().stats.allocated), total};
    }
};

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(std::size_t size) override { return owned(sim::allocate(size, true), true); }
    void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

// The CPU's allocator, which kernels of the device get device memory from.
c10::DeleterFnPtr free_on_host = nullptr;

void release_on_host(void* memory) {
    auto* address = static_cast<char*>(memory);
    const bool is_ours = address >= kernel_view && address < kernel_view + kReserved;
    is_ours ? release(memory) : free_on_host(memory);
}

struct HostAllocator final : c10::Allocator {
    explicit HostAllocator(c10::Allocator* own) : own(own) { free_on_host = own->raw_deleter(); }
    c10::DataPtr allocate(std::size_t size) override {
        return tls_kernel != nullptr ? owned(sim::allocate(size, false), true) : own->allocate(size);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release_on_host; }
    void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
    c10::Allocator* own;
};

// ---------------------------------------------------------------------------------------------------- doors

struct Event {
    Clock clock;
    bool is_recorded = false;
    int queries = 0;
    double seconds = 0;
};

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A device is never in a hurry: it has not done yet what it is asked about first, and has done it when it is asked again.
bool answer_query(int& queries, const Clock& clock) {
    raise_noticed();
    if (host_knows(clock)) {
        return true;
    }
    if (queries++ == 0) {
        return false;
    }
    for (const auto& pending : pending_before(clock)) {
        if (!pending->has_ended()) {
            return false;
        }
    }
    host_learns(clock);
    return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kSim; }
    c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
    c10::Device getDevice() const override { return the_device(); }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() <= 0, "the simulated device has index 0 alone, not ", int(device.index()));
    }
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    static c10::Stream stream_of(StreamNo number) { return c10::Stream(c10::Stream::UNSAFE, the_device(), number); }
    c10::Stream getStream(c10::Device) const override { return stream_of(tls_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool urgent = false) const override {
        return stream_of(new_stream(urgent ? -1 : 0));
    }
    c10::Stream getNewStream(c10::Device, int priority = 0) const override { return stream_of(new_stream(priority)); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(exchange_stream(stream.id())); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
    bool isStreamCapturing(const c10::Stream&) const override { return world().num_captures > 0; }

    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr) {
            *event = new Event;
        }
        auto& made = *static_cast<Event*>(*event);
        made.clock = clock_of(stream.id());
        made.is_recorded = true;
        made.queries = 0;
        made.seconds = seconds_now();
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event != nullptr) {
            stream_waits(stream.id(), static_cast<Event*>(event)->clock);
        }
    }
    bool queryEvent(void* event) const override {
        if (event == nullptr) {
            return true;
        }
        auto& asked = *static_cast<Event*>(event);
        return answer_query(asked.queries, asked.clock);
    }
    bool queryStream(const c10::Stream& stream) const override {
        return answer_query(world().streams[stream.id()].queries, clock_of(stream.id()));
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        host_waits(clock_of(stream.id()), "synchronization with a stream");
    }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr) {
            host_waits(static_cast<Event*>(event)->clock, "synchronization with an event");
        }
    }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        Clock all;
        {
            const Lock lock(world().lock);
            for (const Stream& stream : world().streams) {
                all.merge(stream.known);
            }
        }
        host_waits(all, "synchronization with the device");
    }
    void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
        record_stream(pointer, stream.id());
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        TORCH_CHECK(first != nullptr && second != nullptr, "both events have to be recorded");
        return (static_cast<Event*>(second)->seconds - static_cast<Event*>(first)->seconds) * 1e3;
    }
};

class Generator final : public c10::GeneratorImpl {
  public:
    Generator() : GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
    void set_current_seed(std::uint64_t seed) override { seed_ = seed, offset_ = 0; }
    void set_offset(std::uint64_t offset) override {
        TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
        offset_ = offset;
    }
    std::uint64_t get_offset() const override { return offset_; }
    std::uint64_t current_seed() const override { return seed_; }
    std::uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return seed_;
    }
    void set_state(const c10::TensorImpl& state) override {
        TORCH_CHECK(
            state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<std::uint8_t>() && state.is_cpu(),
            "RNG state must be a tensor of 16 bytes on the CPU");
        const auto* data = static_cast<const std::uint64_t*>(state.data());
        seed_ = data[0], offset_ = data[1];
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        auto state = at::detail::empty_generic(
            {16}, c10::GetCPUAllocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), at::kByte, std::nullopt);
        auto* data = static_cast<std::uint64_t*>(state.mutable_data_ptr());
        data[0] = seed_, data[1] = offset_;
        return state.getIntrusivePtr();
    }

  private:
    GeneratorImpl* clone_impl() const override {
        auto* copy = new Generator;
        copy->seed_ = seed_, copy->offset_ = offset_;
        return copy;
    }
    std::uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    void setCurrentDevice(c10::DeviceIndex index) const override {
        TORCH_CHECK(index <= 0, "the simulated device has index 0 alone, not ", int(index));
    }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void* data) const override {
        const auto* address = static_cast<const char*>(data);
        return address >= pinned_view && address < pinned_view + kReserved;
    }
    c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    c10::Device getDeviceFromPtr(void*) const override { return the_device(); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override {
        static auto* generator = new at::Generator(at::make_generator<Generator>());
        return *generator;
    }
    at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::make_generator<Generator>(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
        c10::DataPtr made = device_allocator()->allocate(size);
        const std::size_t kept = std::min(size, storage.nbytes());
        const auto [from, base] = memory_of(storage.data_ptr());
        if (kept > 0 && from != nullptr) {
            Launch launch("the resizing of a storage");
            Block* to = block_of(made);
            launch.use(*from, base, base + kept, false);
            launch.use(*to, 0, kept, true);
            std::memcpy(to->memory, from->memory + base, kept);
        }
        storage.set_data_ptr_noswap(std::move(made));
        storage.set_nbytes(size);
    }
};

template <typename Stat>
py::dict counted(const std::vector<PlaceRef>& places, Stat total) {
    py::dict by_place;
    for (const PlaceRef& place : places) {
        const py::str text(text_of(place));
        by_place[text] = by_place.contains(text) ? by_place[text].cast<int>() + 1 : 1;
    }
    py::dict found;
    found["count"] = total;
    found["places"] = by_place;
    return found;
}

}  // namespace

std::unique_lock<std::mutex> lock_tables() { return Lock(world().lock); }

NoGil::NoGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
NoGil::~NoGil() {
    if (state_ != nullptr) {
        PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
    }
}

// ---------------------------------------------------------------------------------------------------- places

PlaceRef here(std::string_view what) {
    auto place = std::make_shared<Place>();
    place->what = what;
    place->stream = tls_stream;
    if (!Py_IsInitialized() || is_finalizing()) {
        return place;
    }
    PyThreadState* state = PyGILState_GetThisThreadState();
    if (state == nullptr) {
        return place;  // this thread has never run Python
    }
    const bool had = PyGILState_Check();
    const PyGILState_STATE gil = had ? PyGILState_UNLOCKED : PyGILState_Ensure();
    {
        static auto* known = new std::unordered_set<void*>;  // code objects are kept, so that reports can name them
        PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
        while (frame != nullptr && place->count < Place::kFrames) {
            PyCodeObject* code = PyFrame_GetCode(frame);
            place->frames[place->count++] = {code, PyFrame_GetLasti(frame)};
            if (!known->insert(code).second) {
                Py_DECREF(code);
            }
            PyFrameObject* back = PyFrame_GetBack(frame);
            Py_DECREF(frame);
            frame = back;
        }
        Py_XDECREF(frame);
    }
    if (!had) {
        PyGILState_Release(gil);
    }
    return place;
}

std::string text_of(const PlaceRef& place) {
    if (place == nullptr) {
        return "an unknown place";
    }
    std::string text = c10::str(place->what, " on stream ", place->stream);
    if (place->count == 0) {
        return text + ", below Python (in a backward, say)";
    }
    const py::gil_scoped_acquire gil;
    int shown = 0;
    for (const bool of_library : {false, true}) {  // the user's code, or else one line of a library's
        for (int i = 0; i < place->count && shown < (of_library ? 1 : 3); ++i) {
            auto* code = static_cast<PyCodeObject*>(place->frames[i].code);
            const std::string file = PyUnicode_AsUTF8(code->co_filename);
            const bool is_library = file.find("/lib/python3") != std::string::npos || file.starts_with("<");
            if (is_library == of_library) {
                text += c10::str("\n    ", file, ":", PyCode_Addr2Line(code, place->frames[i].instruction), " ",
                                 PyUnicode_AsUTF8(code->co_name));
                ++shown;
            }
        }
    }
    return text;
}

std::string_view interned(const std::string& text) {
    static auto* known = new std::unordered_set<std::string>;
    const Lock lock(world().lock);
    return *known->insert(text).first;
}

// ---------------------------------------------------------------------------------------------------- reports

void report(const std::string& race, bool may_throw) {
    const std::string text = "Race: " + race;
    bool raises;
    {
        const Lock lock(world().lock);
        world().races.push_back(text);
        raises = world().raises;
    }
    if (raises && may_throw) {
        TORCH_CHECK(false, text);
    }
}

// Makes reports of what the handler of faults has noticed.
bool report_faults() {
    World& w = world();
    if (w.num_faults.load() > 0) {
        std::vector<Fault> faults;
        {
            const Lock lock(w.lock);
            faults.assign(w.faults, w.faults + w.num_faults.load());
            w.num_faults.store(0);
        }
        for (const Fault& fault : faults) {
            std::string stack(std::max(0L, fault.text_to - fault.text_from), ' ');
            const auto got = pread(w.text_fd, stack.data(), stack.size(), fault.text_from);
            stack.resize(std::max<decltype(got)>(got, 0));
            const std::string what =
                fault.is_device
                    ? c10::str("host code touched memory of the device, allocated by ",
                               text_of(fault.block != nullptr ? fault.block->allocated : nullptr))
                    : c10::str("host code ", fault.access.writes ? "touched" : "wrote",
                               " pinned memory before a copy has ended, which ", fault.access.writes ? "writes" : "reads",
                               " it\n  copied by ", text_of(fault.access.place));
            report(what + "\n  touched by\n" + stack, false);
            if (fault.is_device) {
                const auto address = reinterpret_cast<std::uintptr_t>(fault.address);
                mprotect(reinterpret_cast<void*>(address / kPage * kPage), kPage, PROT_NONE);
            }
        }
        return true;
    }
    return false;
}

void raise_noticed() {
    World& w = world();
    if (report_faults() && w.raises) {
        const Lock lock(w.lock);
        TORCH_CHECK(false, w.races.back());
    }
    if (!w.failure.empty()) {
        TORCH_CHECK(false, w.failure);
    }
}

void fail_device(const std::string& error) {
    const Lock lock(world().lock);
    if (world().failure.empty()) {
        world().failure = error;
    }
}

void count_communicator(const std::string& name) {
    PlaceRef place = here(interned("communicator " + name));
    const Lock lock(world().lock);
    note(world().communicators, std::move(place));
}

void require_no_capture(std::string_view what) {
    TORCH_CHECK(world().num_captures == 0, what, " while work is captured: the host cannot wait for what has not run yet");
}

void note_host_sync(std::string_view what) {
    require_no_capture(what);
    PlaceRef place = here(what);
    const Lock lock(world().lock);
    ++world().num_syncs;
    note(world().syncs, std::move(place));
}

// ---------------------------------------------------------------------------------------------------- streams

StreamNo current_stream() { return tls_stream; }

StreamNo exchange_stream(StreamNo stream) {
    TORCH_CHECK(stream >= 0 && stream < StreamNo(world().streams.size()), "there is no stream ", stream);
    return std::exchange(tls_stream, stream);
}

StreamNo new_stream(int priority, bool) {
    World& w = world();
    const Lock lock(w.lock);
    if (w.streams.size() >= kMostStreams) {
        return 1 + w.next_reused++ % (kMostStreams - 1);
    }
    w.streams.emplace_back();
    w.streams.back().priority = priority;
    return StreamNo(w.streams.size()) - 1;
}

int priority_of(StreamNo stream) { return world().streams.at(stream).priority; }

Clock clock_of(StreamNo stream) {
    const Lock lock(world().lock);
    return launched_on(stream).known;
}

void stream_waits(StreamNo stream, const Clock& clock) {
    raise_noticed();
    const Lock lock(world().lock);
    world().streams.at(stream).known.merge(clock);
}

bool host_knows(const Clock& clock) {
    const Lock lock(world().lock);
    return world().host.covers(clock);
}

std::vector<std::shared_ptr<Pending>> pending_before(const Clock& clock) {
    World& w = world();
    std::vector<std::shared_ptr<Pending>> found;
    const Lock lock(w.lock);
    for (const auto& pending : w.pending) {
        if (clock.at(pending->stream) >= pending->time) {
            found.push_back(pending);
        }
    }
    return found;
}

void host_learns(const Clock& clock) {
    World& w = world();
    std::exception_ptr error;
    for (const auto& pending : pending_before(clock)) {
        try {
            pending->finish();
        } catch (...) {
            error = error ? error : std::current_exception();
        }
    }
    {
        const Lock lock(w.lock);
        w.host.merge(clock);
        ++w.host_version;
        protect_all();
    }
    if (error) {
        std::rethrow_exception(error);
    }
}

void host_waits(const Clock& clock, std::string_view what) {
    raise_noticed();
    note_host_sync(what);
    host_learns(clock);
}

void add_pending(std::shared_ptr<Pending> pending) {
    const Lock lock(world().lock);
    world().pending.push_back(std::move(pending));
}

void remove_pending(const Pending* pending) {
    std::vector<std::shared_ptr<Pending>> removed;  // destroyed after the lock
    const Lock lock(world().lock);
    auto& all = world().pending;
    for (auto& one : all) {
        if (one.get() == pending) {
            removed.push_back(std::move(one));
        }
    }
    std::erase(all, nullptr);
}

Launch::Launch(std::string_view what, StreamNo stream) : stream_(stream < 0 ? tls_stream : stream) {
    raise_noticed();
    auto place = here(what);
    if (place->stream != stream_) {
        const_cast<Place&>(*place).stream = stream_;
    }
    place_ = std::move(place);
    const Lock lock(world().lock);
    Stream& launched = launched_on(stream_);
    time_ = ++launched.now;
    launched.known.raise(stream_, time_);
    launched.queries = 0;
    if (what != kAllocation) {
        ++world().launches[what];
        ++world().num_launches;
    }
}

void Launch::use(Block& block, std::size_t low, std::size_t high, bool writes) {
    World& w = world();
    std::vector<std::shared_ptr<Pending>> in_flight;
    Access other;
    bool races = false;
    {
        const Lock lock(w.lock);
        const Clock& known = w.streams[stream_].known;
        for (auto last = block.accesses.rbegin(); last != block.accesses.rend(); ++last) {
            const Access& access = *last;
            if (access.high <= low || access.low >= high || !(writes || access.writes)) {
                continue;
            }
            ++w.checked_pairs;
            if (known.at(access.stream) < access.time) {
                other = access;
                races = true;
                break;
            }
        }
        std::erase_if(block.accesses, [&](const Access& access) {
            return access.low >= low && access.high <= high && (writes || !access.writes) &&
                   known.at(access.stream) >= access.time;
        });
        block.accesses.push_back({low, high, stream_, time_, writes, place_});
        for (const auto& one : block.in_flight) {
            if (one.low < high && low < one.high) {
                in_flight.push_back(one.pending);
            }
        }
        if (block.is_pinned) {
            w.protected_blocks.insert(&block);
        }
    }
    if (races) {
        report(c10::str(writes ? "write" : "read", " of memory that another stream ", other.writes ? "writes" : "reads",
                        ", without waiting for it\n  first ", text_of(other.place), "\n  then ", text_of(place_)),
               true);
    }
    if (!races) {
        for (const auto& pending : in_flight) {
            pending->finish();
        }
    }
}

// ---------------------------------------------------------------------------------------------------- memory

c10::Allocator* device_allocator() {
    static auto* one = new DeviceAllocator;
    return one;
}
c10::Allocator* pinned_allocator() {
    static auto* one = new PinnedAllocator;
    return one;
}

c10::DataPtr owned(Block* block, bool for_kernels) {
    const c10::Device device = for_kernels ? c10::Device(c10::kCPU) : the_device();
    if (block == nullptr) {
        return {nullptr, device};
    }
    return {block->memory + (for_kernels ? 0 : to_device()), block->memory, &release, device};
}

Block* block_of(const c10::DataPtr& pointer) {
    return pointer.get_deleter() == &release ? beginning_at(pointer.get_context()) : nullptr;
}

Position memory_of(const c10::DataPtr& pointer) {
    if (Block* block = block_of(pointer)) {
        return {block, 0};
    }
    auto* address = static_cast<char*>(pointer.get());
    if (address == nullptr) {
        return {nullptr, 0};
    }
    TORCH_CHECK(
        address >= device_view && address < device_view + kReserved, "a storage of the simulated device is elsewhere in memory");
    const Lock lock(world().lock);
    Block* block = find_block(address - to_device());
    TORCH_CHECK(block != nullptr && !block->is_free, "an op was given a tensor in memory that was freed");
    return {block, std::size_t(address - to_device() - block->memory)};
}

Block* pinned_block_of(const void* address) {
    const auto* at = static_cast<const char*>(address);
    if (at < pinned_view || at >= pinned_view + kReserved) {
        return nullptr;
    }
    const Lock lock(world().lock);
    return find_block(at);
}

void record_stream(const c10::DataPtr& pointer, StreamNo stream) {
    if (Block* block = block_of(pointer)) {
        const Lock lock(world().lock);
        if (std::find(block->recorded.begin(), block->recorded.end(), stream) == block->recorded.end()) {
            block->recorded.push_back(stream);
        }
    }
}

void protect_again() {
    const Lock lock(world().lock);
    protect_all();
}

KernelScope::KernelScope(const Launch& launch) : outer(std::exchange(tls_kernel, &launch)) {}
KernelScope::~KernelScope() { tls_kernel = outer; }

Unprotected::Unprotected(Block* block) : block(block) {
    if (block != nullptr) {
        const Lock lock(world().lock);
        mprotect(block->memory, block->size, PROT_READ | PROT_WRITE);
    }
}
Unprotected::~Unprotected() {
    if (block != nullptr) {
        const Lock lock(world().lock);
        protect(*block);
    }
}

void watch_faults() {
    struct sigaction action {}, before {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
    if (!((before.sa_flags & SA_SIGINFO) && before.sa_sigaction == on_fault)) {
        previous_action = before;
    }
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void start() {
    World& w = world();
    device_view = static_cast<char*>(reserve(PROT_NONE));
    w.next_device = kernel_view = static_cast<char*>(reserve(PROT_READ | PROT_WRITE));
    w.next_pinned = pinned_view = static_cast<char*>(reserve(PROT_READ | PROT_WRITE));
    w.starts = static_cast<Block**>(reserve(PROT_READ | PROT_WRITE, kReserved / kUnit * sizeof(Block*)));
    w.streams.emplace_back();
    w.text_fd = memfd_create("places", 0);
    const auto write_stack = py::module_::import("faulthandler").attr("register");
    write_stack(dump_signal(), py::arg("file") = w.text_fd, py::arg("all_threads") = false);
    watch_faults();
    c10::SetAllocator(kSim, device_allocator());
    c10::SetCPUAllocator(new HostAllocator(c10::GetCPUAllocator()));
    at::RegisterPrivateUse1HooksInterface(new Hooks);
}

void bind_runtime(py::module& module) {
    module.def("watch_faults", &watch_faults);
    module.def("races", [] {
        report_faults();
        const Lock lock(world().lock);
        return world().races;
    });
    module.def("clear", [] {  // races, failures and counts
        World& w = world();
        const Lock lock(w.lock);
        w.races.clear();
        w.failure.clear();
        w.num_faults.store(0);
        w.launches.clear();
        w.num_launches = w.num_syncs = w.num_segments = w.checked_pairs = 0;
        w.syncs.clear();
        w.segments.clear();
        w.communicators.clear();
    });
    module.def("set_raises", [](bool raises) { return std::exchange(world().raises, raises); });
    module.def("set_limit", [](std::size_t limit) { return std::exchange(world().limit, limit); });
    module.def("get_limit", [] { return world().limit; });
    module.def("capture", [](bool begins) { world().num_captures += begins ? 1 : -1; });
    module.def("is_capturing", [] { return world().num_captures > 0; });
    module.def("checked_pairs", [] { return world().checked_pairs; });
    module.def("num_syncs", [] { return world().num_syncs; });
    module.def("counts", [] {
        World& w = world();
        std::vector<PlaceRef> syncs, segments, communicators;
        py::dict launches, found;
        std::size_t num_launches, num_syncs, num_segments;
        {
            const Lock lock(w.lock);
            syncs = w.syncs, segments = w.segments, communicators = w.communicators;
            num_launches = w.num_launches, num_syncs = w.num_syncs, num_segments = w.num_segments;
            for (const auto& [name, count] : w.launches) {
                launches[py::str(std::string(name))] = count;
            }
        }
        found["host_syncs"] = counted(syncs, num_syncs);
        found["segments"] = counted(segments, num_segments);
        found["communicators"] = counted(communicators, communicators.size());
        found["launches"] = py::dict();
        found["launches"]["count"] = num_launches;
        found["launches"]["ops"] = launches;
        return found;
    });
    module.def("stats", [] {
        const Lock lock(world().lock);
        const Stats& stats = world().stats;
        py::dict found;
        found["allocated"] = stats.allocated;
        found["peak"] = stats.peak;
        found["reserved"] = stats.reserved;
        found["peak_reserved"] = stats.peak_reserved;
        found["allocations"] = stats.num_allocations;
        return found;
    });
    module.def("priority_of", &priority_of);
}

}  // namespace sim
