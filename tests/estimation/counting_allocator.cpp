// Counts the bytes that PyTorch's host allocator has allocated and not freed yet, on all threads.
//
// The size of a block is stored in front of it, because it is freed by its address alone.

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr std::size_t kHeader = 64;  // keeps the alignment of the block

c10::Allocator* original = nullptr;
std::atomic<std::int64_t> now{0};
std::atomic<std::int64_t> peak{0};

void drop(void* data) {
    auto* const header = static_cast<char*>(data) - kHeader;
    now -= *reinterpret_cast<std::int64_t*>(header);
    original->raw_deallocate(header);
}

class CountingAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(std::size_t size) override {
        if (size == 0) {
            return {nullptr, nullptr, &drop, c10::Device(c10::DeviceType::CPU)};
        }
        auto* const header = static_cast<char*>(original->raw_allocate(size + kHeader));
        *reinterpret_cast<std::int64_t*>(header) = static_cast<std::int64_t>(size);
        const std::int64_t total = now += static_cast<std::int64_t>(size);
        std::int64_t known = peak;
        while (total > known && !peak.compare_exchange_weak(known, total)) {
        }
        auto* const data = header + kHeader;
        return {data, data, &drop, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &drop; }

    void copy_data(void* target, const void* source, std::size_t size) const override {
        original->copy_data(target, source, size);
    }
};

CountingAllocator counting;

}  // namespace

extern "C" {

// Start or stop counting new blocks. Counted blocks are subtracted when they are freed, also after the stop.
void count(bool is_on) {
    if (original == nullptr) {
        original = c10::GetCPUAllocator();
    }
    c10::SetCPUAllocator(is_on ? &counting : original, /*priority=*/255);
}

// Reset the peak to the current number of bytes, which is returned.
std::int64_t begin_peak() { return peak = now.load(); }

std::int64_t peak_bytes() { return peak; }
}
