// The simulated accelerator: what its three sources share. See docs/internals/device.md.
//
// Every op runs at once, on the host, in memory that host code cannot reach. What a device would do later is modelled by
// vector clocks: each stream knows what of the other streams has happened before, each block of memory knows who used
// which of its bytes, and a use that is not ordered after an earlier one of the same bytes is a race.

#pragma once

#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace sim {

using Time = std::uint64_t;
using StreamNo = std::int64_t;

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
inline c10::Device the_device() { return {kSim, 0}; }

class Clock {
  public:
    Time at(StreamNo stream) const { return stream < StreamNo(times_.size()) ? times_[stream] : 0; }
    void raise(StreamNo stream, Time time) {
        if (stream >= StreamNo(times_.size())) {
            times_.resize(stream + 1, 0);
        }
        times_[stream] = std::max(times_[stream], time);
    }
    void merge(const Clock& other) {
        if (times_.size() < other.times_.size()) {
            times_.resize(other.times_.size(), 0);
        }
        for (std::size_t i = 0; i < other.times_.size(); ++i) {
            times_[i] = std::max(times_[i], other.times_[i]);
        }
    }
    bool covers(const Clock& other) const {
        for (std::size_t i = 0; i < other.times_.size(); ++i) {
            if (at(StreamNo(i)) < other.times_[i]) {
                return false;
            }
        }
        return true;
    }

  private:
    std::vector<Time> times_;
};

// Where something was done: the op, and the frames of Python that called it. Text is made of it only for a report.
struct Place {
    static constexpr int kFrames = 24;
    std::string_view what;  // lives forever: a schema's name, a literal, or interned
    StreamNo stream = 0;
    int count = 0;
    struct {
        void* code;
        int instruction;
    } frames[kFrames];
};
using PlaceRef = std::shared_ptr<const Place>;

PlaceRef here(std::string_view what);
std::string text_of(const PlaceRef& place);
std::string_view interned(const std::string& text);

// One use of the bytes [low, high) of a block.
struct Access {
    std::size_t low, high;
    StreamNo stream;
    Time time;
    bool writes;
    PlaceRef place;
    bool is_reported = false;
};

struct Pending;

// Memory of the device, or pinned memory of the host.
struct Block {
    char* memory;  // as kernels see it
    std::size_t size, requested;
    StreamNo stream;  // that it was allocated on
    bool is_pinned = false, is_free = false;
    std::vector<Access> accesses;
    std::vector<StreamNo> recorded;                        // by record_stream
    std::vector<std::pair<StreamNo, Time>> awaited;        // once freed: what record_stream has promised to wait for
    PlaceRef allocated, freed;
    struct InFlight {
        std::size_t low, high;
        std::shared_ptr<Pending> pending;
    };
    std::vector<InFlight> in_flight;  // collectives that have not yet written it
    c10::Storage host;                 // the same bytes, for kernels
};

// A collective that was launched and whose results are not there.
struct Pending {
    virtual ~Pending() = default;
    // Block the calling thread until the other ranks have answered, and write the results. Called without locks; throws
    // what went wrong.
    virtual void finish() = 0;
    virtual bool has_ended() = 0;           // so that finish() returns at once
    virtual void forget(Block& block) = 0;  // freed before the results came
    StreamNo stream = 0;
    Time time = 0;
};

// What an op does on its stream: made when it starts, with the thread's current stream.
class Launch {
  public:
    explicit Launch(std::string_view what) : Launch(what, -1) {}
    Launch(std::string_view what, StreamNo stream);
    // Check a use against all earlier ones, and remember it. Finishes collectives that have not written the block.
    void use(Block& block, std::size_t low, std::size_t high, bool writes);
    StreamNo stream() const { return stream_; }
    Time time() const { return time_; }
    const PlaceRef& place() const { return place_; }

  private:
    StreamNo stream_;
    Time time_;
    PlaceRef place_;
};

// Streams.
StreamNo current_stream();
StreamNo exchange_stream(StreamNo stream);
StreamNo new_stream(int priority, bool of_group = false);
int priority_of(StreamNo stream);
Clock clock_of(StreamNo stream);                         // everything that is ordered before what the stream does next
void stream_waits(StreamNo stream, const Clock& clock);  // no host wait
void host_waits(const Clock& clock, std::string_view what);  // a host synchronization, which is counted
bool host_knows(const Clock& clock);
std::vector<std::shared_ptr<Pending>> pending_before(const Clock& clock);
void host_learns(const Clock& clock);  // by a query, which is no synchronization
void note_host_sync(std::string_view what);

// Memory.
constexpr std::size_t kReserved = std::size_t(1) << 37;
extern char *device_view, *kernel_view, *pinned_view;  // three reservations of kReserved bytes
inline std::ptrdiff_t to_device() { return device_view - kernel_view; }
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
Block* block_of(const c10::DataPtr& pointer);       // that a storage on the device owns; null for one without bytes
struct Position {
    Block* block;
    std::size_t base;  // where the storage begins in it
};
Position memory_of(const c10::DataPtr& pointer);  // also of a storage that lies in another one's block
Block* pinned_block_of(const void* address);        // null where the memory is not pinned
c10::DataPtr owned(Block* block, bool for_kernels);  // frees the block at its end
void record_stream(const c10::DataPtr& pointer, StreamNo stream);
void protect_again();                                // pinned memory, after our own copies or after a synchronization
struct KernelScope {  // what CPU kernels allocate in it is device memory; profilers see the op alone, not what it calls
    explicit KernelScope(const Launch& launch);
    ~KernelScope();
    const Launch* outer;
    at::DisableRecordFunctionGuard unseen;
};
struct Unprotected {  // our own copies read and write a pinned block
    explicit Unprotected(Block* block);
    ~Unprotected();
    Block* block;
};

// Reports.
void report(const std::string& race, bool may_throw);
void raise_noticed();  // races that were noticed where nothing can be raised
void count_communicator(const std::string& name);
void require_no_capture(std::string_view what);
void fail_device(const std::string& error);  // of a watchdog: every later op raises it

void add_pending(std::shared_ptr<Pending> pending);
void remove_pending(const Pending* pending);
std::unique_lock<std::mutex> lock_tables();
void start();

// Without the interpreter's lock, where this thread holds it.
class NoGil {
  public:
    NoGil();
    ~NoGil();

  private:
    void* state_;
};

}  // namespace sim
